"""Dealing: each row once, the same batches on any number of ranks, and nobody waits for long."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import wholebatch as wb
from wholebatch.batch.dealing import deal
from wholebatch.batch.sizes import Cost, Tokens

many_lengths = st.lists(st.integers(0, 500), max_size=60)
numbers_of_ranks = st.integers(1, 9)
sizes = st.none() | st.builds(
    Tokens, st.integers(1, 2000), packed=st.booleans(), cost=st.builds(Cost, st.floats(0, 500), st.just(1.0))
)


def seconds(lengths: list[int], size: Tokens) -> float:
    cost = Cost(overhead=size.overhead)
    micro_batches = size.plan(lengths) if lengths else []
    return sum(cost(len(micro_batch), max(lengths[row] for row in micro_batch)) for micro_batch in micro_batches)


@given(many_lengths, numbers_of_ranks, sizes)
@settings(max_examples=150, deadline=None)
def test_each_row_is_dealt_once(lengths: list[int], ranks: int, size: Tokens | None) -> None:
    dealt = deal(lengths, ranks, size)
    assert len(dealt) == ranks
    assert sorted(row for rows in dealt for row in rows) == list(range(len(lengths)))
    assert all(rows == sorted(rows) for rows in dealt)
    assert dealt == deal(lengths, ranks, size)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=60), numbers_of_ranks, st.integers(500, 2000))
@settings(max_examples=150, deadline=None)
def test_no_rank_has_more_than_its_share_and_one_row(lengths: list[int], ranks: int, budget: int) -> None:
    """Without an overhead and with packing, time is tokens: the bound of the heaviest-first rule."""
    dealt = deal(lengths, ranks, Tokens(budget, packed=True, overhead=0))
    loads = [sum(lengths[row] for row in rows) for rows in dealt]
    assert max(loads) <= sum(lengths) / ranks + max(lengths)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_finish_together_where_loader_order_would_wait(ranks: int) -> None:
    draw, size = random.Random(5), Tokens(4096)
    times, waits = [], []
    for _ in range(5):
        lengths = [min(2000, int(draw.lognormvariate(4.5, 1.0)) + 4) for _ in range(32 * ranks)]
        dealt = [seconds([lengths[row] for row in rows], size) for rows in deal(lengths, ranks, size)]
        in_order = [seconds(lengths[32 * rank : 32 * (rank + 1)], size) for rank in range(ranks)]
        times.append(max(dealt) / max(in_order))
        waits.append((max(dealt) * ranks / sum(dealt), max(in_order) * ranks / sum(in_order)))
    assert max(times) < 0.95
    assert sum(times) / 5 < 0.85
    assert all(ours < loader for ours, loader in waits)


def batches_of(ranks: int, rows: int, batch_size: int, **options: Any) -> list[list[list[int]]]:
    """Each batch of the epoch: the rows of each rank."""
    lengths = [(17 * row) % 101 for row in range(rows)]
    samplers = [wb.DealtBatches(range(rows), batch_size, lengths, ranks=ranks, rank=r, **options) for r in range(ranks)]
    return [list(batch) for batch in zip(*samplers, strict=True)]


def joined(batches: list[list[list[int]]]) -> list[list[int]]:
    return [sorted(row for rows in batch for row in rows) for batch in batches]


@given(numbers_of_ranks, st.integers(0, 50), st.integers(1, 20), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_the_batches_do_not_depend_on_the_number_of_ranks(ranks: int, rows: int, batch_size: int, seed: int) -> None:
    batches = joined(batches_of(ranks, rows, batch_size, seed=seed))
    assert batches == joined(batches_of(1, rows, batch_size, seed=seed))
    assert sorted(row for batch in batches for row in batch) == list(range(rows))
    assert [len(batch) for batch in batches[:-1]] == [batch_size] * (len(batches) - 1)


def test_a_short_last_batch_is_kept_unless_it_is_to_be_dropped() -> None:
    assert [len(batch) for batch in joined(batches_of(3, 10, 4))] == [4, 4, 2]
    assert [len(batch) for batch in joined(batches_of(3, 10, 4, drop_last=True))] == [4, 4]
    assert len(wb.DealtBatches(range(10), 4, drop_last=True)) == 2


def test_every_epoch_has_an_order_of_its_own_and_every_seed() -> None:
    dealt = wb.DealtBatches(range(30), 5, seed=1)
    first, second = list(dealt), list(dealt)
    assert dealt.epoch == 2
    assert first != second
    assert sorted(row for rows in second for row in rows) == list(range(30))
    dealt.set_epoch(0)
    assert list(dealt) == first
    assert list(wb.DealtBatches(range(30), 5, seed=2)) != first
    assert list(wb.DealtBatches(range(6), 4, shuffle=False)) == [[0, 1, 2, 3], [4, 5]]


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_a_run_goes_on_in_the_middle_of_an_epoch_on_another_number_of_ranks(ranks: int) -> None:
    lengths = [(17 * row) % 101 for row in range(40)]
    undisturbed = wb.DealtBatches(range(40), 6, lengths, seed=3, ranks=1, rank=0)
    whole = [sorted(rows) for _ in range(2) for rows in undisturbed]
    stopped = wb.DealtBatches(range(40), 6, lengths, seed=3, ranks=3, rank=0)
    reading = iter(stopped)
    for _ in range(4):
        next(reading)
    states = [stopped.state_dict(), stopped.state_dict(batches=2)]
    for state, done in zip(states, (4, 2), strict=True):
        resumed = []
        for rank in range(ranks):
            sampler = wb.DealtBatches(range(40), 6, lengths, seed=3, ranks=ranks, rank=rank)
            sampler.load_state_dict(state)
            resumed.append([rows for _ in range(2) for rows in sampler])
        assert [sorted(row for rows in batch for row in rows) for batch in zip(*resumed, strict=True)] == whole[done:]


@pytest.mark.parametrize("change", [{"seed": 1}, {"batch_size": 5}, {"dataset": range(41)}])
def test_a_state_of_other_batches_is_refused(change: dict[str, Any]) -> None:
    state = wb.DealtBatches(range(40), 6).state_dict()
    other = {"dataset": range(40), "batch_size": 6, **change}
    with pytest.raises(ValueError, match="would not be the same"):
        wb.DealtBatches(**other).load_state_dict(state)


@pytest.mark.parametrize(("rank", "ranks"), [(-1, 2), (2, 2), (0, 0), (5, 2), (-1, -1)])
def test_a_rank_that_is_none_of_the_ranks_is_refused(rank: int, ranks: int) -> None:
    """Counted from the end, as Python counts, another rank's rows would be dealt twice."""
    with pytest.raises(
        ValueError, match=rf"rank={rank} of ranks={ranks}: ranks count from 0, .*such as rank=0, ranks=2"
    ):
        wb.DealtBatches(range(6), 4, rank=rank, ranks=ranks)


def test_lengths_come_from_a_list_a_key_or_a_function() -> None:
    rows = [{"text": [0] * n} for n in (1, 9, 2, 8)]
    by_key = [list(wb.DealtBatches(rows, 4, "text", ranks=2, rank=rank)) for rank in (0, 1)]
    by_call = [list(wb.DealtBatches(rows, 4, lambda row: len(row["text"]), ranks=2, rank=rank)) for rank in (0, 1)]
    by_list = [list(wb.DealtBatches(rows, 4, [1, 9, 2, 8], ranks=2, rank=rank)) for rank in (0, 1)]
    assert by_key == by_call == by_list
    with pytest.raises(ValueError, match="3 numbers for 4 rows"):
        wb.DealtBatches(rows, 4, [1, 9, 2])
    with pytest.raises(ValueError, match="batch_size"):
        wb.DealtBatches(rows, 0)


def test_a_loader_over_dealt_batches_trains_on_the_whole_batch() -> None:
    rows = [torch.randn(3) for _ in range(10)]
    loader = DataLoader(rows, batch_sampler=wb.DealtBatches(rows, 4, ranks=1, rank=0), collate_fn=list)
    model = torch.nn.Linear(3, 1)
    found = [
        wb.backward(model, lambda m, x: m(x).square(), batch, micro_batch_size=3, collate=torch.stack).rows
        for batch in loader
    ]
    assert found == [4, 4, 2]
