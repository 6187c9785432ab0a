"""The call of a model that a loss function makes, held fast: arguments and the autocast they were given under."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Call:
    """``model(*args, **kwargs)`` as one micro-batch makes it.

    Attributes:
        args: positional arguments, nests of tensors.
        kwargs: arguments by name, sorted.
        autocast: for each device type its autocast as it was at the call: dtype and whether it was on.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: tuple[tuple[str, torch.dtype, bool], ...]

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """Hold the arguments and the autocast of this moment."""
        tensors = [leaf for leaf in pytree.tree_leaves((args, dict(kwargs))) if isinstance(leaf, Tensor)]
        kinds = sorted({"cpu"} | {tensor.device.type for tensor in tensors if tensor.device.type != "meta"})
        autocast = tuple((kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds)
        return cls(tuple(args), dict(sorted(kwargs.items())), autocast)

    @property
    def leaves(self) -> list[Any]:
        """All arguments without their nest, in the order in which a graph takes them."""
        return pytree.tree_leaves((self.args, self.kwargs))

    def ambient(self) -> ExitStack:
        """Restore the autocast of the call."""
        stack = ExitStack()
        for kind, dtype, enabled in self.autocast:
            if enabled != torch.is_autocast_enabled(kind) or enabled:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
        return stack

    @property
    def form(self) -> Hashable:
        """Everything about the call but the sizes and values of its tensors."""
        leaves, spec = pytree.tree_flatten((self.args, self.kwargs))
        return (str(spec), self.autocast, *(_form(leaf) for leaf in leaves))

    @property
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """The size of every tensor."""
        return tuple(tuple(leaf.shape) for leaf in self.leaves if isinstance(leaf, Tensor))


def _form(leaf: Any) -> Hashable:
    if not isinstance(leaf, Tensor):
        return (type(leaf), leaf if isinstance(leaf, Hashable) else id(leaf))
    order = tuple(sorted(range(leaf.dim()), key=leaf.stride().__getitem__, reverse=True))
    return (leaf.dim(), leaf.dtype, leaf.device, order)


def varying(calls: Sequence[Call]) -> dict[tuple[int, int], str]:
    """Find the dimensions whose sizes differ between calls of one form, by leaf and dimension.

    Dimensions that vary in the same way over all calls are the same one, and get one name.
    """
    names: dict[tuple[int, ...], str] = {}
    found: dict[tuple[int, int], str] = {}
    for leaf, tensors in enumerate(zip(*(call.leaves for call in calls), strict=True)):
        if not isinstance(tensors[0], Tensor):
            continue
        for dim in range(tensors[0].dim()):
            sizes = tuple(tensor.shape[dim] for tensor in tensors)
            if len(set(sizes)) > 1:
                found[leaf, dim] = names.setdefault(sizes, f"size_{len(names)}")
    return found
