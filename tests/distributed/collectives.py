"""Count the collectives that a stretch of code starts, whoever starts them: us, DDP's reducer, or FSDP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Collective(NamedTuple):
    """One collective: its name without `c10d` and underscores, and how many numbers this rank hands in."""

    name: str
    numbers: int


class Collectives(TorchDispatchMode):
    """Record every collective of the block, also those that C++ starts in the middle of a backward.

    >>> with Collectives() as seen:
    ...     loss.backward()
    >>> seen.count("allreduce", at_least=1000)
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Collective] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.seen.append(Collective(_plain_name(func), sum(t.numel() for t in _tensors(args[-1:] + args[:2]))))
        return func(*args, **(kwargs or {}))

    def count(self, name: str, at_least: int = 0) -> int:
        """Return how many collectives of this name (`allreduce`, `reduce_scatter`) handed in so many numbers."""
        return sum(1 for one in self.seen if one.name == name and one.numbers >= at_least)

    def gradient_reductions(self, parameters: int) -> int:
        """Return how many all-reduces were as large as the model: those of the small agreements are smaller."""
        return self.count("allreduce", at_least=parameters)


def _plain_name(func: Callable[..., Any]) -> str:
    name = func.__name__.split(".")[0]
    return name.strip("_").removesuffix("_base")


def _tensors(args: Any) -> Iterator[torch.Tensor]:
    if isinstance(args, torch.Tensor):
        yield args
    elif isinstance(args, (list, tuple)):
        for item in args:
            yield from _tensors(item)
