"""What somebody sees whose call was wrong: the message, and the lines of their own."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholebatch as wb


def number(model: nn.Module, rows: Tensor) -> Tensor:
    return model(rows).square().mean()


def weighted(model: nn.Module, rows: Tensor) -> wb.LossSum:
    return wb.mean(model(rows), weights=rows)  # of another shape


def step(loss_fn: Any) -> Any:
    model = nn.Linear(3, 1)
    return lambda rows: wb.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, 4)(rows)


CALLS = {
    "backward": lambda rows: wb.backward(nn.Linear(3, 1), number, rows, 4),
    "Step": step(number),
    "coupled_backward": lambda rows: wb.coupled_backward(nn.Linear(3, 1), number, torch.sum, rows, 4),
    "check": lambda rows: wb.check(nn.Linear(3, 1), number, rows, "four"),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_error_shows_the_users_own_lines_alone(name: str) -> None:
    with pytest.raises((wb.WholeBatchError, TypeError)) as caught:
        CALLS[name](torch.randn(8, 3))
    if isinstance(caught.value, wb.WholeBatchError):
        files = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert sum("wholebatch/" in name.replace("\\", "/") and "/tests/" not in name for name in files) <= 1, files


def test_the_line_of_the_loss_function_is_among_them() -> None:
    with pytest.raises(wb.LossError) as caught:
        wb.backward(nn.Linear(3, 1), weighted, torch.randn(8, 3), 4)
    lines = [frame.line for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert any(line is not None and "of another shape" in line for line in lines), lines


def test_an_error_of_the_users_own_keeps_all_its_frames() -> None:
    def broken(model: nn.Module, rows: Tensor) -> Tensor:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine") as caught:
        wb.backward(nn.Linear(3, 1), broken, torch.randn(8, 3), 4)
    assert len(traceback.extract_tb(caught.value.__traceback__)) > 4
