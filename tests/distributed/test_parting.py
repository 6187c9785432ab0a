"""Whatever happens on one rank at whatever line, all ranks raise within seconds; and who can go on, goes on exactly."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from tests.distributed.launcher import Ranks, needs_shards, run_ranks
from tests.oracle import assert_same_gradient, gradients_of, whole_batch
from wholebatch.loss.totals import LossTotals

pytestmark = pytest.mark.distributed

ROWS = torch.randn(8, 3, generator=torch.Generator().manual_seed(3)).double()
SECONDS = 10.0
"""Within which every rank must have raised; the groups' own time-out is half an hour."""


class Fault(Exception):
    """What is injected."""


class Breaks(torch.autograd.Function):
    """Raises in the backward, when it is told to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, where: Where) -> Tensor:
        ctx.where = where
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.where.trip("backward")
        return grad, None


class Where:
    """Raises once, at one place, in one call of it, on the ranks that are named."""

    def __init__(self, place: str, call: int, ranks: tuple[int, ...]) -> None:
        self.place, self.call, self.armed = place, call, dist.get_rank() in ranks
        self.calls = 0

    def trip(self, place: str) -> None:
        if place != self.place or not self.armed:
            return
        self.calls += 1
        if self.calls == self.call:
            self.armed = False
            raise Fault(f"{place} of rank {dist.get_rank()}")


class Middle(nn.Module):
    def __init__(self, where: Where) -> None:
        super().__init__()
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        self.where.trip("inside the model")
        return torch.tanh(x)


def build(kind: str, where: Where) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), Middle(where), nn.Linear(4, 2)).double()
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "unused":
        return DistributedDataParallel(model, find_unused_parameters=True)
    if kind == "static":
        return DistributedDataParallel(model, static_graph=True)
    for part in (model[0], model[2]):
        fully_shard(part)
    return fully_shard(model)


def loss_at(where: Where, two: bool = False) -> Any:
    def loss(model: nn.Module, rows: Tensor) -> Any:
        where.trip("before the model")
        out = Breaks.apply(model(rows), where)
        where.trip("after the model")
        values = out.square().mean(1)
        return wb.mean(values) + 0.5 * wb.mean(values, rows[:, 0] > 0) if two else values

    return loss


def caught(
    kind: str, sync: str, place: str, call: int | tuple[int, int], ranks: tuple[int, ...], two: bool = False
) -> Any:
    """Fail in a window, and then run another; return what was raised in each, the seconds, and the last gradient."""
    where = Where(place, call[dist.get_rank()] if isinstance(call, tuple) else call, ranks)
    model, said = build(kind, where), []
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    share = ROWS[:6] if dist.get_rank() == 0 else ROWS[6:]
    begun = time.monotonic()
    for _ in range(2):
        try:
            wb.backward(model, loss_at(where, two), share, 2, sync=sync, verify="never")  # type: ignore[arg-type]
            said.append("no error")
        except (Fault, wb.SyncError) as error:
            said.append(f"{type(error).__name__}: {error}")
            assert all(p.grad is None or bool((whole(p.grad) == 1).all()) for p in model.parameters())
            assert len(said) == 2 or all(p.grad is not None for p in model.parameters())
        if len(said) == 1:
            seconds = time.monotonic() - begun
            for parameter in model.parameters() if said[0] != "no error" else ():
                parameter.grad = None
    return said, seconds, gradients_of(model) if said[-1] == "no error" else None


def whole(grad: Any) -> Tensor:
    found: Tensor = grad.to_local() if hasattr(grad, "to_local") else grad
    return found


def truth() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    return whole_batch(model, lambda m, rows: m(rows).square().mean(1).mean(), ROWS)


def renamed(gradients: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {name.removeprefix("module."): gradient for name, gradient in gradients.items()}


MENDED = [
    ("ddp", "last", "before the model", 1),
    ("ddp", "last", "backward", 1),
    ("ddp", "every", "before the model", 1),
    ("ddp", "every", "after the model", 1),
    ("unused", "last", "inside the model", 1),
    ("unused", "last", "after the model", 1),
    ("static", "last", "after the model", 1),
    ("fsdp", "last", "inside the model", 1),
    ("fsdp", "last", "backward", 1),
    ("fsdp", "every", "before the model", 1),
    ("fsdp", "every", "after the model", 1),
]
"""Where the others can still be told: they end with this rank's message, and the next window is right."""


@needs_shards
@pytest.mark.parametrize(("kind", "sync", "place", "call"), MENDED)
def test_after_a_fault_that_the_others_are_told_of_the_next_window_is_exact(
    two_ranks: Ranks, kind: str, sync: str, place: str, call: int
) -> None:
    failing = 0 if place == "backward" else 1  # which has micro-batches before its last
    found = two_ranks.run(caught, kind, sync, place, call, (failing,))
    for rank, (said, seconds, gradients) in enumerate(found):
        own = f"Fault: {place} of rank {failing}"
        assert said == [own if rank == failing else said[0], "no error"]
        assert rank == failing or (said[0].startswith("SyncError") and own in said[0])
        assert seconds < SECONDS
        assert_same_gradient(renamed(gradients), truth())


LEFT = [
    ("ddp", "last", "backward", 3, False),
    ("ddp", "every", "backward", 1, False),
    ("fsdp", "every", "inside the model", 2, False),
    ("fsdp", "every", "backward", 2, False),
    ("fsdp", "every", "inside the model", 2, True),
]
"""Where they are inside of a reduction or a gathering: the process group goes with it."""


@needs_shards
@pytest.mark.parametrize(("kind", "sync", "place", "call", "two"), LEFT)
def test_a_fault_inside_of_a_collective_ends_all_ranks_within_seconds(
    kind: str, sync: str, place: str, call: int, two: bool
) -> None:
    (own, first, _), (other, second, _) = run_ranks(caught, kind, sync, place, call, (0,), two, seconds=40.0)
    assert own[0] == f"Fault: {place} of rank 0"
    assert other[0].startswith("SyncError: Rank 0 failed while the others waited for it.")
    assert own[0] in other[0] and "start the processes again" in other[0]
    assert max(first, second) < SECONDS
    for said in (own, other):  # and nothing is silent after that
        assert said[1].startswith("SyncError") and "start the processes again" in said[1]


@needs_shards
@pytest.mark.parametrize("place", ["before the model", "inside the model", "backward"])
@pytest.mark.parametrize(
    ("kind", "sync", "call"), [("ddp", "last", (3, 1)), ("unused", "last", (3, 1)), ("fsdp", "every", 1)]
)
def test_a_fault_on_all_ranks_alike_leaves_nobody_behind(
    two_ranks: Ranks, kind: str, sync: str, call: Any, place: str
) -> None:
    for rank, (said, seconds, gradients) in enumerate(two_ranks.run(caught, kind, sync, place, call, (0, 1))):
        assert said == [f"Fault: {place} of rank {rank}", "no error"]
        assert seconds < SECONDS
        assert_same_gradient(renamed(gradients), truth())


@needs_shards
def test_a_fault_in_the_counting_pass_is_told_before_the_next_forward(two_ranks: Ranks) -> None:
    for rank, (said, seconds, _) in enumerate(two_ranks.run(caught, "fsdp", "every", "after the model", 3, (0,), True)):
        assert said[0].startswith("Fault" if rank == 0 else "SyncError: Rank 0 failed")
        assert said[1] == "no error"
        assert seconds < SECONDS


def broken_in_an_agreement(kind: str, sync: str) -> Any:
    """Fail on rank 0 when the message of an agreement has travelled and is being read."""
    model, read, armed, said = build(kind, Where("nowhere", 0, ())), LossTotals.of_numbers, [dist.get_rank() == 0], []

    def reading(*arguments: Any) -> LossTotals:
        if armed[0]:
            armed[0] = False
            raise MemoryError
        return read(*arguments)

    begun = time.monotonic()
    with patch.object(LossTotals, "of_numbers", reading):
        for _ in range(2):
            try:
                wb.backward(model, loss_at(Where("nowhere", 0, ())), ROWS, 4, sync=sync, verify="never")  # type: ignore[arg-type]
                said.append("no error")
            except (MemoryError, wb.SyncError) as error:
                said.append(f"{type(error).__name__}: {error}")
    return said, time.monotonic() - begun, [parameter.grad is None for parameter in model.parameters()]


@needs_shards
@pytest.mark.parametrize(("kind", "sync"), [("ddp", "last"), ("ddp", "every"), ("fsdp", "last"), ("fsdp", "every")])
def test_who_fails_after_joining_an_agreement_does_not_come_to_another_one(kind: str, sync: str) -> None:
    for rank, (said, seconds, empty) in enumerate(run_ranks(broken_in_an_agreement, kind, sync, seconds=40.0)):
        assert said[0].startswith("MemoryError" if rank == 0 else "SyncError: Rank 0 failed while the others waited")
        assert said[1].startswith("SyncError") and "start the processes again" in said[1]
        assert all(empty) and seconds < SECONDS


# Interrupts


def interrupted(kind: str, size: Any) -> Any:
    """Interrupt rank 0 while it waits for rank 1 in the agreement; return what it says, and what a sum says then."""
    where = Where("nowhere", 0, ())
    model = build(kind, where)

    def slow(model: nn.Module, rows: Tensor) -> Tensor:
        time.sleep(1.0 if dist.get_rank() == 1 else 0.0)
        return loss_at(where)(model, rows)  # type: ignore[no-any-return]

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    if dist.get_rank() == 0:
        threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGINT)).start()
    said = "no error"
    try:
        wb.backward(model, slow, ROWS[:2] if dist.get_rank() == 0 else ROWS[2:4], size, verify="never")
    except KeyboardInterrupt:
        said = "interrupted"
    signal.signal(signal.SIGINT, before)
    number = torch.tensor(1.0 + dist.get_rank())
    dist.all_reduce(number)
    return said, float(number), [p.grad is None for p in model.parameters()]


@needs_shards
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("size", [2, wb.Auto(2)], ids=["fixed", "auto"])
def test_an_interrupt_in_the_agreement_comes_when_the_others_need_nothing_more(
    two_ranks: Ranks, kind: str, size: Any
) -> None:
    (said, total, empty), (other, same, _) = two_ranks.run(interrupted, kind, size)
    assert (said, other) == ("interrupted", "no error")
    assert total == same == 3.0
    assert all(empty)
