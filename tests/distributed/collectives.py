"""Count the collectives that a stretch of code starts, whoever starts them: us, DDP's reducer, or FSDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


class Collective(NamedTuple):
    """One collective: its name without `c10d` and underscores, and how many numbers this rank hands in."""

    name: str
    numbers: int


class Collectives(TorchDispatchMode):
    """Record every collective of the block, also those that C++ starts in the middle of a backward.

    >>> with Collectives() as seen:
    ...     loss.backward()
    >>> seen.gradient_reductions(model)
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Collective] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.seen.append(Collective(_plain_name(func), max(_numbers(arg) for arg in args)))
        return func(*args, **(kwargs or {}))

    def count(self, name: str, numbers: int | None = None) -> int:
        """Return how many collectives of this name (`allreduce`, `reduce_scatter`) there were, of that size."""
        return sum(1 for one in self.seen if one.name == name and numbers in (None, one.numbers))

    def gradient_reductions(self, model: nn.Module) -> int:
        """Return how many all-reduces carried exactly the gradient of `model`, all parameters in one bucket."""
        return self.count("allreduce", sum(p.numel() for p in model.parameters() if p.requires_grad))


def _plain_name(func: Callable[..., Any]) -> str:
    name = func.__name__.split(".")[0]
    return name.strip("_").removesuffix("_base")


def _numbers(arg: Any) -> int:
    if isinstance(arg, torch.Tensor):
        return arg.numel()
    return sum(_numbers(item) for item in arg) if isinstance(arg, (list, tuple)) else 0
