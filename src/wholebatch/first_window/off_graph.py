"""Kinks where no graph shows them: in a backward, in an ``autograd.Function``, on detached values, behind ``.item()``.

Such a call is seen below autograd, whoever makes it. Whether it matters cannot be read off a graph, so it is asked by
experiment: what the call returns is changed, and loss and gradient either follow or do not.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from wholebatch.first_window.kinks import BENT, COMPARED, LARGEST, Kink
from wholebatch.first_window.lines import line_of
from wholebatch.model.dispatch import OperatorMode

READ = "local_scalar_dense"
"""What ``item()`` and ``float()`` come down to: from here on Python computes, and may clip or compare."""

OURS = Path(__file__).parents[1]
"""Where the backward is called: what has no other frame of Python's below it is a formula of torch's own."""


class OffGraph(OperatorMode):
    """Note what is clipped, bent, compared or read as a number while no graph carries it.

    Followed are the values that depend on something that learns, also once they are detached.

    Attributes:
        disturbed: a place, and whether upwards: what is returned there is another number meanwhile.

    Example:
        >>> with OffGraph() as watch:
        ...     weight = torch.ones((), requires_grad=True).detach().clamp(max=0.5)
        >>> [kink.place.split(" ")[0] for kink in watch.take()]
        ['clamp']
    """

    def __init__(self) -> None:
        super().__init__()
        self.disturbed: tuple[str, bool] | None = None
        self._seen: list[Kink] = []
        self._follows = WeakTensorKeyDictionary()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = getattr(function, "_schema", None)
        given = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        backward = torch._C._current_graph_task_id() != -1
        if schema is None or not (backward or any(self._learns(each) for each in given)):
            return function(*args, **kwargs)
        name = schema.name.rpartition("::")[2].strip("_")
        place = self._place(name) if name in BENT or name in COMPARED or name == READ else ""
        kinks = self._kinks(name, place, given, backward) if place else []
        result = function(*args, **kwargs)
        if place and self.disturbed is not None and place == self.disturbed[0]:
            result = _disturbed(result, self.disturbed[1], in_place=schema.name.endswith("_"))
        self._seen += kinks
        if not backward:
            for made in pytree.tree_leaves(result):
                if isinstance(made, Tensor) and made.is_floating_point():
                    self._follows[made] = True
        return result

    def take(self) -> list[Kink]:
        """Return what was noted since the last time."""
        seen, self._seen = self._seen, []
        return seen

    def _learns(self, tensor: Tensor) -> bool:
        return tensor.requires_grad or tensor in self._follows

    def _place(self, name: str) -> str:
        """Say where the user's own code makes a call; "" for formulas of torch's own."""
        line = line_of(sys._getframe(2))
        if line is None or OURS in Path(line.filename).parents:
            return ""
        return f"{'item' if name == READ else name} ({line})"

    def _kinks(self, name: str, place: str, given: list[Tensor], backward: bool) -> list[Kink]:
        """Note what a call is given, unless the graph shows it or it is too much."""
        if torch.is_grad_enabled() and name != READ and (backward or any(each.requires_grad for each in given)):
            return []  # in the backward, the forward of a checkpoint runs again
        values = [each for each in given if each.is_floating_point() and not each.is_sparse and each.numel()]
        if not backward:
            values = [each for each in values if each.numel() <= LARGEST and self._learns(each)]
        compares, side = name == READ or name in COMPARED, "backward" if backward else "aside"
        return [Kink(place, _some_of(each), compares, tuple(each.shape), side) for each in values]


def _some_of(value: Tensor) -> Tensor:
    """Copy a value, or every n-th number of a large one."""
    flat = value.detach().reshape(-1)
    return flat[:: 1 + flat.numel() // LARGEST].clone()


def _disturbed(result: Any, up: bool, in_place: bool) -> Any:
    """Return another number: the other side of a comparison, or one that is larger or smaller."""
    if isinstance(result, (tuple, list)):
        return type(result)((_disturbed(result[0], up, in_place), *result[1:])) if result else result
    if isinstance(result, Tensor):
        if result.dtype is torch.bool:
            other = result.logical_not()
        elif result.is_floating_point():
            other = result + (0.25 if up else -0.25) * (1 + result.abs())
        else:
            return result
        return result.copy_(other) if in_place else other
    return result * (1e3 if up else 1e-3) if isinstance(result, float) else result
