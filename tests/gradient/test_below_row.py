"""A row that is larger than memory: less of it is kept, in the order of what that costs, and the window is exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholebatch as wb
from tests.oracle import assert_differs, assert_same_gradient, whole_batch
from wholebatch.errors import OutOfMemoryError
from wholebatch.model.memory import SavedBytes

WIDTH = 8


class Block(nn.Module):
    """Attention of a kind, then a feed-forward block that keeps far more than it is given."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Sequential(nn.Linear(WIDTH, wide * WIDTH), nn.GELU(), nn.Linear(wide * WIDTH, WIDTH))

    def forward(self, x: Tensor, scale: float) -> Tensor:
        x = x + scale * self.mix(x).cumsum(1).tanh()
        out: Tensor = x + self.wide(x)
        return out


class Net(nn.Module):
    def __init__(self, layers: int, wide: int = 12) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(wide) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, 0.5)
        return x


def squares(model: Any, rows: Tensor) -> Tensor:
    out: Tensor = model(rows).square().mean((1, 2))
    return out


ROWS = torch.randn(3, 300, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def peak(model: nn.Module, rows: Tensor, *handles: Any) -> int:
    with SavedBytes(ignored=list(model.parameters())) as saved:
        squares(model, rows).sum().backward()
    for handle in handles:
        handle.remove()
    model.zero_grad()
    return saved.peak


CASES = {
    "tiles": (("tiles",), Net(2, wide=12)),
    "checkpointing": (("checkpointing",), Net(12, wide=2)),
    "both": (("checkpointing", "tiles"), Net(8, wide=12)),
}


@pytest.mark.parametrize(("wanted", "model"), CASES.values(), ids=CASES)
def test_a_row_that_does_not_fit_is_kept_in_part(wanted: tuple[str, ...], model: Net) -> None:
    model = model.double()
    one = ROWS[:1]
    peaks = {(): peak(model, one)}
    peaks["tiles",] = peak(model, one, wb.tiled(model))
    peaks["checkpointing",] = peak(model, one, wb.checkpointed(model))
    blocks, tiles = wb.checkpointed(model), wb.tiled(model)
    peaks["checkpointing", "tiles"] = peak(model, one, tiles, blocks)
    limit = peaks[wanted] + 500
    assert all(peaks[earlier] > limit for earlier in list(peaks)[: list(peaks).index(wanted)])

    reference = whole_batch(model, lambda m, x: squares(m, x).mean(), ROWS)
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    auto = wb.Auto(2)
    with SavedBytes(limit, ignored=list(model.parameters())):
        result = wb.backward(model, squares, ROWS, auto)
        assert_same_gradient(model, reference)
        failures = auto.failures
        model.zero_grad()
        again = wb.backward(model, squares, ROWS, auto)
    assert result.ways == again.ways == wanted
    assert failures and auto.failures == failures  # the choice is remembered
    assert_same_gradient(model, reference)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before

    later = wb.Auto(2)
    later.load_state_dict(auto.state_dict())
    assert later.way == auto.way
    model.zero_grad()
    naive = ROWS.split([2, 1])
    for part in naive:
        (squares(model, part).mean() / 2).backward()
    assert_differs(model, reference)


def test_a_row_that_fits_in_no_way_is_named() -> None:
    model = Net(layers=2).double()
    with (
        SavedBytes(1000, ignored=list(model.parameters())),
        pytest.raises(OutOfMemoryError, match="keep less of a row"),
    ):
        wb.backward(model, squares, ROWS, wb.Auto(2))
    assert all(p.grad is None for p in model.parameters())
    assert not any("forward" in vars(module) for module in model.modules())


def test_rows_that_fit_run_as_they_are() -> None:
    model = Net(layers=2).double()
    assert wb.backward(model, squares, ROWS, wb.Auto(2)).ways == ()
