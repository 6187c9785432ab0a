"""Ways to break off a window at a chosen place: an operator of torch, or a line of the library."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import wholebatch

SOURCE = str(Path(wholebatch.__file__).parent)


def device_memory() -> BaseException:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate a block.")


def host_memory() -> BaseException:
    return RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory")


MEMORY: dict[str, Callable[[], BaseException]] = {
    "device": device_memory,
    "host": host_memory,
    "Python": MemoryError,
}
"""How memory runs out."""

ERRORS: dict[str, Callable[[], BaseException]] = {
    "interrupt": KeyboardInterrupt,
    "exit": SystemExit,
    "value": lambda: ValueError("injected"),
    "stop": lambda: StopIteration("injected"),
    "memory": device_memory,
}
"""What else a window is broken off by."""


class AtOperator(TorchDispatchMode):
    """Count the operators that torch runs, forward and backward, and raise in the place of one."""

    def __init__(self, at: int = -1, make: Callable[[], BaseException] = KeyboardInterrupt) -> None:
        super().__init__()
        self.at, self.make, self.count = at, make, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count - 1 == self.at:
            raise self.make()
        return function(*args, **(kwargs or {}))


class AtLine:
    """Count the places at which Python raises a KeyboardInterrupt, and raise one there.

    Signals are looked for where a function begins, and where one of C has returned. Of those, the ones in the library's
    own code are counted.
    """

    def __init__(self, at: int = -1) -> None:
        self.at, self.count = at, 0
        self.place = ""

    def __enter__(self) -> AtLine:
        sys.setprofile(self._look)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _look(self, frame: FrameType, event: str, _: object) -> None:
        if event not in ("call", "c_return") or not frame.f_code.co_filename.startswith(SOURCE):
            return
        if event == "call" and frame.f_code.co_flags & inspect.CO_GENERATOR:
            return  # it may be one that nobody waits for any more, where nothing can be raised
        self.count += 1
        if self.count - 1 == self.at:
            self.place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {event}"
            sys.setprofile(None)
            raise KeyboardInterrupt
