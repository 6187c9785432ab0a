"""What shares are divided by before the true number is known: in range for half precision, whatever the order."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wholebatch as wb
from tests.oracle import assert_same_gradient, gradients_of, whole_batch

torch.manual_seed(1203)
INPUTS = torch.randn(8, 128, 64)
LABELS = torch.randint(0, 50, (8, 128))


def logits_of(model: nn.Module, inputs: Tensor) -> Tensor:
    if inputs.dtype is torch.float64:
        return model(inputs)  # type: ignore[no-any-return]
    with torch.autocast("cpu", torch.float16):
        return model(inputs)  # type: ignore[no-any-return]


def labelled(model: nn.Module, batch: Any) -> Any:
    return wb.losses.cross_entropy(logits_of(model, batch[0]).flatten(0, 1), batch[1].flatten())


def masked(model: nn.Module, batch: Any) -> Any:
    losses = F.cross_entropy(logits_of(model, batch[0]).transpose(1, 2), batch[1].clamp(min=0), reduction="none")
    return wb.mean(losses, weights=batch[1] >= 0)


def by_positives(model: nn.Module, batch: Any) -> Any:
    """A sum over all places, divided by those that count: a micro-batch without any has a gradient all the same."""
    losses = F.cross_entropy(logits_of(model, batch[0]).transpose(1, 2), batch[1].clamp(min=0), reduction="none")
    return wb.LossSum(losses.sum(), (batch[1] >= 0).sum())


def empty_rows(*empty: int) -> Tensor:
    labels = LABELS.clone()
    labels[list(empty)] = -100
    return labels


ALL_BUT_ONE_IGNORED = empty_rows(0, 1)
ALL_BUT_ONE_IGNORED[0, 0] = 3
WINDOWS = {
    "the first is empty": empty_rows(0, 1),
    "the first two are empty": empty_rows(0, 1, 2, 3),
    "the last is empty": empty_rows(6, 7),
    "the first has one label": ALL_BUT_ONE_IGNORED,
    "all but the first are empty": empty_rows(2, 3, 4, 5, 6, 7),
}


@pytest.mark.parametrize("loss", [labelled, masked, by_positives], ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("labels", WINDOWS.values(), ids=WINDOWS.keys())
def test_a_window_under_a_scaler_steps_whatever_it_begins_with(loss: Any, labels: Tensor) -> None:
    if loss is by_positives and labels is WINDOWS["the first has one label"]:
        pytest.skip("a sum over all places beside one item tells nothing of the rest, and the scaler finds its way")
    model = nn.Linear(64, 50)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    step = wb.Step(model, torch.optim.SGD(model.parameters(), lr=0.0), loss, micro_batch_size=2, scaler=scaler)
    assert [step((INPUTS, labels)).stepped for _ in range(3)] == [True] * 3
    assert scaler.get_scale() == 65536.0


def test_divided_by_one_a_window_overflows() -> None:
    """The twin: what a provisional number of 1 would have done to the same rows."""
    model, scaler = nn.Linear(64, 50), torch.amp.GradScaler("cpu", init_scale=65536.0)
    for inputs, labels in zip(INPUTS.split(2), LABELS.split(2), strict=True):
        scaler.scale(labelled(model, (inputs, labels)).total).backward()
    assert not bool(torch.isfinite(model.weight.grad).all())  # type: ignore[arg-type]


@pytest.mark.parametrize("loss", [labelled, masked, by_positives], ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("labels", WINDOWS.values(), ids=WINDOWS.keys())
@pytest.mark.parametrize("size", [2, 3, wb.Auto(4)], ids=["2", "3", "auto"])
def test_a_number_that_changes_on_the_way_leaves_the_gradient_exact(loss: Any, labels: Tensor, size: Any) -> None:
    model, inputs = nn.Linear(64, 50).double(), INPUTS.double()
    wb.backward(model, loss, (inputs, labels), copy.deepcopy(size))

    def meant(model: nn.Module, batch: Any) -> Tensor:
        return loss(model, batch).value  # type: ignore[no-any-return]

    assert_same_gradient(model, whole_batch(model, meant, (inputs, labels)))


def test_gradients_that_stood_there_are_not_divided_anew() -> None:
    model, inputs, labels = nn.Linear(64, 50).double(), INPUTS.double(), ALL_BUT_ONE_IGNORED
    reference = whole_batch(model, lambda model, batch: labelled(model, batch).value, (inputs, labels))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.25)
    wb.backward(model, labelled, (inputs, labels), 2)
    found = {name: None if g is None else g - 0.25 for name, g in gradients_of(model).items()}
    assert_same_gradient(found, reference)
