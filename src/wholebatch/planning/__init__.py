"""What a batch takes before it runs: memory, time, and the arithmetic of its sizes."""

from __future__ import annotations
