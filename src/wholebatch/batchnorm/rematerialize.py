"""Which of the values that cross from stage to stage are kept, and which are made again.

Keeping all is fastest. Keeping only those that cross a few cuts takes one more forward pass: going backward, the
stages between two kept cuts run once more without graph. What is in memory then is what crosses kept cuts, and the
inside of one such span at a time; cuts are chosen so that the sum is least, by bytes, because a few early values weigh
more than many late ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

LIMITS = 64
"""How many limits on the inside of a span are tried."""


@dataclass(frozen=True)
class Value:
    """A value that crosses cuts: made by stage ``birth``, read for the last time by stage ``last``, of so many bytes.

    It crosses cuts birth ... last - 1; an argument of the call has birth -1.
    """

    birth: int
    last: int
    bytes: int


def least_bytes(values: Sequence[Value], cuts: int) -> frozenset[int]:
    """Choose the cuts to keep, of 0 ... cuts - 1, so that the most bytes at once are least.

    For every limit on the inside of a span, a dynamic program finds the cheapest cuts that respect it.
    """
    crossing, inside = _spans(values, cuts)
    spans = sorted({size for row in inside for size in row.values()})
    step = max(1, len(spans) // LIMITS)
    best: tuple[float, frozenset[int]] = (float("inf"), frozenset(range(cuts)))
    for limit in {*spans[::step], *spans[-1:]}:
        bytes_kept, kept = _cheapest(crossing, inside, cuts, limit)
        peak = bytes_kept + max(inside[a + 1][b] for a, b in _neighbours(kept, cuts))
        best = min(best, (peak, kept), key=lambda found: (found[0], -len(found[1])))
    return best[1]


def peak_bytes(values: Sequence[Value], cuts: int, kept: frozenset[int]) -> int:
    """Say how many bytes are there at once if these cuts are kept."""
    crossing, inside = _spans(values, cuts)
    ways = _neighbours(kept, cuts)
    return sum(crossing[a + 1].get(b, 0) for a, b in ways) + max(inside[a + 1][b] for a, b in ways)


def _neighbours(kept: frozenset[int], cuts: int) -> list[tuple[int, int]]:
    """Pair each kept cut with the one before it; -1 stands before all, ``cuts`` behind."""
    ends = [*sorted(kept), cuts]
    return list(zip([-1, *ends[:-1]], ends, strict=True))


def _spans(values: Sequence[Value], cuts: int) -> tuple[list[dict[int, int]], list[dict[int, int]]]:
    """For a kept cut a (-1 ... ) and the next kept cut b: the bytes that b adds, and those inside of the span.

    A value born behind a adds to b if it crosses b, and is inside if its last reader comes no later than b.
    """
    crossing, inside = [], []
    for a in range(-1, cuts):
        added, within = [0] * (cuts + 2), [0] * (cuts + 2)
        for value in values:
            if value.birth > a:
                added[max(value.birth, 0)] += value.bytes
                added[value.last] -= value.bytes
                within[value.last] += value.bytes
        totals, insides = list(accumulate(added)), list(accumulate(within))
        crossing.append({b: totals[b] for b in range(a + 1, cuts)})
        inside.append({b: insides[b] for b in range(a + 1, cuts + 1)})
    return crossing, inside


def _cheapest(
    crossing: Sequence[Mapping[int, int]], inside: Sequence[Mapping[int, int]], cuts: int, limit: int
) -> tuple[float, frozenset[int]]:
    """Find the kept cuts of least bytes whose spans respect a limit."""
    cost = [0.0] + [float("inf")] * (cuts + 1)
    before = [-1] * (cuts + 2)
    for b in range(cuts + 1):
        for a in range(-1, b):
            price = cost[a + 1] + crossing[a + 1].get(b, 0)
            if inside[a + 1][b] <= limit and price < cost[b + 1]:
                cost[b + 1], before[b + 1] = price, a
    if cost[cuts + 1] == float("inf"):
        return float("inf"), frozenset(range(cuts))
    kept, at = set(), before[cuts + 1]
    while at >= 0:
        kept.add(at)
        at = before[at + 1]
    return cost[cuts + 1], frozenset(kept)
