"""Losses over all rows on a sharded model: one gather and one scatter a window, and the whole batch's gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from tests.distributed.collectives import Collectives
from tests.distributed.launcher import Ranks, needs_shards
from tests.oracle import assert_differs, assert_same_gradient, gradients_of, whole_batch

pytestmark = [pytest.mark.distributed, needs_shards]


class Scaled(nn.Module):
    """An encoder in two blocks, and a temperature that the loss alone uses."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Sequential(nn.Linear(4, 6), nn.Tanh()), nn.Linear(6, 3))
        self.scale = nn.Parameter(torch.tensor([1.5]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x)
        return out


def model_and_rows() -> tuple[Scaled, torch.Tensor]:
    torch.manual_seed(7)
    return Scaled().double(), torch.randn(9, 4).double()


def apart(model: Any) -> Any:
    """Hold every row against every other: no sum over rows."""

    def loss(encoded: torch.Tensor) -> torch.Tensor:
        return (model.scale.exp() * torch.cdist(encoded, encoded)).logsumexp(1).mean().sqrt()

    return loss


def sharded() -> tuple[nn.Module, torch.Tensor]:
    model, rows = model_and_rows()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.body[0], mesh=mesh)
    return fully_shard(model, mesh=mesh), rows.split([5, 4])[dist.get_rank()]


def encode(model: nn.Module, x: torch.Tensor) -> Any:
    return model(x)


def over_shards(gather: bool) -> Any:
    model, share = sharded()
    for _ in range(2):  # the second window finds the model as the first one left it
        model.zero_grad()
        with Collectives() as seen:
            result = wb.coupled_backward(model, encode, apart(model), share, micro_batch_size=2, gather=gather)
    return gradients_of(model), float(result.loss), seen.count("reduce_scatter")


def test_a_sharded_encoder_gets_the_gradient_of_the_rows_of_all_ranks(two_ranks: Ranks) -> None:
    model, rows = model_and_rows()
    plain = whole_batch(model, lambda m, rows: apart(m)(m(rows)), rows)
    for gradients, loss, scatters in two_ranks.run(over_shards, True):
        assert_same_gradient(gradients, plain)
        assert loss == pytest.approx(float(plain.loss), rel=1e-12)
        assert scatters == 1


def test_without_gather_it_is_the_mean_of_the_ranks_losses(two_ranks: Ranks) -> None:
    model, rows = model_and_rows()
    mean = whole_batch(model, lambda m, rows: sum(apart(m)(m(part)) for part in rows.split([5, 4])) / 2, rows)
    whole = whole_batch(model, lambda m, rows: apart(m)(m(rows)), rows)
    for gradients, loss, _ in two_ranks.run(over_shards, False):
        assert_same_gradient(gradients, mean)
        assert_differs(gradients, whole, by=0.01)
        assert loss == pytest.approx(float(mean.loss), rel=1e-12)


def stepped_over_shards() -> Any:
    model, share = sharded()
    step = wb.Step(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        wb.CoupledLoss(encode, apart(model), gather=True),
        micro_batch_size=2,
        max_grad_norm=0.01,
    )
    norm = step(share).grad_norm
    return norm, {name: parameter.full_tensor() for name, parameter in model.named_parameters()}


def test_a_step_clips_by_the_norm_over_all_shards(two_ranks: Ranks) -> None:
    model, rows = model_and_rows()
    apart(model)(model(rows)).backward()
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.01))
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for found, parameters in two_ranks.run(stepped_over_shards):
        assert found == pytest.approx(norm, rel=1e-10)
        for name, parameter in model.named_parameters():
            assert torch.allclose(parameters[name], parameter, rtol=1e-10, atol=1e-13), name


def head_beside() -> str:
    model, rows = model_and_rows()
    head = nn.Linear(3, 3).double()
    wrapped = DistributedDataParallel(model)
    share = rows.split([5, 4])[dist.get_rank()]
    with pytest.raises(wb.SyncError) as said:
        wb.coupled_backward(wrapped, lambda m, x: head(m(x)), torch.pdist, share, micro_batch_size=2)
    return str(said.value) if head.weight.grad is None else "a gradient has stayed"


def test_parameters_of_the_encoder_that_no_rank_would_exchange_are_refused(two_ranks: Ranks) -> None:
    for said in two_ranks.run(head_beside):
        assert "outside of the wrapped model" in said


def one_rank_without_rows() -> str:
    model, rows = model_and_rows()
    wrapped = DistributedDataParallel(model)
    share = rows.split([9, 0])[dist.get_rank()]
    with pytest.raises(wb.SplitError) as said:
        wb.coupled_backward(wrapped, encode, apart(model), share, micro_batch_size=2)
    return str(said.value)


def test_a_rank_without_rows_is_refused_on_all_with_the_rows_of_each(two_ranks: Ranks) -> None:
    for said in two_ranks.run(one_rank_without_rows):
        assert "[9, 0] rows" in said
