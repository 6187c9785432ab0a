"""Over which ranks, and in which way, the gradients of a model travel."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from wholebatch.errors import SyncError
from wholebatch.model.inspection import ModelInfo
from wholebatch.options import Options
from wholebatch.ranks.agreement import Ranks
from wholebatch.ranks.ddp import DDPRanks

OLDEST = (2, 8)
"""The first torch whose FSDP2 sums exactly with every backend, and whose pipelines can leave gradients undivided."""


def ranks_of(model_info: ModelInfo, sync: Literal["last", "every", "alone"] = "last") -> Ranks:
    """Find out over which ranks a model's gradients are reduced.

    Args:
        model_info: of the model: plain, wrapped in ``DistributedDataParallel``, or sharded by ``fully_shard``.
        sync: when gradients travel: once a window, with each micro-batch, or not at all.

    Raises:
        SyncError: for a wrapper that is not supported, and for several processes of which it cannot be known whether
            they train one model.
    """
    model = getattr(model_info.model, "_orig_mod", model_info.model)  # as torch.compile was given it
    if sync == "alone":
        return _by_itself(model_info)
    if isinstance(model, DistributedDataParallel):
        return DDPRanks(model, every=sync == "every")
    kinds = {type(module) for module in model_info.modules}
    wrappers = {kind.__name__ for kind in kinds}
    if "FullyShardedDataParallel" in wrappers:
        raise SyncError(
            "FullyShardedDataParallel keeps its parameters in flat tensors of its own. Shard the model with "
            "torch.distributed.fsdp.fully_shard, its successor."
        )
    if "DataParallel" in wrappers:
        raise SyncError(
            "torch.nn.DataParallel gathers losses from replicas inside one forward; use DistributedDataParallel, "
            "one process a device, started by torchrun."
        )
    if any(hasattr(kind, "set_requires_gradient_sync") for kind in kinds):
        return _sharded(model, sync)
    _refuse_unwrapped(model_info)
    return Ranks()


def refuse_older(what: str) -> None:
    """Raise if torch is older than what is needed.

    Raises:
        SyncError: names both versions.
    """
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise SyncError(
            f"{what} needs torch {oldest} or newer; this is {torch.__version__}. Update torch, or wrap the model in "
            "DistributedDataParallel."
        )


def is_wrapped(model_info: ModelInfo) -> bool:
    """Tell whether a model, or a part of it, exchanges gradients with other ranks by itself."""
    return any(
        isinstance(module, DistributedDataParallel) or hasattr(module, "set_requires_gradient_sync")
        for module in model_info.modules
    )


def by_itself(model: nn.Module, options: Options) -> Options:
    """Return the options with which a copy that only this process has is run, whatever ranks there are."""
    return options if is_wrapped(ModelInfo(model)) else {**options, "sync": "alone"}


def _by_itself(model_info: ModelInfo) -> Ranks:
    if is_wrapped(model_info):
        raise SyncError(
            f'sync="alone" is for a model that no other rank shares, but {type(model_info.model).__name__} exchanges '
            'gradients. Pass the model unwrapped, or sync="last".'
        )
    return Ranks()


def _refuse_unwrapped(model_info: ModelInfo) -> None:
    """Raise if there are several ranks and nothing says whether they train one model or one each.

    A denominator of one rank's rows alone is wrong for the one, and right for the other.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    inner = [module for module in model_info.modules if isinstance(module, DistributedDataParallel)]
    if inner:
        raise SyncError(
            f"A part of the model ({model_info.path(inner[0])!r}) is wrapped in DistributedDataParallel, whose "
            f"reductions "
            "know nothing of the window. Wrap the model as a whole, once, and pass that."
        )
    if any(_spans_all(parameter) for parameter in model_info.parameters):
        return
    raise SyncError(
        f"{dist.get_world_size()} processes have joined torch.distributed, but this "
        f"{type(model_info.model).__name__} is "
        "wrapped in nothing, so its batch would be this rank's rows alone, and a mean of the ranks' gradients another "
        "one than that of all rows. Wrap it: DistributedDataParallel(model), or fully_shard(model). If each rank "
        'trains a model of its own, or an optimizer averages what you mean it to, say so: sync="alone".'
    )


def _spans_all(parameter: Any) -> bool:
    """Tell whether a parameter is laid out over all ranks already, as tensor parallelism does."""
    mesh = getattr(parameter, "device_mesh", None)
    return mesh is not None and mesh.size() == dist.get_world_size()


def _sharded(model: nn.Module, sync: str) -> Ranks:
    refuse_older("A model sharded by fully_shard")
    from wholebatch.ranks.fsdp import GatheredFSDP, PerMicroBatchFSDP  # loads torch's FSDP, which few models need

    return PerMicroBatchFSDP(model) if sync == "every" else GatheredFSDP(model)
