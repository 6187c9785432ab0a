"""What the machine is and how much of its memory was used."""

from __future__ import annotations

import sys

import torch

from wholebatch.train.errors import ConfigError


def device_named(name: str) -> torch.device:
    """Return the device to train on; "auto" takes a GPU if there is one.

    Raises:
        ConfigError: for a name that is no device, or a device that is not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch built without CUDA asserts
        first = str(error).strip().splitlines()[0]
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
