"""What each share of a window is divided by, before and after the whole batch's denominators are known."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from wholebatch.errors import InexactError, LossError
from wholebatch.loss.counts import Count, power_of_two, precise
from wholebatch.loss.graphs import values_summed
from wholebatch.loss.terms import LossSum, ParsedLoss, TermKey
from wholebatch.loss.totals import KNOWN, LossTotals

Divisors = dict[TermKey, Count]

FAR = 4
"""How many times too small a guess may be; half precision has room for this."""


class Denominators:
    """Divides the shares of a window. What is written here is for numbers that are known and stay as they are.

    Attributes:
        loose: whether shares are propagated before their true denominators are known.
    """

    loose = False

    @property
    def guess(self) -> float:
        """The number to agree on with other ranks; 0 for none, or one that is agreed already."""
        return 0.0

    def use_agreed(self, number: float) -> None:
        """Divide by the number that all ranks have agreed on."""
        return

    def observe(self, answer: ParsedLoss, extent: float) -> bool:
        """Take note of an answer before its backward; False if every denominator must be known first."""
        raise NotImplementedError

    def correction(self) -> float:
        """Take the factor that what was propagated before the last answer is to be given now."""
        return 1.0

    def of(self, answer: ParsedLoss) -> Divisors:
        """Return what each term of the answer is divided by now."""
        raise NotImplementedError

    def check(self, sums: LossTotals) -> None:
        """Raise if this rank's own counts are not what was said of them beforehand."""
        return

    def settle(self, sums: LossTotals) -> Count:
        """Learn the sums of all ranks; return the factor that what was propagated so far is still to be given."""
        return 1.0


class Provisional(Denominators):
    """Divide by one number for the window, a guess from its micro-batches, and mend the sum afterwards.

    Serves losses whose terms all share one denominator, or have none. The guess is a power of two, so that dividing
    by it costs no digit, and keeps half-precision gradients in the range that a mean would have. It is made from the
    first micro-batch; one without items tells nothing, and one with far fewer than the rest too little, so a guess that
    turns out far too small is given up for a better one, and what was divided by it is brought over.

    Args:
        world: number of ranks, over which a wrapper averages.
        exact_last: whether nothing is propagated, or the last share waits, until the true denominators are known.
        loose: whether shares are propagated before that.
        extent: how much there is in the window, in rows or tokens: the guess while no micro-batch has any item.
        adapts: whether a guess may change once shares have been divided by it.
        read: whether hooks read gradients on their way, for which no guess will do.
    """

    def __init__(
        self,
        world: int,
        exact_last: bool,
        loose: bool,
        extent: float = 1.0,
        adapts: bool = False,
        read: bool = False,
    ) -> None:
        self.loose = loose
        self._world, self._exact_last, self._extent, self._adapts, self._read = world, exact_last, extent, adapts, read
        self._pattern: frozenset[TermKey] | None = None
        self._number: Count = 1.0
        self._items = self._share = 0.0
        self._correction = 1.0
        self._agreed = False
        self._true: LossTotals | None = None

    def observe(self, answer: ParsedLoss, extent: float) -> bool:
        """Make or better the guess, unless terms turn out to have denominators of their own."""
        pattern = _pattern(answer)
        if pattern is not None:
            averaged = [term for term in answer.terms.values() if term.kind not in KNOWN]
            if averaged and not self._agreed:
                self._guess(averaged[0], extent, first=self._pattern is None)
            self._pattern = pattern if self._pattern is None else self._pattern
        if not self.loose:
            return True
        return pattern is not None and pattern == self._pattern and not (self._read and pattern)

    def correction(self) -> float:
        """Take the ratio of the guess that was given up to the one that took its place."""
        correction, self._correction = self._correction, 1.0
        return correction

    def _guess(self, term: LossSum, extent: float, first: bool) -> None:
        count = term.count
        if isinstance(count, Tensor):
            if first:  # a device is not asked: its first micro-batch has to do
                self._number = power_of_two(torch.where(count != 0, count * extent, self._most(term, extent)))
            return
        empty = not self._items
        self._items, self._share = self._items + abs(count), self._share + 1 / extent
        items = self._items / self._share if self._items else self._most(term, extent)
        guess, number = power_of_two(items), self._number
        if first:
            self._number = guess
        elif (
            isinstance(guess, float) and isinstance(number, float) and self._adapts and (empty or guess >= FAR * number)
        ):
            self._number, self._correction = guess, number / guess

    def _most(self, term: LossSum, extent: float) -> float:
        """What is divided by while nothing has been counted."""
        return max(_places(term) * extent, self._extent)

    def of(self, answer: ParsedLoss) -> Divisors:
        """Divide by the guess, or by the true denominators once these are known."""
        if self._true is not None:
            return counted_divisors(self._true, answer)
        known = {"one": 1.0, "once": float(self._world)}
        return {key: known.get(term.kind, self._number) for key, term in answer.terms.items()}

    @property
    def guess(self) -> float:
        """Say this rank's share of the number to agree on."""
        return 0.0 if self._agreed or self._pattern is None else float(self._number)

    def use_agreed(self, number: float) -> None:
        """Divide by the sum of all ranks' guesses from now on."""
        if number:
            self._number, self._agreed = float(power_of_two(number)), True

    def settle(self, sums: LossTotals) -> Count:
        """Return the ratio of the guess to the true denominator."""
        if self._exact_last:
            self._true = sums
        averaged = [key for key, kind in sums.schema.terms if kind not in KNOWN]
        if not averaged or not self.loose:
            return 1.0
        denominator = sums.denominator(averaged[0], "mean")
        if isinstance(denominator, float) and isinstance(self._number, float):
            return self._number / denominator if denominator else 0.0
        device = next(n.device for n in (denominator, self._number) if isinstance(n, Tensor))
        exact = torch.as_tensor(denominator, dtype=precise(device), device=device)
        return torch.where(exact != 0, self._number / exact, 0.0)


class Known(Denominators):
    """Divide by the denominators of the whole batch, known before the first backward.

    Args:
        everywhere: finds the terms' denominators over all ranks.
        here: finds what this rank's micro-batches were said to count.
        source: who said so, for the error.
        before: what this rank's micro-batches added up to in a counting pass, which they must do again.
    """

    def __init__(
        self,
        everywhere: Callable[[ParsedLoss], Divisors],
        here: Callable[[ParsedLoss], Divisors],
        source: str,
        before: LossTotals | None = None,
    ) -> None:
        self._everywhere, self._here, self._source, self._before = everywhere, here, source, before
        self._expected: Divisors = {}

    def observe(self, answer: ParsedLoss, extent: float) -> bool:
        """Note what was said beforehand of the answer's terms."""
        self._expected.update(self._here(answer))
        return True

    def of(self, answer: ParsedLoss) -> Divisors:
        """Divide by what is known."""
        return self._everywhere(answer)

    def check(self, sums: LossTotals) -> None:
        """Hold the counts of the answers against what was said beforehand."""
        for key, kind in sums.schema.terms:
            found, expected = sums.counts[key], self._expected.get(key, 0.0)
            if kind in KNOWN or isinstance(found, Tensor) or isinstance(expected, Tensor):
                continue
            if not math.isclose(found, expected, rel_tol=1e-5, abs_tol=1e-9):
                raise InexactError(
                    f"{self._source} counted {expected:g} items for the term {key[0]!r}, its loss divides by {found:g}"
                    ": the gradient would be off by their ratio. Count the same items in both, micro-batches for which "
                    "the loss function returns None included."
                )
        if self._before is not None:
            _same_answers(self._before, sums)


def stated_divisors(sums: LossTotals, answer: ParsedLoss) -> Divisors:
    """Look the terms of an answer up among the counts that ``items=`` stated, by name or position.

    Raises:
        LossError: if a term has no stated count, or there are more counts than terms.
    """
    counts = {key[0]: count for key, count in sums.counts.items()}
    averaged = [key for key, term in answer.terms.items() if term.kind not in KNOWN]
    by_name = sums.schema.named
    names = _names(answer.terms)
    if not by_name and len(counts) != len(names):
        names = _names(averaged)  # a count for each term that has one, none for sums and what exists once
    places = {name: name if by_name else place for place, name in enumerate(names)}
    if any(places[key[0]] not in counts for key in averaged) or (not by_name and len(counts) != len(names)):
        raise LossError(
            f"items= states {len(counts)} counts ({list(counts)}), but the loss function returned the terms {names}. "
            "Return one count a term, in their order or under their names."
        )
    return {key: counts[places[key[0]]] if key in averaged else 1.0 for key in answer.terms}


def _names(keys: Iterable[TermKey]) -> list[str | int]:
    """Name the terms once each, in their order."""
    return list(dict.fromkeys(key[0] for key in keys))


def uniform(sums: LossTotals, world: int) -> bool:
    """Tell whether one common factor mends what ranks propagated with numbers of their own."""
    kinds = {kind for _, kind in sums.schema.terms}
    counts = {sums.denominator(key, kind) for key, kind in sums.schema.terms if kind != "one"}
    if kinds <= set(KNOWN):
        return counts <= {float(world)}
    return kinds == {"mean"} and len(counts) == 1


def _same_answers(before: LossTotals, now: LossTotals) -> None:
    """Notice a loss function that answers differently the second time; on a device that would mean to wait for it."""
    if any(isinstance(count, Tensor) for count in now.counts.values()):
        return
    for key, first in before.totals.items():
        second = now.totals.get(key, torch.zeros_like(first))
        if first.device.type == "cpu" and not torch.isclose(first, second, rtol=1e-3, atol=1e-6, equal_nan=True):
            raise InexactError(
                f"The loss function answered differently the second time: the term {key[0]!r} added up to "
                f"{first.item():g} in the counting pass and to {second.item():g} after it. It keeps a state of its own "
                "or draws from a generator of its own. State the counts with items=, then each micro-batch is run once."
            )


def _places(term: LossSum) -> float:
    """How many items a micro-batch could have had: as many as there are weights or labels, or values in its sum."""
    given = term.source.numel() if isinstance(term.source, Tensor) else 1
    return float(given if given > 1 else values_summed(term) or 1)


def _pattern(answer: ParsedLoss) -> frozenset[TermKey] | None:
    """Which terms one provisional number serves; None if it takes several."""
    averaged = frozenset([key for key, term in answer.terms.items() if term.kind not in KNOWN])
    if len(answer.terms) == 1:
        return averaged
    groups = {group for key, group in answer.groups.items() if key in averaged}
    return None if len(groups) > 1 or (groups and len(averaged) < len(answer.terms)) else averaged


def counted_divisors(sums: LossTotals, answer: ParsedLoss) -> Divisors:
    """Look the terms of an answer up among sums that were counted beforehand.

    Raises:
        InexactError: for a term that was not there then.
    """
    kinds = dict(sums.schema.terms)
    unknown = [key for key in answer.terms if key not in kinds]
    if unknown:
        raise InexactError(
            f"The loss function returned the term {unknown[0][0]!r}, which it did not return for the same micro-batch "
            "in the counting pass. Make its terms depend on the micro-batch alone, or state the counts with items=."
        )
    return {key: sums.denominator(key, kinds[key]) for key in answer.terms}
