"""Real processes for tests: run a function on every rank of a gloo group, count what they say to each other."""

from __future__ import annotations

from tests.distributed.collectives import Collectives
from tests.distributed.launcher import Ranks, RanksError, needs_shards, run_ranks

__all__ = ["Collectives", "Ranks", "RanksError", "needs_shards", "run_ranks"]
