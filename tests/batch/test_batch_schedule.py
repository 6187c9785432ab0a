"""Batches that change while a run goes on, and that are the same when it is resumed."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import wholebatch as wb
from tests.oracle import assert_same_gradient, whole_batch


@pytest.mark.parametrize("stages", ["16,64@200,256@600", {0: 16, 200: 64, 600: 256}, " 16 , 64 @ 200, 256@600"])
def test_stages_begin_at_their_steps(stages: Any) -> None:
    schedule = wb.BatchSchedule(stages)
    assert [schedule.at(step) for step in (0, 199, 200, 599, 600, 10**6)] == [16, 16, 64, 64, 256, 256]
    assert str(schedule) == "16,64@200,256@600"
    assert schedule.settled and schedule.smallest == 16


def test_a_batch_doubles_with_each_epoch() -> None:
    schedule = wb.BatchSchedule("12..50@epoch")
    assert [schedule.at(7, epoch) for epoch in range(5)] == [12, 24, 48, 50, 50]
    assert schedule.at(0, epoch=10**9) == 50


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ("", "cannot be read"),
        ("16,64", "cannot be read at '64'"),
        ("16@3", "cannot be read"),
        ("16,64@200,32@200", "twice"),
        ("16,64@200,32@100", "in order"),
        ("0", "hold a row"),
        ("64..16@epoch", "smaller one first"),
        ({1: 16}, "Begin at step 0"),
        ({0: 16, 5: True}, "Begin at step 0"),
        ({}, "Begin at step 0"),
    ],
)
def test_what_does_not_say_every_step_is_refused(stages: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        wb.BatchSchedule(stages)


def test_noise_is_followed_only_where_it_is_measured() -> None:
    with pytest.raises(TypeError, match="which nothing measures"):
        wb.BatchSchedule("16..256@noise")
    with pytest.raises(TypeError, match="says nothing of the noise"):
        wb.BatchSchedule("16,64@200", noise_scale=wb.NoiseScale())
    with pytest.raises(TypeError, match="is none"):
        wb.BatchSchedule("16..256@noise", noise_scale=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="whole number"):
        wb.BatchSchedule(2.5)  # type: ignore[arg-type]


@given(
    rows=st.integers(1, 60),
    stages=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    ranks=st.integers(1, 3),
    stop=st.integers(0, 12),
    drop=st.booleans(),
)
def test_every_row_comes_once_an_epoch_also_when_resumed_on_other_ranks(
    rows: int, stages: list[int], ranks: int, stop: int, drop: bool
) -> None:
    def dealt(rank: int, of: int) -> wb.DealtBatches:
        schedule = wb.BatchSchedule({3 * place: size for place, size in enumerate(stages)})
        return wb.DealtBatches(range(rows), schedule, rank=rank, ranks=of, drop_last=drop)

    def taken(samplers: list[wb.DealtBatches]) -> list[list[int]]:
        return [sorted(chain(*parts)) for parts in zip(*samplers, strict=True)]

    one = dealt(0, 1)
    batches = [[sorted(batch) for batch in one] for _ in range(2)]
    sizes = wb.BatchSchedule({3 * place: size for place, size in enumerate(stages)})
    for place, batch in enumerate(batch for epoch in batches for batch in epoch):
        assert len(batch) <= sizes.at(place)
    assert drop or [sorted(chain(*epoch)) for epoch in batches] == [list(range(rows))] * 2

    begun = dealt(0, 1)
    assert len(begun) == len(batches[0])
    for _, _ in zip(range(stop), begun, strict=False):
        pass
    state = begun.state_dict()
    resumed = [dealt(rank, ranks) for rank in range(ranks)]
    for sampler in resumed:
        sampler.load_state_dict(state)
    left = batches[state["epoch"]][state["batch"] :]
    assert taken(resumed) == left


def test_a_later_epoch_can_be_gone_to() -> None:
    whole = wb.DealtBatches(range(40), wb.BatchSchedule("4,8@6,16@9"), ranks=1, rank=0)
    epochs = [list(whole) for _ in range(3)]
    there = wb.DealtBatches(range(40), wb.BatchSchedule("4,8@6,16@9"), ranks=1, rank=0)
    there.set_epoch(2)
    assert list(there) == epochs[2]


def test_another_schedule_is_not_resumed() -> None:
    state = wb.DealtBatches(range(40), wb.BatchSchedule("4,8@6"), ranks=1, rank=0).state_dict()
    with pytest.raises(ValueError, match="batch_size=4,8@6"):
        wb.DealtBatches(range(40), wb.BatchSchedule("4,8@7"), ranks=1, rank=0).load_state_dict(state)
    with pytest.raises(ValueError, match="'4,8@6'"):
        wb.BatchSchedule("4..8@epoch").load_state_dict({"stages": "4,8@6"})


def noisy(step: int) -> tuple[nn.Linear, Tensor]:
    torch.manual_seed(step)
    return nn.Linear(3, 1).double(), torch.randn(64, 3, dtype=torch.float64)


def squares(model: nn.Module, x: Tensor) -> Tensor:
    """Losses whose gradient is short beside what rows add to it."""
    return (model(x) - 5 * torch.randn(len(x), 1, dtype=x.dtype)).square().mean(1)


def test_a_batch_follows_the_noise_and_never_falls() -> None:
    def run(steps: int, noise: wb.NoiseScale, schedule: wb.BatchSchedule, first: int = 0) -> list[int]:
        torch.manual_seed(0)
        model = nn.Linear(3, 1).double()
        sizes = []
        for step in range(first, steps):
            sizes.append(schedule.at(step))
            x = torch.randn(sizes[-1], 3, dtype=torch.float64)
            wb.backward(model, squares, x, 1, noise_scale=noise, verify="never")
        return sizes

    noise = wb.NoiseScale(every=1)
    schedule = wb.BatchSchedule("2..16@noise", noise_scale=noise)
    sizes = run(60, noise, schedule)
    assert sizes[:8] == [2] * 8  # until enough was measured
    assert sizes == sorted(sizes) and sizes[-1] == 16
    assert [schedule.at(step) for step in range(60)] == sizes  # what was decided stays

    again = wb.NoiseScale(every=1)
    resumed = wb.BatchSchedule("2..16@noise", noise_scale=again)
    again.load_state_dict(noise.state_dict())
    resumed.load_state_dict(schedule.state_dict())
    assert [resumed.at(step) for step in range(60)] == sizes


def test_a_loader_of_batches_that_follow_the_noise_has_no_length() -> None:
    schedule = wb.BatchSchedule("2..16@noise", noise_scale=wb.NoiseScale())
    dealt = wb.DealtBatches(range(10), schedule, ranks=1, rank=0)
    with pytest.raises(TypeError, match="follows the noise"):
        len(dealt)
    assert [len(batch) for batch in dealt] == [2] * 5


def test_windows_count_rows_and_each_is_exact() -> None:
    model, rows = noisy(0)
    windows = list(wb.windows(rows.split(3), wb.BatchSchedule("6,13@2")))
    assert [sum(map(len, window)) for window in windows] == [6, 6, 15, 15, 15, 7]
    for window in windows:
        model.zero_grad()
        plain = whole_batch(model, lambda m, x: m(x).square().mean(), torch.cat(list(window)))
        wb.backward(model, lambda m, x: m(x).square(), window)
        assert_same_gradient(model, plain)
    assert [sum(map(len, w)) for w in wb.windows(rows.split(3), wb.BatchSchedule("6,13@2"), last="drop")] == [
        6,
        6,
        15,
        15,
        15,
    ]
    with pytest.raises(TypeError, match="counted in rows"):
        len(wb.windows(rows.split(3), wb.BatchSchedule(6)))


def test_windows_of_what_has_no_rows_say_how_to_count() -> None:
    with pytest.raises(wb.SplitError, match=r"schedule\.at\(step\) // 4"):
        list(wb.windows([{"x": torch.zeros(2), "y": torch.zeros(3)}], wb.BatchSchedule(6)))
