"""What can lie in a batch, and how each kind is counted, cut, joined and moved."""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from wholebatch.errors import SplitError

Index: TypeAlias = "slice | list[int]"

NO_ENTRIES = (str, bytes, bytearray, memoryview, Mapping, torch.Size, nn.Module)
SCALARS = (str, bytes, int, float, complex, type(None))
# What a class raises that does not know the brackets or the arguments it is tried with.
UNABLE = (TypeError, ValueError, LookupError, AttributeError, RuntimeError, AssertionError, NotImplementedError)


class LeafKind:
    """What goes whole into every micro-batch: a number, a text, None, an object of which nothing is known."""

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


class Entries(LeafKind):
    """A list or tuple with one entry a row, or another sequence; one of a class of its own stays of that class."""

    def shape(self, value: Any) -> tuple[int, ...]:
        """Return the length."""
        return (len(value),)

    def cut(self, value: Any, index: Index) -> Any:
        """Return the entries, in a container of the same type where it is a list or tuple."""
        return of_type(value, [value[place] for place in _places(value, index)])

    def join(self, values: list[Any]) -> Any:
        """Chain the entries."""
        return of_type(values[0], [entry for value in values for entry in value])


class Sliced(Entries):
    """A batch object whose brackets take rows out of it and return one of its kind."""

    def cut(self, value: Any, index: Index) -> Any:
        """Return what its own brackets give, or its ``index_select``."""
        rows = len(_places(value, index))
        for ask in _asked(value, index):
            part = _answer(ask)
            if _is_part(part, value, rows):
                return part
        raise SplitError(
            f"A {type(value).__name__} of {len(value)} rows gives slices of itself, but not the rows "
            f"{_places(value, index)[:4]} ... in this order, for which it is asked by value[[...]], "
            "value[torch.tensor([...])] and value.index_select([...]). Give the size as a number of rows, which takes "
            "slices, or the samples and collate=."
        )

    def join(self, values: list[Any]) -> Any:
        """Refuse: how objects of a class of their own are put together is not known."""
        raise SplitError(
            f"{len(values)} objects of the class {type(values[0]).__name__} cannot be joined: it is not known how. "
            "They run as they are, as the micro-batches of a wb.Window."
        )


class Array(LeafKind):
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


class Packed(LeafKind):
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


class Nested(LeafKind):
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


def kind_of(value: Any) -> LeafKind:
    """Say what kind of leaf a value is.

    Example:
        >>> [type(kind_of(value)).__name__ for value in (torch.zeros(2), [1, 2], "text", 3)]
        ['Dense', 'Entries', 'LeafKind', 'LeafKind']
    """
    if isinstance(value, Tensor):
        return Nested() if value.is_nested else Dense()
    if isinstance(value, (list, tuple, range, deque)) and not isinstance(value, (PackedSequence, torch.Size)):
        return Entries()
    if isinstance(value, SCALARS):
        return LeafKind()
    return _kind_of_object(value)


def has_entries(value: Any) -> bool:
    """Tell whether a value has a length and entries: a list of samples, or an object that is read like one."""
    sized = hasattr(type(value), "__len__") and hasattr(type(value), "__getitem__")
    return sized and not isinstance(value, (Tensor, *NO_ENTRIES))


def slices_itself(value: Any) -> bool:
    """Tell whether brackets with a slice return an object of the same class with as many rows as were asked for."""
    return has_entries(value) and _is_part(_answer(lambda: value[0:1]), value, min(1, len(value)))


def of_type(value: Any, entries: Iterable[Any]) -> Any:
    """Return entries in a list or tuple of the type of ``value``; in a plain list, if it is a range or the like.

    Raises:
        SplitError: if a class of its own does not hold what it is made of.
    """
    entries = list(entries)
    if type(value) is list or isinstance(value, (range, deque)):
        return entries
    if type(value) is tuple:
        return tuple(entries)
    made = _answer(lambda: type(value)(entries))
    if isinstance(made, type(value)) and same_entries(_answer(lambda: list(made)), entries):
        return made
    if not isinstance(value, (list, tuple)) and not hasattr(value, "__dict__"):
        return entries
    name = type(value).__name__
    raise SplitError(
        f"A {name} cannot be made of {len(entries)} of its {len(value)} entries: {name}([...]) does not hold what it "
        f"is given. Give list(batch) or tuple(batch), or let {name} take a list, or slices return a {name}."
    )


def same_entries(made: Any, given: Sequence[Any]) -> bool:
    """Tell whether a sequence holds the very things that it was made of."""
    return isinstance(made, (list, tuple)) and len(made) == len(given) and all(map(is_same, made, given))


def is_same(made: Any, given: Any) -> bool:
    """Tell whether an object keeps what it was made of: the very object, or one that looks at the same memory."""
    if made is given:
        return True
    if isinstance(made, Tensor) and isinstance(given, Tensor):
        plain = made.layout is given.layout is torch.strided
        return plain and made.shape == given.shape and made.data_ptr() == given.data_ptr() and made.dtype == given.dtype
    if type(made) is not type(given):
        return False
    if isinstance(given, (list, tuple)):
        return same_entries(made, given)
    if isinstance(given, Mapping):
        return list(made) == list(given) and all(is_same(made[key], given[key]) for key in given)
    return isinstance(given, SCALARS) and bool(made == given)


def _kind_of_object(value: Any) -> LeafKind:
    if isinstance(value, PackedSequence):
        return Packed()
    if hasattr(type(value), "shape") and isinstance(value.shape, tuple) and not _is_bare_mapping(value):
        return Array()
    if not has_entries(value):
        return LeafKind()
    if slices_itself(value):
        return Sliced()
    # The entries of what is no declared sequence are its rows if they are plain: a graph's brackets may mean anything.
    plain = isinstance(value, Sequence) or (len(value) > 0 and isinstance(_answer(lambda: value[0]), (str, int, float)))
    return Entries() if plain else LeafKind()


def _is_bare_mapping(value: Any) -> bool:
    """Whether it is a mapping with a shape that says nothing of rows: its entries do."""
    return isinstance(value, Mapping) and getattr(value, "shape", None) == ()


def _places(value: Any, index: Index) -> Sequence[int]:
    return range(len(value))[index] if isinstance(index, slice) else index


def _asked(value: Any, index: Index) -> Iterator[Callable[[], Any]]:
    """The ways in which an object may let rows be taken out of it, the usual one first."""
    if isinstance(index, slice):
        yield lambda: value[index]
    places = list(_places(value, index))
    yield lambda: value[places]
    yield lambda: value[torch.tensor(places, dtype=torch.long)]
    yield lambda: value.index_select(places)


def _answer(ask: Callable[[], Any]) -> Any:
    """What an object answers; None if it is not able to."""
    try:
        return ask()
    except UNABLE:
        return None


def _is_part(part: Any, value: Any, rows: int) -> bool:
    return isinstance(part, type(value)) and len(part) == rows


def _nested(rows: list[Tensor], like: Tensor) -> Tensor:
    return torch.nested.as_nested_tensor(rows, layout=like.layout)
