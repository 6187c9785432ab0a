"""What a loss function returns, what it is divided by, and where its backward begins."""

from __future__ import annotations
