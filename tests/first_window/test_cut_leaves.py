"""Leaves that have as many entries as the batch has rows by chance, where single rows run with any one entry."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import wholebatch as wb
from tests.oracle import assert_differs, assert_same_gradient, gradients_of, whole_batch

SIZE = 6

Batch = dict[str, Tensor]


class Attends(nn.Module):
    """One head of attention under a mask over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query = self.query(x)
        weights = (query @ query.transpose(1, 2)).masked_fill(mask == 0, -1e9).softmax(-1)
        found: Tensor = self.out(weights @ x).squeeze(-1)
        return found


def problem() -> tuple[Attends, Batch]:
    torch.manual_seed(0)
    x = torch.randn(SIZE, SIZE, 8, dtype=torch.float64)
    return Attends().double(), {"x": x, "mask": torch.ones(SIZE, SIZE).tril()}


def squares(model: nn.Module, batch: Batch) -> Tensor:
    found: Tensor = model(batch["x"], batch["mask"]).square()
    return found


def test_a_mask_that_is_square_by_chance_is_refused_in_single_rows_and_named() -> None:
    model, batch = problem()
    with pytest.raises(wb.SplitError, match=r"'mask' \(6, 6\) has as many entries .* whole=\('mask',\)"):
        wb.backward(model, squares, batch, 1)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_call_that_is_named_is_exact(size: int) -> None:
    model, batch = problem()
    plain = whole_batch(model, lambda m, b: squares(m, b).mean(), batch)
    wb.backward(model, squares, batch, size, whole=("mask",))
    assert_same_gradient(model, plain)


def test_rows_with_one_row_each_of_the_mask_miss_it() -> None:
    model, batch = problem()
    plain = whole_batch(model, lambda m, b: squares(m, b).mean(), batch)
    for row in range(SIZE):
        part = {name: leaf[row : row + 1] for name, leaf in batch.items()}
        (squares(model, part).mean() / SIZE).backward()
    assert_differs(gradients_of(model), plain, by=0.1)


def test_a_model_that_takes_single_rows_alone_is_not_refused() -> None:
    class OneByOne(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) != 1:
                raise ValueError("one row at a time")
            return super().forward(x)

    torch.manual_seed(0)
    model = OneByOne(3, 1).double()
    rows = {"x": torch.randn(4, 3, dtype=torch.float64), "y": torch.randn(4, 1, dtype=torch.float64)}
    result = wb.backward(model, lambda m, b: (m(b["x"]) - b["y"]).square(), rows, 1)
    assert result.verified.startswith("not verified")
