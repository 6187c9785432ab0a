"""Where a window begins and ends: short last windows, epochs, streams without a length, and nobody's rows lost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import wholebatch as wb
from tests.oracle import assert_same_parameters, parameters_of, relative_error

Pair = tuple[torch.Tensor, torch.Tensor]


def squared_error(model: nn.Module, rows: Pair) -> torch.Tensor:
    return F.mse_loss(model(rows[0]), rows[1], reduction="none")


def drawn(seed: int, rows: int, inputs: int, size: int) -> tuple[nn.Module, list[Pair]]:
    """Return a linear model and rows in micro-batches of `size`, from a seed."""
    torch.manual_seed(seed)
    model = nn.Linear(inputs, 1).double()
    x, y = torch.randn(rows, inputs).double(), torch.randn(rows, 1).double()
    return model, list(zip(x.split(size), y.split(size), strict=True))


def whole_steps(model: nn.Module, batches: Iterable[list[Pair]], lr: float) -> nn.Module:
    """Train in plain torch, one step a batch, each in one micro-batch: what windows must equal."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for batch in batches:
        optimizer.zero_grad()
        F.mse_loss(model(torch.cat([x for x, _ in batch])), torch.cat([y for _, y in batch])).backward()
        optimizer.step()
    return model


def stepped(model: nn.Module, windows: Iterable[wb.Window], lr: float) -> int:
    """Train with `wb.Step`, and return the number of steps."""
    step = wb.Step(model, torch.optim.SGD(model.parameters(), lr=lr), squared_error)
    return sum(step(window).stepped for window in windows)


def by_hand(model: nn.Module, windows: Iterable[wb.Window], lr: float) -> int:
    """Train in a plain loop round `wb.backward`, and return the number of steps."""
    optimizer, steps = torch.optim.SGD(model.parameters(), lr=lr), 0
    for window in windows:
        optimizer.zero_grad()
        wb.backward(model, squared_error, window)
        optimizer.step()
        steps += 1
    return steps


in_both_loops = pytest.mark.parametrize("train", [stepped, by_hand])


@in_both_loops
def test_a_short_last_window_has_its_own_denominator(train: Callable[..., int]) -> None:
    """Lightning-AI/pytorch-lightning#19987: nine micro-batches of one row in windows of four."""
    model, rows = drawn(6, rows=9, inputs=3, size=1)
    assert train(model, wb.windows(rows, 4), lr=0.1) == 3
    expected = whole_steps(drawn(6, 9, 3, 1)[0], [rows[:4], rows[4:8], rows[8:]], lr=0.1)
    assert_same_parameters(model, expected)

    naive, _ = drawn(6, 9, 3, 1)
    optimizer = torch.optim.SGD(naive.parameters(), lr=0.1)
    for index, (x, y) in enumerate(rows):
        (F.mse_loss(naive(x), y) / 4).backward()  # four, though one is left
        if index % 4 == 3 or index == 8:
            optimizer.step()
            optimizer.zero_grad()
    assert_other_parameters(naive, expected)


@in_both_loops
@pytest.mark.parametrize("policy", ["flush", "drop"])
def test_no_row_leaks_from_one_epoch_into_the_next(policy: str, train: Callable[..., int]) -> None:
    """WalkingMeatAxolotl/AnimaLoraStudio#305: two epochs of five micro-batches in windows of three."""
    model, rows = drawn(8, rows=20, inputs=2, size=2)
    epochs = [rows[:5], rows[5:]]
    windows = [window for epoch in epochs for window in wb.windows(epoch, 3) if policy == "flush" or len(window) == 3]
    assert train(model, windows, lr=0.2) == (4 if policy == "flush" else 2)
    tails = [epoch[3:] for epoch in epochs] if policy == "flush" else [[], []]
    batches = [batch for epoch, tail in zip(epochs, tails, strict=True) for batch in (epoch[:3], tail) if batch]
    expected = whole_steps(drawn(8, 20, 2, 2)[0], batches, lr=0.2)
    assert_same_parameters(model, expected)

    naive, _ = drawn(8, 20, 2, 2)
    optimizer = torch.optim.SGD(naive.parameters(), lr=0.2)
    for epoch in epochs:
        for index, (x, y) in enumerate(epoch):  # the counter starts again, the gradient does not
            (F.mse_loss(naive(x), y) / 3).backward()
            if index % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
    assert_other_parameters(naive, expected)


class Stream:
    """Rows without a length, that can be walked through once; it counts how often that was tried."""

    def __init__(self, rows: list[Pair]) -> None:
        self.rows, self.passes, self.handed = rows, 0, 0

    def __iter__(self) -> Iterator[Pair]:
        self.passes += 1
        for row in self.rows:
            self.handed += 1
            yield row


@in_both_loops
def test_a_stream_without_a_length_is_walked_through_once_and_to_its_end(train: Callable[..., int]) -> None:
    """facebookresearch/mmf#521: seven micro-batches of 2, 2, 2, 2, 2, 2 and 1 rows in windows of three."""
    model, rows = drawn(10, rows=13, inputs=3, size=2)
    stream = Stream(rows)
    assert train(model, wb.windows(stream, 3), lr=0.2) == 3
    assert (stream.passes, stream.handed) == (1, 7)
    expected = whole_steps(drawn(10, 13, 3, 2)[0], [rows[:3], rows[3:6], rows[6:]], lr=0.2)
    assert_same_parameters(model, expected)

    naive = whole_steps(drawn(10, 13, 3, 2)[0], [rows[:3], rows[3:6]], lr=0.2)  # the last window never comes
    assert_other_parameters(naive, expected)


def test_windows_read_no_further_ahead_than_they_must() -> None:
    stream = Stream(drawn(0, 12, 3, 1)[1])
    next(iter(wb.windows(stream, 4)))
    assert stream.handed <= 5


@pytest.mark.parametrize("count", range(1, 10))
@pytest.mark.parametrize("k", [1, 2, 4, 20])
def test_every_micro_batch_is_in_one_window_in_its_place(count: int, k: int) -> None:
    windows = list(wb.windows(iter(range(count)), k))
    assert [item for window in windows for item in window] == list(range(count))
    assert [len(window) for window in windows] == [k] * (count // k) + [count % k] * (count % k > 0)
    assert all(isinstance(window, wb.Window) for window in windows)


def test_the_first_window_is_as_long_as_the_others() -> None:
    """A loop that steps where `index % k == 0` gives the first step one micro-batch alone."""
    model, rows = drawn(201, rows=12, inputs=3, size=1)
    stepped(model, wb.windows(rows, 4), lr=0.1)
    expected = whole_steps(drawn(201, 12, 3, 1)[0], [rows[:4], rows[4:8], rows[8:]], lr=0.1)
    assert_same_parameters(model, expected)

    naive = whole_steps(drawn(201, 12, 3, 1)[0], [rows[:1], rows[1:5], rows[5:9]], lr=0.1)
    assert_other_parameters(naive, expected)


def test_an_epoch_shorter_than_a_window_is_one_step_with_its_own_denominator() -> None:
    model, rows = drawn(202, rows=2, inputs=3, size=1)
    assert stepped(model, wb.windows(rows, 8), lr=0.1) == 1
    assert_same_parameters(model, whole_steps(drawn(202, 2, 3, 1)[0], [rows], lr=0.1))


def test_no_micro_batches_make_no_window() -> None:
    assert list(wb.windows([], 4)) == []


def test_the_micro_batches_of_a_window_can_be_cut_further() -> None:
    """A loader of batches too large for the memory: cut, never joined, the gradient stays."""
    model, rows = drawn(203, rows=11, inputs=3, size=4)
    result = wb.backward(model, squared_error, next(iter(wb.windows(rows, 8))), micro_batch_size=3)
    assert result.rows == 11
    assert result.micro_batches == 5  # 4 = 3 + 1, 4 = 3 + 1, 3
    expected, _ = drawn(203, 11, 3, 4)
    F.mse_loss(expected(torch.cat([x for x, _ in rows])), torch.cat([y for _, y in rows])).backward()
    assert_same_parameters(
        {n: p.grad for n, p in model.named_parameters()}, {n: p.grad for n, p in expected.named_parameters()}
    )


@pytest.mark.parametrize("size", [1, 2, 3, 5, 10, 11, 16, None])
def test_a_batch_is_cut_into_any_size_without_a_difference(size: int | None) -> None:
    model, rows = drawn(204, rows=11, inputs=3, size=11)
    sizes: list[int] = []

    def seen(model: nn.Module, micro_batch: Pair) -> Any:
        sizes.append(len(micro_batch[0]))
        return squared_error(model, micro_batch)

    wb.backward(model, seen, rows[0], micro_batch_size=size)
    assert sum(sizes) == 11
    assert max(sizes) <= (size or 11)
    expected, _ = drawn(204, 11, 3, 11)
    F.mse_loss(expected(rows[0][0]), rows[0][1]).backward()
    assert_same_parameters(
        {n: p.grad for n, p in model.named_parameters()}, {n: p.grad for n, p in expected.named_parameters()}
    )


def assert_other_parameters(model: nn.Module, expected: nn.Module) -> None:
    """The twin: the naive loop ends elsewhere."""
    with pytest.raises(AssertionError):
        assert_same_parameters(model, expected)
    assert relative_error(parameters_of(model), parameters_of(expected)) > 1e-3
