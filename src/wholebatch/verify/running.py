"""`backward` run for the sake of a comparison: on the model as it is, watched, and undone."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from wholebatch.batch.sizes import Size
from wholebatch.batch.window import MicroBatch
from wholebatch.errors import SyncError, WholeBatchError, own_faults_apart
from wholebatch.gradient.result import Result
from wholebatch.gradient.separable import backward
from wholebatch.loss.terms import LossFunction
from wholebatch.model.inspection import ModelInfo, unwrapped
from wholebatch.model.references import reach_of
from wholebatch.model.snapshot import Moved, Snapshot
from wholebatch.model.state import State
from wholebatch.options import Options
from wholebatch.verify.copies import copied, tensors_in
from wholebatch.verify.explaining import FOREIGN
from wholebatch.verify.reference import Gradients, buffers_of, held, named_targets, twin_of
from wholebatch.verify.watching import HookSums, RecordedLoss, optimizers_kept

T = TypeVar("T")

EVERYTHING = 2**50
"""Bytes of tensors that are copied in order to be put back: as many as there are."""


@dataclasses.dataclass(frozen=True)
class Ran:
    """What a run of `backward` left, before it was undone.

    Attributes:
        gradients: by parameter name, zeros where nothing arrived; missing: the names of those.
        result: what `backward` returned.
        watched: the loss function, and what it was called with.
        moved: what is no longer as before, gradients and buffers aside.
        written: tensors of the caller's batch that are no longer as before, by their shapes.
        taken: places of the caller's batch where something else stands, or nothing.
        stepped: optimizers that stepped.
        buffers: where they stood.
        seen: what hooks were shown.
    """

    gradients: Gradients
    missing: tuple[str, ...]
    result: Result
    watched: RecordedLoss
    moved: list[Moved]
    written: list[str]
    taken: list[str]
    stepped: list[str]
    buffers: dict[str, Tensor]
    seen: HookSums

    @property
    def micro_batches(self) -> list[Any]:
        """The micro-batches as the loss function was given them: a counting pass comes before, so the last count."""
        return [call.micro_batch for call in self.watched.calls[-self.result.micro_batches :]]

    @property
    def items(self) -> list[float]:
        """The denominators that were reported."""
        items = self.result.items
        return [float(each) for each in (items.values() if isinstance(items, dict) else items)]


class Bench:
    """A model, a loss function and a batch, on which things are tried and undone.

    Args:
        model, loss_fn, batch, size, options: as for `backward`.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFunction, batch: Any, size: Size, options: Options) -> None:
        self.model, self.loss_fn, self.batch, self.size, self.options = model, loss_fn, batch, size, options
        self.plain = unwrapped(model)
        if any(hasattr(parameter, "placements") for parameter in self.plain.parameters()):
            raise SyncError(
                f"{type(self.plain).__name__} has its parameters spread over ranks, and the plain reading needs them "
                "whole. Check the model before fully_shard."
            )
        if any(is_lazy(parameter) for parameter in self.plain.parameters()):
            raise ValueError(
                f"{type(self.plain).__name__} has parameters that its first forward makes, and here it would make them "
                "with draws held still. Run one forward before, such as loss_fn(model, batch), and then check."
            )
        self.model_info = ModelInfo(self.plain, reach_of(loss_fn).modules)
        self.outside: list[Tensor] = []
        self.before = Snapshot(self.model_info, loss_fn, keep=EVERYTHING)
        self.tensors = [(tensor, tensor.detach().clone()) for tensor in tensors_in(batch)]
        self.given = Snapshot(ModelInfo(nn.Module()), cast(Any, _NamedBatch(batch)), keep=EVERYTHING)

    def back(self) -> None:
        """Put everything back but gradients, which are put back where they are made."""
        self.before.restore()
        self.given.restore(draws=False)

    def run(self, on: nn.Module | None = None) -> Ran:
        """Run `backward`, and undo it.

        Args:
            on: another model in the place of this one.
        """
        model = self.model if on is None else on
        plain = unwrapped(model)
        targets = named_targets(plain, self.outside)
        start = State(plain)
        seen = HookSums()
        unverified: Options = {**self.options, "verify": "never"}  # one proof is enough
        watched = RecordedLoss(self.loss_fn, self.plain, [*plain.parameters(), *self.outside])
        try:
            with optimizers_kept() as stepped, gradients_kept([*plain.parameters(), *self.outside]):
                with own_faults_apart(), seen.on(plain):
                    result = backward(model, watched, self.batch, self.size, **unverified)
                return Ran(
                    gradients={name: held(tensor, torch.float64) for name, tensor in targets.items()},
                    missing=tuple(name for name, tensor in targets.items() if tensor.grad is None),
                    result=result,
                    watched=watched,
                    moved=[each for each in self.before.moved() if each.kind != "buffer"],
                    written=[str(tuple(tensor.shape)) for tensor, was in self.tensors if not _same(tensor, was)],
                    taken=[each.name for each in self.given.moved()],
                    stepped=stepped,
                    buffers=buffers_of(plain),
                    seen=seen,
                )
        finally:
            start.restore()
            self.back()

    def copy(self) -> nn.Module:
        """Copy the model, with its wrapper: what is remembered of the copy is not remembered of the model."""
        twin = twin_of(self.plain)
        if not isinstance(self.model, DistributedDataParallel):
            return twin
        own = self.model
        return DistributedDataParallel(twin, own.device_ids, own.output_device, process_group=own.process_group)


def _same(tensor: Tensor, was: Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.is_nested:
        return True  # what can't be compared at a glance is not written to either
    return bool(((tensor == was) | ((tensor != tensor) & (was != was))).all())


class _NamedBatch:
    """Something to take a snapshot of, by the name of the batch."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch


@contextmanager
def gradients_kept(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Clear gradients for a while, and put back what was there, in whose memory others may have written meanwhile."""
    kept = [(tensor, tensor.grad, None if tensor.grad is None else tensor.grad.clone()) for tensor in tensors]
    for tensor, _, _ in kept:
        tensor.grad = None
    try:
        yield
    finally:
        for tensor, gradient, saved in kept:
            if gradient is not None and saved is not None and not gradient.is_sparse:
                gradient.detach().copy_(saved)
            tensor.grad = gradient


def several_ranks() -> int:
    """Return how many processes there are, 1 without any group of them."""
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def over_ranks(value: Any, wrapped: bool) -> list[Any]:
    """Return what each rank brings, in the order of ranks; alone where the model is not wrapped."""
    if not wrapped:
        return [value]
    found: list[Any] = [None] * several_ranks()
    torch.distributed.all_gather_object(found, value)
    return found


def shares(own: Callable[[], Sequence[Any]], wrapped: bool) -> list[Any]:
    """Return the micro-batches of all ranks, of which ``own`` makes this rank's.

    Raises:
        SyncError: on every rank, if one can't send its own.
    """
    if not wrapped:
        return list(own())
    try:
        sent: bytes | str = pickle.dumps(copied(list(own()), None, torch.device("cpu")))
    except (pickle.PicklingError, *FOREIGN) as error:
        sent = f"{type(error).__name__}: {error}"
    everywhere = over_ranks(sent, wrapped)
    failed = [each for each in everywhere if isinstance(each, str)]
    if failed:
        raise SyncError(
            f"{len(failed)} ranks can't send their share of the batch ({failed[0]:.120}), so there is no whole batch "
            "to compare with. Check in one process, or with a batch that can be pickled."
        )
    return [micro_batch for each in everywhere for micro_batch in pickle.loads(each)]


def numbered(cut: Sequence[MicroBatch], wrapped: bool) -> list[list[int]]:
    """Number the rows of micro-batches through the batch of all ranks, and through the micro-batches of a window."""
    starts: list[tuple[Any, int]] = []
    total, own = 0, []
    for micro_batch in cut:
        known = [start for made, start in starts if made == micro_batch.cut]
        start = known[0] if known else total
        if not known:
            starts.append((micro_batch.cut, start))
            total += sum(each.rows for each in cut if each.cut == micro_batch.cut)
        own.append([start + row for row in micro_batch.index])
    found, before = [], 0
    for share in over_ranks(own, wrapped):
        found += [[before + row for row in rows] for rows in share]
        before += sum(map(len, share))
    return found


def together(work: Callable[[], T], wrapped: bool) -> T:
    """Do something that may fail on this rank; if it fails on any, let no other go on and wait for it.

    Raises:
        SyncError: if it failed on another rank.
    """
    if not wrapped:
        return work()
    try:
        found = work()
    except (*FOREIGN, WholeBatchError) as error:
        over_ranks(f"{type(error).__name__}: {error}", wrapped)
        raise
    failed = [each for each in over_ranks(None, wrapped) if each is not None]
    if failed:
        raise SyncError(f"{len(failed)} other ranks failed in reading the batch, so this one stops: {failed[0]:.200}")
    return found
