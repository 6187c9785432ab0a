"""What a batch is: a nest of containers whose leaves have rows, and how rows are taken out and put together.

A leaf with rows is a tensor or an array of one dimension or more, or a sequence (the list of names beside the
tensor of images). All of them must agree. What has no length (numbers, strings, None, 0-d tensors, other
objects) goes whole into every piece; so does a leaf that is named in ``whole``.

A list or tuple is read as a structure of fields if a tensor lies anywhere in it, and as one entry a row if not.
The outermost tuple is always a structure: ``(texts, labels)``.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from wholebatch.errors import SplitError

Index: TypeAlias = "slice | Sequence[int]"
Build: TypeAlias = Callable[[Iterator[Any]], Any]

SHOWN = 16
WITHOUT_ROWS = (str, bytes, bytearray, memoryview, Mapping, torch.Size, nn.Module)


@dataclass(frozen=True, eq=False)
class Leaf:
    """One place of a batch: its dotted path, what lies there, and how many rows that has (None: it goes whole)."""

    path: str
    value: Any
    rows: int | None

    @property
    def key(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a tensor or array, the length of a sequence, else nothing."""
        if is_array(self.value):
            return tuple(self.value.shape)
        return () if self.rows is None else (self.rows,)

    def __str__(self) -> str:
        name = f"'{self.path}'" if self.path else "the batch"
        kind = "" if is_array(self.value) else f"{type(self.value).__name__} "
        return f"{name} {kind}{self.shape if self.shape or is_array(self.value) else ''}".rstrip()


class Nest:
    """A batch taken apart once, so that many pieces can be cut from it cheaply.

    Args:
        batch: mappings, tuples, named tuples, lists, dataclasses, in each other; kept, not copied.
        whole: paths of leaves or of containers that go whole into every piece.

    Raises:
        SplitError: for a name in ``whole`` that is not in the batch.

    Example:
        >>> Nest({"x": torch.zeros(4, 2), "name": ["a", "b", "c", "d"]}).take(slice(1, 3))["name"]
        ['b', 'c']
    """

    def __init__(self, batch: Any, whole: Sequence[str] = ()) -> None:
        names = (whole,) if isinstance(whole, str) else tuple(str(name) for name in whole)
        leaves: list[Leaf] = []
        self.batch = batch
        self._build = _flatten(batch, "", leaves)
        _refuse_unknown(names, leaves)
        self.leaves = [dataclasses.replace(f, rows=None) if _named(f.path, names) else f for f in leaves]

    def count_rows(self) -> int:
        """Return the number of rows, on which all leaves agree.

        Raises:
            SplitError: if they disagree, or if nothing has rows; lists the leaves.
        """
        counts = Counter(leaf.rows for leaf in self.leaves if leaf.rows is not None)
        if not counts:
            raise SplitError(
                f"Nothing in the batch has rows: {_listed(self.leaves)}. "
                "Give tensors with a first dimension, or a list of samples with collate=."
            )
        if len(counts) > 1:
            raise SplitError(_disagreement(self.leaves, counts))
        return next(iter(counts))

    def map(self, change: Callable[[Leaf], Any]) -> Any:
        """Put the nest together again from ``change(leaf)`` of every leaf; the batch itself if none changed."""
        values = [change(leaf) for leaf in self.leaves]
        if all(new is leaf.value for new, leaf in zip(values, self.leaves, strict=True)):
            return self.batch
        return self._build(iter(values))

    def take(self, index: Index, change: Callable[[Leaf, Any], Any] = lambda leaf, cut: cut) -> Any:
        """Cut the rows of ``index`` out of every leaf that has rows, then let ``change(leaf, cut)`` shape each."""
        rows = index if isinstance(index, slice) else _as_slice([operator.index(row) for row in index])
        return self.map(lambda leaf: change(leaf, _cut(leaf, rows)))


def rows_of(batch: Any, whole: Sequence[str] = ()) -> int:
    """Count the rows of a batch.

    Args:
        batch: a nest of mappings, tuples, lists, dataclasses with tensors (rows, ...) and sequences of that length.
        whole: names of leaves that only look as if they had rows: ``"labels"``, ``"meta.table"``.

    Returns:
        The first dimension that all leaves share.

    Raises:
        SplitError: if leaves disagree or nothing has rows; lists every leaf.

    Example:
        >>> rows_of({"x": torch.zeros(4, 2), "name": ["a", "b", "c", "d"], "weight": 0.5})
        4
    """
    return Nest(batch, whole).count_rows()


def take(batch: Any, index: Index, whole: Sequence[str] = (), rows: int | None = None) -> Any:
    """Take rows out of a batch and keep its structure and types.

    Costs no copy where the rows lie together (tensors become views); other indices copy the rows.

    Args:
        batch: as for `rows_of`; left alone.
        index: a slice, or row numbers in the order wanted.
        whole: names of leaves that go whole.
        rows: the number of rows if the batch has been checked already.

    Returns:
        The same structure with the rows of ``index``; what has no rows is the same object.

    Raises:
        SplitError: as `rows_of`.

    Example:
        >>> take((torch.arange(4), ["a", "b", "c", "d"]), [3, 0])
        (tensor([3, 0]), ['d', 'a'])
    """
    nest = Nest(batch, whole)
    if rows is None:
        nest.count_rows()
    return nest.take(index)


def join(pieces: Sequence[Any], whole: Sequence[str] = ()) -> Any:
    """Put pieces of one structure together to one batch: the inverse of cutting.

    Tensors and arrays are concatenated along the first dimension and sequences chained; what has no rows, or is
    named in ``whole``, is taken from the first piece.

    Raises:
        SplitError: if there is no piece, or the pieces differ in structure.

    Example:
        >>> join([{"x": torch.tensor([1, 2]), "id": ["a", "b"]}, {"x": torch.tensor([3]), "id": ["c"]}])
        {'x': tensor([1, 2, 3]), 'id': ['a', 'b', 'c']}
    """
    if not pieces:
        raise SplitError("There are 0 pieces to join: nothing says what structure the batch has. Join at least one.")
    nests = [Nest(piece, whole) for piece in pieces]
    paths = [[leaf.path for leaf in nest.leaves] for nest in nests]
    for number, other in enumerate(paths):
        if other != paths[0]:
            raise SplitError(
                f"Piece {number} has the leaves {other}, piece 0 has {paths[0]}. "
                "Pieces can be joined only if each has the same structure."
            )
    places = zip(*(nest.leaves for nest in nests), strict=True)
    joined = iter([_joined([leaf.value for leaf in leaves], leaves[0].rows) for leaves in places])
    return nests[0].map(lambda leaf: next(joined))


def move(nest: Any, device: torch.device | str | None) -> Any:
    """Move the tensors of a nest to a device; pinned ones without waiting.

    Args:
        nest: anything; objects with a ``to`` of their own are copied before it is called.
        device: where to; None leaves everything where it is.

    Returns:
        The same object if nothing had to move, else a nest of the same structure.

    Example:
        >>> batch = {"x": torch.zeros(2)}
        >>> move(batch, torch.device("cpu")) is batch
        True
    """
    if device is None:
        return nest
    target = torch.device(device)
    return Nest(nest).map(lambda leaf: _moved(leaf.value, target))


def is_array(value: Any) -> bool:
    """Say whether a leaf is a tensor, or an array that is cut like one (NumPy, TensorDict, a data frame)."""
    return isinstance(value, Tensor) or (hasattr(type(value), "shape") and isinstance(value.shape, tuple))


def is_sequence(value: Any) -> bool:
    """Say whether a value has a length and entries, and is no text and no mapping."""
    sized = hasattr(type(value), "__len__") and hasattr(type(value), "__getitem__")
    return sized and not isinstance(value, WITHOUT_ROWS)


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _is_named_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields") and not isinstance(value, PackedSequence)


def _holds_array(value: Any) -> bool:
    if is_array(value) or isinstance(value, PackedSequence):
        return _count(value) is not None
    if isinstance(value, Mapping):
        return any(map(_holds_array, value.values()))
    if _is_record(value):
        return any(_holds_array(getattr(value, field.name)) for field in dataclasses.fields(value))
    return isinstance(value, (list, tuple)) and any(map(_holds_array, value))


def _parts(value: Any, outermost: bool) -> list[tuple[str, Any]] | None:
    """The named children of a container, or None for a leaf."""
    if is_array(value) or isinstance(value, PackedSequence | torch.Size):
        return None
    if isinstance(value, Mapping):
        return [(str(key), item) for key, item in value.items()]
    if _is_named_tuple(value):
        return list(zip(value._fields, value, strict=True))
    if _is_record(value):
        return [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    if isinstance(value, list | tuple):
        fields = (outermost and isinstance(value, tuple)) or _holds_array(value)
        return [(str(place), item) for place, item in enumerate(value)] if fields else None
    return None


def _flatten(value: Any, path: str, leaves: list[Leaf]) -> Build:
    """Append the leaves below ``value`` and return what builds it again from an iterator of new ones."""
    parts = _parts(value, outermost=path == "")
    if parts is None:
        leaves.append(Leaf(path, value, _count(value)))
        return next
    builds = [_flatten(part, f"{path}.{name}" if path else name, leaves) for name, part in parts]
    return lambda new: _rebuilt(value, [build(new) for build in builds])


def _count(value: Any) -> int | None:
    if is_array(value):
        return int(value.shape[0]) if len(value.shape) else None
    if isinstance(value, PackedSequence):
        return int(value.batch_sizes[0])
    return len(value) if is_sequence(value) else None


def _rebuilt(value: Any, parts: list[Any]) -> Any:
    """A container of the same type around new parts; the old one is left alone."""
    if isinstance(value, Mapping):
        return _rebuilt_mapping(value, dict(zip(value, parts, strict=True)))
    if _is_named_tuple(value):
        return type(value)(*parts)
    if isinstance(value, list | tuple):
        return _of_type(value, parts)
    new = copy.copy(value)
    for field, part in zip(dataclasses.fields(value), parts, strict=True):
        object.__setattr__(new, field.name, part)  # frozen ones too, and without running __init__ a second time
    return new


def _rebuilt_mapping(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(value) is dict:
        return items
    if not isinstance(value, MutableMapping) or hasattr(type(value), "encodings"):
        kind: Any = type(value)  # a BatchEncoding's encodings are of all rows: without them it refuses word_ids()
        return kind(items)
    new = copy.copy(value)  # keeps a default factory and whatever else a subclass holds
    for key, item in items.items():
        new[key] = item
    return new


def _of_type(value: Any, entries: Iterable[Any]) -> Any:
    """Entries in a list or tuple of the type of ``value``, in a plain list where that has another constructor."""
    entries = list(entries)
    if type(value) is list or not isinstance(value, list | tuple):
        return entries
    return type(value)(entries)


def _as_slice(index: list[int]) -> Index:
    """A slice where the rows lie together: tensors then need no copy."""
    if index and index == list(range(index[0], index[0] + len(index))):
        return slice(index[0], index[0] + len(index))
    return index


def _cut(leaf: Leaf, index: Index) -> Any:
    value = leaf.value
    if leaf.rows is None or (isinstance(index, slice) and index.indices(leaf.rows) == (0, leaf.rows, 1)):
        return value
    places = range(leaf.rows)[index] if isinstance(index, slice) else index
    if _is_ragged(value):
        rows = _rows_apart(value)
        return _rows_together(value, [rows[place] for place in places])
    if isinstance(value, Tensor):
        if isinstance(index, slice) and value.layout is torch.strided:
            return value[index]
        return value.index_select(0, torch.tensor(places, dtype=torch.long, device=value.device))
    if is_array(value):
        return getattr(value, "iloc", value)[index]  # a data frame's own brackets mean columns
    return _of_type(value, [value[place] for place in places])


def _joined(values: list[Any], rows: int | None) -> Any:
    first = values[0]
    if rows is None or len(values) == 1:
        return first
    if _is_ragged(first):
        return _rows_together(first, [row for value in values for row in _rows_apart(value)])
    if not is_array(first):
        return _of_type(first, [entry for value in values for entry in value])
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(first, numpy.ndarray):
        return numpy.concatenate(values)
    return torch.cat(values)


def _is_ragged(value: Any) -> bool:
    return isinstance(value, PackedSequence) or (isinstance(value, Tensor) and value.is_nested)


def _rows_apart(value: Any) -> list[Tensor]:
    return unpack_sequence(value) if isinstance(value, PackedSequence) else list(value.unbind())


def _rows_together(value: Any, rows: list[Tensor]) -> Any:
    if isinstance(value, PackedSequence):
        return pack_sequence(rows, enforce_sorted=False)
    return torch.nested.as_nested_tensor(rows, layout=value.layout)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=value.is_pinned())
    if callable(getattr(type(value), "to", None)) and not isinstance(value, nn.Module):
        return copy.copy(value).to(device)
    return value


def _named(path: str, names: Iterable[str]) -> bool:
    return any(path == name or path.startswith(f"{name}.") for name in names)


def _refuse_unknown(names: Iterable[str], leaves: Sequence[Leaf]) -> None:
    for name in names:
        if not any(_named(leaf.path, (name,)) for leaf in leaves):
            raise SplitError(
                f"whole={name!r} names nothing in the batch, so it would have no effect. "
                f"The batch has {', '.join(repr(leaf.path) for leaf in leaves)}."
            )


def _listed(leaves: Sequence[Leaf]) -> str:
    more = f" and {len(leaves) - SHOWN} more" if len(leaves) > SHOWN else ""
    return ", ".join(map(str, leaves[:SHOWN])) + more


def _disagreement(leaves: Sequence[Leaf], counts: Mapping[int, int]) -> str:
    with_rows = [leaf for leaf in leaves if leaf.rows is not None]
    usual = max(counts, key=counts.__getitem__)  # the first of those that are equally frequent
    others = tuple(leaf.path for leaf in with_rows if leaf.rows != usual)
    shown = ", ".join(f"{leaf} has {leaf.rows}" for leaf in with_rows[:SHOWN])
    more = f" and {len(with_rows) - SHOWN} more" if len(with_rows) > SHOWN else ""
    per_row = any(part.isdigit() for path in others for part in path.split(".")[1:])
    hint = " Where a list holds tensors, one entry a row, give the samples themselves and collate=." if per_row else ""
    return (
        f"The batch's tensors disagree on the number of rows: {shown}{more}. Give every tensor the same first "
        f"dimension, or name those that go whole: whole={others}.{hint}"
    )
