"""What can lie in a batch, and how each kind is counted, cut, joined and moved."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

Index: TypeAlias = "slice | list[int]"

NO_ENTRIES = (str, bytes, bytearray, memoryview, Mapping, torch.Size, nn.Module)


class Kind:
    """What goes whole into every piece: a number, a text, None, an object of which nothing is known."""

    def shape(self, value: Any) -> tuple[int, ...]:
        """Return the dimensions, rows first; none if it has no rows."""
        return ()

    def cut(self, value: Any, index: Index) -> Any:
        """Return the rows of ``index``."""
        return value

    def has_views(self, value: Any) -> bool:
        """Tell whether rows that lie together are cut out without a copy."""
        return False

    def join(self, values: list[Any]) -> Any:
        """Return the rows of all values, one behind the other."""
        return values[0]

    def move(self, value: Any, device: torch.device) -> Any:
        """Return the value on a device: the same object if nothing had to move."""
        if callable(getattr(type(value), "to", None)) and not isinstance(value, nn.Module):
            return copy.copy(value).to(device)  # the `to` of a graph or an encoding changes the object itself
        return value


class Entries(Kind):
    """A list or tuple with one entry a row, or anything else with a length and entries."""

    def shape(self, value: Any) -> tuple[int, ...]:
        """Return the length."""
        return (len(value),)

    def cut(self, value: Any, index: Index) -> Any:
        """Return the entries, in a container of the same type where it is a list or tuple."""
        places = range(len(value))[index] if isinstance(index, slice) else index
        return of_type(value, [value[place] for place in places])

    def join(self, values: list[Any]) -> Any:
        """Chain the entries."""
        return of_type(values[0], [entry for value in values for entry in value])


class Array(Kind):
    """What has a shape and is cut by brackets: a NumPy array, a TensorDict, a data frame."""

    def shape(self, value: Any) -> tuple[int, ...]:
        """Return its own shape."""
        return tuple(value.shape)

    def cut(self, value: Any, index: Index) -> Any:
        """Index the first dimension."""
        return getattr(value, "iloc", value)[index]  # a data frame's own brackets mean columns

    def join(self, values: list[Any]) -> Any:
        """Concatenate along the first dimension."""
        numpy = sys.modules.get("numpy")  # there can be no array of it if it is not loaded
        if numpy is not None and isinstance(values[0], numpy.ndarray):
            return numpy.concatenate(values)
        return torch.cat(values)


class Dense(Array):
    """A tensor; also a sparse one."""

    def has_views(self, value: Tensor) -> bool:
        """Tell whether it is strided: sparse tensors know no slices."""
        return value.layout is torch.strided

    def cut(self, value: Tensor, index: Index) -> Tensor:
        """Return a view where the rows lie together, else a copy."""
        if isinstance(index, slice) and self.has_views(value):
            return value[index]
        places = list(range(len(value))[index]) if isinstance(index, slice) else index
        return value.index_select(0, torch.tensor(places, dtype=torch.long, device=value.device))

    def move(self, value: Tensor, device: torch.device) -> Tensor:
        """Move it, without waiting for it if it is pinned."""
        return value.to(device, non_blocking=value.is_pinned())


class Packed(Kind):
    """A `PackedSequence`, whose rows lie interleaved."""

    def shape(self, value: PackedSequence) -> tuple[int, ...]:
        """Return the number of sequences: all that have a first entry."""
        return (int(value.batch_sizes[0]),)

    def cut(self, value: PackedSequence, index: Index) -> PackedSequence:
        """Pack the chosen sequences anew."""
        rows = unpack_sequence(value)  # in the order in which they were packed
        return pack_sequence(Entries().cut(rows, index), enforce_sorted=False)

    def join(self, values: list[PackedSequence]) -> PackedSequence:
        """Pack the sequences of all anew."""
        return pack_sequence([row for value in values for row in unpack_sequence(value)], enforce_sorted=False)


class Nested(Kind):
    """A nested tensor, which torch does not index by rows."""

    def shape(self, value: Tensor) -> tuple[int, ...]:
        """Return the number of rows, whose own shapes differ."""
        return (value.size(0),)

    def cut(self, value: Tensor, index: Index) -> Tensor:
        """Nest the chosen rows anew."""
        return _nested(Entries().cut(list(value.unbind()), index), value)

    def join(self, values: list[Any]) -> Any:
        """Nest the rows of all anew."""
        return _nested([row for value in values for row in value.unbind()], values[0])


def kind_of(value: Any) -> Kind:
    """Say what kind of leaf a value is.

    Example:
        >>> [type(kind_of(value)).__name__ for value in (torch.zeros(2), [1, 2], "text", 3)]
        ['Dense', 'Entries', 'Kind', 'Kind']
    """
    if isinstance(value, Tensor):
        return Nested() if value.is_nested else Dense()
    if isinstance(value, PackedSequence):
        return Packed()
    if hasattr(type(value), "shape") and isinstance(value.shape, tuple):
        return Array()
    sized = hasattr(type(value), "__len__") and hasattr(type(value), "__getitem__")
    return Entries() if sized and not isinstance(value, NO_ENTRIES) else Kind()


def of_type(value: Any, entries: Iterable[Any]) -> Any:
    """Return entries in a list or tuple of the type of ``value``, else in a plain list."""
    entries = list(entries)
    return entries if type(value) is list or not isinstance(value, (list, tuple)) else type(value)(entries)


def _nested(rows: list[Tensor], like: Tensor) -> Tensor:
    return torch.nested.as_nested_tensor(rows, layout=like.layout)
