"""What is reported is the whole window's: its loss, its metrics, its rows, whatever the cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import wholebatch as wb
from tests.oracle import assert_same_gradient, whole_batch


def classified() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(55)
    x, y = torch.randn(10, 3).double(), torch.randint(0, 3, (10,))
    return nn.Linear(3, 3).double(), (x, y)


def loss_and_accuracy(model: nn.Module, rows: Any) -> Any:
    out = model(rows[0])
    return F.cross_entropy(out, rows[1], reduction="none"), {"accuracy": (out.argmax(-1) == rows[1]).double()}


def test_loss_and_metrics_cover_every_micro_batch_of_the_window() -> None:
    """allenai/allennlp#4706: micro-batches of 4, 4 and 2 rows, read after the last one."""
    model, (x, y) = classified()
    window = wb.Window(zip(x.split(4), y.split(4), strict=True))
    result = wb.backward(model, loss_and_accuracy, window)
    reference = whole_batch(model, lambda model, rows: F.cross_entropy(model(rows[0]), rows[1]), (x, y))
    accuracy = (model(x).argmax(-1) == y).double().mean()
    assert_same_gradient(model, reference)
    assert result.loss.item() == pytest.approx(reference.loss.item(), rel=1e-12)
    assert result.metrics["accuracy"].item() == pytest.approx(accuracy.item(), rel=1e-12)
    assert (result.rows, result.micro_batches) == (10, 3)
    assert not any(t.requires_grad for t in (result.loss, *result.metrics.values()))

    out = model(window[-1][0])  # the twin reads the last micro-batch
    assert abs(F.cross_entropy(out, window[-1][1]).item() / 3 - reference.loss.item()) > 0.1
    assert abs((out.argmax(-1) == window[-1][1]).double().mean().item() - accuracy.item()) > 0.05


@pytest.mark.parametrize("size", [1, 3, 4, 10])
def test_reported_values_do_not_depend_on_the_cut(size: int) -> None:
    model, batch = classified()
    result = wb.backward(model, loss_and_accuracy, batch, micro_batch_size=size)
    whole = wb.backward(model, loss_and_accuracy, batch)
    assert result.loss.item() == pytest.approx(whole.loss.item(), rel=1e-12)
    assert result.metrics["accuracy"].item() == pytest.approx(whole.metrics["accuracy"].item(), rel=1e-12)
    assert result.rows == whole.rows == 10


def test_terms_are_reported_without_their_weights_and_under_their_names() -> None:
    model, (x, y) = classified()

    def loss(model: nn.Module, rows: Any) -> Any:
        out = model(rows[0])
        return {"ce": F.cross_entropy(out, rows[1], reduction="none"), "size": 0.1 * wb.mean(out.square())}

    result = wb.backward(model, loss, (x, y), micro_batch_size=3)
    out = model(x)
    assert isinstance(result.terms, dict)
    assert isinstance(result.items, dict)
    assert result.terms["ce"].item() == pytest.approx(F.cross_entropy(out, y).item(), rel=1e-12)
    assert result.terms["size"].item() == pytest.approx(out.square().mean().item(), rel=1e-12)
    assert result.loss.item() == pytest.approx((F.cross_entropy(out, y) + 0.1 * out.square().mean()).item(), rel=1e-12)
    assert {name: float(count) for name, count in result.items.items()} == {"ce": 10, "size": 30}


def test_a_metric_with_weights_has_its_own_denominator() -> None:
    model, (x, y) = classified()

    def loss(model: nn.Module, rows: Any) -> Any:
        out = model(rows[0])
        right = (out.argmax(-1) == rows[1]).double()
        return F.cross_entropy(out, rows[1], reduction="none"), {"recall of 0": wb.mean(right, weights=rows[1] == 0)}

    y[0], y[4:8], y[9] = 0, 1, 0  # a micro-batch without a row of class 0
    result = wb.backward(model, loss, (x, y), micro_batch_size=4)
    right = (model(x).argmax(-1) == y).double()
    assert result.metrics["recall of 0"].item() == pytest.approx(right[y == 0].mean().item(), rel=1e-12)


def test_a_window_of_nothing_reports_a_finite_loss() -> None:
    """Every label ignored: the gradient is zero and so is the loss, not NaN."""
    model, (x, y) = classified()
    result = wb.backward(
        model,
        lambda model, rows: wb.losses.cross_entropy(model(rows[0]), rows[1]),
        (x, y * 0 - 100),
        micro_batch_size=4,
    )
    assert result.loss.item() == 0
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())
