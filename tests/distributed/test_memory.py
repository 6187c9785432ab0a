"""Out of memory on one rank is that rank's own affair: the others neither wait for ever nor get another gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from tests.distributed.launcher import Ranks
from tests.distributed.problems import PROBLEMS, model_and_rows, share_of
from tests.distributed.test_sharded import reference
from tests.gradient.test_out_of_memory import Memory, Probe
from tests.oracle import assert_differs, assert_same_gradient, gradients_of

pytestmark = pytest.mark.distributed

FITS = {"rank 0": (2.0, 1e9), "rank 1": (1e9, 1.0), "both": (3.0, 1.0)}
"""Rows that each rank's memory holds."""


def narrow(fits: tuple[float, float], forward: bool) -> nn.Sequential:
    """Build the model with a place, before its last block, where this rank's memory runs out."""
    model, _ = model_and_rows()
    memory = Memory(fits[dist.get_rank()], forward=forward)

    def pass_through(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (Probe.apply(inputs[0], memory, 0),)

    model[2].register_forward_pre_hook(pass_through)
    model.memory = memory  # type: ignore[assignment]
    return model


def share(fits: tuple[float, float]) -> Any:
    return share_of(model_and_rows()[1], "uneven", dist.get_rank())


def windows(problem: str, fits: tuple[float, float], forward: bool) -> Any:
    """Run three windows; return their gradients and losses, how often memory ran out, and the micro-batches of the
    last."""
    model, auto, found = narrow(fits, forward), wb.Auto(4), []
    wrapped = DistributedDataParallel(model)
    for _ in range(3):
        model.zero_grad()
        result = wb.backward(wrapped, PROBLEMS[problem].ours, share(fits), auto)
        found.append((gradients_of(wrapped), float(result.loss)))
    return found, model.memory.failures, result.micro_batches


@pytest.mark.parametrize("forward", [True, False], ids=["forward", "backward"])
@pytest.mark.parametrize("where", FITS)
@pytest.mark.parametrize("problem", PROBLEMS)
def test_every_rank_has_the_whole_batch_s_gradient(two_ranks: Ranks, problem: str, where: str, forward: bool) -> None:
    plain, fits = reference(problem), FITS[where]
    for (found, failures, _), rows in zip(two_ranks.run(windows, problem, fits, forward), fits, strict=True):
        assert bool(failures) is (rows < 4)
        for gradients, loss in found:
            assert_same_gradient(gradients, plain)
            assert loss == pytest.approx(float(plain.loss), rel=1e-12)


def test_each_rank_remembers_a_size_of_its_own(two_ranks: Ranks) -> None:
    micro_batches = [last for _, _, last in two_ranks.run(windows, "token mean", (1e9, 1.0), False)]
    assert micro_batches == [2, 4]


def final(fits: tuple[float, float]) -> Any:
    """Meet a row that does not fit; return which error this rank saw and whether its gradient is as before."""
    model = narrow(fits, forward=False)
    wrapped = DistributedDataParallel(model)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    try:
        wb.backward(wrapped, PROBLEMS["token mean"].ours, share(fits), wb.Auto(4))
    except (wb.OutOfMemoryError, wb.SyncError) as error:
        untouched = all(p.grad is not None and bool((p.grad == p).all()) for p in model.parameters())
        return type(error).__name__, str(error), untouched
    return None


@pytest.mark.parametrize("rank", [0, 1])
def test_a_row_that_does_not_fit_ends_the_step_on_all_ranks(two_ranks: Ranks, rank: int) -> None:
    errors = two_ranks.run(final, (0.0, 1e9) if rank == 0 else (1e9, 0.0))
    kind, text, untouched = errors[rank]
    assert (kind, untouched) == ("OutOfMemoryError", True)
    assert "One row alone does not fit" in text
    kind, text, untouched = errors[1 - rank]
    assert (kind, untouched) == ("SyncError", True)
    assert f"Rank {rank} failed in this window" in text and "One row alone does not fit" in text


def dropping() -> Any:
    """The twin: rank 1 leaves out the micro-batch that does not fit."""
    model, rows = model_and_rows()
    words, targets = share_of(rows, "uneven", dist.get_rank())
    kept = slice(2, None) if dist.get_rank() else slice(None)
    wb.backward(DistributedDataParallel(model), PROBLEMS["token mean"].ours, (words[kept], targets[kept]), 2)
    return gradients_of(model)


def test_leaving_out_what_does_not_fit_is_another_gradient(two_ranks: Ranks) -> None:
    for gradients in two_ranks.run(dropping):
        assert_differs(gradients, reference("token mean"), by=0.01)
