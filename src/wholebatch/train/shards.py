"""Weights and optimizer of a sharded model on disk, each process writing its own: torch.distributed.checkpoint.

Can be read on any number of processes, also on one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer


def write(folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Write this process's shards; all processes call it together."""
    weights, moments = get_state_dict(model, optimizer)
    save({"model": weights, "optimizer": moments}, checkpoint_id=folder, no_dist=not dist.is_initialized())


def read(folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Load weights and optimizer, whatever number of processes wrote them."""
    weights, moments = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": weights, "optimizer": moments}
    load(state, checkpoint_id=folder, no_dist=not dist.is_initialized())
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def whole(model: nn.Module, plain: nn.Module) -> nn.Module:
    """Gather all shards into a plain copy of the model; all processes call it together."""
    gathered = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if gathered:  # the first process alone
        plain.load_state_dict(gathered)
    return plain
