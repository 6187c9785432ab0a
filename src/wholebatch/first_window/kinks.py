"""Kinks in a loss behind a mean over the micro-batch: straight on one side, so parts add up until one lies elsewhere.

``torch.clamp(kl.mean(), min=0.5)`` is a straight line wherever every micro-batch is above 0.5, and a constant wherever
all are below. Whole and parts then agree, and a later window, whose micro-batches lie on both sides, is wrong. So it is
not the gradient that shows a kink, but the value that goes into it: one of a fixed shape, which depends on all rows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode

from wholebatch.first_window.lines import line_of

BENT = {
    *("clamp", "clip", "clamp_min", "clamp_max", "relu", "relu6", "leaky_relu", "elu", "threshold", "hardtanh"),
    *("abs", "absolute", "abs_", "clamp_", "relu_", "maximum", "minimum", "max", "min", "amax", "amin", "fmax", "fmin"),
    *("softshrink", "hardshrink", "smooth_l1_loss", "huber_loss", "l1_loss", "margin_ranking_loss"),
}
"""Functions that are straight, or constant, on each side of some point."""

COMPARED = {"gt", "lt", "ge", "le", "greater", "less", "greater_equal", "less_equal"}

LARGEST = 1 << 14
"""Up to how many numbers a value is looked at: what has met all rows is a number, or one for each feature."""


class Kink(NamedTuple):
    """A call that bends what it is given, or compares it.

    Attributes:
        place: what was called, and where.
        value: what it was given, or some numbers of it.
        compares: whether it only compares.
        shape: of what it was given.
        side: "graph" where the graph of the loss shows it, "aside" where none does, "backward" while gradients flow.
    """

    place: str
    value: Tensor
    compares: bool
    shape: tuple[int, ...]
    side: str = "graph"


class KinkWatch(TorchFunctionMode):
    """Note what is clipped, bent or compared while it carries a gradient.

    Example:
        >>> with KinkWatch() as watch:
        ...     loss = torch.ones((), requires_grad=True).clamp(min=0.5)
        >>> [kink.place.split(" ")[0] for kink in watch.take([loss])]
        ['clamp']
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: list[tuple[Kink, Node | None]] = []
        self._chosen: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "").strip("_")
        bends, compares = name in BENT or name == "where", name in COMPARED
        given = _learning([*args, *kwargs.values()]) if bends or compares else []
        if name == "where":
            given = [value for condition, value in self._chosen if args and condition is args[0]]
        values = [value.detach().clone() for value in given]  # before it is bent in place
        result = function(*args, **kwargs)
        if given:
            self._note(name, given, values, result, compares)
        return result

    def take(self, outputs: Iterable[Tensor]) -> list[Kink]:
        """Return what was noted and is part of some loss, or was compared; forget the graphs.

        Args:
            outputs: the sums that a loss function has returned.
        """
        seen, self._seen, self._chosen = self._seen, [], []
        nodes = {node for _, node in seen if node is not None}
        reached = _below(outputs, nodes) if nodes else set()
        return [kink for kink, node in seen if node is None or node in reached]

    def _note(self, name: str, given: Sequence[Tensor], values: Sequence[Tensor], result: Any, compares: bool) -> None:
        place = f"{name} ({line_of(sys._getframe(2)) or 'in torch'})"
        node = None if compares else _node_of(result)
        if compares and isinstance(result, Tensor):
            self._chosen += [(result, value) for value in given]
        if compares or node is not None:
            self._seen += [(Kink(place, value, compares, tuple(value.shape)), node) for value in values]


def bent_over_rows(whole: Sequence[Kink], parts: Sequence[Sequence[Kink]]) -> list[Kink]:
    """List the calls that bend or compare a value which has met all rows, one for each place.

    Calls are told apart by their place and their turn there. Where whole and parts call a place in different numbers,
    it is called once a row, and what it is given is a row's.
    """
    found = []
    for turns in turns_at_places([whole, *parts]):
        if any(_has_met_rows(turn) for turn in turns):
            found.append(turns[0][0])
    return found


def turns_at_places(runs: Sequence[Sequence[Kink]]) -> list[list[tuple[Kink, ...]]]:
    """Put the calls of several runs side by side, place for place; those that were made in different numbers aside."""
    places = [_by_place(kinks) for kinks in runs]
    sides = [[place.get(key, []) for place in places] for key in places[0]]
    return [list(zip(*calls, strict=True)) for calls in sides if len(set(map(len, calls))) == 1]


def _has_met_rows(kinks: Sequence[Kink]) -> bool:
    """Tell whether a value of the whole is another than each part's, and a number, or a mixture or sum of theirs."""
    whole, *parts = [kink.value for kink in kinks]
    if len(parts) < 2 or any(kink.shape != kinks[0].shape for kink in kinks):
        return False
    tolerance = torch.finfo(whole.dtype).eps * (100 if whole.element_size() > 2 else 4)
    w, *p = (kink.value.double().flatten() for kink in kinks)
    size = tolerance * float(torch.stack([w, *p]).abs().max())
    if not all(float((w - each).abs().max()) > size for each in p):  # also where one is no number
        return False
    if w.numel() == 1:
        return True
    apart = p[0] - p[1]
    share = float((w - p[1]) @ apart) / max(float(apart @ apart), sys.float_info.min)
    mixed = w - p[1] - share * apart
    total = p[0] + p[1]
    times = float(w @ total) / max(float(total @ total), sys.float_info.min)  # gradients of parts may be half as large
    return any(float(rest.abs().max()) <= size for rest in (mixed, w - times * total))


def _by_place(kinks: Sequence[Kink]) -> dict[tuple[str, str], list[Kink]]:
    found: dict[tuple[str, str], list[Kink]] = {}
    for kink in kinks:
        found.setdefault((kink.place, kink.side), []).append(kink)
    return found


def _learning(given: Sequence[Any]) -> list[Tensor]:
    """Of what a function is given, the numbers and short vectors that carry a gradient."""
    flat = [each for value in given for each in (value if isinstance(value, (list, tuple)) else [value])]
    tensors = [each for each in flat if isinstance(each, Tensor) and each.requires_grad]
    return [each for each in tensors if each.is_floating_point() and each.numel() <= LARGEST and not each.is_sparse]


def _node_of(result: Any) -> Node | None:
    first = result[0] if isinstance(result, tuple) and result else result
    return first.grad_fn if isinstance(first, Tensor) else None


def _below(outputs: Iterable[Tensor], wanted: set[Node]) -> set[Node]:
    """Say which of some nodes the backward from some outputs would come through."""
    waiting = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = set(waiting)
    while waiting and not wanted <= seen:
        new = {node for node, _ in waiting.pop().next_functions if node is not None} - seen
        seen |= new
        waiting += new
    return wanted & seen
