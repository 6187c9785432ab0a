"""Random draws in a check: the whole batch and its micro-batches read plainly, each row with numbers of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from wholebatch.batch.tree import BatchTree
from wholebatch.errors import SplitError, WholeBatchError
from wholebatch.first_window import reasons
from wholebatch.first_window.draws import FixedDraws
from wholebatch.first_window.levels import RowNumbers, those_that_matter
from wholebatch.first_window.norms import NormWatch
from wholebatch.loss.terms import LossFunction
from wholebatch.model.comparison import Comparison, compare, joined
from wholebatch.verify import causes
from wholebatch.verify.explaining import FOREIGN
from wholebatch.verify.finding import Finding
from wholebatch.verify.reference import OtherName, Reference, plain_gradient, rows_or_one
from wholebatch.verify.running import Bench
from wholebatch.verify.watching import ReplayedLoss

Reads = Callable[[Sequence[Any], LossFunction], Reference]
Portions = tuple[Any, Sequence[Any], Sequence[Sequence[int]]]

NO_ROWS = "whether what is drawn there counts or mixes rows: rows can't be joined or cut, to be compared"
"""What is said of draws where nothing tells which rows a micro-batch holds."""


class OwnDraws(NamedTuple):
    """What lies between a batch and its micro-batches where each row draws for itself.

    Attributes:
        size: how far the gradients are apart; None where nothing says which draws are a row's.
        counts: whether the items of both are other numbers.
        places: where the user's own code draws.
        held: where it draws what goes with no row, and was the same for each row.
        shared: where it draws once for all rows, and the gradient follows that.
    """

    size: Comparison | None
    counts: bool
    places: list[str]
    held: list[str]
    shared: list[str]


class _PortionedLoss:
    """A loss function that begins each micro-batch with the draws of its rows."""

    def __init__(self, loss_fn: LossFunction, draws: FixedDraws, rows: Sequence[Sequence[int]]) -> None:
        self.loss_fn, self.draws, self.rows, self.calls = loss_fn, draws, rows, 0

    def __call__(self, model: Any, micro_batch: Any) -> Any:
        """Call the loss function for the next rows; they are run once to be counted, and once more."""
        self.draws.begin(self.rows[self.calls % len(self.rows)])
        self.calls += 1
        return self.loss_fn(model, micro_batch)


class DrawCheck:
    """Reads the same rows whole and in micro-batches, BatchNorm on its running statistics.

    Args:
        read: reads micro-batches plainly and leaves everything as it was.
        loss_fn: as for `backward`.
        whole: the batch in one micro-batch.
        micro_batches: the same rows in several.
        rows: those of each micro-batch.
        tolerance: what rounding explains.
    """

    def __init__(
        self,
        read: Reads,
        loss_fn: LossFunction,
        whole: Any,
        micro_batches: Sequence[Any],
        rows: Sequence[Sequence[int]],
        tolerance: float,
    ) -> None:
        self.read, self.loss_fn, self.whole, self.micro_batches = read, loss_fn, whole, micro_batches
        self.rows, self.tolerance = rows, tolerance
        self.places = set[str]()

    def take(self) -> OwnDraws:
        """Compare; where rows are guessed by shapes and do not add up, hold still what leaves a doubt."""
        numbers = RowNumbers()
        size, counts = self.apart(numbers)
        for other in self.further(numbers) if self.is_apart(size, counts) else ():
            tried, counted = self.apart(other)
            if not self.is_apart(tried, counted):
                return self.found(other, tried, counted)
        if self.is_apart(size, counts) and (numbers.doubtful or numbers.astray or not math.isfinite(size.error)):
            return OwnDraws(None, False, sorted(self.places), sorted(self.places), [])
        return self.found(numbers, size, counts)

    def further(self, numbers: RowNumbers) -> Iterator[RowNumbers]:
        """Yield other numbers that the same rows may have."""
        yield RowNumbers(flipped=True)
        yield from numbers.further()

    def found(self, numbers: RowNumbers, size: Comparison, counts: bool) -> OwnDraws:
        """Say what these numbers have shown."""
        right = not self.is_apart(size, counts)
        shared = those_that_matter(numbers, self.follows) if right else []
        return OwnDraws(size, counts, sorted(self.places), numbers.held_by_hand(), shared)

    def is_apart(self, size: Comparison, counts: bool) -> bool:
        """Tell whether more than rounding lies between."""
        return counts or not size.error <= self.tolerance

    def apart(self, numbers: RowNumbers) -> tuple[Comparison, bool]:
        """Measure how far the gradients are apart, and whether items are."""
        everything = sorted(row for rows in self.rows for row in rows)
        one, several = self.both(numbers, [([self.whole], [everything]), (self.micro_batches, self.rows)])
        size = compare(*joined(several.gradients, one.gradients))
        return size, causes.counts_differ(several.items, one.items)

    def follows(self, numbers: RowNumbers) -> bool:
        """Tell whether the whole batch's gradient is another with other numbers."""
        everything = sorted(row for rows in self.rows for row in rows)
        try:
            one, other = self.both(numbers, [([self.whole], [everything])] * 2)
        except (*FOREIGN, WholeBatchError):
            return True
        return self.is_apart(
            compare(*joined(other.gradients, one.gradients)), causes.counts_differ(other.items, one.items)
        )

    def both(self, numbers: RowNumbers, runs: Sequence[tuple[Sequence[Any], Any]]) -> list[Reference]:
        """Read micro-batches twice, under the same numbers."""
        with FixedDraws(numbers) as draws, NormWatch(hold=True):
            said = [self.read(batches, _PortionedLoss(self.loss_fn, draws, rows)) for batches, rows in runs]
        numbers.settle()
        self.places |= draws.own
        return said


def portions_of(
    whole: Any, micro_batches: Sequence[Any], rows: Sequence[Sequence[int]], names: Sequence[str]
) -> Portions | None:
    """Return a whole and the same rows in micro-batches; None where it can't be told which rows these are.

    Where the batch could not be put together (it is None), the largest micro-batch is a whole in two halves.
    """
    if whole is not None:
        return (whole, micro_batches, rows) if len(rows) == len(micro_batches) else None
    largest = max(micro_batches, key=rows_or_one)
    try:
        tree = BatchTree(largest, names)
        several = list(range(tree.count_rows()))
    except SplitError:
        return None
    halves = [several[: len(several) // 2], several[len(several) // 2 :]]
    return (largest, [tree.take(half) for half in halves], halves) if len(several) > 1 else None


def drawn_apart(
    read: Reads, loss_fn: LossFunction, portions: Portions | None, tolerance: float, steady: FixedDraws
) -> tuple[Finding | None, list[str]]:
    """Compare with each row's own draws; return what does not add up, and what could not be shown.

    Args:
        read, loss_fn, tolerance: as for :class:`DrawCheck`.
        portions: the whole, its micro-batches, and the rows of these.
        steady: what has drawn while draws were held still.
    """
    own = ", ".join(sorted(steady.own)[:3])
    if portions is None:
        return None, [f"{own}: {NO_ROWS}."] * bool(own)
    try:
        found = DrawCheck(read, loss_fn, *portions, tolerance).take()
    except (*FOREIGN, OtherName, WholeBatchError) as error:
        return None, [f"{own}: it can't be read with draws of each row's own ({error!r:.120})."] * bool(own)
    apart = found.size is not None and (found.counts or not found.size.error <= tolerance)
    finding = causes.drawn(found.places or sorted(steady.seen), found.size) if apart and found.size else None
    pairs = (found.held, reasons.HELD), (found.shared, reasons.SHARED)
    return finding, [f"{', '.join(places[:3])}: {why}." for places, why in pairs if places]


def replayed(stage: Bench, loss_fn: LossFunction, reading: dict[str, Any]) -> Comparison | None:
    """Measure how far a window is from its micro-batches run again with the draws that they made.

    None where a generator of the user's own draws, which nobody sets back at the beginning of each micro-batch.
    """
    ran = stage.run()
    if any(each.kind == "generator" for each in ran.moved):
        return None
    starts = [call.start for call in ran.watched.calls[-ran.result.micro_batches :]]
    try:
        again = plain_gradient(stage.model, ReplayedLoss(loss_fn, starts), ran.micro_batches, **reading)
    finally:
        stage.back()
    return compare(*joined(ran.gradients, again.gradients))
