"""The call of a model that a loss function makes, held fast: arguments and the autocast they were given under."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class ModelCall:
    """``model(*args, **kwargs)`` as one micro-batch makes it.

    Attributes:
        leaves: all arguments without their nest, in the order in which a graph takes them.
        tree: how they are nested.
        autocast: for each device type its autocast as it was at the call: dtype and whether it was on.
        form: everything about the call but the sizes and values of its tensors.
        sizes: the size of every leaf that is a tensor, None for others.
    """

    leaves: tuple[Any, ...]
    tree: pytree.TreeSpec
    autocast: tuple[tuple[str, torch.dtype, bool], ...]
    form: Hashable
    sizes: tuple[tuple[int, ...] | None, ...]

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ModelCall:
        """Hold the arguments and the autocast of this moment."""
        leaves, tree = pytree.tree_flatten((tuple(args), dict(sorted(kwargs.items()))))
        devices = {leaf.device.type for leaf in leaves if isinstance(leaf, Tensor) and leaf.device.type != "meta"}
        autocast = tuple(
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in sorted({"cpu", *devices})
        )
        form = (str(tree), autocast, *(_form(leaf) for leaf in leaves))
        sizes = tuple(tuple(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in leaves)
        return cls(tuple(leaves), tree, autocast, form, sizes)

    @property
    def args(self) -> tuple[Any, ...]:
        """The positional arguments."""
        args: tuple[Any, ...] = pytree.tree_unflatten(list(self.leaves), self.tree)[0]
        return args

    @property
    def kwargs(self) -> dict[str, Any]:
        """The arguments by name, sorted."""
        kwargs: dict[str, Any] = pytree.tree_unflatten(list(self.leaves), self.tree)[1]
        return kwargs

    def map(self, change: Callable[[Any], Any]) -> ModelCall:
        """Hold something else in the place of every leaf."""
        return replace(self, leaves=tuple(change(leaf) for leaf in self.leaves))

    def ambient(self) -> ExitStack:
        """Restore the autocast of the call."""
        stack = ExitStack()
        for kind, dtype, enabled in self.autocast:
            if enabled or torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
        return stack


def _form(leaf: Any) -> Hashable:
    if not isinstance(leaf, Tensor):
        return (type(leaf), leaf if isinstance(leaf, Hashable) else id(leaf))
    order = tuple(sorted(range(leaf.dim()), key=leaf.stride().__getitem__, reverse=True))
    return (leaf.dim(), leaf.dtype, leaf.device, order)


def varying(calls: Sequence[ModelCall]) -> dict[tuple[int, int], str]:
    """Find the dimensions whose sizes differ between calls of one form, by leaf and dimension.

    Dimensions that vary in the same way over all calls are the same one, and get one name.
    """
    names: dict[tuple[int, ...], str] = {}
    found: dict[tuple[int, int], str] = {}
    for leaf, shapes in enumerate(zip(*(call.sizes for call in calls), strict=True)):
        for dim, sizes in enumerate(zip(*(shape for shape in shapes if shape is not None), strict=True)):
            if len(set(sizes)) > 1:
                found[leaf, dim] = names.setdefault(sizes, f"size_{len(names)}")
    return found
