"""What a batch is: a nest of containers whose leaves have rows, and how rows are taken out and put together.

A leaf with rows is a tensor or an array of one dimension or more, or a sequence (the list of names beside the
tensor of images). All of them must agree. What has no length (numbers, strings, None, 0-d tensors, other
objects) goes whole into every micro-batch; so does a leaf that is named in ``whole``.

A list or tuple is read as a structure of fields if a tensor lies anywhere in it, and as one entry a row if not.
The outermost tuple is always a structure: ``(texts, labels)``. A list whose entries are alike may hold one entry a
row all the same: `wholebatch.batch.ambiguity` says when it is refused. An object of a class of its own is cut by what
it offers
(slices, or a constructor, `wholebatch.batch.containers`); one that offers neither goes whole if it holds nothing with
rows.
"""

from __future__ import annotations

import dataclasses
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from wholebatch.batch.ambiguity import Doubt, doubt_about, refuse_uncertain, refuse_uncountable
from wholebatch.batch.containers import attributes_of, fields_of, is_named_tuple, remade
from wholebatch.batch.leaf_kinds import SCALARS, Array, Index, LeafKind, Nested, Packed, has_entries, kind_of, of_type
from wholebatch.batch.places import said_of_places
from wholebatch.errors import SplitError

Build: TypeAlias = "Callable[[Iterator[Any], bool], Any]"

SHOWN = 16


@dataclass(frozen=True, eq=False)
class Leaf:
    """One place of a batch.

    Attributes:
        path: how to get there, with dots.
        value: what lies there.
        kind: how it is cut.
        rows: how many it has; None if it goes whole.
    """

    path: str
    value: Any
    kind: LeafKind
    rows: int | None

    @property
    def key(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a tensor or array, the length of a sequence, else nothing."""
        return self.kind.shape(self.value)

    @property
    def is_array(self) -> bool:
        """Whether it is a tensor, or an array that is indexed like one."""
        return isinstance(self.kind, Array)

    def cut(self, index: Index) -> Any:
        """Return the rows of ``index``; the very value if these are all, or if it goes whole."""
        all_rows = isinstance(index, slice) and index.indices(self.rows or 0) == (0, self.rows, 1)
        return self.value if self.rows is None or all_rows else self.kind.cut(self.value, index)

    def join(self, others: Sequence[Leaf]) -> Any:
        """Return its rows with those of others behind them; the very value if it goes whole."""
        values = [self.value, *(other.value for other in others)]
        return self.value if self.rows is None or not others else self.kind.join(values)

    def __str__(self) -> str:
        name = f"'{self.path}'" if self.path else "the batch"
        kind = "" if self.is_array else f" {type(self.value).__name__}"
        return f"{name}{kind} {self.shape if self.shape or self.is_array else ''}".rstrip()


class BatchTree:
    """A batch taken apart once, so that many micro-batches can be cut from it cheaply.

    Args:
        batch: mappings, tuples, named tuples, lists, dataclasses, in each other; kept, not copied.
        whole: paths of leaves or of containers that go whole into every micro-batch.

    Raises:
        SplitError: for a name in ``whole`` that is not in the batch.

    Example:
        >>> BatchTree({"x": torch.zeros(4, 2), "name": ["a", "b", "c", "d"]}).take(slice(1, 3))["name"]
        ['b', 'c']
    """

    def __init__(self, batch: Any, whole: Sequence[str] = ()) -> None:
        names = (whole,) if isinstance(whole, str) else tuple(str(name) for name in whole)
        leaves: list[Leaf] = []
        self.batch = batch
        self._doubts: list[Doubt] = []
        self._build = _flatten(batch, "", leaves, self._doubts)
        _refuse_unknown(names, leaves)
        self.leaves = [dataclasses.replace(f, rows=None) if _named(f.path, names) else f for f in leaves]
        self._objects = [f for f in leaves if _is_object(f) and not _named(f.path, names)]

    @property
    def paths(self) -> list[str]:
        """Where its leaves lie, in order."""
        return [leaf.path for leaf in self.leaves]

    @property
    def has_views(self) -> bool:
        """Whether rows that lie together can be taken out without a copy."""
        return all(leaf.rows is None or leaf.kind.has_views(leaf.value) for leaf in self.leaves)

    def count_rows(self) -> int:
        """Return the number of rows, on which all leaves agree.

        Raises:
            SplitError: if they disagree, or if nothing has rows; lists the leaves.
        """
        counts = Counter(leaf.rows for leaf in self.leaves if leaf.rows is not None)
        if not counts:
            _refuse_no_rows(self.batch, self.leaves)
        if len(counts) > 1:
            ready = (
                " If its entries are samples, one a row, give collate=; if they are the micro-batches of one step, say "
                "so: wb.Window(batch)."
            ) * isinstance(self.batch, list)
            _refuse_disagreement([leaf for leaf in self.leaves if leaf.rows is not None], counts, ready)
        rows = next(iter(counts))
        if self._doubts:
            refuse_uncountable(self._doubts, [leaf.rows for leaf in self.leaves])
        for leaf in self._objects:
            _refuse_hidden_rows(leaf, rows)
        return rows

    def map(self, change: Callable[[Leaf], Any]) -> Any:
        """Put the nest together again from ``change(leaf)`` of every leaf; the batch itself if none changed."""
        return self._rebuilt([change(leaf) for leaf in self.leaves], all_rows=True)

    def take(self, index: slice | Sequence[int], change: Callable[[Leaf, Any], Any] | None = None) -> Any:
        """Cut the rows of ``index`` out of every leaf that has rows, then let ``change(leaf, cut)`` shape each.

        Raises:
            SplitError: if it is not certain what the rows are, or an object does not let some of them be taken out.
        """
        rows = index if isinstance(index, slice) else _as_slice(index)
        parts = [leaf.cut(rows) for leaf in self.leaves]
        if (self._doubts or self._objects) and any(
            part is not leaf.value for part, leaf in zip(parts, self.leaves, strict=True)
        ):
            self._refuse_uncertain()
        return self._rebuilt(parts if change is None else list(map(change, self.leaves, parts)), all_rows=False)

    def _refuse_uncertain(self) -> None:
        self.count_rows()
        if self._doubts:
            refuse_uncertain(self._doubts, [leaf.rows for leaf in self.leaves])
        self._doubts, self._objects = [], []  # looked at once

    def _rebuilt(self, values: list[Any], all_rows: bool) -> Any:
        if all(new is leaf.value for new, leaf in zip(values, self.leaves, strict=True)):
            return self.batch
        return self._build(iter(values), all_rows)


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
    return BatchTree(batch, whole).count_rows()


def take(batch: Any, index: slice | Sequence[int], whole: Sequence[str] = (), rows: int | None = None) -> Any:
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
    tree = BatchTree(batch, whole)
    if rows is None:
        tree.count_rows()
    return tree.take(index)


def join(micro_batches: Sequence[Any], whole: Sequence[str] = ()) -> Any:
    """Put micro-batches of one structure together to one batch: the inverse of cutting.

    Tensors and arrays are concatenated along the first dimension and sequences chained; what has no rows, or is
    named in ``whole``, is taken from the first micro-batch.

    Raises:
        SplitError: if there is no micro-batch, or the micro-batches differ in structure.

    Example:
        >>> join([{"x": torch.tensor([1, 2]), "id": ["a", "b"]}, {"x": torch.tensor([3]), "id": ["c"]}])
        {'x': tensor([1, 2, 3]), 'id': ['a', 'b', 'c']}
    """
    if not micro_batches:
        raise SplitError(
            "There are 0 micro-batches to join: nothing says what structure the batch has. Join at least one."
        )
    trees = [BatchTree(micro_batch, whole) for micro_batch in micro_batches]
    for number, tree in enumerate(trees):
        if tree.paths != trees[0].paths:
            raise SplitError(
                f"Micro-batch {number} has the leaves {tree.paths}, micro-batch 0 has {trees[0].paths}. "
                "Micro-batches can be joined only if each has the same structure."
            )
    places = zip(*(tree.leaves for tree in trees), strict=True)
    joined = iter([first.join(others) for first, *others in places])
    return trees[0].map(lambda leaf: next(joined))


def move(tree: Any, device: torch.device | str | None) -> Any:
    """Move the tensors of a nest to a device; pinned ones without waiting.

    Args:
        tree: anything; objects with a ``to`` of their own are copied before it is called.
        device: where to; None leaves everything where it is.

    Returns:
        The same object if nothing had to move, else a nest of the same structure.

    Example:
        >>> batch = {"x": torch.zeros(2)}
        >>> move(batch, torch.device("cpu")) is batch
        True
    """
    if device is None:
        return tree
    target = torch.device(device)
    if _lies_on(tree, target):
        return tree
    return BatchTree(tree).map(lambda leaf: leaf.kind.move(leaf.value, target))


def _lies_on(tree: Any, device: torch.device) -> bool:
    """Tell at a glance whether plain containers of plain tensors are on a device; False if it takes a closer look."""
    if type(tree) is torch.Tensor:
        return bool(tree.device == device)
    if type(tree) is dict:
        return all(_lies_on(value, device) for value in tree.values())
    return type(tree) in (tuple, list) and all(_lies_on(value, device) for value in tree)


def _parts(value: Any, outermost: bool) -> list[tuple[str, Any]] | None:
    """The named children of a container, or None for a leaf."""
    if isinstance(value, torch.Tensor) or isinstance(kind_of(value), (Array, Packed, Nested)):
        return None
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size) and not is_named_tuple(value):
        structure = (outermost and isinstance(value, tuple)) or _holds_array(value)
        return [(str(place), item) for place, item in enumerate(value)] if structure else None
    return fields_of(value, outermost)


def _holds_array(value: Any) -> bool:
    if isinstance(value, (str, int, float)):
        return False  # soon done with long lists of numbers
    if isinstance(kind := kind_of(value), (Array, Packed, Nested)):
        return kind.shape(value) != ()
    parts = fields_of(value, outermost=False)
    if parts is None:
        return isinstance(value, (list, tuple)) and any(map(_holds_array, value))
    return any(_holds_array(part) for _, part in parts)


def _flatten(value: Any, path: str, leaves: list[Leaf], doubts: list[Doubt]) -> Build:
    """Append the leaves below ``value`` and return what builds it again from an iterator of new ones."""
    parts = _parts(value, outermost=path == "")
    if parts is None:
        kind = kind_of(value)
        leaves.append(Leaf(path, value, kind, next(iter(kind.shape(value)), None)))
        return lambda new, all_rows: next(new)
    start = len(leaves)
    builds = [_flatten(part, f"{path}.{name}" if path else name, leaves, doubts) for name, part in parts]
    if isinstance(value, (list, tuple)) and not is_named_tuple(value):
        doubt = doubt_about(path, value, range(start, len(leaves)))
        doubts += [] if doubt is None else [doubt]
        return lambda new, all_rows: of_type(value, [build(new, all_rows) for build in builds])
    names, held = [name for name, _ in parts], [part for _, part in parts]

    def build_again(new: Iterator[Any], all_rows: bool) -> Any:
        made = [build(new, all_rows) for build in builds]
        # One of a class of its own whose contents all go whole is left as it is.
        same = type(value) is not dict and all(map(operator.is_, made, held))
        return value if same else remade(value, made, names, all_rows)

    return build_again


def _as_slice(index: Sequence[int]) -> Index:
    """A slice where the rows lie together: tensors then need no copy."""
    if isinstance(index, range) and index.step == 1 and index.start >= 0:
        return slice(index.start, index.stop)
    rows = [operator.index(row) for row in index]
    if rows and rows[0] >= 0 and rows == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows))
    return rows


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


def _is_object(leaf: Leaf) -> bool:
    """Whether it goes whole only because nothing is known of it."""
    return type(leaf.kind) is LeafKind and not isinstance(leaf.value, (*SCALARS, torch.Size, nn.Module, type))


def _refuse_no_rows(batch: Any, leaves: Sequence[Leaf]) -> None:
    if batch is None:
        raise SplitError(
            "Nothing in the batch has rows: it is None, which only a loss function returns, where there is nothing to "
            "learn from. Leave it out: wb.Window(batch for batch in window if batch is not None)."
        )
    if isinstance(batch, Iterable) and not isinstance(batch, (Mapping, str, tuple, list)):  # a loader, a generator
        raise SplitError(
            f"Nothing in the batch has rows: {_listed(leaves)}. If it yields batches, take one at a time: for batch in "
            "loader; if it yields micro-batches, for window in wb.windows(loader, 8); if it yields samples, give a "
            "list of them with collate=."
        )
    raise SplitError(
        f"Nothing in the batch has rows: {_listed(leaves)}. "
        "Give tensors with a first dimension, or a list of samples with collate=."
    )


def _refuse_hidden_rows(leaf: Leaf, rows: int) -> None:
    """Raise if an object that would go whole holds something with as many entries as the batch has rows."""
    arrays = [kind_of(item).shape(item) for item in attributes_of(leaf.value).values()]
    held = {shape[0] for shape in arrays if shape} | ({len(leaf.value)} if has_entries(leaf.value) else set())
    if rows > 1 and rows in held:
        name = type(leaf.value).__name__
        raise SplitError(
            f"{leaf} holds {rows} entries, as many as the batch has rows, but it cannot be cut: slices of it are no "
            f"{name}. If it goes whole, say whole=({leaf.path!r},). If not, give a dict of its tensors, a class that "
            f"can be sliced, or samples with collate=."
        )


def _refuse_disagreement(leaves: Sequence[Leaf], counts: Mapping[int, int], more_hints: str) -> None:
    more = f" and {len(leaves) - SHOWN} more" if len(leaves) > SHOWN else ""
    said = f"{', '.join(f'{leaf} has {leaf.rows}' for leaf in leaves[:SHOWN])}{more}"
    raise SplitError(
        f"The batch's tensors disagree on the number of rows: {said}. {_way_out(leaves, counts)}{more_hints}"
    )


def _lists_of_samples(leaves: Sequence[Leaf]) -> str:
    """Name lists inside of a batch whose tensors differ in length, or that have as many entries as others have rows."""
    inside: dict[str, list[tuple[str, Leaf]]] = {}
    for leaf in leaves:
        parts = leaf.path.split(".")
        place = next((at for at, part in enumerate(parts) if at and part.isdigit()), None)
        if place is not None:
            inside.setdefault(".".join(parts[:place]), []).append((parts[place], leaf))
    lengths = Counter(len({entry for entry, _ in held}) for held in inside.values())
    lengths.update(leaf.rows for leaf in leaves if not leaf.is_array and leaf.rows is not None)
    for path, held in inside.items():
        entries = len({entry for entry, _ in held})
        if len({leaf.rows for _, leaf in held}) > 1:
            return f"'{path}' is a list that holds tensors of different lengths,"
        if lengths[entries] > 1 or any(leaf.rows == entries for leaf in leaves if leaf.path.split(".")[0] != path):
            return f"'{path}' is a list of {entries} entries, and something beside it has as many:"
    return ""


def _way_out(leaves: Sequence[Leaf], counts: Mapping[int, int]) -> str:
    if "batch_idx" in {leaf.key for leaf in leaves}:
        return (
            "'batch_idx' says which image a box belongs to: the boxes of all images lie one behind the other, so none "
            "of these tensors goes whole, and images and boxes can be cut together only before they are collated. Let "
            "the loader yield samples (collate_fn=list) and give its function as collate=."
        )
    entries = _lists_of_samples(leaves)
    if entries:
        return (
            f"{entries} one entry a row. Give the samples themselves, one entry of a list each, and collate=, which "
            "makes a micro-batch of some of them: the loader's collate_fn, or lambda samples: tuple(zip(*samples))."
        )
    for rows in counts:
        places = said_of_places(leaves, rows)
        if places:
            return places
    usual = max(counts, key=counts.__getitem__)  # the first of those that are equally frequent
    others = tuple(leaf.path for leaf in leaves if leaf.rows != usual)
    sideways = next((leaf for leaf in leaves if leaf.shape[1:2] and leaf.shape[1] in counts.keys() - {leaf.rows}), None)
    if sideways is not None:
        return (
            f"{sideways} has {sideways.shape[1]} on its second dimension: if rows lie behind time there, give "
            "x.transpose(0, 1), and turn it back in loss_fn. Else give every tensor the same first dimension, or name "
            f"those that go whole: whole={others}."
        )
    return f"Give every tensor the same first dimension, or name those that go whole: whole={others}."
