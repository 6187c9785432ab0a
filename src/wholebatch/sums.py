"""The sums of a window: every term's total and count over its pieces, and what follows from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from wholebatch.errors import LossError, SyncError
from wholebatch.loss import Answer, Count, Mean, TermKey, describe, plain_count

KNOWN = ("one", "once")
"""The kinds of terms whose denominator does not depend on the batch."""


@dataclass(frozen=True)
class Schema:
    """Which terms and metrics there are, in the order in which their numbers stand in a message."""

    named: bool = False
    terms: tuple[tuple[TermKey, str], ...] = ()
    metrics: tuple[str, ...] = ()

    def __or__(self, other: Schema) -> Schema:
        if not other.terms:
            return Schema(self.named, self.terms, _joined(self.metrics, other.metrics))
        if self.terms and self.named != other.named:
            raise SyncError(
                "One rank's loss function returned a dict of terms and another's none, so the terms cannot be told "
                f"apart: {self.terms} and {other.terms}. Return the same form on every rank."
            )
        return Schema(other.named, _joined(self.terms, other.terms), _joined(self.metrics, other.metrics))

    @property
    def size(self) -> int:
        """How many numbers it takes."""
        return 3 * len(self.terms) + 2 * len(self.metrics)


@dataclass
class Sums:
    """Totals and counts over a window: of this rank's pieces, or of all ranks' after the agreement."""

    schema: Schema = field(default_factory=Schema)
    totals: dict[TermKey, Tensor] = field(default_factory=dict)
    weighted: dict[TermKey, Tensor] = field(default_factory=dict)
    counts: dict[TermKey, Count] = field(default_factory=dict)
    metrics: dict[str, tuple[Tensor, Count]] = field(default_factory=dict)

    def denominator(self, key: TermKey, kind: str) -> Count:
        """What a term is divided by: its items, or 1 for a total."""
        return 1.0 if kind == "one" else self.counts.get(key, 0.0)

    @property
    def items(self) -> Count:
        """A number that is 0 if nothing in the window was there to learn from."""
        counts = [self.denominator(key, kind) for key, kind in self.schema.terms]
        found = [c != 0 for c in counts]
        if all(isinstance(f, bool) for f in found):
            return float(any(found))
        return torch.stack([torch.as_tensor(f).to(_device_of(counts)) for f in found]).any()

    def numbers(self, schema: Schema) -> Tensor:
        """Write the sums down for a message, zeros for what this rank does not have."""
        numbers: list[Count] = []
        for key, _ in schema.terms:
            numbers += [self.totals.get(key, 0.0), self.weighted.get(key, 0.0), self.counts.get(key, 0.0)]
        for name in schema.metrics:
            numbers += self.metrics.get(name, (0.0, 0.0))
        return torch.tensor([float(n) for n in numbers], dtype=torch.float64)

    @classmethod
    def of_numbers(cls, schema: Schema, numbers: Tensor) -> Sums:
        """Read sums from a message."""
        sums, rest = cls(schema), iter(numbers.unbind())
        for key, _ in schema.terms:
            sums.totals[key], sums.weighted[key], sums.counts[key] = next(rest), next(rest), float(next(rest))
        sums.metrics = {name: (next(rest), float(next(rest))) for name in schema.metrics}
        return sums

    def report(self, device: torch.device | None) -> dict[str, Any]:
        """Work out loss, terms, items and metrics: Result's fields of these names."""
        means: dict[TermKey, Tensor] = {}
        shares: dict[TermKey, Tensor] = {}
        for key, kind in self.schema.terms:
            means[key] = quotient(self.totals[key], self.denominator(key, kind))
            shares[key] = quotient(self.weighted[key], self.denominator(key, kind))
        items = {key: _count(self.denominator(key, kind)) for key, kind in self.schema.terms}
        loss = torch.stack(list(shares.values())).sum() if shares else torch.zeros((), device=device)
        return {
            "loss": loss,
            "terms": self._as_returned(means, shares),
            "items": self._as_returned(items),
            "metrics": {name: quotient(*sums) for name, sums in self.metrics.items()},
        }

    def _as_returned(
        self, values: dict[TermKey, Tensor], shares: dict[TermKey, Tensor] | None = None
    ) -> tuple[Tensor, ...] | dict[str, Tensor]:
        if not self.schema.named:
            return tuple(values.values())
        composite = {name for name, j in values if j > 0}
        returned: dict[str, Tensor] = {}
        for key, value in values.items():
            name = str(key[0])
            if name in composite and shares is not None:
                returned[name] = returned.get(name, torch.zeros_like(value)) + shares[key]
            else:
                returned.setdefault(name, value)
        return returned


class Tally:
    """Collects what the loss function says, piece by piece, without reading a number from the device."""

    def __init__(self) -> None:
        self.losses: list[list[Tensor]] = []
        self._kinds: dict[TermKey, str] = {}
        self._named = False
        self._width: int | None = None
        self._totals: dict[TermKey, list[Tensor]] = {}
        self._weights: dict[TermKey, list[Count]] = {}
        self._counts: dict[TermKey, list[Count]] = {}
        self._metrics: dict[str, tuple[list[Tensor], list[Count]]] = {}

    def add(self, answer: Answer | None) -> Answer | None:
        """Note one micro-batch's sums; return what of it is to be learned from.

        Raises:
            LossError: if an unnamed sum has another number of terms than before.
        """
        self.losses.append([])
        if answer is None:
            return None
        for name, metric in answer.metrics.items():
            totals, counts = self._metrics.setdefault(name, ([], []))
            totals.append(metric.total.detach() * _detached(metric.weight))
            counts.append(metric.count)
        self._check_form(answer)
        repeated = {key for key, term in answer.terms.items() if term.kind == "once" and key in self._kinds}
        terms = {key: term for key, term in answer.terms.items() if key not in repeated}
        for key, term in terms.items():
            self._note(key, term)
        return Answer(terms, answer.metrics, answer.named) if terms else None

    def sums(self) -> Sums:
        """Add up what was noted."""
        sums = Sums(Schema(self._named, tuple(self._kinds.items()), tuple(self._metrics)))
        for key, totals in self._totals.items():
            sums.totals[key] = _total(totals)
            sums.weighted[key] = _weighted(totals, self._weights[key], sums.totals[key])
            sums.counts[key] = count_total(self._counts[key])
        sums.metrics = {name: (_total(t), count_total(c)) for name, (t, c) in self._metrics.items()}
        return sums

    def _note(self, key: TermKey, term: Mean) -> None:
        self._kinds[key] = term.kind if term.kind in KNOWN else "mean"
        total = term.total.detach()
        self.losses[-1].append(total)
        self._totals.setdefault(key, []).append(total)
        self._weights.setdefault(key, []).append(_detached(term.weight))
        self._counts.setdefault(key, []).append(term.count)

    def _check_form(self, answer: Answer) -> None:
        if not answer.terms:
            return
        width = None if answer.named else len(answer.terms)
        if self._kinds and (width != self._width or answer.named != self._named):
            raise LossError(
                f"The loss function returned {_form(self._width)} for an earlier micro-batch and {_form(width)} for "
                "this one, so its terms cannot be told apart. Name them: return {'ce': a, 'aux': 0.1 * b}."
            )
        self._width, self._named = width, answer.named


def stated_sums(answers: Iterable[Any]) -> Sums:
    """Add up what ``items=`` returned for each micro-batch: counts under names or in the order of the terms.

    Raises:
        LossError: for anything that is no number, nor numbers in a sequence or under names.
    """
    counts: dict[TermKey, list[Count]] = {}
    for answer in answers:
        if isinstance(answer, Mapping):
            pairs = [(str(name), count) for name, count in answer.items()]
        else:
            pairs = list(enumerate(answer if isinstance(answer, (list, tuple)) else [answer]))
        for place, count in pairs:
            counts.setdefault((place, 0), []).append(_stated_number(count))
    schema = Schema(named=any(isinstance(place, str) for place, _ in counts), terms=tuple((k, "mean") for k in counts))
    return Sums(schema, counts={key: count_total(found) for key, found in counts.items()})


def quotient(total: Tensor, count: Count) -> Tensor:
    """Divide, where dividing by no items gives 0."""
    if isinstance(count, Tensor):
        return torch.where(count != 0, total / count, torch.zeros_like(total))
    return total / count if count else torch.zeros_like(total)


def count_total(counts: Sequence[Count]) -> Count:
    """Add counts up: to a number if all of them are, to a tensor on their device otherwise."""
    if all(isinstance(c, float) for c in counts):
        return float(sum(counts))
    device = _device_of(counts)
    return torch.stack([torch.as_tensor(c).to(device) for c in counts]).sum()


def _total(totals: Sequence[Tensor]) -> Tensor:
    return totals[0] if len(totals) == 1 else torch.stack(list(totals)).sum()


def _weighted(totals: Sequence[Tensor], weights: Sequence[Count], total: Tensor) -> Tensor:
    first = weights[0]
    if isinstance(first, float) and all(isinstance(w, float) and w == first for w in weights):
        return total * first
    return torch.stack([t * w for t, w in zip(totals, weights, strict=True)]).sum()


def _count(count: Count) -> Tensor:
    return count if isinstance(count, Tensor) else torch.tensor(count, dtype=torch.float64)


def _detached(weight: Count) -> Count:
    return weight.detach() if isinstance(weight, Tensor) else weight


def _device_of(counts: Sequence[Any]) -> torch.device:
    return next((c.device for c in counts if isinstance(c, Tensor)), torch.device("cpu"))


def _stated_number(count: Any) -> Count:
    try:
        return plain_count(count)
    except LossError as error:
        raise LossError(f"items= must return a number, or one for each term. {error}") from None


def _form(width: int | None) -> str:
    return "a dict of terms" if width is None else f"a sum of {width} terms" if width > 1 else "one term"


def _joined(first: tuple[Any, ...], second: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(first + second))
