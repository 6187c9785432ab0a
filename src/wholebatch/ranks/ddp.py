"""Every rank holds the whole model: ``DistributedDataParallel``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from wholebatch.batch.window import MicroBatch
from wholebatch.errors import SyncError
from wholebatch.loss.totals import LossTotals
from wholebatch.model.gradients import GradientAccumulator, device_of
from wholebatch.ranks.agreement import Next, ProcessGroups, Status, Travel, buckets, message_device, write
from wholebatch.ranks.passes import Passes


class DDPRanks(ProcessGroups):
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
        self._left_out = set(model.parameters_to_ignore)
        self._prepared = False
        self._times: list[int] = []
        self._passes = Passes()
        _refuse_settings(model, self._reduced())
        self.views = bool(model.gradient_as_bucket_view)
        self.meets = any(isinstance(m, nn.SyncBatchNorm) and m.training for m in model.modules())
        # A static graph is reduced when every hook has fired as often as in its first backward. That is no count for a
        # window: a rank may have nothing in a round, and reentrant checkpoints fire once for each use of a block.
        self._plans = bool(model.static_graph) and not model._static_graph_delay_allreduce_enqueued
        self.travel = Travel.APART if model.static_graph else Travel.EVERY if every else Travel.LAST

    def _open(self) -> None:
        # After its first backward DDP orders its buckets anew, in a collective inside of the next forward, which a rank
        # without rows would leave out. Here all ranks are together.
        self._model.reducer._rebuild_buckets()
        # Buffers are sent below, once a window; without this each forward that is not under no_sync would send them.
        self._model.require_forward_param_sync = False
        if self._model.find_unused_parameters:
            self._model.reducer._reset_state()  # else what earlier windows used, and never reduced, counts as used now
        if self._plans:  # else each forward would plan a reduction for its own backward
            self._model._static_graph_delay_allreduce_enqueued = True
        if self._model.broadcast_buffers:
            self._broadcast_buffers()
        if self.meets:
            self._passes.watch(self._model)

    def __exit__(self, *error: Any) -> None:
        if self._plans:
            self._model._static_graph_delay_allreduce_enqueued = False
        self._passes.forget()
        try:
            super().__exit__(*error)
        finally:
            if self._prepared and not self._finished():
                self._model.reducer._reset_state()  # else it refuses the next backward, for this one's sake

    @property
    def alone(self) -> list[Tensor]:
        """The parameters that the wrapper was told to ignore."""
        if not self._left_out:
            return []
        reduced = {id(parameter) for parameter in self._reduced()}
        return [p for p in self._model.parameters() if p.requires_grad and id(p) not in reduced]

    def local(self) -> AbstractContextManager[Any]:
        """Run a forward whose backward reduces nothing."""
        return cast("AbstractContextManager[Any]", self._model.no_sync())

    def rounds(
        self, micro_batches: Sequence[MicroBatch], run: Callable[[MicroBatch], Any]
    ) -> Iterator[MicroBatch | None]:
        """Yield the micro-batches; with SyncBatchNorm as many on every rank, in step one round for all."""
        if self.travel is not Travel.EVERY and not self.meets:
            return iter(micro_batches)
        counts = self.agree(Status.READY, LossTotals(), micro_batches=len(micro_batches)).micro_batches
        if self.meets and min(counts) < max(counts):
            raise SyncError(
                f"SyncBatchNorm joins the micro-batches of all ranks, but they bring {list(counts)} of them. Give "
                "every rank the same number of micro-batches."
            )
        self._next = Next.COLLECTIVE
        return self._in_step([*micro_batches, *[None] * (max(counts) - len(micro_batches))])

    def settle(self) -> None:
        """Note that all ranks go on to send gradients, after the forwards of this round."""
        super().settle()
        self._prepared = False  # the reduction to come; an earlier round's is finished
        self._passes.begin()

    def conclude(self, gradients: GradientAccumulator) -> None:
        """Note that nothing is outstanding, and that DDP has come to the end of its reduction.

        Raises:
            SyncError: if it has not, so that gradients are this rank's alone.
        """
        if self._prepared and not self._finished():
            raise SyncError(
                "DistributedDataParallel has not finished its reduction: some parameter took no part in the last "
                "backward. Build it with find_unused_parameters=True, or let the loss depend on every parameter."
            )
        super().conclude(gradients)

    def prepare_reducer(self, outputs: Sequence[Tensor]) -> None:
        """Make the backward from these outputs reduce all gradients."""
        # The forwards ran under no_sync, so the reducer believes that it is not wanted. These two calls are what a
        # forward outside of no_sync would have made of it: forget the last window, then look through the graph of the
        # coming backward for parameters that it will not reach (they count as ready at once).
        self._prepared, self._times = True, self._model.reducer.get_backward_stats()
        self._model.reducer.prepare_for_forward()
        self._model.reducer.prepare_for_backward(list(outputs))

    def zero_output(self) -> list[Tensor]:
        """Return a zero that depends on every parameter, so that each hook of the reducer fires."""
        wanted = self._reduced()
        if self._model.find_unused_parameters:
            wanted = [p for p in wanted if p.grad is not None] or wanted[:1]
        return [torch.stack([p.flatten()[:0].sum().to("cpu", torch.float64) for p in wanted]).sum()]

    def reduce(self, gradients: GradientAccumulator) -> None:
        """Average all sums as they lie, where the reducer cannot reach them."""
        self.average(gradients.held(self.complete(gradients, self._reduced())))

    def _in_step(self, micro_batches: Sequence[MicroBatch | None]) -> Iterator[MicroBatch | None]:
        for micro_batch in micro_batches:
            self._next = Next.COLLECTIVE
            self._model.reducer._rebuild_buckets()  # a collective, once in a life: before a forward that some leave out
            self._passes.begin()
            self._next = Next.COLLECTIVE if self.meets else Next.AGREEMENT
            yield micro_batch
        self._next = Next.AGREEMENT

    def _awaited(self, error: BaseException) -> Next:
        """A forward in which ranks meet has been left by all once it is over; so has a reduction that is finished."""
        if self._next is not Next.COLLECTIVE:
            return self._next
        if self.meets and self._passes.over:
            return Next.AGREEMENT
        if self._prepared and self._finished():
            return Next.AGREEMENT if self.travel is Travel.EVERY else Next.NOTHING
        return Next.COLLECTIVE

    def _finished(self) -> bool:
        """Tell whether DDP has begun the reduction that it was armed for, and come to its end."""
        if self._times == self._model.reducer.get_backward_stats():  # of each parameter's last reduction
            return False
        ask = getattr(self._model.reducer, "_check_reducer_finalized", lambda: None)
        try:
            ask()
        except RuntimeError:
            return False
        return True

    def _reduced(self) -> list[Tensor]:
        """List the parameters that DDP reduces, by the names that it goes by."""
        if not self._left_out:
            return [p for p in self._model.parameters() if p.requires_grad]
        found: dict[int, Tensor] = {}
        for place, module in self._model.module.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad and f"{place}.{name}" not in self._left_out:
                    found[id(parameter)] = parameter
        return list(found.values())

    def _broadcast_buffers(self) -> None:
        group = self.groups[0]
        named = self._model.module.named_buffers()
        for bucket in buckets(buffer.detach() for name, buffer in named if name not in self._left_out):
            flat = torch.cat([buffer.flatten() for buffer in bucket])
            work = dist.broadcast(flat, dist.get_global_rank(group, 0), group, async_op=True)
            if work is not None:
                self._wait(work)
            write(flat, bucket)


def _refuse_settings(model: DistributedDataParallel, reduced: Sequence[Tensor]) -> None:
    """Raise for a wrapper that does not reduce what now receives gradients, or that reduces in another way as well."""
    if getattr(model, "_delay_all_reduce_params", None):
        raise SyncError(
            "DistributedDataParallel(delay_all_reduce_named_params=...) reduces gradients in every backward, also of a "
            "micro-batch. Leave it out."
        )
    said: dict[str, Any] = model._get_ddp_logging_data()
    built, now = said.get("num_parameter_tensors"), len(reduced)
    if built is not None and (now > built or (now < built and not model.find_unused_parameters)):
        raise SyncError(
            f"DistributedDataParallel was built when {built} parameters required a gradient, and now {now} do: it "
            "reduces those that it was built with. Wrap the model anew after freezing or unfreezing parameters."
        )
