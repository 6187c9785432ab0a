"""What the ranks of a window tell each other, and how gradients travel between them."""

from __future__ import annotations
