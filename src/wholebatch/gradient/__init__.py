"""The gradient of a whole batch: set up, run micro-batch by micro-batch, finish. Read `separable` first."""

from __future__ import annotations
