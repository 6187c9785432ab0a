"""The micro-batches of one optimizer step: read from a loader, or cut from one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count, groupby, islice
from typing import Any, Generic, Literal, SupportsIndex, TypeAlias, overload

import torch
from typing_extensions import TypeVar

from wholebatch.amounts import whole_number
from wholebatch.batch.batch_schedule import BatchSchedule
from wholebatch.batch.leaf_kinds import SCALARS, Entries, has_entries
from wholebatch.batch.padding import Padding
from wholebatch.batch.reuse import Memory
from wholebatch.batch.sizes import Auto, Size, Tokens
from wholebatch.batch.tree import BatchTree, Leaf
from wholebatch.errors import SplitError

T = TypeVar("T", default=Any)
Schedule: TypeAlias = "int | Sequence[int] | Callable[[int], int] | BatchSchedule"
Collate: TypeAlias = "Callable[[list[Any]], Any] | None"


class Window(list[T], Generic[T]):
    """The micro-batches of one optimizer step, ready-made: a list that says so.

    A plain list is a structure of fields; a window is run micro-batch by micro-batch.

    Example:
        >>> window = wb.Window([torch.zeros(2, 1), torch.zeros(3, 1)])
        >>> loss_fn = lambda model, x: model(x).square()
        >>> wb.backward(torch.nn.Linear(1, 1), loss_fn, window).micro_batches
        2
    """

    def __init__(self, micro_batches: Iterable[T] = ()) -> None:
        if isinstance(micro_batches, Mapping):
            raise TypeError(
                f"A window is made of micro-batches, and this is {type(micro_batches).__name__} with "
                f"{', '.join(map(repr, list(micro_batches)[:3]))}: one batch. Cut it, micro_batch_size=4, or give its "
                "micro-batches in a list: wb.Window([batch])."
            )
        super().__init__(micro_batches)

    def __repr__(self) -> str:
        return f"Window of {len(self)}"

    @overload
    def __getitem__(self, place: SupportsIndex, /) -> T: ...
    @overload
    def __getitem__(self, place: slice, /) -> Window[T]: ...
    def __getitem__(self, place: SupportsIndex | slice, /) -> Any:
        """Return a micro-batch, or those of a slice as a window of their own."""
        return Window(super().__getitem__(place)) if isinstance(place, slice) else super().__getitem__(place)


def windows(loader: Iterable[T], k: Schedule, last: Literal["apply", "drop"] = "apply") -> Windows[T]:
    """Gather the micro-batches of a loader into windows of ``k``; the last may be short.

    Every micro-batch comes once, in order, and none is dropped unless ``last="drop"`` says so. The loader needs no
    length and is read once; a window is yielded as soon as it is full, and nothing beyond it is read before the next
    is asked for. A loader that writes each micro-batch into the same memory is refused.

    Args:
        loader: whatever yields micro-batches.
        k: micro-batches in a window: a number; a sequence of numbers, window by window, whose last one goes on;
            or a function of the window's number, from 0. A :class:`wholebatch.BatchSchedule` counts rows: a window is
            full with as many as its step is to have, or with the micro-batch that brings them.
        last: what becomes of a last window with fewer micro-batches: ``"apply"`` yields it, ``"drop"`` does not.

    Returns:
        An iterator of windows, each with one micro-batch or more. It has a length where the loader has one.

    Raises:
        TypeError: for a ``k`` that is no whole number.
        ValueError: for a ``k`` below 1, an empty sequence, or another ``last``.
        SplitError: while it is read, if a micro-batch has been overwritten by a later one.

    Example:
        >>> [list(window) for window in wb.windows(range(5), 2)]
        [[0, 1], [2, 3], [4]]
        >>> [list(window) for window in wb.windows(range(6), [1, 2])]
        [[0], [1, 2], [3, 4], [5]]
        >>> len(wb.windows(range(5), 2)), len(wb.windows(range(5), 2, last="drop"))
        (3, 2)
    """
    if not isinstance(loader, Iterable):
        raise TypeError(f"loader is {loader!r:.80}, of which nothing can be read. Call wb.windows(loader, 8).")
    if last not in ("apply", "drop"):
        raise ValueError(f'last={last!r} is no way to end: a short last window is stepped with, "apply", or "drop".')
    if isinstance(k, BatchSchedule):
        return Windows(loader, k.at, last == "drop", _rows_of, known=False)
    return Windows(loader, _schedule(k), last == "drop")


class Windows(Iterator[Window[T]], Generic[T]):
    """What `windows` returns: reads a loader once, window by window.

    Args:
        loader: whatever yields micro-batches.
        sizes: says how much a window holds, by its number.
        drop_last: whether a last window with less is left out.
        measure: says how much of that a micro-batch is; each counts one if None.
        known: whether that is known before a micro-batch is there.
    """

    def __init__(
        self,
        loader: Iterable[T],
        sizes: Callable[[int], int],
        drop_last: bool,
        measure: Callable[[T], int] | None = None,
        known: bool = True,
    ) -> None:
        self._loader, self._sizes, self._drop_last = loader, sizes, drop_last
        self._measure, self._known = measure or (lambda micro_batch: 1), known
        self._read: Iterator[Window[T]] | None = None

    def __iter__(self) -> Windows[T]:
        return self

    def __next__(self) -> Window[T]:
        if self._read is None:
            self._read = _gathered(self._loader, self._sizes, self._drop_last, self._measure)
        return next(self._read)

    def __len__(self) -> int:
        """How many windows the whole loader makes.

        Raises:
            TypeError: if the loader has no length, or windows are counted in rows.
        """
        if not self._known:
            raise TypeError("How many windows there will be is not known: they are counted in rows of micro-batches.")
        loader: Any = self._loader  # says itself that it has no length
        number, left = 0, len(loader)
        while left > 0:
            left -= self._sizes(number)
            number += 1
        return number - 1 if left < 0 and self._drop_last else number


def _gathered(
    loader: Iterable[T], sizes: Callable[[int], int], drop_last: bool, measure: Callable[[T], int]
) -> Iterator[Window[T]]:
    micro_batches = iter(loader)
    for number in count():
        first = list(islice(micro_batches, 1))  # before the schedule is asked: it may end with the loader
        if not first:
            return
        size = sizes(number)
        window, memory = Window(first), Memory()
        held = measure(first[0])
        while held < size:
            memory.add(window[-1])
            following = list(islice(micro_batches, 1))
            if not following:
                break
            window += following
            held += measure(following[0])
        memory.check(window)
        if held >= size or not drop_last:
            yield window


def _rows_of(micro_batch: Any) -> int:
    """Count the rows of a micro-batch.

    Raises:
        SplitError: if they cannot be counted.
    """
    rows = _rows(BatchTree(micro_batch))
    if rows is None:
        raise SplitError(
            f"A batch schedule counts rows, and those of a micro-batch of type {type(micro_batch).__name__} cannot be "
            "counted. Say how many micro-batches a window has: wb.windows(loader, lambda step: schedule.at(step) // 4)."
        )
    return rows


class MicroBatch:
    """One micro-batch that has yet to be cut: which rows it takes, and how.

    Args:
        cut: makes the micro-batch of the rows with these numbers.
        index: the numbers of its rows.
        lengths: of all rows in tokens, where micro-batches are counted in tokens.
        packed: rows lie one behind the other, without padding.
        ready: the micro-batch, if it has been cut already; it is handed out once, since a loss function may change it.
        is_cut: whether it is a part of what the caller gave, and not all of it as it came.
        counted: whether its rows could be counted; if not, it runs whole and stands for one.
    """

    def __init__(
        self,
        cut: Callable[[Sequence[int]], Any],
        index: Sequence[int],
        lengths: Sequence[int] | None = None,
        packed: bool = False,
        ready: Any = None,
        is_cut: bool = True,
        counted: bool = True,
    ) -> None:
        self.index, self.is_cut, self.counted = index, is_cut, counted
        self._cut, self._lengths, self._packed, self._ready = cut, lengths, packed, ready

    def __repr__(self) -> str:
        return f"Micro-batch(rows={self.rows}, size={self.size:g})"

    @property
    def cut(self) -> Callable[[Sequence[int]], Any]:
        """What makes a micro-batch of rows of the same batch."""
        return self._cut

    @property
    def lengths(self) -> Sequence[int] | None:
        """The tokens of all rows of the batch; None where micro-batches are counted in rows."""
        return self._lengths

    @property
    def rows(self) -> int:
        """How many rows it takes."""
        return len(self.index)

    @property
    def size(self) -> float:
        """Its share of the work: rows, or real tokens where micro-batches are cut by tokens."""
        return float(self.rows if self._lengths is None else sum(self._lengths[row] for row in self.index))

    @property
    def longest(self) -> int:
        """The tokens of its longest row; 1 where micro-batches are cut by rows."""
        return 1 if self._lengths is None else max(self._lengths[row] for row in self.index)

    @property
    def held(self) -> int:
        """What it holds in the unit that its size is limited in: rows, padded tokens, or packed ones."""
        return int(self.size) if self._packed else self.rows * self.longest

    def load(self) -> Any:
        """Make the micro-batch: cut, collated, trimmed; on the device where the batch lies."""
        ready, self._ready = self._ready, None
        return self._cut(self.index) if ready is None else ready

    def halves(self) -> tuple[MicroBatch, MicroBatch] | None:
        """Split it in two by rows, in order; None if one row is left."""
        if self.rows < 2:
            return None
        middle = (self.rows + 1) // 2
        first, second = self.index[:middle], self.index[middle:]
        rest = (self._lengths, self._packed)
        return MicroBatch(self._cut, first, *rest), MicroBatch(self._cut, second, *rest)


def micro_batches_of(
    batch: Any, size: Size = None, *, whole: Sequence[str] = (), collate: Collate = None
) -> list[MicroBatch]:
    """Say how a batch is cut into micro-batches, without cutting it yet.

    Each row goes to exactly one micro-batch; with rows as size, in order.

    Args:
        batch: a nest, a list of samples with ``collate``, or a `Window` of either. A window's micro-batches run as
            they are without a size, and are each cut further with one, never joined.
        size: rows, `Tokens`, `Auto`, or None: one micro-batch.
        whole: names of leaves that go whole into every micro-batch.
        collate: makes a micro-batch of a list of samples.

    Returns:
        The micro-batches in the order in which they run; none for a batch without rows.

    Raises:
        SplitError: if the batch cannot be cut.
        TypeError, ValueError: for a size that is none.

    Example:
        >>> [micro_batch.load().tolist() for micro_batch in micro_batches_of(torch.arange(5), 2)]
        [[0, 1], [2, 3], [4]]
    """
    if collate is not None and whole:
        raise SplitError(f"whole={whole!r} names leaves of a batch, but with collate= samples are cut. Leave one out.")
    limit = _limit(size)
    if not isinstance(batch, Window):
        return _micro_batches(batch, limit, whole, collate)
    if limit is not None or collate is not None:
        return [micro_batch for given in batch for micro_batch in _micro_batches(given, limit, whole, collate)]
    return _ready_made(batch, whole)


def at_random(micro_batches: Sequence[MicroBatch], size: Size, seed: int) -> list[MicroBatch]:
    """Cut anew at random where rows were sorted by length; else leave the micro-batches as they are.

    The gradient is the same. Sorted rows are no random sample of the batch, which a measure of noise needs.

    Args:
        micro_batches: as :func:`micro_batches_of` returned them for this size.
        seed: of the order.
    """
    tokens = _limit(size)
    if not isinstance(tokens, Tokens):
        return list(micro_batches)
    draws = torch.Generator().manual_seed(seed)
    found: list[MicroBatch] = []
    for cut, group in groupby(micro_batches, key=lambda micro_batch: micro_batch.cut):
        of_one_batch = list(group)
        lengths = of_one_batch[0].lengths or ()
        order = [row for micro_batch in of_one_batch for row in micro_batch.index]
        mixed = [order[place] for place in torch.randperm(len(order), generator=draws).tolist()]
        found += [MicroBatch(cut, index, lengths, tokens.packed) for index in tokens.filled(lengths, mixed)]
    return found


def _schedule(k: Schedule) -> Callable[[int], int]:
    if callable(k):
        return lambda number: whole_number(k(number), f"The schedule's value for window {number}", "lambda window: 8")
    if not isinstance(k, Sequence):
        fixed = whole_number(k, "k", "wb.windows(loader, 8)")
        return lambda number: fixed
    sizes = [whole_number(size, f"k[{place}]", "wb.windows(loader, [1, 2, 4])") for place, size in enumerate(k)]
    if not sizes:
        raise ValueError(f"k={k!r} says the size of 0 windows. Give at least one: wb.windows(loader, [8]).")
    return lambda number: sizes[min(number, len(sizes) - 1)]


def _limit(size: Size) -> int | Tokens | None:
    if isinstance(size, Auto):
        return size.size
    if size is None or isinstance(size, Tokens):
        return size
    return whole_number(size, "micro_batch_size", "micro_batch_size=4, or wb.Tokens(8192), or wb.Auto(64)")


def _micro_batches(batch: Any, limit: int | Tokens | None, whole: Sequence[str], collate: Collate) -> list[MicroBatch]:
    if collate is not None:
        return _micro_batches_of_samples(batch, limit, collate)
    tree = BatchTree(batch, whole)
    if limit is None:
        return _one_micro_batch(tree)
    rows = tree.count_rows()
    if isinstance(limit, int):
        # Views cost no memory, and cutting all of them in a row takes a tenth of the time of one here and one there.
        cut = tree.take if tree.has_views else lambda index: None
        return [MicroBatch(tree.take, index, ready=cut(index), is_cut=rows > limit) for index in _runs(rows, limit)]
    return _micro_batches_by_tokens(tree, limit) if rows else []


def _ready_made(window: Window, whole: Sequence[str]) -> list[MicroBatch]:
    """One for each entry of the window; where the rows of one cannot be counted, all count the same."""
    trees = [BatchTree(given, whole) for given in window]
    if any(_rows(tree) is None for tree in trees):
        return [_uncut(tree) for tree in trees]
    return [micro_batch for tree in trees for micro_batch in _one_micro_batch(tree)]


def _one_micro_batch(tree: BatchTree) -> list[MicroBatch]:
    """The batch as it is, whatever it is; nothing if it has no rows and nothing else that could be learned from."""
    rows = _rows(tree)
    if rows is None or (rows == 0 and any(map(_may_be_data, tree.leaves))):
        return [_uncut(tree)]
    return [MicroBatch(tree.take, range(rows), is_cut=False)] if rows else []


def _may_be_data(leaf: Leaf) -> bool:
    """Whether a leaf without rows may be what is learned from: an image or its path beside empty targets, a graph."""
    return leaf.rows is None and (isinstance(leaf.value, str) or not isinstance(leaf.value, SCALARS))


def _uncut(tree: BatchTree) -> MicroBatch:
    return MicroBatch(lambda index: tree.batch, range(1), is_cut=False, counted=False)


def _rows(tree: BatchTree) -> int | None:
    try:
        return tree.count_rows()
    except SplitError:
        return None


def _runs(rows: int, size: int) -> list[range]:
    return [range(start, min(start + size, rows)) for start in range(0, rows, size)]


def _micro_batches_by_tokens(tree: BatchTree, tokens: Tokens) -> list[MicroBatch]:
    if tree.leaves[0].path == "" and isinstance(tree.leaves[0].kind, Entries):  # the batch is a list of samples
        return _planned(tree.take, tokens.lengths(tree.batch), tokens)
    lengths = None if callable(tokens.length) else tokens.jagged_lengths(tree)
    if lengths is not None:
        return _planned(tree.take, lengths, tokens)
    if callable(tokens.length) or tokens.packed:
        raise SplitError(
            f"{tokens} is for single samples, but this batch is padded already. Give a list of samples with collate=, "
            "or leave length= and packed= out: the mask of a padded batch knows the lengths."
        )
    padding = Padding(tree, tokens.mask, tokens.names)

    def cut(index: Sequence[int]) -> Any:
        return tree.take(index, padding.trim(index))

    return _planned(cut, padding.lengths, tokens)


def _planned(cut: Callable[[Sequence[int]], Any], lengths: list[int], tokens: Tokens) -> list[MicroBatch]:
    return [MicroBatch(cut, index, lengths, tokens.packed) for index in tokens.plan(lengths)]


def _micro_batches_of_samples(
    samples: Any, limit: int | Tokens | None, collate: Callable[[list[Any]], Any]
) -> list[MicroBatch]:
    if not has_entries(samples):
        raise SplitError(
            f"collate= makes a micro-batch of a list of samples, but the batch is a {type(samples).__name__}. "
            "Let the loader yield samples: DataLoader(..., collate_fn=list)."
        )

    def cut(index: Sequence[int]) -> Any:
        return collate([samples[row] for row in index])

    rows = len(samples)
    if isinstance(limit, Tokens):
        return _planned(cut, limit.lengths(samples), limit)
    return [MicroBatch(cut, index) for index in _runs(rows, limit or max(1, rows))]
