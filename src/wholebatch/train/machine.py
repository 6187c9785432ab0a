"""What the machine is, how much of its memory was used, and how much may be."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import nn

from wholebatch.amounts import in_bytes
from wholebatch.model.memory import SavedBytes
from wholebatch.planning.planner import parts_of
from wholebatch.train.errors import ConfigError

Room: TypeAlias = "Callable[[], AbstractContextManager[Any]]"
"""Makes a context in which no more than the allowed memory can be used."""


def device_named(name: str) -> torch.device:
    """Return the device to train on; "auto" takes a GPU if there is one.

    Raises:
        ConfigError: for a name that is no device, a device that is not there, or one that holds no numbers.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
        if device.type == "meta":
            raise RuntimeError("it has shapes and no numbers, so nothing can be learned on it.")
    except (RuntimeError, AssertionError) as error:  # torch built without CUDA asserts
        first = [*str(error).strip().splitlines(), type(error).__name__][0]
        raise ConfigError(f"device is {name!r}, which cannot be used here: {first} Choose auto or cpu.") from None
    return device


def in_words(device: torch.device) -> str:
    """Return a device as a person would say it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{device.type}, {threads} thread{'s' if threads > 1 else ''}"


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory used so far: a GPU's allocations, elsewhere this process's; 0 where it is not known."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def room(memory: int | None, model: nn.Module, device: torch.device) -> Room:
    """Say in what context steps may use no more than so many bytes.

    On a CUDA device the allocator keeps the limit. Elsewhere what autograd saves is limited, to what weights,
    gradients and optimizer leave of the memory: the machine then behaves like a device of that size.

    Args:
        memory: in bytes; None for all there is.
        model: on its device.
        device: where it is.

    Raises:
        ConfigError: if the device has less, or nothing is left for activations.
    """
    if memory is None:
        return nullcontext
    if device.type == "cuda":
        return _allocated(memory, device)
    free = memory - sum(parts_of(model).values())
    if free <= 0:
        raise ConfigError(
            f"memory is {in_bytes(memory)}, but weights, gradients and optimizer alone take {in_bytes(memory - free)}."
        )
    saved = SavedBytes(free, ignored=[*model.parameters(), *model.buffers()])
    return lambda: saved


def _allocated(memory: int, device: torch.device) -> Room:
    there = torch.cuda.get_device_properties(device).total_memory
    if memory > there:
        raise ConfigError(f"memory is {in_bytes(memory)}, but the device has {in_bytes(there)}. Leave it out.")

    @contextmanager
    def limited() -> Iterator[None]:
        torch.cuda.set_per_process_memory_fraction(memory / there, device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, device)

    return limited
