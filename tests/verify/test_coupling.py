"""Whether rows meet is found by experiment, in modules of any name and in the loss."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import wholebatch as wb


def squares(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square()


class Centred(nn.Module):
    """Couples rows without any layer that says so."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


class CentredInside(nn.Module):
    """Couples rows between its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        out: torch.Tensor = self.second(hidden - hidden.mean(0, keepdim=True))
        return out


@pytest.mark.parametrize(
    ("layers", "found"),
    [
        ((nn.Linear(3, 4), nn.ReLU(), nn.Dropout(0.5)), []),
        ((nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), ["1"]),
        ((nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.BatchNorm1d(4)), ["1", "3"]),
        ((nn.Linear(3, 4), nn.Sequential(nn.Tanh(), Centred())), ["1.1"]),
        ((nn.Linear(3, 4), nn.LayerNorm(4), nn.Dropout(0.5)), []),
        ((CentredInside(),), ["0"]),
    ],
    ids=["separable", "BatchNorm", "two of them", "a layer of another name", "LayerNorm", "between parts"],
)
@pytest.mark.parametrize("rows", [2, 5, 8])
def test_the_modules_in_which_rows_meet_are_named(layers: tuple[nn.Module, ...], found: list[str], rows: int) -> None:
    model = nn.Sequential(*layers)
    coupling = wb.find_coupling(model, squares, torch.randn(rows, 3))
    assert list(coupling.modules) == found
    assert bool(coupling) == bool(found)


def test_layers_in_eval_mode_do_not_couple() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval()
    assert not wb.find_coupling(model, squares, torch.randn(6, 3))


def rmse(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return squares(model, x).mean().sqrt()


def dice(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    p = model(x).sigmoid()
    return 1 - 2 * (p * x[:, :2]).sum() / (p.sum() + x[:, :2].abs().sum())


def in_batch_negatives(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    encoded = model(x)
    return F.cross_entropy(encoded @ encoded.T, torch.arange(len(x)), reduction="none")


@pytest.mark.parametrize("loss", [rmse, dice, in_batch_negatives])
def test_a_loss_that_needs_all_rows_is_found(loss: Callable[..., torch.Tensor]) -> None:
    coupling = wb.find_coupling(nn.Linear(3, 2), loss, torch.randn(8, 3))
    assert coupling.loss > 0 and not coupling.modules
    assert "in the loss function itself" in str(coupling)


@pytest.mark.parametrize(
    "loss",
    [
        squares,
        lambda m, x: squares(m, x).mean(),
        lambda m, x: wb.mean(squares(m, x), x[:, :2].abs()),
        lambda m, x: {"a": squares(m, x), "b": 0.1 * wb.once(m.weight.square().sum())},
        lambda m, x: wb.total(squares(m, x)) + 0.5 * wb.mean(m(x).abs()),
    ],
    ids=["values", "a plain mean", "weights", "a regulariser", "two terms"],
)
def test_a_loss_of_single_rows_is_not_suspected(loss: Callable[..., Any]) -> None:
    assert not wb.find_coupling(nn.Linear(3, 2), loss, torch.randn(8, 3))


def test_looking_leaves_no_trace() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    before, x = copy.deepcopy(model.state_dict()), torch.randn(8, 3)
    torch.manual_seed(3)
    wb.find_coupling(model, squares, x)
    drawn = torch.rand(())
    torch.manual_seed(3)
    assert torch.equal(torch.rand(()), drawn)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_one_row_cannot_tell() -> None:
    with pytest.raises(wb.SplitError, match="1 row"):
        wb.find_coupling(nn.Linear(3, 2), squares, torch.randn(1, 3))


def test_a_size_in_the_place_of_names_is_refused() -> None:
    with pytest.raises(TypeError, match=r"whole is 4; .*whole=\('mask',\).*no size"):
        wb.find_coupling(nn.Linear(3, 1), lambda model, x: model(x), torch.zeros(4, 3), 4)  # type: ignore[arg-type]
