"""What the ranks of a window tell each other.

Before gradients travel, every rank joins one small agreement, which carries counts, losses and whether all is well.
So ranks may bring different numbers of rows and micro-batches, an error on one ends the step on all, and every rank
knows the denominators of the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import reduce
from operator import or_
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from wholebatch.batch.window import MicroBatch
from wholebatch.errors import SyncError
from wholebatch.loss.totals import LossTotals, Schema
from wholebatch.model.gradients import GradientAccumulator, gradient_dtype, scale_
from wholebatch.ranks.parting import all_here, cut, is_lost, leave_word, word_of

CAPACITY = 48
"""How many numbers travel with the agreement; more of them take a second message."""

BUCKET_BYTES = 25 * 2**20
"""How large a message of gradients or buffers gets."""

TEXT_BYTES = 2048
"""How much of an error the other ranks get to read."""


MARKS = (131, 8191)
"""The bases of the two hashes by which ranks compare what their sums are named."""


class Status(IntEnum):
    """How a rank comes to the agreement."""

    READY = 0
    RECOUNT = 1
    FAILED = 2


class Next(Enum):
    """What the other ranks do next that this one must take part in, for all that it knows."""

    AGREEMENT = "they come to an agreement"
    COLLECTIVE = "they are in collectives that are not ours: a reduction, a gathering"
    NOTHING = "they need nothing of this rank"
    UNKNOWN = "an agreement has begun, and where it leads is not known here yet"


class Travel(Enum):
    """When gradients travel: with the last backward of a window, after it, or with every backward."""

    LAST = "in the last backward, after the agreement"
    APART = "after all backwards, outside of them"
    EVERY = "in every backward, all ranks in step"


@dataclass(frozen=True)
class Agreement:
    """What all ranks know after the agreement.

    Attributes:
        sums: totals and counts over all ranks.
        recount: whether some rank needs every denominator before its first backward.
        number: the sum of the provisional numbers that ranks came with; 0 if none did.
        micro_batches: how many micro-batches each rank said that it has.
    """

    sums: LossTotals
    recount: bool = False
    number: float = 0.0
    micro_batches: Sequence[int] = ()


class Ranks:
    """One process, which has nobody to agree with."""

    world = 1
    divides = 1
    """What the reduction of gradients divides their sum by."""
    views = False
    travel = Travel.LAST
    per_micro_batch = False
    """Whether forwards are collectives too, so that no rank can leave one out."""
    meets = False
    """Whether gradients flow between ranks in the middle of a backward, so that all must divide by the same number."""
    accumulate_in: torch.dtype | None = None
    groups: Sequence[dist.ProcessGroup] = ()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def local(self) -> AbstractContextManager[Any]:
        """Run a forward without reducing gradients in its backward."""
        return nullcontext()

    @property
    def alone(self) -> list[Tensor]:
        """The parameters that the wrapper was told to leave out: every rank has its own, with a gradient of its own."""
        return []

    def agree(
        self,
        status: Status,
        sums: LossTotals,
        number: float = 0.0,
        micro_batches: int = 0,
        then: Next = Next.AGREEMENT,
    ) -> Agreement:
        """Add sums up over ranks and learn how the others are.

        Args:
            then: where all ranks go from here unless one of them needs the denominators first; UNKNOWN until the caller
                says it: :meth:`settle`, :meth:`resume`.

        Raises:
            SyncError: on all ranks, if one of them failed.
        """
        return Agreement(sums, status is Status.RECOUNT, number, [micro_batches])

    def total(self, numbers: Tensor) -> Tensor:
        """Add numbers up over all ranks."""
        return numbers

    def settle(self) -> None:
        """Note that all ranks go on to send gradients: they do not come to another agreement before."""

    def resume(self) -> None:
        """Note that all ranks come to another agreement, with no collective of others before it."""

    def conclude(self, gradients: GradientAccumulator) -> None:
        """Note that gradients have travelled, and bring those to the batch that stay where they are."""

    def rounds(
        self, micro_batches: Sequence[MicroBatch], run: Callable[[MicroBatch], Any]
    ) -> Iterator[MicroBatch | None]:
        """Yield the micro-batches; where all ranks go in step, None for each round that this rank has no micro-batch
        for.

        Args:
            run: runs the forward of a micro-batch.
        """
        return iter(micro_batches)

    def run_dummy_forward(self) -> None:
        """Take part in the forward of this round if this rank has not done so yet."""

    def leaves(self) -> list[Tensor]:
        """List what backward passes add to in place of the model's own parameters."""
        return []

    def owns(self, leaf: Tensor) -> bool:
        """Tell whether a leaf that is no parameter of the model stands for one."""
        return False

    def prepare_reducer(self, outputs: Sequence[Tensor]) -> None:
        """Make the backward from these outputs reduce all gradients."""

    def zero_output(self) -> list[Tensor]:
        """Return what to run a backward from so as to reduce what has been summed, with nothing to add."""
        return []

    def reduce(self, gradients: GradientAccumulator) -> None:
        """Average the window's sums over ranks as they lie, in their own precision, outside of any backward."""


class ProcessGroups(Ranks):
    """The ranks of one or several process groups, all of which agree.

    Args:
        groups: whose product they are: one group, or one for each dimension of a mesh.
        device: where messages lie.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
        self.groups, self.device = list(groups), device
        self.world = self.divides = math.prod(dist.get_world_size(group) for group in groups)
        self.rank = 0
        for group in groups:
            self.rank = self.rank * dist.get_world_size(group) + dist.get_rank(group)
        self._next = Next.NOTHING
        self._failure = ""
        self._interrupt: KeyboardInterrupt | None = None

    def __enter__(self) -> Ranks:
        self._next = Next.COLLECTIVE
        with ExitStack() as undo:
            undo.push(self)
            self._open()
            undo.pop_all()
        self._next = Next.AGREEMENT
        return self

    def _open(self) -> None:
        """Do what all ranks do together before anything else."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        self._failure = f"{type(error).__name__}: {error}"
        following = Next.COLLECTIVE if is_lost(error) else self._awaited(error)
        self._next = Next.NOTHING
        if following is Next.AGREEMENT:
            with suppress(SyncError):  # the others are gone; the error on its way says what there is to say
                self.agree(Status.FAILED, LossTotals())
        elif following is not Next.NOTHING and not all_here(self.groups, error):
            self._part(error)

    def settle(self) -> None:
        """Note that all ranks go on to send gradients."""
        self._next = Next.COLLECTIVE

    def resume(self) -> None:
        """Note that all ranks come to another agreement."""
        self._next = Next.AGREEMENT

    def conclude(self, gradients: GradientAccumulator) -> None:
        """Note that nothing is outstanding; divide what no reduction has divided."""
        self._next = Next.NOTHING
        alone = self.alone
        gradients.keep_apart(alone, self.groups)
        if alone and self.divides != 1:
            scale_(gradients.held(alone), 1.0 / self.divides)
        self._let_interrupt()

    def agree(
        self,
        status: Status,
        sums: LossTotals,
        number: float = 0.0,
        micro_batches: int = 0,
        then: Next = Next.AGREEMENT,
    ) -> Agreement:
        """Add sums up over ranks and learn how the others are, in one small message."""
        if status is not Status.FAILED:
            self._let_interrupt()
        numbers = sums.numbers(sums.schema)
        # Do all ranks describe their sums alike? Sums over w ranks must tell: w * sum(m^2) = sum(m)^2 if their marks m
        # are equal, and only then (Cauchy and Schwarz). Marks have 20 bits, so that float64 keeps a single other one
        # apart from rounding on thousands of ranks; two marks, so that equal ones are no chance.
        marks = torch.tensor([float(hash_of(sums.schema, base)) for base in MARKS], dtype=torch.float64)
        common = torch.cat([marks, marks.square(), torch.tensor([number], dtype=torch.float64)])
        # What must be known of each rank by itself has a place for each in the sum, where all others add a zero.
        own = torch.zeros(2, self.world, dtype=torch.float64)
        own[:, self.rank] = torch.tensor([float(status), float(micro_batches)])
        body = torch.zeros(CAPACITY, dtype=torch.float64)
        body[: len(numbers)] = numbers[:CAPACITY]
        message = torch.cat([common, own.flatten(), body])
        if status is not Status.FAILED:
            self._next = Next.UNKNOWN  # who fails from here on may have joined, and the others go on
        message = self.total(message)
        common, own, body = torch.split(message, [len(common), own.numel(), CAPACITY])
        statuses = [Status(int(each)) for each in own[: self.world].tolist()]
        marks, squares = common[:-1].view(2, len(MARKS))
        number = float(common[-1])
        if Status.FAILED in statuses:
            self._fail(statuses)
            return Agreement(sums)
        schema, alike = sums.schema, bool((self.world * squares == marks.square()).all())
        # From here on every branch depends on sums alone, so all ranks take the same one and meet again.
        if Status.RECOUNT not in statuses and not alike:
            schema = self._union(schema)
        if Status.RECOUNT not in statuses and (not alike or schema.size > CAPACITY):
            body = self.total(sums.numbers(schema))
        agreement = Agreement(
            LossTotals.of_numbers(schema, body[: schema.size]),
            recount=Status.RECOUNT in statuses,
            number=number,
            micro_batches=[int(each) for each in own[self.world :].tolist()],
        )
        self._next = Next.AGREEMENT if agreement.recount else then
        return agreement

    def total(self, numbers: Tensor) -> Tensor:
        """Add numbers up over all ranks, on the host."""
        moved = numbers.to(self.device)
        self._add_up(moved)
        return moved.cpu()

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Add tensors up over all ranks in place, many in one message; divide as the reduction of gradients does."""
        for bucket in buckets(tensors):
            flat = torch.cat([tensor.flatten() for tensor in bucket]).div_(self.divides)
            self._add_up(flat)
            write(flat, bucket)

    def share(self, thing: Any) -> Any:
        """Hand the one thing that is not None to all ranks."""
        for group in self.groups:
            things: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(things, thing, group=group)
            thing = next((each for each in things if each is not None), None)
        return thing

    def complete(self, gradients: GradientAccumulator, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Give every parameter that has a sum on some rank one on this rank, of zeros; return those parameters."""
        sums = [gradients.take(p) for p in parameters]
        present = self.total(torch.tensor([float(s is not None) for s in sums])).tolist()
        for parameter, total, anywhere in zip(parameters, sums, present, strict=True):
            if anywhere and total is None:
                gradients.put(parameter, torch.zeros_like(parameter, dtype=gradient_dtype(parameter)))
        return [p for p, anywhere in zip(parameters, present, strict=True) if anywhere]

    def _add_up(self, numbers: Tensor) -> None:
        for group in self.groups:
            self._wait(dist.all_reduce(numbers, group=group, async_op=True))

    def _wait(self, work: dist.Work) -> None:
        """Wait for the other ranks.

        An interrupt that comes meanwhile is kept: this rank has joined already, so that the others go on, and it must
        not leave before it can tell them.

        Raises:
            SyncError: if one of them is not there any more.
        """
        try:
            try:
                work.wait()
            except KeyboardInterrupt as interrupt:
                self._interrupt = interrupt
                work.wait()
        except RuntimeError as error:
            self._next, self._failure = Next.NOTHING, f"{type(error).__name__}: {error}"
            self._part(error)
            raise

    def _let_interrupt(self) -> None:
        interrupt, self._interrupt = self._interrupt, None
        if interrupt is not None:
            raise interrupt

    def _awaited(self, error: BaseException) -> Next:
        """Say what the others do next, now that this rank has failed."""
        return self._next

    def _part(self, error: BaseException) -> None:
        """Leave the others where they are, or say that this rank was left.

        Raises:
            SyncError: if it is another rank that has left.
        """
        said = word_of(self.groups) if isinstance(error, RuntimeError) else None
        left = said or ("A rank has ended or cannot be reached." if is_lost(error) else None)
        own = f"Rank {self.rank} failed while the others waited for it. It said: {self._failure}"
        leave_word(self.groups, left or own)
        cut(self.groups)
        if left is not None:
            raise SyncError(
                f"{left} No rank may step, and this process group is of no use any more: start the processes again."
            ) from error

    def _union(self, schema: Schema) -> Schema:
        for group in self.groups:
            schemas: list[Schema] = [schema] * dist.get_world_size(group)
            dist.all_gather_object(schemas, schema, group=group)
            schema = reduce(or_, schemas)
        return schema

    def _fail(self, statuses: Sequence[Status]) -> None:
        """Raise what the first rank that failed has to say, on all ranks that did not."""
        failed = statuses.index(Status.FAILED)
        text = self._failure.encode()[:TEXT_BYTES] if failed == self.rank else b""
        letters = torch.zeros(TEXT_BYTES, dtype=torch.int32)
        letters[: len(text)] = torch.tensor(list(text), dtype=torch.int32)
        letters = self.total(letters)
        self._next = Next.NOTHING
        said = bytes(letters.tolist()).rstrip(b"\0").decode(errors="replace")
        if statuses[self.rank] is not Status.FAILED:
            raise SyncError(f"Rank {failed} failed in this window, so no rank may step. It said: {said}")


def hash_of(schema: Schema, base: int) -> int:
    """Reduce a description to 20 bits that are the same in every process, as Python's own hash of a text is not."""
    value = 0
    for letter in repr(schema):
        value = (value * base + ord(letter)) % (1 << 20)
    return value + 1


def message_device(group: dist.ProcessGroup | None, near: torch.device | None) -> torch.device:
    """Say where a group's messages (None: of all ranks) must lie: with the model if it has no backend for the host."""
    alone = dist.get_backend(group) == "nccl"
    return near if alone and near is not None else torch.device("cpu")


def buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Group tensors of one dtype and device into messages of a bounded size."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        group = groups.setdefault((tensor.device, tensor.dtype), [])
        if group and sum(t.nbytes for t in group) + tensor.nbytes > BUCKET_BYTES:
            yield list(group)
            group.clear()
        group.append(tensor)
    yield from groups.values()


def write(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy a message back into the tensors that it was made of."""
    for tensor, part in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
