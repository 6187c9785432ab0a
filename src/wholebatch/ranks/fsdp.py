"""Every rank holds a shard of each parameter: FSDP2, ``torch.distributed.fsdp.fully_shard``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.hooks import RemovableHandle

from wholebatch.batch.tree import BatchTree, move
from wholebatch.batch.window import MicroBatch
from wholebatch.errors import SyncError
from wholebatch.loss.counts import is_half
from wholebatch.loss.totals import LossTotals
from wholebatch.model.gradients import GradientAccumulator, device_of
from wholebatch.model.state import State
from wholebatch.ranks.agreement import Next, ProcessGroups, Status, Travel, buckets, message_device
from wholebatch.ranks.passes import Passes

SETTINGS = (
    "reduce_grads",
    "all_reduce_grads",
    "reshard_after_backward",
    "post_forward_mesh_info",
    "gradient_divide_factor",
    "force_sum_reduction_for_comms",
    "reduce_scatter_unused_params",
)
"""What ``FSDPModule.set_...`` writes into a parameter group and no public name reads (torch 2.8 to 2.14)."""


class ShardedRanks(ProcessGroups):
    """The ranks of a model under ``fully_shard``; its own settings are borrowed for the window and given back."""

    def __init__(self, model: nn.Module) -> None:
        shards = [p for p in model.parameters() if isinstance(p, DTensor)]
        mesh = _mesh_of(shards)
        groups = [mesh.get_group(dimension) for dimension in range(mesh.ndim)]
        super().__init__(groups, message_device(groups[0], device_of(model)))
        self._model = model
        self._modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        inside = {id(p) for module in self._modules for p in module.parameters()}
        plain = [p for p in model.parameters() if p.requires_grad and not isinstance(p, DTensor)]
        self._plain = [p for p in plain if id(p) not in inside]
        self._ignored: list[Tensor] = [p for p in plain if id(p) in inside]
        self._settings: list[tuple[Any, str, Any]] = []

    def _open(self) -> None:
        for module in self._roots():
            module._get_fsdp_state()._lazy_init()  # else the first forward would change settings after us
        for group in self._parameter_groups():
            self._settings += [(group, name, getattr(group, name)) for name in SETTINGS if hasattr(group, name)]

    @property
    def alone(self) -> list[Tensor]:
        """The parameters of sharded modules that are not sharded: ``ignored_params``."""
        return self._ignored

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        try:
            super().__exit__(kind, *rest)
        finally:
            for module in self._modules:
                module.reshard()
            for group, name, value in self._settings:
                setattr(group, name, value)
            if kind is not None:
                self._forget_iteration()

    def reduce(self, gradients: GradientAccumulator) -> None:
        """Reduce what FSDP does not manage: parameters of modules that are not sharded."""
        if self._plain:
            self.average(gradients.held(self.complete(gradients, self._plain)))

    def _roots(self) -> list[FSDPModule]:
        inner = {id(part) for module in self._modules for part in module.modules() if part is not module}
        return [module for module in self._modules if id(module) not in inner]

    def _parameter_groups(self) -> list[Any]:
        states = [module._get_fsdp_state() for module in self._modules]
        several = [getattr(s, "_fsdp_param_groups", None) or [getattr(s, "_fsdp_param_group", None)] for s in states]
        return [group for groups in several for group in groups if group is not None]

    def _forget_iteration(self) -> None:
        """Bring FSDP back from a forward or backward that was broken off."""
        for module in self._roots():
            if hasattr(module, "reset_iter_state"):
                module.reset_iter_state()
                continue
            context = module._get_fsdp_state()._state_ctx
            context.iter_forward_root, context.post_backward_final_callback_queued = None, False
            for state in context.all_states:
                state._training_state = type(state._training_state).IDLE
        for group in self._parameter_groups():
            group._training_state = type(group._training_state).IDLE


class GatheredFSDP(ShardedRanks):
    """Gather all parameters once, run every micro-batch without communication, and scatter the summed gradient once.

    The micro-batches of a window then run as in one process: any number of them on any rank, also none. Holds the whole
    parameters and their whole gradient on every rank for the length of the window.
    """

    travel = Travel.APART

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._pairs: list[tuple[DTensor, Tensor]] = []
        self.accumulate_in = self._reduced_in()

    def _open(self) -> None:
        super()._open()
        shards = dict(self._model.named_parameters())
        for module in self._modules:
            module.set_requires_gradient_sync(False, recurse=False)
            module.set_reshard_after_backward(False, recurse=False)
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
        wholes = dict(self._model.named_parameters())
        self._pairs = [
            (shard, wholes[name])
            for name, shard in shards.items()
            if isinstance(shard, DTensor) and shard.requires_grad
        ]

    def leaves(self) -> list[Tensor]:
        """List the gathered parameters."""
        return [whole for _, whole in self._pairs]

    def reduce(self, gradients: GradientAccumulator) -> None:
        """Scatter the whole sums: every rank keeps the average of its shards."""
        super().reduce(gradients)
        shards = {id(whole): shard for shard, whole in self._pairs}
        present = self.complete(gradients, self.leaves())
        owner = {id(total): shards[id(p)] for p in present for total in gradients.held([p])}
        totals = gradients.held(present)
        gradients.drop(keep=lambda parameter: id(parameter) not in shards)
        for bucket in buckets(totals):
            for shard, part in self._scattered([(owner[id(total)], total) for total in bucket]):
                gradients.put(shard, part)

    def _scattered(self, pairs: Sequence[tuple[DTensor, Tensor]]) -> Iterator[tuple[DTensor, DTensor]]:
        """Sum whole gradients over ranks in one message, and yield this rank's shard of each."""
        mesh, placements = pairs[0][0].device_mesh, pairs[0][0].placements
        dimension = next(i for i, placement in enumerate(placements) if isinstance(placement, Shard))
        parts = mesh.size(dimension)
        packed = torch.cat([_in_parts(total, _cut_of(shard), parts) for shard, total in pairs], dim=1)
        mine = packed.new_empty(packed.shape[1])
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # its name before 2.13
        scatter(mine, packed.flatten().div_(self.world), group=mesh.get_group(dimension))
        for other in range(mesh.ndim):
            if other != dimension:
                dist.all_reduce(mine, group=mesh.get_group(other))
        lengths = [_in_parts(total, _cut_of(shard), parts).shape[1] for shard, total in pairs]
        for (shard, _), part in zip(pairs, torch.split(mine, lengths), strict=True):
            yield shard, _as_shard(part, shard)

    def _reduced_in(self) -> torch.dtype | None:
        """The precision that the policy reduces gradients in, where it is wider than that of the computation."""
        policies = {group.mp_policy for group in self._parameter_groups()}
        for policy in policies:
            narrow = policy.reduce_dtype is not None and torch.empty(0, dtype=policy.reduce_dtype)
            if isinstance(narrow, Tensor) and is_half(narrow) and policy.param_dtype is not policy.reduce_dtype:
                raise SyncError(
                    f"MixedPrecisionPolicy(param_dtype={policy.param_dtype}, reduce_dtype={policy.reduce_dtype}) "
                    'rounds sums to fewer bits than they are made in, which sync="last" would do at each micro-batch. '
                    'Leave reduce_dtype out, or pass sync="every".'
                )
        wide = {policy.reduce_dtype for policy in policies if policy.reduce_dtype is not policy.param_dtype}
        return next(iter(wide - {None}), None)


class PerMicroBatchFSDP(ShardedRanks):
    """Let FSDP gather and scatter within each micro-batch, all ranks in step: no rank ever holds more than shards.

    Every forward and backward is then a collective. Ranks with fewer micro-batches run their smallest again, or one
    that another rank lends them, whose result weighs nothing; buffers and random state are then as if they had not.
    """

    travel = Travel.EVERY
    per_micro_batch = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.divides = 1  # summation works with every backend; gloo before torch 2.14 ignores a divisor in silence
        self._run: Callable[[MicroBatch], Any] = lambda micro_batch: None
        self._spare: MicroBatch | None = None
        self._before: State | None = None
        self._outputs: list[Tensor] = []
        self._whole: set[int] = set()
        self._hooks: list[RemovableHandle] = []
        self._passes = Passes()
        self._gathers = False

    def _open(self) -> None:
        super()._open()
        for module in self._modules:
            module.set_requires_gradient_sync(True, recurse=False)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if hasattr(module, "set_reduce_scatter_unused_params"):
                module.set_reduce_scatter_unused_params(True)
            self._hooks.append(module.register_forward_pre_hook(self._note_parameters))
        self._hooks.append(self._model.register_forward_hook(self._note_outputs))
        self._passes.watch(self._model)

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)  # which may have to run another forward
        finally:
            self._passes.forget()
            for hook in self._hooks:
                hook.remove()

    def rounds(
        self, micro_batches: Sequence[MicroBatch], run: Callable[[MicroBatch], Any]
    ) -> Iterator[MicroBatch | None]:
        """Yield the micro-batches, and None for the rounds that other ranks still need."""
        counts = self.agree(Status.READY, LossTotals(), micro_batches=len(micro_batches)).micro_batches
        self._next = Next.COLLECTIVE
        self._run, self._spare = run, self._smallest(micro_batches, counts)
        for micro_batch in [*micro_batches, *[None] * (max(counts) - len(micro_batches))]:
            self._outputs, self._before = [], None
            self._next, self._gathers = Next.COLLECTIVE, True
            self._passes.begin()
            yield micro_batch
            self._restore_buffers()
        self._next = Next.AGREEMENT

    def settle(self) -> None:
        """Note that all ranks go on to a backward."""
        super().settle()
        self._gathers = False

    def _awaited(self, error: BaseException) -> Next:
        """A forward that this rank has not begun it can still run for the others, with a micro-batch that weighs
        nothing.
        """
        if self._next is not Next.COLLECTIVE or not self._gathers:
            return self._next
        if not self._passes.begun and isinstance(error, Exception):
            with suppress(Exception):  # whatever it is, the others are then left
                self.run_dummy_forward()
        return Next.AGREEMENT if self._passes.over else Next.COLLECTIVE

    def run_dummy_forward(self) -> None:
        """Run a micro-batch without weight if this rank has none in this round, or its loss function left the model
        out.
        """
        if self._outputs or self._spare is None:
            return
        self._before = State(self._model)
        self._run(self._spare)
        self._before.restore_random()
        if not self._outputs:
            raise SyncError(
                'Under sync="every" each forward of a sharded model is a collective of all ranks, and on this one the '
                "loss function returned without calling the model. Call it for every micro-batch and return None "
                'after that, or pass sync="last".'
            )

    def _restore_buffers(self) -> None:
        """Go back to the buffers of before a micro-batch without weight, once its backward needs them no more."""
        if self._before is not None:
            self._before.restore_buffers()

    def owns(self, leaf: Tensor) -> bool:
        """Tell whether a leaf is a gathered parameter."""
        return id(leaf) in self._whole

    def zero_output(self) -> list[Tensor]:
        """Return a zero that depends on what the model returned in this round."""
        return [torch.stack([output.flatten()[:0].sum().float() for output in self._outputs]).sum()]

    def _smallest(self, micro_batches: Sequence[MicroBatch], counts: Sequence[int]) -> MicroBatch | None:
        """Find a micro-batch to run in rounds without one: an own one, or one of the first rank that has some."""
        spare = min(micro_batches, key=lambda micro_batch: micro_batch.size, default=None)
        if min(counts) == 0 and max(counts) > 0:
            lends = self.rank == next(rank for rank, count in enumerate(counts) if count)
            lent = self.share(move(spare.load(), torch.device("cpu")) if lends and spare is not None else None)
            spare = spare or MicroBatch(lambda index: lent, range(1))
        return spare

    def _note_parameters(self, module: nn.Module, inputs: Any) -> None:
        self._whole.update(id(p) for p in module.parameters())

    def _note_outputs(self, module: nn.Module, inputs: Any, output: Any) -> None:
        tensors = (leaf.value for leaf in BatchTree((output,)).leaves)
        self._outputs += [t for t in tensors if isinstance(t, Tensor) and t.requires_grad]


def _mesh_of(shards: Sequence[DTensor]) -> Any:
    """Find the one mesh of all shards: one dimension of shards, and perhaps one of replicas."""
    meshes = {shard.device_mesh for shard in shards}
    kinds = {tuple(type(placement) for placement in shard.placements) for shard in shards}
    if len(meshes) == 1 and kinds <= {(Shard,), (Replicate, Shard)}:
        return meshes.pop()
    raise SyncError(
        f"Parameters lie on {len(meshes)} device meshes with placements {sorted(map(str, kinds))}. Exact windows need "
        "one mesh: fully_shard(model) over one dimension, or over two (replicate, shard)."
    )


def _cut_of(shard: DTensor) -> int:
    """The dimension along which a parameter is cut."""
    return next(placement.dim for placement in shard.placements if isinstance(placement, Shard))


def _in_parts(whole: Tensor, dimension: int, parts: int) -> Tensor:
    """Lay a tensor out as (parts, numbers): one line for each rank, as ``torch.chunk`` cuts, filled up with zeros."""
    first = whole.movedim(dimension, 0)
    rows = -(-len(first) // parts)
    if len(first) < rows * parts:
        first = torch.cat([first, first.new_zeros(rows * parts - len(first), *first.shape[1:])])
    return first.reshape(parts, -1)


def _as_shard(line: Tensor, shard: DTensor) -> DTensor:
    """Read one rank's line back as its shard of a parameter."""
    local, dimension = shard.to_local(), _cut_of(shard)
    moved = local.movedim(dimension, 0).shape
    part = line[: local.numel()].view(moved).movedim(0, dimension).contiguous().to(local.device)
    return DTensor.from_local(
        part, shard.device_mesh, shard.placements, run_check=False, shape=shard.shape, stride=shard.stride()
    )
