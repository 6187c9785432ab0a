"""A batch: its leaves and rows, how it is cut into micro-batches, and the windows of a loader."""

from __future__ import annotations
