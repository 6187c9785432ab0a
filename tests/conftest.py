"""What holds for every test: one thread, fixed draws, no network."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

from tests.distributed.fixtures import four_ranks, two_ranks  # noqa: F401

# Child processes inherit these, and find this checkout whether it is installed or not; a hub is never asked.
SOURCE = str(Path(__file__).parents[1] / "src")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (SOURCE, os.environ.get("PYTHONPATH"))))
os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
torch.set_num_threads(1)
hypothesis.settings.register_profile("shared machine", deadline=None)
hypothesis.settings.load_profile("shared machine")


@pytest.fixture(autouse=True)
def fixed_draws() -> None:
    """Start every test from the same random state, whatever ran before it."""
    torch.manual_seed(0)


class NoFaultOfOurs(logging.Handler):
    """Fails a test in which something of ours failed while it tried other code, which is only said elsewhere."""

    def emit(self, record: logging.LogRecord) -> None:
        """Raise where an error is told."""
        raise AssertionError(record.getMessage())


@pytest.fixture(autouse=True)
def no_fault_of_ours(request: pytest.FixtureRequest) -> Iterator[None]:
    """Listen to what the first window tells as an error."""
    handler, wanted = NoFaultOfOurs(logging.ERROR), request.node.get_closest_marker("faulty")
    logger = logging.getLogger("wholebatch")
    if wanted is None:
        logger.addHandler(handler)
    yield
    logger.removeHandler(handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a device that is not there."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
