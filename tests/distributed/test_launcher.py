"""The launcher itself: results come back, and neither an error, nor a death, nor a hang can hold up a test."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed import Collectives, Ranks, RanksError, run_ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pair = Ranks(2)
    yield pair
    pair.close()


def test_every_rank_returns_its_own_result_and_the_processes_are_used_again(ranks: Ranks) -> None:
    first = ranks.run(_sum_of_ranks, 10)
    second = ranks.run(_sum_of_ranks, 20)
    assert [value.item() for value, _ in first] == [21, 21]
    assert [value.item() for value, _ in second] == [41, 41]
    assert [pid for _, pid in first] == [pid for _, pid in second]


def test_collectives_are_counted_by_name_and_size(ranks: Ranks) -> None:
    assert ranks.run(_reductions_of_two_backwards) == [(1, 3)] * 2


def test_an_error_on_one_rank_comes_back_with_its_traceback_while_the_other_hangs(ranks: Ranks) -> None:
    began = time.monotonic()
    with pytest.raises(RanksError, match=r"(?s)rank 0: not done.*all_reduce.*rank 1:.*the message of rank 1"):
        ranks.run(_one_raises_and_one_waits)
    assert time.monotonic() - began < 20
    assert [value.item() for value, _ in ranks.run(_sum_of_ranks, 1)] == [3, 3]


def test_a_hang_ends_at_the_time_out_and_says_where_each_rank_stood(ranks: Ranks) -> None:
    ranks.run(_sum_of_ranks, 1)
    with pytest.raises(RanksError, match=r"(?s)did not end within 1 seconds.*_sleeps_on"):
        ranks.run(_sleeps_on, seconds=1.0)


def test_a_process_that_dies_is_reported() -> None:
    with pytest.raises(RanksError, match="exit code 7"):
        run_ranks(_one_dies)


def _sum_of_ranks(start: int) -> tuple[torch.Tensor, int]:
    value = torch.tensor(start + dist.get_rank())
    dist.all_reduce(value)
    assert torch.get_num_threads() == 1
    return value, os.getpid()


def _one_raises_and_one_waits() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the message of rank 1")
    dist.all_reduce(torch.ones(1))


def _sleeps_on() -> None:
    time.sleep(1000)


def _one_dies() -> None:
    if dist.get_rank() == 0:
        os._exit(7)
    dist.all_reduce(torch.ones(1))


def _reductions_of_two_backwards() -> tuple[int, int]:
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 3))
    with Collectives() as seen:
        with model.no_sync():
            model(torch.ones(2, 4)).sum().backward()
        model(torch.ones(2, 4)).sum().backward()
        dist.all_reduce(torch.ones(2))
        dist.all_reduce(torch.ones(3))
    return seen.gradient_reductions(model), seen.count("allreduce")
