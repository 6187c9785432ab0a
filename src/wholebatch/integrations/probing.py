"""Some rows of a window and two parts of them, as uneven as it offers: what a way of counting has to explain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from wholebatch.batch.tree import join, take
from wholebatch.errors import SplitError
from wholebatch.integrations.infer_denominator import IGNORED, LABELS, Inputs, targets_of

Cut: TypeAlias = "tuple[Inputs, Inputs, Inputs]"
Widths: TypeAlias = "dict[str, list[int]]"

FEWEST = 3  # rows of a probe: with two, one against one, means over rows and means of means are the same


class Targets(TorchFunctionMode):
    """Note what cross-entropies in a forward ignore, and whether they divide by class weights.

    Attributes:
        ignored: the targets that they ignore, in the order of their first appearance.
        weighted: whether one divides by a sum of unequal class weights.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ignored: list[int] = []
        self.weighted = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if function in (F.cross_entropy, F.nll_loss):
            self._note(**dict(zip(("input", "target", "weight", "size_average"), args, strict=False)), **given)
        return function(*args, **given)

    def _note(self, weight: Any = None, ignore_index: int = IGNORED, reduction: str = "mean", **others: Any) -> None:
        if ignore_index not in self.ignored:
            self.ignored.append(int(ignore_index))
        uneven = isinstance(weight, Tensor) and bool((weight != weight.reshape(-1)[0]).any())
        self.weighted |= uneven and reduction == "mean"


def uneven(batches: Sequence[Inputs], ignored: int | None) -> Cut:
    """Return rows of these micro-batches, the first of them and the rest: the one with fewest targets against others.

    Args:
        batches: micro-batches with rows; those that cannot be put together are left out.
        ignored: a target that the loss is known to ignore, so that labels may be taken out; None if none is known.

    Raises:
        SplitError: if not even one micro-batch can be cut by rows.
    """
    rows = _together(batches, ignored)
    order = _spread(_by_targets(rows, ignored), _limit(batches))
    whole = _thinned(take(rows, order), ignored)
    return whole, take(whole, slice(0, 1)), take(whole, slice(1, len(order)))


def in_pairs(batches: Sequence[Inputs], ignored: int | None) -> Cut | None:
    """Cut micro-batches whose second half belongs to their first, row by row; None if they are none, or hold one pair.

    A pair against itself would prove any way of counting; and rows with labels of their own are no halves of pairs.
    """
    halves = [len(targets_of(each)) / 2 for each in batches]
    labelled = any(isinstance(each.get(name), Tensor) for each in batches for name in LABELS)
    if labelled or sum(halves) < 2 or any(half % 1 for half in halves):
        return None
    try:
        even = filled(batches, ignored)
        first = join([take(each, slice(0, int(half))) for each, half in zip(even, halves, strict=True)])
        second = join([take(each, slice(int(half), None)) for each, half in zip(even, halves, strict=True)])
        chosen = [min(pair, int(sum(halves)) - 1) for pair in range(max(FEWEST, _limit(batches) // 2))]
        cuts = (chosen, chosen[:1], chosen[1:])
        whole, one, rest = (join([take(first, cut), take(second, cut)]) for cut in cuts)
    except SplitError:
        return None
    return whole, one, rest


def widened(batches: Sequence[Inputs], ignored: int | None) -> tuple[Inputs, Inputs] | None:
    """Return the narrowest micro-batch, and the same filled up to the widest; None where no mask says what is filler.

    A row must say the same however far its batch is filled up: else micro-batches of several widths are no parts of one
    batch.
    """
    if not any(name.endswith("mask") for name in batches[0]):
        return None
    try:
        even = filled(batches, ignored)
    except SplitError:
        return None
    narrow = min(range(len(batches)), key=lambda place: _width(batches[place]))
    return batches[narrow], even[narrow]


def differ(rows: Sequence[Inputs]) -> bool:
    """Say whether there is more than one row in these micro-batches, so that a proof proves something."""
    return sum(len(targets_of(each)) for each in rows) > 1


def _width(inputs: Inputs) -> int:
    return max((v.shape[1] for v in inputs.values() if isinstance(v, Tensor) and v.dim() > 1), default=0)


def _limit(batches: Sequence[Inputs]) -> int:
    return max(FEWEST, *(len(targets_of(each)) for each in batches))


def _together(batches: Sequence[Inputs], ignored: int | None) -> Inputs:
    """Put micro-batches together, filled up to one shape; the largest alone where they do not fit."""
    largest = max(batches, key=lambda each: len(targets_of(each)))
    try:
        even = filled(batches, ignored)
        rows = join(even) if len(batches) > 1 else largest
        take(rows, [0])
    except SplitError:
        take(largest, [0])
        return largest
    return dict(rows)


def widths(batches: Sequence[Inputs]) -> Widths:
    """Return how wide tensors of each name are at most, where all micro-batches have one of as many dimensions."""
    columns = {name: [each.get(name) for each in batches] for name in batches[0]}
    sizes = {
        name: [value.shape[1:] for value in column if isinstance(value, Tensor) and value.dim() > 1]
        for name, column in columns.items()
    }
    return {
        name: [max(each) for each in zip(*found, strict=True)]
        for name, found in sizes.items()
        if len(found) == len(batches) and len(set(map(len, found))) == 1
    }


def filled(batches: Sequence[Inputs], ignored: int | None, widest: Widths | None = None) -> list[Inputs]:
    """Fill tensors up to the widest of their name: labels with what is ignored, everything else with zeros.

    Raises:
        SplitError: for labels of several widths where nothing is known to be ignored.
    """
    wide: list[dict[str, Any]] = [dict(each) for each in batches]
    for name, sizes in (widths(batches) if widest is None else widest).items():
        if all(list(each[name].shape[1:]) == sizes for each in wide):
            continue
        if "label" in name and ignored is None:
            raise SplitError(f"{name!r} has several widths, and nothing is known that fills it up.")
        fill = ignored if "label" in name and ignored is not None else 0
        for each in wide:
            short = [size - have for size, have in zip(sizes, each[name].shape[1:], strict=True)]
            each[name] = F.pad(each[name], [n for size in reversed(short) for n in (0, size)], value=fill)
    return list(wide)


def _by_targets(rows: Inputs, ignored: int | None) -> list[int]:
    """Return the rows ordered by how many targets they have, or by their one; those without any say nothing."""
    targets = targets_of(rows)
    if targets.dim() < 2:
        return [int(row) for row in targets.argsort(stable=True)]
    counts = (targets != (IGNORED if ignored is None else ignored)).reshape(len(targets), -1).sum(1)
    order = [int(row) for row in counts.argsort(stable=True)]
    return [row for row in order if counts[row]] or order


def _spread(order: Sequence[int], limit: int) -> list[int]:
    """Choose rows evenly out of their order, the first and the last among them; twice if there are too few."""
    if len(order) < FEWEST:
        return [order[0], *[order[-1]] * (FEWEST - 1)]
    chosen = min(limit, len(order))
    return [order[round(place * (len(order) - 1) / (chosen - 1))] for place in range(chosen)]


def _thinned(rows: Inputs, ignored: int | None) -> Inputs:
    """Leave two labels of the first row, where they can be taken out: as uneven as can be."""
    labels = rows.get("labels")
    if not isinstance(labels, Tensor) or labels.dim() < 2 or labels.is_floating_point() or ignored is None:
        return rows
    labels = labels.clone()
    first = labels[0].reshape(-1)
    first[(first != ignored).nonzero().flatten()[2:]] = ignored
    labels[0] = first.reshape(labels[0].shape)
    return {**rows, "labels": labels}


def known_ignored(seen: Sequence[int], batches: Sequence[Inputs]) -> int | None:
    """Return a target that may be written into labels: one that the loss ignores, or that they hold already."""
    labels = [targets for targets in map(targets_of, batches) if not targets.is_floating_point()]
    held = [value for value in (*seen, IGNORED) if any(bool((each == value).any()) for each in labels)]
    return next(iter([*held, *seen]), None)


def look_of(inputs: Inputs) -> frozenset[Any]:
    """Return what of a micro-batch may change what its loss averages over, as marks that are compared over time.

    The shape of its targets, whether some are ignored or lie outside of the text, and, for one target a row, which.
    """
    marks: set[Any] = {("names", tuple(sorted(inputs)))}
    length = next((v.shape[1] for v in inputs.values() if isinstance(v, Tensor) and v.dim() > 1), None)
    for name in (*LABELS, "shift_labels", "end_positions"):
        targets = inputs.get(name)
        if not isinstance(targets, Tensor) or targets.is_floating_point():
            continue
        marks.add((name, targets.dim(), str(targets.dtype)))
        marks |= {(name, "ignored")} if bool((targets < 0).any()) else set()
        if length is not None and name.endswith("positions"):
            marks |= {(name, "outside")} if bool((targets >= length).any()) else set()
        elif targets.dim() == 1:
            marks |= {(name, value) for value in torch.unique(targets).tolist()[:MOST]}
    return frozenset(marks)


MOST = 64
"""Values of a target that are told apart; a loss with more classes has been seen with many of them by then."""
