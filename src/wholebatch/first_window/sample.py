"""Which rows of a window are tried: one micro-batch, whole and in two uneven parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wholebatch.batch.tree import BatchTree, join
from wholebatch.batch.window import MicroBatch, Window
from wholebatch.errors import SplitError
from wholebatch.first_window.identity import leaves_out
from wholebatch.options import Options

CANDIDATES = 8
"""How many micro-batches are looked at to find one whose rows differ."""

SOME = 4
"""From how many micro-batches pairs are taken: one pair may add up by chance, such as by signs that agree."""

COLUMNS = 8
"""How many entries of the second dimension are tried as rows."""

Cut = Callable[[Sequence[int]], Any]


class Portion(NamedTuple):
    """Rows to be run as one micro-batch, and what makes it."""

    rows: Sequence[int]
    make: Callable[[], Any]


@dataclass(frozen=True)
class TriedRows:
    """Rows to be run whole and in parts.

    Attributes:
        cut: makes a micro-batch of rows.
        whole: the rows.
        parts: the same rows in two parts.
        layout: how they were cut, in words.
        through: the first part of another cut, through the rows that this one keeps together; nothing if it keeps none.
        further: other rows, laid in the same way, that have to add up too.
        beside: a few rows that lie side by side, as those of a class or of a prompt do, to be tried besides.
    """

    cut: Cut
    whole: Sequence[int]
    parts: tuple[Sequence[int], Sequence[int]]
    layout: str
    through: Sequence[int] = ()
    further: tuple[TriedRows, ...] = ()
    beside: tuple[TriedRows, ...] = ()

    @property
    def sizes(self) -> str:
        """How many rows the parts have, in words."""
        return " + ".join(str(len(part)) for part in self.parts)

    def portion(self, rows: Sequence[int]) -> Portion:
        """Some of the rows as one micro-batch."""
        return Portion(rows, lambda: self.cut(rows))

    def smaller(self) -> TriedRows | None:
        """Half of the rows, for when memory does not suffice; None if that leaves one."""
        half = self.whole[: len(self.whole) // 2]
        return None if len(half) < 2 else split(self.cut, half, self.layout)

    def against(self) -> TriedRows | None:
        """The same rows cut through what belongs together, which has to matter if it is the reason; None if nothing."""
        rest = [row for row in self.whole if row not in set(self.through)]
        return TriedRows(self.cut, self.whole, (self.through, rest), self.layout) if self.through else None

    def even(self) -> TriedRows | None:
        """The same rows in halves, for functions that can't take one row alone; None if a half would be one."""
        middle = len(self.whole) // 2
        if middle < 2 or len(self.parts[0]) == middle:
            return None
        return TriedRows(self.cut, self.whole, (self.whole[:middle], self.whole[middle:]), self.layout)


def samples_of(batch: Any, micro_batches: Sequence[MicroBatch], options: Options) -> Iterator[TriedRows]:
    """Yield what can be tried of a window, the best first; nothing if no micro-batch has two rows to tell apart."""
    names = options.get("whole", ())
    several = [micro_batch for micro_batch in micro_batches if micro_batch.rows > 1]
    if several and several[0].lengths:
        limit = max(micro_batch.held for micro_batch in micro_batches)
        yield from _mixed(several[0].cut, several[0].lengths, limit)
    else:
        yield from _spread(micro_batches, names, options.get("collate") is not None)
    for micro_batch in _by_difference(several[: 1 if options.get("collate") else CANDIDATES], names):
        yield split(micro_batch.cut, micro_batch.index, "rows", _marks(micro_batch.cut(micro_batch.index), names))
    if not several and isinstance(batch, Window):
        yield from _joined_ready(batch, names)


def others_of(
    sample: TriedRows, batch: Any, micro_batches: Sequence[MicroBatch], options: Options
) -> Iterator[TriedRows]:
    """Yield other ways to cut in which rows that belong together stay so, where the window itself keeps them so."""
    names = options.get("whole", ())
    if isinstance(batch, Window):
        yield from _ready_made_otherwise(batch, sample, names)
    elif len(micro_batches) > 1 and not micro_batches[0].lengths:
        yield from _joined(micro_batches)


def split(cut: Cut, rows: Sequence[int], layout: str, marks: Sequence[float] = ()) -> TriedRows:
    """Cut rows in two uneven parts, so that parts which count differently are apart as far as possible."""
    few = _few(len(rows))
    at = max(few, len(rows) - few, key=lambda at: _apart(marks, at)) if marks else few  # the first of equals
    return TriedRows(cut, rows, (rows[:at], rows[at:]), layout)


def _mixed(cut: Cut, lengths: Sequence[int], limit: int) -> Iterator[TriedRows]:
    """The longest row, the shortest and its neighbour, if they fit, in order of length: parts padded differently."""
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    longest, shortest = order[0], order[-1]
    near = shortest + 1 if shortest + 1 < len(lengths) else shortest - 1
    rows = list(dict.fromkeys([longest, near, shortest]))
    if len(rows) > 1 and len(rows) * lengths[longest] <= limit:
        yield TriedRows(cut, rows, (rows[:-1], rows[-1:]), "rows of different length")


def _spread(micro_batches: Sequence[MicroBatch], names: Sequence[str], samples: bool) -> Iterator[TriedRows]:
    """As many rows as a micro-batch has, from all over the batch and as different as they come."""
    first = micro_batches[0]
    if len(micro_batches) < 2 or any(micro_batch.cut != first.cut for micro_batch in micro_batches):
        return
    rows = [row for micro_batch in micro_batches for row in micro_batch.index]
    marks = [] if samples else _marks(first.cut(rows), names)
    order = sorted(range(len(rows)), key=marks.__getitem__) if marks else range(len(rows))
    size = max(first.rows, 2)
    places = [order[i * (len(rows) - 1) // (size - 1)] for i in range(size)]
    spread = split(first.cut, [rows[place] for place in places], "rows", [marks[place] for place in places if marks])
    yield replace(spread, beside=_beside(first, rows))


def _beside(first: MicroBatch, rows: Sequence[int]) -> tuple[TriedRows, ...]:
    """Three rows in a row, the middle one apart from both others; where a micro-batch has fewer, both pairs of those.

    Of two pairs that share a row, one at least lies within a group, wherever groups of two or more begin.
    """
    start = max(len(rows) // 2 - 1, 0)
    few = rows[start : start + 3]
    if first.rows > 2:
        return (TriedRows(first.cut, few, (few[1:2], [*few[:1], *few[2:]]), "rows side by side"),)
    return tuple(TriedRows(first.cut, pair, (pair[:1], pair[1:]), "rows side by side") for pair in pairwise(few))


def _joined(micro_batches: Sequence[MicroBatch]) -> Iterator[TriedRows]:
    """Two micro-batches as one, if they were cut from the same batch, as they are, and of more than single rows."""
    places = sorted({round(i * (len(micro_batches) - 1) / (SOME - 1)) for i in range(SOME)})
    pairs = list(combinations([micro_batches[place] for place in places], 2))
    made = []
    middle = (len(micro_batches) - 1) // 2
    adjacent = [micro_batches[:2], micro_batches[middle : middle + 2]]  # which rows cut apart would be shared by
    for one, two in [pairs[0], *adjacent, *pairs[1 :: max(1, len(pairs) // SOME)]]:
        if one.cut == two.cut and one.index != two.index and min(one.rows, two.rows) > 1:
            rows, parts = [*one.index, *two.index], (list(one.index), list(two.index))
            made.append(TriedRows(one.cut, rows, parts, "two micro-batches", _half_of_each(*parts)))
    if made:
        yield replace(made[0], further=tuple(made[1:]))


def _joined_ready(window: Window, names: Sequence[str]) -> Iterator[TriedRows]:
    """Two micro-batches of a loader as one, where their shapes allow it."""
    for one, two in pairwise(window[:2]):
        try:
            tree = BatchTree(join([one, two], names), names)
            first, rows = BatchTree(one, names).count_rows(), tree.count_rows()
        except (SplitError, RuntimeError, ValueError, TypeError):  # padded to different lengths, or of no known kind
            return
        parts = (range(first), range(first, rows))
        yield TriedRows(tree.take, range(rows), parts, "two micro-batches", _half_of_each(*parts))


def _half_of_each(one: Sequence[int], two: Sequence[int]) -> list[int]:
    """Take some rows of both, so that neither stays whole; nothing if one of them is a single row."""
    return [*one[: len(one) // 2], *two[: len(two) // 2]] if min(len(one), len(two)) > 1 else []


def _ready_made_otherwise(window: Window, sample: TriedRows, names: Sequence[str]) -> Iterator[TriedRows]:
    """Rows as loaders lay them: pairs in two halves, or rows on the second dimension."""
    rows = len(sample.whole)
    if sample.layout == "rows":
        yield from _joined_ready(window, names)
    if rows % 2 == 0 and rows > 2:
        half = rows // 2
        few = max(1, half // 3)
        first = [*range(few), *range(half, half + few)]
        rest = [row for row in range(rows) if row not in first]
        broken = [*range(few), *range(half + few, half + 2 * few)]
        yield TriedRows(sample.cut, sample.whole, (first, rest), "pairs in halves", broken)
    across = sideways(window[0], names) if sample.layout == "rows" else None
    if across is not None:
        yield across


def sideways(micro_batch: Any, names: Sequence[str]) -> TriedRows | None:
    """Cut along the second dimension: rows behind time; no more than a few of them."""
    tree = BatchTree(micro_batch, names)
    deep = [leaf.value for leaf in tree.leaves if isinstance(leaf.value, Tensor) and leaf.value.dim() > 1]
    widths = {tensor.shape[1] for tensor in deep}
    if len(widths) != 1 or min(widths) < 2:
        return None

    def cut(rows: Sequence[int]) -> Any:
        chosen = torch.tensor(list(rows))
        return tree.map(lambda leaf: _columns(leaf.value, chosen))

    return split(cut, range(min(widths.pop(), COLUMNS)), "rows on the second dimension")


def _columns(value: Any, chosen: Tensor) -> Any:
    deep = isinstance(value, Tensor) and value.dim() > 1
    return value.index_select(1, chosen.to(value.device)) if deep else value


def _counted(micro_batch: Any, names: Sequence[str]) -> BatchTree | None:
    try:
        tree = BatchTree(micro_batch, names)
        tree.count_rows()
    except SplitError:
        return None
    return tree


def _by_difference(micro_batches: Sequence[MicroBatch], names: Sequence[str]) -> list[MicroBatch]:
    """Order micro-batches by how much their rows differ in what may be ignored, those alike in their order."""
    if len(micro_batches) < 2:
        return list(micro_batches)

    def spread(micro_batch: MicroBatch) -> float:
        marks = _marks(micro_batch.cut(micro_batch.index), names)
        return max(marks, default=0.0) - min(marks, default=0.0)

    return sorted(micro_batches, key=lambda micro_batch: -spread(micro_batch))


def _marks(micro_batch: Any, names: Sequence[str]) -> list[float]:
    """Count for each row the integers of zero and below, and zeros of masks: what is left out, and labels ignored."""
    tree = _counted(micro_batch, names)
    if tree is None:
        return []
    rows = tree.count_rows()
    marks = torch.zeros(rows)
    for leaf in tree.leaves:
        value = leaf.value
        if isinstance(value, Tensor) and leaf.rows == rows and (_is_plain_integer(value) or leaves_out(value)):
            marks += (value <= 0).reshape(rows, -1).sum(1)
    return [float(mark) for mark in marks]


def _is_plain_integer(value: Tensor) -> bool:
    real = value.is_floating_point() or value.is_complex()
    return not real and value.device.type == "cpu" and value.layout is torch.strided and not value.is_nested


def _few(rows: int) -> int:
    """How many rows the smaller part has."""
    return 1 if rows < 5 else max(2, rows // 3)


def _apart(marks: Sequence[float], at: int) -> float:
    return abs(_average(marks[:at]) - _average(marks[at:]))


def _average(marks: Sequence[float]) -> float:
    return sum(marks) / max(len(marks), 1)
