"""Ranks that any test may ask for by name: started at the first use, kept until the last test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.launcher import Ranks


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """Two gloo processes: `two_ranks.run(function, *args)` returns the results by rank."""
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    """Four gloo processes, for what two cannot show."""
    ranks = Ranks(4)
    yield ranks
    ranks.close()
