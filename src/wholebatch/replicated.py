"""Every rank holds the whole model: ``DistributedDataParallel``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from wholebatch.errors import SyncError
from wholebatch.precision import Gradients, device_of
from wholebatch.sums import Sums
from wholebatch.sync import Peers, Ranks, Status, Travel, buckets, message_device, write
from wholebatch.window import Piece


class DataParallelRanks(Peers):
    """The ranks of a ``DistributedDataParallel`` model.

    Forwards run inside ``no_sync``, so that none of them reduces or waits. The reducer is armed only after an
    agreement, for the one backward that it shall serve; a rank with nothing left to run gives it a zero. The
    methods of the reducer used for this are those with which torch itself begins a forward, and shadows a rank that
    has run out of batches (torch/nn/parallel/distributed.py, 2.6 to 2.14).
    """

    def __init__(self, model: DistributedDataParallel, every: bool) -> None:
        group: dist.ProcessGroup = model.process_group
        super().__init__([group], message_device(group, device_of(model.module)))
        self._model = model
        self.views = bool(model.gradient_as_bucket_view)
        self.meets = any(isinstance(m, nn.SyncBatchNorm) and m.training for m in model.modules())
        self._learns_graph = model.static_graph and not model._static_graph_delay_allreduce_enqueued
        self.travel = Travel.EVERY if every or self._learns_graph else Travel.LAST

    def __enter__(self) -> Ranks:
        super().__enter__()
        self._model.reducer._rebuild_buckets()
        self._model.require_forward_param_sync = False
        if self._learns_graph:  # else each forward would plan a reduction for its own backward
            self._model._static_graph_delay_allreduce_enqueued = True
        if self._model.broadcast_buffers:
            self._broadcast_buffers()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._learns_graph:  # no backward came that far
            self._model._static_graph_delay_allreduce_enqueued = False
        super().__exit__(*error)

    def local(self) -> AbstractContextManager[Any]:
        """Run a forward whose backward reduces nothing."""
        return cast("AbstractContextManager[Any]", self._model.no_sync())

    def rounds(self, pieces: Sequence[Piece], run: Callable[[Piece], Any]) -> Iterator[Piece | None]:
        """Yield the pieces; with SyncBatchNorm as many on every rank, in step one round for all."""
        if self.travel is not Travel.EVERY and not self.meets:
            return iter(pieces)
        counts = self.agree(Status.READY, Sums(), pieces=len(pieces)).pieces
        if self.meets and min(counts) < max(counts):
            raise SyncError(
                f"SyncBatchNorm joins the micro-batches of all ranks, but they bring {list(counts)} of them. Give "
                "every rank the same number of micro-batches."
            )
        return self._in_step([*pieces, *[None] * (max(counts) - len(pieces))])

    def arm(self, outputs: Sequence[Tensor]) -> None:
        """Make the backward from these outputs reduce all gradients."""
        self._model.reducer.prepare_for_forward()
        self._model.reducer.prepare_for_backward([] if self._model.static_graph else list(outputs))
        if self._learns_graph:
            self._learns_graph = False
            outputs[0].register_hook(self._reduce_at_the_end)  # type: ignore[no-untyped-call]

    def idle(self) -> list[Tensor]:
        """Return a zero that depends on every parameter, so that each hook of the reducer fires."""
        wanted = [p for p in self._model.parameters() if p.requires_grad]
        if self._model.find_unused_parameters:
            wanted = [p for p in wanted if p.grad is not None] or wanted[:1]
        return [torch.stack([p.flatten()[:0].sum().to("cpu", torch.float64) for p in wanted]).sum()]

    def reduce(self, gradients: Gradients) -> None:
        """Average all sums as they lie, where the reducer cannot reach them."""
        parameters = [p for p in self._model.parameters() if p.requires_grad]
        self.average(gradients.held(self.complete(gradients, parameters)))

    def _in_step(self, pieces: Sequence[Piece | None]) -> Iterator[Piece | None]:
        for piece in pieces:
            self._model.reducer._rebuild_buckets()  # a collective, once in a life: before a forward that some leave out
            yield piece

    def _reduce_at_the_end(self, grad: Tensor) -> None:
        """Reduce when the backward is over, as DDP does while it learns which parameters its static graph uses."""
        reducer: Any = self._model.reducer
        torch.autograd.Variable._execution_engine.queue_callback(reducer._delay_all_reduce)

    def _broadcast_buffers(self) -> None:
        group = self.groups[0]
        for bucket in buckets(buffer.detach() for buffer in self._model.module.buffers()):
            flat = torch.cat([buffer.flatten() for buffer in bucket])
            dist.broadcast(flat, dist.get_global_rank(group, 0), group)
            write(flat, bucket)
