"""An operation is a small protocol: a statistic of all rows, and how a row uses it. These are no BatchNorm."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from tests.oracle import assert_differs, assert_same_gradient, whole_batch
from wholebatch.batchnorm.executor import Executor
from wholebatch.batchnorm.model_call import ModelCall
from wholebatch.batchnorm.operations import OPERATIONS, Operation, Statistic
from wholebatch.batchnorm.tensor_store import TensorStore


class Sum(Operation):
    """What every row gets is made of the sum over rows of a function of each: all that has to be said of a coupling."""

    def __init__(self, of_row: Callable[[Tensor], tuple[Tensor, ...]], result: Callable[..., Tensor]) -> None:
        self.of_row, self.result = of_row, result

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sum) and self.of_row is other.of_row

    def __hash__(self) -> int:
        return hash(self.of_row)

    def partial(self, x: Tensor) -> Statistic:
        return tuple(each.sum(0) for each in self.of_row(x))

    def apply(self, x: Tensor, statistic: Statistic, *operands: Any) -> Tensor:
        return self.result(x, *statistic)


def balance(x: Tensor, used: Tensor, rows: Tensor) -> Tensor:
    """The load balance of a mixture of experts: mean probability times share of rows, over all rows."""
    return x.sum(1) + (used * used.detach()).sum() / rows.square()


def dice(x: Tensor, overlap: Tensor, size: Tensor) -> Tensor:
    return x.sum(1) + 1 - 2 * overlap.sum() / size.sum()


def covariance(x: Tensor, sums: Tensor, squares: Tensor, rows: Tensor) -> Tensor:
    """VICReg's: the square of what is off the diagonal."""
    matrix = (squares - sums[:, None] * sums[None] / rows) / (rows - 1)
    return x.sum(1) + matrix.square().sum() - matrix.diagonal().square().sum()


def ones(x: Tensor) -> Tensor:
    return torch.ones_like(x[:, 0])


COUPLINGS: dict[str, Sum] = {
    "expert balance": Sum(lambda x: (x.softmax(1), ones(x)), balance),
    "batch Dice": Sum(lambda x: (x.sigmoid() * x.detach().abs(), x.sigmoid() + x.detach().abs()), dice),
    "VICReg covariance": Sum(lambda x: (x, x[:, :, None] * x[:, None], ones(x)), covariance),
}


@pytest.fixture(params=COUPLINGS)
def meeting(request: pytest.FixtureRequest) -> Iterator[tuple[Sum, Any]]:
    """An operation of a library of the test's own, as a model would call it: whole-batch by itself."""
    operation = COUPLINGS[request.param]
    library = torch.library.Library("wholebatch_test", "FRAGMENT")
    name = f"meet_{list(COUPLINGS).index(request.param)}"
    library.define(f"{name}(Tensor x) -> Tensor")
    library.impl(name, lambda x: operation.alone(x), "CompositeImplicitAutograd")
    yield operation, getattr(torch.ops.wholebatch_test, name)
    library._destroy()


class Meets(nn.Module):
    """Rows meet once in an operation and once in a BatchNorm behind it."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self.first, self.norm, self.last, self.call = nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2), call

    def __deepcopy__(self, memo: Any) -> Meets:
        twin = Meets(self.call).to(self.first.weight.dtype)
        twin.load_state_dict(self.state_dict())
        return twin

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        out: Tensor = self.last(torch.tanh(self.norm(x + self.call(x)[:, None])))
        return out


def run(model: nn.Module, x: Tensor, size: int, operations: Mapping[Any, Any]) -> None:
    engine, micro_batches = Executor(model, TensorStore(), operations=operations), x.split(size)
    engine.forward([ModelCall.of((micro_batch,), {}) for micro_batch in micro_batches])
    for index in range(len(micro_batches)):
        (engine.output(index).square().sum() / len(x)).backward()
    engine.backward()
    engine.commit()


@pytest.mark.parametrize("size", [2, 3, 8])
def test_whatever_is_a_sum_over_rows_needs_no_more_than_that_said(meeting: tuple[Sum, Any], size: int) -> None:
    operation, call = meeting

    def read(node: fx.Node, buffers: Mapping[fx.Node, str]) -> Any:
        return operation, node.args[0], ()

    torch.manual_seed(6)
    model, x = Meets(call).double(), torch.randn(8, 4).double()
    reference, naive = whole_batch(model, lambda m, x: m(x).square().sum() / len(x), x), copy.deepcopy(model)
    run(model, x, size, {**OPERATIONS, call.default: read})
    assert_same_gradient(model, reference)
    if size < 8:
        run(naive, x, size, OPERATIONS)  # the norm alone, as if rows met nowhere else
        assert_differs(naive, reference, by=1e-6)
