"""Whatever a loss averages over, the window's gradient is the whole batch's: every situation, every form."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import wholebatch as wb
from tests.cases.kinds import KINDS, Rows
from tests.cases.reported import REPORTED
from tests.cases.situation import Loss, Situation, columns, every_form
from tests.oracle import assert_differs, assert_same_gradient, gradients_of, relative_error, tolerance

SITUATIONS = [*REPORTED, *KINDS]
FORMS = every_form(SITUATIONS)
ROWS = [s for s in KINDS if isinstance(s, Rows) and s.same_shapes]

in_every_form = pytest.mark.parametrize(("situation", "loss"), FORMS.values(), ids=FORMS.keys())
in_every_situation = pytest.mark.parametrize("situation", SITUATIONS, ids=repr)
in_both_precisions = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])


@in_both_precisions
@in_every_form
def test_a_window_has_the_gradient_and_the_loss_of_the_whole_batch(
    situation: Situation, loss: Loss, dtype: torch.dtype
) -> None:
    model, window = situation.start(dtype)
    reference = situation.reference(model, window)
    result = wb.backward(model, loss, wb.Window(window))
    assert_same_gradient(model, reference)
    assert_close(result.loss, reference.loss, dtype)
    assert result.micro_batches == situation.ran(window)


@in_every_situation
def test_the_usual_loop_misses_it(situation: Situation) -> None:
    model, window = situation.start()
    reference = situation.reference(model, window)
    situation.usual_loop(model, window)
    assert_differs(model, reference, by=0.01)


@in_both_precisions
@pytest.mark.parametrize("situation", [s for s in SITUATIONS if s.counts_known], ids=repr)
def test_counts_known_beforehand_give_the_same(situation: Situation, dtype: torch.dtype) -> None:
    model, window = situation.start(dtype)
    reference = situation.reference(model, window)
    result = wb.backward(model, situation.loss, wb.Window(window), items=situation.items)
    assert_same_gradient(model, reference)
    assert_close(result.loss, reference.loss, dtype)


@in_every_situation
def test_the_order_of_the_micro_batches_does_not_matter(situation: Situation) -> None:
    model, window = situation.start()
    reference = situation.reference(model, window)
    wb.backward(model, situation.loss, wb.Window(window[::-1]))
    assert_same_gradient(model, reference)


@pytest.mark.parametrize("size", [1, 2, 5, 100])
@pytest.mark.parametrize("situation", ROWS, ids=repr)
def test_the_library_s_own_cut_does_not_matter(situation: Rows, size: int) -> None:
    model, window = situation.start()
    reference = situation.reference(model, window)
    wb.backward(model, situation.loss, columns(window), micro_batch_size=size)
    assert_same_gradient(model, reference)


@in_every_situation
def test_a_window_of_one_micro_batch_is_no_special_case(situation: Situation) -> None:
    model, window = situation.start()
    some = [rows for rows in window if situation.loss(model, rows) is not None]
    micro_batch = next(rows for rows in some if not situation.counts_known or all(numbers(situation.items(rows))))
    reference = situation.reference(model, [micro_batch])
    wb.backward(model, situation.loss, wb.Window([micro_batch]))
    assert_same_gradient(model, reference)


@in_every_situation
def test_gradients_that_are_there_already_are_added_to(situation: Situation) -> None:
    model, window = situation.start()
    reference = situation.reference(model, window)
    expected = dict(reference.gradients)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not parameter.is_sparse and expected[name] is not None:
            parameter.grad = torch.full_like(parameter, 0.25)
            expected[name] = expected[name] + 0.25
    wb.backward(model, situation.loss, wb.Window(window))
    assert_same_gradient(model, expected)


@pytest.mark.filterwarnings("ignore:2 parameters got no gradient")  # in FrozenAndUnused
@in_both_precisions
@in_every_situation
def test_a_step_hands_the_same_gradient_to_the_optimizer(situation: Situation, dtype: torch.dtype) -> None:
    model, window = situation.start(dtype)
    reference = situation.reference(model, window)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    handed: dict[str, Any] = {}
    optimizer.register_step_pre_hook(lambda *_: handed.update(gradients_of(model)))
    result = wb.Step(model, optimizer, situation.loss)(wb.Window(window))
    assert_same_gradient(handed, reference)
    assert result.stepped
    tol = tolerance(handed)
    assert float(result.grad_norm) == pytest.approx(float(norm_of(reference.gradients)), rel=tol, abs=tol)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("situation", [s for s in SITUATIONS if s.counts_known], ids=repr)
def test_the_denominators_are_reported(situation: Situation) -> None:
    model, window = situation.start()
    expected = torch.tensor([numbers(situation.items(rows)) for rows in window]).sum(0)
    result = wb.backward(model, situation.loss, wb.Window(window))
    assert numbers(result.items) == pytest.approx(expected.tolist())


def numbers(counts: Any) -> list[float]:
    """Return one count or several as a list."""
    counts = list(counts.values()) if isinstance(counts, dict) else counts
    return [float(count) for count in (counts if isinstance(counts, (tuple, list)) else [counts])]


def assert_close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Compare two numbers within the tolerance of the precision."""
    assert not found.requires_grad
    tol = tolerance({"": torch.zeros((), dtype=dtype)})
    assert float(found) == pytest.approx(float(expected), rel=tol, abs=tol)


def norm_of(gradients: dict[str, torch.Tensor | None]) -> torch.Tensor:
    """Return the norm over all gradients together."""
    zeros = {name: None if gradient is None else torch.zeros_like(gradient) for name, gradient in gradients.items()}
    return torch.tensor(relative_error(gradients, zeros), dtype=torch.float64)
