"""Which forwards led to a loss, and which of them saw the same rows: read off graph and memory, not off the order."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

from torch import Tensor

from wholebatch.model.origin import library

MARK = "wholebatch.forward"
MOST_NODES = 512


def mark(outputs: Any, number: int) -> None:
    """Write the number of a forward on the graph nodes of what it returned; they keep it as long as they live.

    A node's `metadata` is torch's own place for notes of others, and holds nothing alive.
    """
    for _, tensor in leaves(outputs):
        notes: Any = None if tensor.grad_fn is None else tensor.grad_fn.metadata  # typed as a method, is a dict
        if notes is not None:
            notes[MARK] = number


def marks_below(tensors: Iterable[Any]) -> tuple[int, ...]:
    """Return the numbers of the nearest forwards that tensors come from; none where they are too far down."""
    waiting = [node for tensor in tensors if (node := getattr(tensor, "grad_fn", None)) is not None]
    seen: set[Any] = set()
    found: set[int] = set()
    while waiting and len(seen) < MOST_NODES:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        number = node.metadata.get(MARK)
        if number is not None:
            found.add(number)
        else:
            waiting += [below for below, _ in node.next_functions if below is not None]
    return tuple(sorted(found))


class Rows:
    """Numbers for tensors by the memory they show, so that two looks at the same rows have the same number.

    Memory is given out again when its owner is gone, so the owner is watched, not the address.
    """

    def __init__(self) -> None:
        self.owners: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self.count = 0

    def of(self, inputs: Any) -> tuple[tuple[int, int, int], ...]:
        """Return owner, offset and entries of every tensor among a module's inputs."""
        tensors = [tensor for _, tensor in leaves(inputs) if tensor.dim() > 0]
        return tuple((self.owner(tensor), offset_of(tensor), tensor.numel()) for tensor in tensors)

    def owner(self, tensor: Tensor) -> int:
        """Return the number of the tensor whose memory this one shows."""
        root = tensor if tensor._base is None else tensor._base
        known = self.owners.get(id(root))
        if known is None or known[0]() is not root:
            self.count += 1
            known = self.owners[id(root)] = (weakref.ref(root), self.count)
        return known[1]


def offset_of(tensor: Tensor) -> int:
    """Return where in its memory a tensor begins; 0 for those that have no plain memory."""
    try:
        return int(tensor.storage_offset())
    except (RuntimeError, NotImplementedError):
        return 0


def path_of(frame: FrameType | None) -> str:
    """Return the places in the user's own code that a call stands in, the innermost first.

    Each is a line and an instruction: two calls in one line, or through one function from two lines, are told apart,
    and the turns of a loop are not.
    """
    places = []
    while frame is not None:
        code = frame.f_code
        if library(code.co_filename) is None:
            places.append(f"{code.co_name}:{frame.f_lineno}.{frame.f_lasti}")
        frame = frame.f_back
    return " < ".join(places)


def leaves(nest: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for the tensors of a nest of tuples, lists and mappings."""
    if isinstance(nest, Tensor):
        yield name, nest
    elif hasattr(nest, "items") and hasattr(nest, "keys"):
        for key, value in nest.items():
            yield from leaves(value, str(key))
    elif isinstance(nest, (list, tuple)):
        for value in nest:
            yield from leaves(value, name)
