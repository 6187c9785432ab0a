"""Weights and optimizer of a sharded model on disk, each process writing its own: torch.distributed.checkpoint.

Can be read on any number of processes, also on one. Torch reads its description of the shards, and values that are no
tensors, with Python's own unpickler, which runs whatever a file says; here both are read by what knows only plain data.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from wholebatch.train.errors import RunError

DESCRIPTION = ".metadata"
STEP = "step"

_OWN = (
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
)
_HARMLESS: dict[tuple[str, str], Any] = {
    **{(metadata.__name__, name): getattr(metadata, name) for name in _OWN if hasattr(metadata, name)},
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,  # looks a name up in a table
    # Where it was written, also on another system: a path is made, and nothing opened.
    **{
        (module, f"{system}Path"): PurePosixPath
        for module in ("pathlib", "pathlib._local")
        for system in ("Posix", "Windows", "PurePosix", "PureWindows")
    },
}


def write(folder: Path, model: nn.Module, optimizer: Optimizer, step: int) -> None:
    """Write this process's shards; all processes call it together.

    Raises:
        OSError: on every process, if one of them could not write.
    """
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, STEP: torch.tensor(step)}
    try:
        save(state, checkpoint_id=folder, no_dist=not dist.is_initialized())
    except CheckpointException as error:  # no Exception: nothing above would catch it
        raise _first(error) from None


def read(folder: Path, model: nn.Module, optimizer: Optimizer) -> int | None:
    """Load weights and optimizer, whatever number of processes wrote them.

    Returns:
        The step that they are of; None if they do not say it.

    Raises:
        RunError: if the shards are those of another model, or hold anything but plain data; nothing of it is run.
    """
    weights, moments = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": weights, "optimizer": moments}
    described = describe(folder)
    if STEP in described.state_dict_metadata:
        state[STEP] = torch.tensor(0)
    try:
        load(state, storage_reader=_Reader(folder, described), planner=_Planner(), no_dist=not dist.is_initialized())
    except CheckpointException as error:
        first = _first(error)
        raise RunError(
            f"{folder} cannot be loaded into this model: {type(first).__name__}: {' '.join(str(first).split())[:300]}"
        ) from None
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return int(state[STEP]) if STEP in state else None


def describe(folder: Path) -> Metadata:
    """Read what torch wrote of the shards, without running anything.

    Raises:
        RunError: if it is damaged, or names anything but the plain data that torch writes there.
    """
    path = folder / DESCRIPTION
    try:
        described: Metadata = _Unpickler(io.BytesIO(path.read_bytes())).load()
        places = {info.relative_path for info in described.storage_data.values()}
    except (OSError, pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, LookupError) as error:
        raise RunError(f"{path} cannot be read: {error}. The checkpoint is damaged, or not one of ours.") from None
    outside = sorted(place for place in places if Path(place).name != place)
    if outside:
        raise RunError(
            f"{path} names files outside of the checkpoint, the first {outside[0]!r}. It is not one of ours."
        )
    return described


def whole(model: nn.Module, plain: nn.Module) -> nn.Module:
    """Gather all shards into a plain copy of the model; all processes call it together."""
    gathered = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if gathered:  # the first process alone
        plain.load_state_dict(gathered)
    return plain


class _Unpickler(pickle.Unpickler):
    """Knows the classes that torch writes there, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class that does no more than hold values, or a dtype."""
        known = _HARMLESS.get((module, name))
        if known is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            known = getattr(torch, name)
        if known is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no plain data and was not run")
        return known


class _Reader(FileSystemReader):
    """Reads shards by a description that has been read already."""

    def __init__(self, folder: Path, described: Metadata) -> None:
        super().__init__(folder)
        self._described = described

    def read_metadata(self) -> Metadata:
        """Return the description."""
        return self._described


class _Planner(DefaultLoadPlanner):
    """Reads values that are no tensors as plain data."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Hand on what a reader that runs nothing made of a value: torch's own planner would run what lies in it."""
        plain = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


def _first(error: CheckpointException) -> BaseException:
    """Return what the first of the processes that failed met."""
    reason: BaseException = next(iter(error.failures.values()))[0]
    return reason if isinstance(reason, OSError) else OSError(f"{type(reason).__name__}: {reason}")
