"""Below one row: blocks in which positions do not meet, run over tiles of positions. Read `tiles` first."""

from __future__ import annotations
