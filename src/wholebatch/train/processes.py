"""The processes of one run, as torchrun starts them: who writes, who computes what, and how they share the model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from wholebatch.batch.dealing import deal
from wholebatch.ranks.agreement import message_device
from wholebatch.ranks.reduction import refuse_older
from wholebatch.train.display import Display
from wholebatch.train.errors import RunError
from wholebatch.train.lock import is_locked
from wholebatch.train.machine import device_named

T = TypeVar("T")

PATIENCE = timedelta(minutes=30)
"""How long a process waits for the others, also while the first one measures and saves."""


@dataclass(frozen=True)
class Processes:
    """One process among those of the run; alone unless torchrun started several.

    Args:
        rank: the number of this process.
        world: how many there are.
        parallel: whether each holds the whole model ("ddp") or a shard of it ("fsdp").
    """

    rank: int = 0
    world: int = 1
    parallel: Literal["ddp", "fsdp"] = "ddp"

    @property
    def first(self) -> bool:
        """Whether this process speaks and writes for all."""
        return self.rank == 0

    @property
    def sharded(self) -> bool:
        """Whether weights and optimizer lie in shards."""
        return self.world > 1 and self.parallel == "fsdp"

    @property
    def in_shards(self) -> bool:
        """Whether checkpoints are written in shards, so that any number of processes can go on."""
        return self.parallel == "fsdp"

    def device(self, name: str) -> torch.device:
        """Return this process's device."""
        device = device_named(name)
        if self.world > 1 and device.type == "cuda" and ":" not in name:
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(device)
        return device

    def share(self, model: nn.Module) -> nn.Module:
        """Wrap the model, or cut it into shards in place, so that all processes train it together."""
        if self.world == 1:
            return model
        if not self.sharded:
            return DistributedDataParallel(model)
        refuse_older("--parallel fsdp")
        from torch.distributed.fsdp import fully_shard

        for blocks in [part for part in model.modules() if isinstance(part, nn.ModuleList)]:
            for block in blocks:
                fully_shard(block)
        fully_shard(model)
        return model

    def deal(self, rows: Sequence[int], lengths: Callable[[], Sequence[int]], size: int | wb.Tokens) -> list[int]:
        """Return which of a batch's rows this process computes, so that all finish together."""
        if self.world == 1:
            return list(rows)
        known, tokens = (lengths(), size) if isinstance(size, wb.Tokens) else ([1] * len(rows), None)
        return [rows[place] for place in deal(known, self.world, tokens)[self.rank]]

    def total(self, *numbers: float) -> list[float]:
        """Add numbers up over all processes."""
        if self.world == 1:
            return list(numbers)
        summed = torch.tensor(numbers, dtype=torch.float64, device=message_device(None, torch.device("cuda")))
        dist.all_reduce(summed)
        totals: list[float] = summed.tolist()
        return totals

    def each(self, value: T) -> list[T]:
        """Return every process's value, by rank."""
        values: list[Any] = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value)
        return values

    def by_first(self, work: Callable[[], T]) -> T:
        """Let the first process do a thing and tell the others what came of it, also if it failed.

        Raises:
            RunError: on the other processes, if the first one failed.
        """
        if self.world == 1:
            return work()
        told: list[Any] = [None, "the first process failed"]
        try:
            if self.first:
                told = [work(), None]
        finally:
            dist.broadcast_object_list(told)
        if told[1] is not None:
            raise RunError(f"Process {self.rank} ends because {told[1]}; what it said stands above.")
        result: T = told[0]
        return result


class Quiet:
    """A display that shows nothing: that of all processes but the first."""

    def note(self, label: str, text: str) -> None:
        """Say nothing."""

    def step(self, record: dict[str, Any]) -> None:
        """Show nothing."""

    def close(self) -> None:
        """Nothing is open."""


@contextmanager
def gathered(parallel: Literal["ddp", "fsdp"], device: str) -> Iterator[Processes]:
    """Meet the other processes that torchrun started, and part at the end."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield Processes(parallel=parallel)
        return
    began = not dist.is_initialized()
    if began:
        kind = device_named(device).type
        distributed: Any = dist  # the two names below are public, but not typed
        store, rank, size = next(iter(distributed.rendezvous("env://", timeout=PATIENCE)))
        # torchrun's store outlives the workers that it replaces, and new ones would meet at the old ones' addresses.
        attempt = distributed.PrefixStore(f"restart {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        backend = "nccl" if kind == "cuda" else "gloo"
        dist.init_process_group(backend, store=attempt, rank=rank, world_size=size, timeout=PATIENCE)
    try:
        yield Processes(dist.get_rank(), dist.get_world_size(), parallel)
        dist.barrier()  # nobody closes a connection that another one still reads from
    finally:
        if began:
            dist.destroy_process_group()


def display_of(team: Processes, shown: Display) -> Display:
    """Return what a process shows: the first all, the others nothing."""
    return shown if team.first else Quiet()


def interrupted_run(out: Path | None, settings: str) -> Path | None:
    """Find the run that torchrun's restart goes on with: the one under these settings that has not ended.

    Args:
        out: the folder that was asked for; None for the newest under `runs`.
        settings: what `config.yaml` holds.
    """
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) == 0:
        return None
    folders = [out] if out is not None else sorted(Path("runs").glob("*"), key=lambda path: path.stat().st_mtime)
    begun = [f for f in folders if (f / "config.yaml").is_file() and not (f / "summary.json").exists()]
    same = [f for f in begun if _holds(f / "config.yaml", settings) and not is_locked(f)]
    return same[-1] if same else None


def _holds(path: Path, text: str) -> bool:
    try:
        return path.read_bytes() == text.encode()
    except OSError:
        return False
