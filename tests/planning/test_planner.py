"""What the planner says beforehand is what happens, and its arithmetic rounds nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import wholebatch as wb
from tests.oracle import assert_same_gradient, gradients_of
from wholebatch.model.checkpointing import checkpointed
from wholebatch.model.memory import SavedBytes
from wholebatch.planning.arrangement import Arrangement
from wholebatch.planning.planner import Measured, Plan, plan

MIB = 2**20


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.inner(x)
        return out


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(6)])


ROWS = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))


def squares(model: nn.Module, rows: Tensor) -> Tensor:
    out: Tensor = model(rows).square()
    return out


def parts_of(found: Plan) -> int:
    return sum(found.parts.values())


def test_a_step_stays_within_what_was_planned_and_a_larger_micro_batch_would_not() -> None:
    model = build()
    free = plan(model, squares, ROWS)
    cap = parts_of(free) + 300_000
    found = plan(model, squares, ROWS, cap)
    way = next(choice for choice in found.choices if choice.way == "smaller micro-batches")
    assert 1 <= way.micro_batch_size < 64
    for size, fits in ((way.micro_batch_size, True), (2 * way.micro_batch_size, False)):
        with SavedBytes(ignored=list(model.parameters())) as saved:
            wb.backward(model, squares, ROWS, size)
        assert (saved.peak <= 300_000) is fits


def test_checkpointing_is_chosen_where_nothing_else_fits() -> None:
    model = build()
    measured = {way.way: way for way in plan(model, squares, ROWS).measured}
    one_plain, one_again = (measured[way].micro_batch_bytes(1) for way in ("smaller micro-batches", "checkpointing"))
    assert one_again < 0.75 * one_plain
    cap = parts_of(plan(model, squares, ROWS)) + int(0.9 * one_plain)
    found = plan(model, squares, ROWS, cap)
    assert found.best.way == "checkpointing"
    assert "smaller micro-batches would not fit one row" in found.reason
    with SavedBytes(ignored=list(model.parameters())) as saved, checkpointed(model):
        wb.backward(model, squares, ROWS, found.best.micro_batch_size)
    assert saved.peak <= cap - parts_of(found)


def test_nothing_fitting_is_an_error_with_the_parts() -> None:
    with pytest.raises(wb.OutOfMemoryError, match=r"Not even one row fits into 0\.10 MiB: weights .*optimizer"):
        plan(build(), squares, ROWS, int(0.1 * MIB))


@pytest.mark.parametrize(("words", "size"), [("1GiB", 2**30), ("500 MB", 500_000_000), (8e9, 8_000_000_000)], ids=str)
def test_memory_may_be_said_in_words(words: Any, size: int) -> None:
    assert plan(build(), squares, ROWS, words).memory == size


@pytest.mark.parametrize(
    ("memory", "error", "says"),
    [
        ("lots", ValueError, "memory is 'lots'; it must be a number of bytes such as 2GiB"),
        (0, ValueError, "memory is 0; it must be a number of bytes"),
        ([2], TypeError, r"memory is \[2\], of type list; pass a number of bytes: .*memory=\"2GiB\""),
        (True, TypeError, "of type bool; pass a number of bytes"),
        (0.5, TypeError, "of type float; pass a number of bytes"),
    ],
    ids=str,
)
def test_what_is_no_memory_is_refused(memory: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        plan(build(), squares, ROWS, memory)


def test_a_batch_without_rows_cannot_be_planned() -> None:
    with pytest.raises(wb.SplitError, match=r"no rows.*wb\.plan\(model, loss_fn, next\(iter\(loader\)\)\)"):
        plan(build(), squares, ROWS[:0])


def test_a_plan_and_a_handle_are_read_in_a_line() -> None:
    said = repr(plan(build(), squares, ROWS, "10MiB"))
    assert said.startswith("Plan of 64 rows in 10 MiB: ")
    assert "1 x 64 rows at most" in said and "weights 0.4 MiB" in said and len(said) < 400
    with checkpointed(build()) as handle:
        assert repr(handle) == "Checkpointed(6 blocks of Block: 0, ..., 5)"
    assert repr(handle) == "Checkpointed(removed)"


def test_planning_leaves_no_trace() -> None:
    model = build()
    wb.backward(model, squares, ROWS)
    before, twin = gradients_of(model), build()
    wb.backward(twin, squares, ROWS)
    torch.manual_seed(4)
    plan(model, squares, ROWS)
    drawn = torch.rand(2)
    torch.manual_seed(4)
    assert torch.equal(drawn, torch.rand(2))
    assert_same_gradient(model, before)


def test_parts_are_counted_in_bytes() -> None:
    model = build()
    numbers = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wb.Step(model, optimizer, squares, micro_batch_size=16)(ROWS)
    found = plan(model, squares, ROWS, optimizer=optimizer)
    assert found.parts == {"weights": 4 * numbers, "gradients": 4 * numbers, "optimizer": 4 * numbers, "inputs": 16384}
    assert plan(model, squares, ROWS).parts["optimizer"] == 8 * numbers


def test_a_batch_can_be_planned_in_tokens() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 32), *[nn.Linear(32, 32) for _ in range(4)])
    lengths = [int(n) for n in torch.randint(3, 40, (40,))]
    samples = [torch.randint(0, 50, (n,)) for n in lengths]

    def collate(rows: list[Tensor]) -> Tensor:
        return nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def loss(model: nn.Module, ids: Tensor) -> wb.LossSum:
        return wb.mean(model(ids).square().mean(-1), ids != 0)

    found = plan(model, loss, samples, tokens=wb.Tokens(4096), collate=collate)
    assert found.unit == "tokens"
    cap = parts_of(found) + int(found.measured[0].micro_batch_bytes(200))
    smaller = plan(model, loss, samples, cap, tokens=wb.Tokens(4096), collate=collate)
    assert 100 < smaller.choices[-1].micro_batch_size <= 300
    assert smaller.choices[-1].micro_batches > found.choices[-1].micro_batches


def test_a_way_that_keeps_as_much_is_not_weighed() -> None:
    """Layers alone keep their input, which is what a checkpoint would have to keep."""
    stack = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    assert [way.way for way in plan(stack, squares, ROWS).measured] == ["smaller micro-batches"]


def test_doing_more_never_seems_faster() -> None:
    plain, again = plan(build(), squares, ROWS).measured
    for held in (1, 8, 64):
        assert again.fixed_seconds + again.unit_seconds * held >= plain.fixed_seconds + plain.unit_seconds * held


def test_no_micro_batch_is_tried_far_beyond_the_memory() -> None:
    free = plan(build(), squares, ROWS)
    capped = plan(build(), squares, ROWS, parts_of(free) + int(free.measured[0].micro_batch_bytes(6)))
    assert free.measured[0].held == [1, 2, 4, 8, 16, 32, 64]
    assert capped.measured[0].held == [1, 2, 4, 8]


def test_curves_reach_from_one_row_to_the_batch() -> None:
    found = plan(build(), squares, ROWS)
    plain = [choice for choice in found.curves if choice.way == "smaller micro-batches"]
    sizes = [choice.micro_batch_size for choice in plain]
    assert (sizes[0], sizes[-1]) == (1, 64) and sizes == sorted(set(sizes))
    assert all(choice.micro_batches == -(-64 // choice.micro_batch_size) for choice in plain)
    assert [choice.activations for choice in plain] == sorted(choice.activations for choice in plain)


def test_a_plan_is_plain_values() -> None:
    import json

    found = plan(build(), squares, ROWS)
    assert json.loads(json.dumps(found.as_dict()))["rows"] == 64


def test_the_line_through_the_bytes_is_what_largest_inverts() -> None:
    way = Measured("smaller micro-batches", [1], [1.0], [1.0], 100.0, 10.0, 0.0, 1.0)
    assert (way.largest(250.0, 64), way.largest(105.0, 64), way.largest(1e9, 64)) == (15, 0, 64)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((128, 4, 4), "batch 128 = 4 rows x 8 micro-batches x 4 ranks"),
        ((130, 4, 1), "batch 130 = 4 rows x 32 micro-batches + 1 micro-batch of 2 rows"),
        ((130, 4, 2), "batch 130 = (4 rows x 16 micro-batches + 1 micro-batch of 1 row) x 2 ranks"),
        ((10, 4, 3), "batch 10 = 4 + 3 + 3 rows on 3 ranks, in micro-batches of at most 4 rows"),
        ((3, 8, 1), "batch 3 = 3 rows x 1 micro-batch"),
        ((64, None, 1), "batch 64 = 64 rows x 1 micro-batch"),
    ],
)
def test_the_arithmetic_is_said_with_every_remainder(arguments: tuple[int, int | None, int], said: str) -> None:
    assert str(Arrangement(*arguments)) == said


@given(st.integers(1, 500), st.integers(1, 64), st.integers(1, 9))
def test_no_row_is_lost_in_the_arithmetic(batch: int, rows: int, ranks: int) -> None:
    arrangement = Arrangement(batch, rows, ranks)
    assert sum(arrangement.shares) == batch
    assert max(arrangement.shares) - min(arrangement.shares) <= 1
    for words in arrangement.in_other_words().values():
        rows_there = words.get("per_device_train_batch_size", 0) * words.get("gradient_accumulation_steps", 0) * ranks
        assert rows_there in (0, batch)


def test_other_tools_words_are_given_only_where_they_can_say_it() -> None:
    words = Arrangement(128, 4, 4).in_other_words()
    assert words["Hugging Face"] == {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8}
    assert words["Ultralytics"] == {"batch": 16, "nbs": 128}
    assert Arrangement(130, 4).in_other_words() == {}


@pytest.mark.parametrize(
    ("arguments", "batches"),
    [((128, 4, 4), (128,)), ((130, 4, 4), (128, 144)), ((3, 4, 4), (4,)), ((10, None, 3), (12,))],
    ids=str,
)
def test_the_nearest_batches_of_equal_micro_batches_are_named(arguments: Any, batches: tuple[int, ...]) -> None:
    found = Arrangement(*arguments).nearest()
    assert found == batches
    assert all(Arrangement(batch, *arguments[1:]).even for batch in found)


def test_rates_follow_both_rules() -> None:
    assert Arrangement(1024, 4).rates(0.1, base_batch=256) == {"linear": 0.4, "sqrt": 0.2}


@pytest.mark.parametrize("arguments", [(0, 4, 1), (8, 0, 1), (8, 4, 0)])
def test_sizes_below_one_are_refused(arguments: Any) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Arrangement(*arguments)
