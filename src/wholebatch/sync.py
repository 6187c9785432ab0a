"""What the ranks of a window tell each other, and when gradients travel.

The forwards and backwards of a window are local to each rank. Before its last backward every rank joins one small
agreement, which carries counts, losses and whether all is well; only then are gradients reduced, once. So ranks
may bring different numbers of rows and micro-batches, and an error on one ends the step on all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import IntEnum
from functools import reduce
from operator import or_
from types import TracebackType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from wholebatch.errors import SyncError
from wholebatch.precision import Gradients, device_of
from wholebatch.sums import Schema, Sums

CAPACITY = 48
"""How many numbers travel with the agreement; more of them take a second message."""

BUCKET_BYTES = 25 * 2**20
"""How large a message of gradients or buffers gets."""


class Status(IntEnum):
    """How a rank comes to the agreement."""

    READY = 0
    RECOUNT = 1
    FAILED = 2


@dataclass(frozen=True)
class Agreement:
    """What all ranks know after the agreement.

    Attributes:
        sums: totals and counts over all ranks.
        recount: whether some rank needs every denominator before its first backward.
        loose: whether some rank has propagated shares with a number of its own.
    """

    sums: Sums
    recount: bool
    loose: bool


class Ranks:
    """One process, which has nobody to agree with."""

    world = 1
    views = False

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return None

    def local(self) -> AbstractContextManager[Any]:
        """Run forwards and backwards without reducing gradients."""
        return nullcontext()

    def agree(self, status: Status, sums: Sums, loose: bool = False) -> Agreement:
        """Add sums up over ranks and learn how the others are.

        Raises:
            SyncError: on all ranks, if one of them failed.
        """
        return Agreement(sums, status is Status.RECOUNT, loose)

    def settle(self) -> None:
        """Note that no agreement is outstanding: what follows can only succeed on all ranks."""

    def arm(self, outputs: Sequence[Tensor]) -> None:
        """Make the backward from these outputs reduce all gradients."""

    def idle(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Return what to run a backward from so as to reduce what has been summed, with nothing to add."""
        return []

    def reduce(self, gradients: Gradients) -> None:
        """Average the windows' sums over ranks as they lie, in their own precision, outside of any backward."""


class DataParallelRanks(Ranks):
    """The ranks of a ``DistributedDataParallel`` model.

    Forwards run inside ``no_sync``, so that none of them reduces or waits. The reducer is armed only after the
    agreement, for the one backward that it shall serve; a rank with nothing left to run gives it a zero. The
    three methods of the reducer used for this are those with which torch's own ``Join`` shadows a rank that has
    run out of batches (torch/nn/parallel/distributed.py, 2.6 to 2.14).
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        if model.static_graph:
            raise SyncError(
                "DistributedDataParallel(static_graph=True) counts the uses of each parameter in its first backward, "
                "which fails inside no_sync. Build it with static_graph=False."
            )
        self._model = model
        self._group = model.process_group
        self._outstanding = False
        self._failure = ""
        self.views = bool(model.gradient_as_bucket_view)
        self.world = dist.get_world_size(self._group)
        self.rank = dist.get_rank(self._group)
        nccl = dist.get_backend(self._group) == "nccl"
        self._device = device_of(model.module) if nccl else torch.device("cpu")

    def __enter__(self) -> DataParallelRanks:
        self._outstanding = True
        self._model.reducer._rebuild_buckets()
        self._model.require_forward_param_sync = False
        if self._model.broadcast_buffers:
            _broadcast(self._model.module.buffers(), self._group)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and self._outstanding:
            self._failure = f"{type(error).__name__}: {error}"
            self.agree(Status.FAILED, Sums())

    def local(self) -> AbstractContextManager[Any]:
        return cast("AbstractContextManager[Any]", self._model.no_sync())

    def settle(self) -> None:
        self._outstanding = False

    def agree(self, status: Status, sums: Sums, loose: bool = False) -> Agreement:
        world, numbers = self.world, sums.numbers(sums.schema)
        mark = float(hash_of(sums.schema))
        message = torch.zeros(world + 3 + CAPACITY, dtype=torch.float64)
        message[self.rank] = float(status)
        message[world : world + 3] = torch.tensor([mark, mark * mark, float(loose)])
        message[world + 3 :][: len(numbers)] = numbers[:CAPACITY]
        message = self._sum(message)
        statuses = [Status(int(status)) for status in message[:world].tolist()]
        mark, square, loose_ranks = message[world : world + 3].tolist()
        if Status.FAILED in statuses:
            return self._fail(statuses)
        if Status.RECOUNT in statuses:
            return Agreement(sums, recount=True, loose=bool(loose_ranks))
        schema, numbers = sums.schema, message[world + 3 :][: sums.schema.size]
        if world * square != mark * mark:
            schema = self._union(schema)
        if schema.size > CAPACITY or schema != sums.schema or world * square != mark * mark:
            numbers = self._sum(sums.numbers(schema))
        return Agreement(Sums.of_numbers(schema, numbers), recount=False, loose=bool(loose_ranks))

    def arm(self, outputs: Sequence[Tensor]) -> None:
        self._model.reducer.prepare_for_backward(list(outputs))

    def idle(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        wanted = list(parameters)
        if self._model.find_unused_parameters:
            wanted = [p for p in wanted if p.grad is not None] or wanted[:1]
        return [torch.stack([p.flatten()[:0].sum().to("cpu", torch.float64) for p in wanted]).sum()]

    def reduce(self, gradients: Gradients) -> None:
        parameters = list(gradients.parameters.values())
        sums = [gradients.take(p) for p in parameters]
        present = self._sum(torch.tensor([float(s is not None) for s in sums])).tolist()
        for parameter, total, anywhere in zip(parameters, sums, present, strict=True):
            if anywhere and total is None:
                gradients.put(parameter, torch.zeros_like(parameter))
        for bucket in _buckets(gradients.held()):
            flat = torch.cat([total.flatten() for total in bucket]).div_(self.world)
            dist.all_reduce(flat, group=self._group)
            _write(flat, bucket)

    def _sum(self, numbers: Tensor) -> Tensor:
        moved = numbers.to(self._device)
        dist.all_reduce(moved, group=self._group)
        return moved.cpu()

    def _union(self, schema: Schema) -> Schema:
        schemas: list[Schema] = [schema] * self.world
        dist.all_gather_object(schemas, schema, group=self._group)
        return reduce(or_, schemas)

    def _fail(self, statuses: list[Status]) -> Agreement:
        self._outstanding = False
        failed = statuses.index(Status.FAILED)
        held = [self._failure]
        dist.broadcast_object_list(held, dist.get_global_rank(self._group, failed), self._group, self._device)
        if statuses[self.rank] is not Status.FAILED:
            raise SyncError(f"Rank {failed} failed in this window, so no rank may step. It said: {held[0]}")
        return Agreement(Sums(), recount=False, loose=False)


def ranks_of(model: nn.Module) -> Ranks:
    """Find out over which ranks a model's gradients are reduced.

    Raises:
        SyncError: for a wrapper that is not supported.
    """
    if isinstance(model, DistributedDataParallel):
        return DataParallelRanks(model)
    if isinstance(model, nn.DataParallel):
        raise SyncError(
            "torch.nn.DataParallel gathers losses from replicas inside one forward; use DistributedDataParallel, "
            "one process a device, started by torchrun."
        )
    return Ranks()


def hash_of(schema: Schema) -> int:
    """Reduce a description to 20 bits that are the same in every process."""
    value = 0
    for letter in repr(schema):
        value = (value * 131 + ord(letter)) % (1 << 20)
    return value + 1


def _broadcast(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    for bucket in _buckets([t.detach() for t in tensors]):
        flat = torch.cat([t.flatten() for t in bucket])
        dist.broadcast(flat, dist.get_global_rank(group, 0), group)
        _write(flat, bucket)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Group tensors of one dtype and device into messages of a bounded size."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        group = groups.setdefault((tensor.device, tensor.dtype), [])
        if group and sum(t.nbytes for t in group) + tensor.nbytes > BUCKET_BYTES:
            yield list(group)
            group.clear()
        group.append(tensor)
    yield from groups.values()


def _write(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy a message back into the tensors that it was made of."""
    start = 0
    for tensor in tensors:
        tensor.copy_(flat[start : start + tensor.numel()].view_as(tensor))
        start += tensor.numel()
