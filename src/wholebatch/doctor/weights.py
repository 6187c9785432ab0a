"""What weight each micro-batch's items had in a window, read off the losses: the arithmetic behind most findings.

A right window gives every item the same factor. With ``a`` the sum of all factors, a mean over the window has
``a = 1``: micro-batch by micro-batch, ``factor * reduction(items)`` contributes ``factor`` (mean) or ``factor * items``
(sum).
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterator

from wholebatch.doctor.grouping import losses_of
from wholebatch.doctor.micro_batch import WatchedMicroBatch
from wholebatch.doctor.trace import Forward, TracedTerm
from wholebatch.doctor.windows import Story, WatchedWindow, parallel
from wholebatch.verify.source_line import Site

CLOSE = 1e-3
# A gradient whose part along the old one is this near to it was altered (decayed, noised), not scaled.
ALTERED = 0.05


@dataclasses.dataclass(frozen=True)
class Share:
    """One term of one micro-batch on one rank."""

    rank: int
    place: int
    micro_batch: WatchedMicroBatch
    term: TracedTerm


@dataclasses.dataclass
class Division:
    """How one term of the loss is divided in one window, over all ranks.

    world: how many ranks the gradients are averaged over afterwards.
    lengths: how many micro-batches the windows of this optimizer have, the usual number first.
    after: what the gradients were multiplied by between the last backward and the step.
    finer: the same by losses, where the shares look like several losses that are added on purpose.
    """

    shares: list[Share]
    windows: list[WatchedWindow]
    world: int
    lengths: list[int]
    after: float
    finer: list[Division] = dataclasses.field(default_factory=list)

    @property
    def length(self) -> int:
        """The micro-batches of a rank (the longest rank's)."""
        return max(sum(share.rank == rank for share in self.shares) for rank in {share.rank for share in self.shares})

    @property
    def alone(self) -> bool:
        """Whether the loss has this one term only."""
        return all(len(share.micro_batch.backward.terms) == 1 for share in self.shares)

    @property
    def cached(self) -> bool:
        """Whether each micro-batch computes a pairing loss over more rows than its own: the others' features are
        cached.
        """
        return all(share.term.paired and 0 < share.micro_batch.rows < share.term.total for share in self.shares)

    @property
    def site(self) -> Site | None:
        """The user's line that makes the loss: inside a framework's loop the forward's, else the backward's."""
        return self.shares[-1].micro_batch.site

    @property
    def is_mean(self) -> bool:
        """Whether each micro-batch divides by its own items."""
        kinds = [share.term.reduction for share in self.shares if share.term.items > 1] or [
            self.shares[0].term.reduction
        ]
        return statistics.mode(kinds) == "mean"

    @property
    def items(self) -> list[float]:
        """The items of each micro-batch."""
        return [share.term.items for share in self.shares]

    @property
    def weights(self) -> list[float]:
        """What the micro-batches weigh: the sum of their items' factors."""
        return [abs(share.term.per_item) * share.term.items * self.after / self.world for share in self.shares]

    @property
    def whole(self) -> float:
        """The sum of all factors: 1 for a mean over the window."""
        return sum(self.weights)

    @property
    def rows(self) -> int:
        """The rows of the window, over all ranks."""
        return sum(share.micro_batch.rows for share in self.shares)

    @property
    def labels(self) -> float:
        """The labels that the models were given and that are not ignored, over all ranks."""
        return sum(forward.labels or 0.0 for share in self.shares for forward in share.micro_batch.forwards)

    def even(self, ranks: bool = True) -> bool:
        """Tell whether every item has the same factor; with `ranks` false, within each rank only."""
        groups: dict[int, list[float]] = {}
        for share in self.shares:
            groups.setdefault(share.rank if not ranks else 0, []).append(abs(share.term.per_item))
        return all(same(values) for values in groups.values())

    def factors(self) -> list[tuple[float, ...]]:
        """Return the parts of each micro-batch's factor."""
        return [share.term.factors for share in self.shares]


def same(values: list[float]) -> bool:
    """Tell whether numbers are equal to rounding."""
    return max(values) - min(values) <= CLOSE * max(abs(value) for value in values)


def near(value: float, other: float) -> bool:
    """Tell whether two numbers are equal to rounding."""
    return abs(value - other) <= CLOSE * abs(other)


def contains(factors: tuple[float, ...], wanted: float) -> bool:
    """Tell whether `wanted` is the product of neighbouring factors."""
    ends = itertools.combinations(range(len(factors) + 1), 2)
    return any(near(abs(math.prod(factors[start:end])), wanted) for start, end in ends)


def divisions(stories: list[Story]) -> list[Division]:
    """Return every term of every window that came to a step, those of the main loss first."""
    first = stories[0]
    found: list[Division] = []
    for place, optimizer in enumerate(first.windows):
        for number in range(len(first.windows[optimizer])):
            group = [window for story in stories if (window := window_at(story, place, number)) is not None]
            if not group:
                continue
            lengths = lengths_of(stories, place)
            found += of_window(group, [story.trace.rank for story in stories], lengths, spread(stories))
    return found


def window_at(story: Story, place: int, number: int) -> WatchedWindow | None:
    """Return the same window of another rank: of the optimizer at the same place, with the same number."""
    optimizers = list(story.windows)
    windows = story.windows[optimizers[place]] if place < len(optimizers) else []
    return windows[number] if number < len(windows) and windows[number].step is not None else None


def spread(stories: list[Story]) -> int:
    """Return over how many ranks gradients are averaged: those whose model is wrapped."""
    forwards = [forward for story in stories for windows in story.windows.values() for forward in forwards_of(windows)]
    return stories[0].trace.world if any(forward.wrapper for forward in forwards) else 1


def forwards_of(windows: list[WatchedWindow]) -> list[Forward]:
    """Return the forwards of all micro-batches."""
    return [forward for window in windows for micro_batch in window.micro_batches for forward in micro_batch.forwards]


def lengths_of(stories: list[Story], place: int) -> list[int]:
    """Return the numbers of micro-batches that windows of the optimizer at this place have, the most frequent first."""
    windows = [w for story in stories for w in story.windows.get(list(story.windows)[place], []) if w.micro_batches]
    counts = collections.Counter(window.length for window in windows)
    return sorted(counts, key=lambda length: (-counts[length], -length)) or [0]


def of_window(group: list[WatchedWindow], ranks: list[int], lengths: list[int], world: int) -> list[Division]:
    """Return one division for each term that the micro-batches of a window have in common."""
    after = rescaled(group[0], world)
    if after is None:
        return []  # the loop made a gradient of its own out of what the backwards left
    keyed: dict[tuple[object, ...], dict[int, list[Share]]] = {}
    gatherings = [(rank, window, each) for rank, window in zip(ranks, group, strict=False) for each in window.gathered]
    for rank, window, gathering in gatherings:
        for part, loss in enumerate(losses_of(gathering)):
            for key, share in shares_in(rank, window, loss):
                keyed.setdefault((gathering[0].backward.path, *key), {}).setdefault(part, []).append(share)
    return [together(list(parts.values()), group, world, lengths, after) for parts in keyed.values()]


def shares_in(
    rank: int, window: WatchedWindow, loss: list[WatchedMicroBatch]
) -> Iterator[tuple[tuple[str, str], Share]]:
    """Yield the terms of the micro-batches that are in the gradient, each under what it has in common with others."""
    places = {id(micro_batch): place for place, micro_batch in enumerate(window.micro_batches)}
    for micro_batch in loss:
        for term in micro_batch.backward.terms if id(micro_batch) in places else ():
            if term.reduction != "opaque" and term.items > 0:
                yield (term.path, term.name), Share(rank, places[id(micro_batch)], micro_batch, term)


def together(
    parts: list[list[Share]], group: list[WatchedWindow], world: int, lengths: list[int], after: float
) -> Division:
    """Return the division of all shares, with that of each part where there are several."""
    shares = sorted((share for part in parts for share in part), key=lambda share: (share.rank, share.place))
    finer = [Division(part, group, world, lengths, after) for part in parts] if len(parts) > 1 else []
    return Division(shares, group, world, lengths, after, finer)


def rescaled(window: WatchedWindow, world: int) -> float | None:
    """Return what the gradients were multiplied by after the last micro-batch and before clip and step.

    1 when it was not kept, or reduced over ranks meanwhile; None when something else was done to them than scaling.
    """
    found = window.found()
    last = window.own(window.micro_batches[-1].backward.after) if window.micro_batches else None
    if found is None or last is None:
        return 1.0
    ratio = parallel(found, last)
    if ratio is None and window.lost:
        return None
    if ratio is None and world == 1:
        along = float(found @ last) / max(float(last @ last), 1e-30)
        return 1.0 if abs(along - 1.0) < ALTERED else None
    return 1.0 if ratio is None else ratio
