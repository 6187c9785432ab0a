"""The oracle: a plain reading of the mathematics, and why a gradient is not the whole batch's."""

from __future__ import annotations
