"""BatchNorm over the rows of all ranks, of any number on each."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from tests.distributed import Ranks, RanksError
from tests.oracle import assert_differs, assert_same_gradient, gradients_of, whole_batch

pytestmark = pytest.mark.distributed


def net() -> nn.Module:
    torch.manual_seed(7)
    model = nn.Sequential(
        nn.Linear(5, 6),
        nn.BatchNorm1d(6),
        nn.SiLU(),
        nn.Linear(6, 6),
        nn.BatchNorm1d(6, momentum=None),
        nn.Linear(6, 2),
    ).double()
    for parameter in model.parameters():
        parameter.data.add_(0.3 * torch.rand_like(parameter))
    return model


def rows() -> torch.Tensor:
    torch.manual_seed(8)
    return torch.randn(13, 5).double() * torch.linspace(0.3, 3, 13).double()[:, None] + 1


def values(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().sum(1)


def two_terms(model: nn.Module, x: torch.Tensor) -> Any:
    each = values(model, x)
    return {"all": each, "some": 0.5 * wb.mean(each.sqrt(), x[:, 0] > 1)}


def both(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    each = values(model, x)
    return each.mean() + 0.5 * each[x[:, 0] > 1].sqrt().mean()


def run(loss: Any, shares: list[int], size: int, choice: Any, fail: bool = False) -> Any:
    model = DistributedDataParallel(net())
    share = rows().split(shares)[dist.get_rank()]

    def loss_here(model: nn.Module, x: torch.Tensor) -> Any:
        if fail and dist.get_rank() == 1:
            raise ArithmeticError("the second rank cannot")
        return loss(model, x)

    result = wb.backward(model, loss_here, share, micro_batch_size=size, batch_norm=choice)
    return gradients_of(model), dict(model.module.named_buffers()), result.loss.item()


@pytest.mark.parametrize(("loss", "meant"), [(values, lambda m, x: values(m, x).mean()), (two_terms, both)])
@pytest.mark.parametrize("shares", [[7, 6], [12, 1], [13, 0]], ids=["even", "uneven", "a rank without rows"])
def test_statistics_are_those_of_all_ranks(two_ranks: Ranks, loss: Any, meant: Any, shares: list[int]) -> None:
    reference = whole_batch(net(), meant, rows())
    for gradients, buffers, value in two_ranks.run(run, loss, shares, 3, "exact"):
        assert_same_gradient(gradients, reference)
        assert value == pytest.approx(reference.loss.item(), rel=1e-12)
        for name, buffer in reference.model.named_buffers():
            assert torch.allclose(buffers[name], buffer, rtol=1e-12, atol=1e-14), name


def test_the_same_rows_with_each_rank_s_own_statistics_are_another_gradient(two_ranks: Ranks) -> None:
    reference = whole_batch(net(), lambda m, x: values(m, x).mean(), rows())
    parts = [whole_batch(net(), lambda m, x: values(m, x).sum() / 13, x) for x in rows().split([7, 6])]
    summed = {name: sum(part.gradients[name] for part in parts) for name in reference.gradients}
    for gradients, _, _ in two_ranks.run(run, values, [7, 6], 3, "exact-per-rank"):
        assert_same_gradient(gradients, summed)
        assert_differs(gradients, reference)


def test_a_rank_that_fails_ends_all_of_them(two_ranks: Ranks) -> None:
    with pytest.raises(RanksError, match="the second rank cannot"):
        two_ranks.run(run, values, [7, 6], 3, "exact", True, seconds=20.0)


def contrast(model: nn.Module, x: torch.Tensor) -> Any:
    return model(x)


def spread(encoded: torch.Tensor) -> torch.Tensor:
    return torch.pdist(encoded).square().mean().sqrt()


def run_coupled() -> Any:
    model = DistributedDataParallel(net())
    share = rows().split([8, 5])[dist.get_rank()]
    result = wb.coupled_backward(model, contrast, spread, share, micro_batch_size=3, gather=True, batch_norm="exact")
    return gradients_of(model), result.loss.item(), copy.deepcopy(model.module)


def test_a_loss_over_all_rows_behind_statistics_of_all_rows(two_ranks: Ranks) -> None:
    reference = whole_batch(net(), lambda m, x: spread(m(x)), rows())
    for gradients, loss, model in two_ranks.run(run_coupled):
        assert_same_gradient(gradients, reference)
        assert loss == pytest.approx(reference.loss.item(), rel=1e-12)
        for name, buffer in reference.model.named_buffers():
            assert torch.allclose(model.get_buffer(name), buffer, rtol=1e-12, atol=1e-14), name
