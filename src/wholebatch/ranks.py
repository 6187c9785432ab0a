"""Over which ranks, and in which way, the gradients of a model travel."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from wholebatch.errors import SyncError
from wholebatch.replicated import DataParallelRanks
from wholebatch.survey import Survey
from wholebatch.sync import Ranks

OLDEST = (2, 8)
"""The first torch whose FSDP2 sums exactly with every backend, and whose pipelines can leave gradients undivided."""


def ranks_of(survey: Survey, sync: Literal["last", "every"] = "last") -> Ranks:
    """Find out over which ranks a model's gradients are reduced.

    Args:
        survey: of the model: plain, wrapped in ``DistributedDataParallel``, or sharded by ``fully_shard``.
        sync: when gradients travel: once a window, or with each micro-batch.

    Raises:
        SyncError: for a wrapper that is not supported.
    """
    model = survey.model
    if isinstance(model, DistributedDataParallel):
        return DataParallelRanks(model, every=sync == "every")
    kinds = {type(module) for module in survey.modules}
    wrappers = {kind.__name__ for kind in kinds}
    if "FullyShardedDataParallel" in wrappers:
        raise SyncError(
            "FullyShardedDataParallel keeps its parameters in flat pieces of its own. Shard the model with "
            "torch.distributed.fsdp.fully_shard, its successor."
        )
    if "DataParallel" in wrappers:
        raise SyncError(
            "torch.nn.DataParallel gathers losses from replicas inside one forward; use DistributedDataParallel, "
            "one process a device, started by torchrun."
        )
    if any(hasattr(kind, "set_requires_gradient_sync") for kind in kinds):
        return _sharded(model, sync)
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


def _sharded(model: nn.Module, sync: str) -> Ranks:
    refuse_older("A model sharded by fully_shard")
    from wholebatch.sharded import LockstepShards, WholeShards  # loads torch's FSDP, which few models need

    return LockstepShards(model) if sync == "every" else WholeShards(model)
