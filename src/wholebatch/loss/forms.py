"""What the answers of a window's micro-batches must have in common to be parts of one loss."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from wholebatch.errors import LossError
from wholebatch.loss.counts import Count
from wholebatch.loss.flags import Flags
from wholebatch.loss.graphs import ignored_targets, mean_divisors
from wholebatch.loss.terms import LossSum, ParsedLoss, TermKey

CLOSE = {torch.float64: 1e-9}
"""How far apart, relative, a value that exists once may come out in two micro-batches, where not 1e-5."""


COUNTED = 1e-4
"""How far apart, relative, sums of class weights may be by rounding."""


class Forms:
    """Looks whether the answers of a window fit together: the same terms, the same values where they exist once.

    Args:
        holds_counts: whether the items that are stated beside a mean are held against what it was divided by.

    Attributes:
        named: whether the terms have names; None before the first.
        flags: what a device has yet to say.
    """

    def __init__(self, holds_counts: bool = True) -> None:
        self._holds_counts = holds_counts
        self._divided: dict[tuple[TermKey, int], tuple[Tensor, Tensor]] = {}
        self.named: bool | None = None
        self.flags = Flags()
        self._pattern: tuple[tuple[str, float | None], ...] = ()

    def check(self, answer: ParsedLoss) -> None:
        """Note an answer.

        Raises:
            LossError: if its terms cannot be told apart from an earlier answer's, or if it counts ignored targets in.
        """
        if not answer.terms:
            return
        pattern = () if answer.named else tuple((_kind(t), _number(t.weight)) for t in answer.terms.values())
        if self.named is not None and (answer.named, pattern) != (self.named, self._pattern):
            self._refuse(answer.named, pattern)
        self.named, self._pattern = answer.named, pattern
        for key, term in answer.terms.items():
            if _kind(term) == "shape" and isinstance(term.source, torch.Size):
                for some in ignored_targets(term):
                    self.flags.add(some, partial(_ignored, key, term.count))
            elif term.kind == "count" and self._holds_counts:
                self._hold(key, term)

    def _hold(self, key: TermKey, term: LossSum) -> None:
        """Look whether the items of a mean are as large a part of what it was divided by as they were before.

        Raises:
            LossError: if not; then the batch's mean is another, whatever the items are.
        """
        for place, divisor in enumerate(mean_divisors(term)):
            stated = torch.as_tensor(term.count, dtype=divisor.dtype, device=divisor.device).detach()
            first, before = self._divided.setdefault((key, place), (divisor, stated))
            if first is divisor:
                continue
            one, other = divisor * before.to(divisor.device), first.to(divisor.device) * stated
            apart = ((one - other).abs() > COUNTED * torch.maximum(one, other)) & (stated != 0) & (before != 0)
            self.flags.add(apart, partial(_miscounted, key, (first, before), (divisor, stated)))

    def compare(self, key: TermKey, first: Tensor, term: LossSum) -> None:
        """Look whether a value that exists once per batch is the same in another micro-batch.

        Raises:
            LossError: if it is not.
        """
        now = term.total.detach()
        near = torch.isclose(
            now, first.to(now.device, now.dtype), rtol=CLOSE.get(now.dtype, 1e-5), atol=1e-12, equal_nan=True
        )
        self.flags.add(~near, partial(_differs, key, first, now))

    def _refuse(self, named: bool, pattern: tuple[tuple[str, float | None], ...]) -> None:
        before, now = _described(bool(self.named), self._pattern), _described(named, pattern)
        name = "Name them: return {'ce': a, 'aux': 0.1 * b}."
        if before != now:
            raise LossError(
                f"The loss function returned {before} for an earlier micro-batch and {now} for this one, so its terms "
                f"cannot be told apart. {name}"
            )
        was, found = next((b, n) for b, n in zip(self._pattern, pattern, strict=True) if b != n)
        raise LossError(
            f"The loss function returned a term without a name that was {_one(was)} for an earlier micro-batch and "
            f"is {_one(found)} for this one. Whether that is one term or two cannot be known, and their denominators "
            f"differ. {name} Under the same name they are one term."
        )


def _kind(term: LossSum) -> str:
    return "shape" if term.kind == "bare" else term.kind


def _number(weight: Count) -> float | None:
    return weight if isinstance(weight, float) else None


def _one(part: tuple[str, float | None]) -> str:
    kind, weight = part
    how = {
        "shape": "a mean of all values",
        "weights": "a mean by weights",
        "count": "a sum with a count",
        "one": "a total",
        "once": "a value that exists once",
    }.get(kind, f"a mean over {kind}")
    return f"{how} with a weight that is a tensor" if weight is None else f"{how} times {weight:g}"


def _described(named: bool, pattern: tuple[tuple[str, float | None], ...]) -> str:
    return "a dict of terms" if named else f"a sum of {len(pattern)} terms" if len(pattern) > 1 else "one term"


def _differs(key: TermKey, first: Tensor, now: Tensor) -> str:
    return (
        f"The term {key[0]!r} was returned as wb.once(value), but its value differs between micro-batches: "
        f"{first.item():g} and {now.item():g}. It is computed from their rows (or draws), and only the first would "
        "count. A mean over rows is wb.mean(values) or wb.from_mean(loss, items=n), a sum wb.total(values); what needs "
        "all rows at once is for wb.coupled_backward."
    )


def _miscounted(key: TermKey, before: tuple[Tensor, Tensor], now: tuple[Tensor, Tensor]) -> str:
    one, other = (f"{stated.item():g} items and was divided by {divisor.item():g}" for divisor, stated in (before, now))
    return (
        f"The term {key[0]!r} states {one} in one micro-batch, {other} in another: a cross entropy divides by the "
        "targets that are not ignored, or by their class weights. Micro-batches would weigh as the stated items do. "
        "State what it divides by, wb.from_mean(loss, items=(labels != ignore_index).sum()), or return "
        "wb.losses.cross_entropy(logits, labels, weight=..., ignore_index=...), which counts for itself."
    )


def _ignored(key: TermKey, count: Count) -> str:
    return (
        f"The loss values of the term {key[0]!r} are a cross entropy with ignored targets, for which "
        f'reduction="none" gives zeros: their mean over all {float(count):g} values would count these in. Use '
        "wb.losses.cross_entropy(logits, labels), or wb.mean(values, labels != ignore_index). To divide by all of them "
        "on purpose: wb.LossSum(values.sum(), values.numel())."
    )
