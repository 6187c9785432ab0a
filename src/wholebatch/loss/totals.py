"""The sums of a window: every term's total and count over its micro-batches, and what follows from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, overload

import torch
from torch import Tensor

from wholebatch.errors import LossError, SyncError
from wholebatch.loss.counts import Count
from wholebatch.loss.flags import Flags
from wholebatch.loss.forms import Forms
from wholebatch.loss.terms import LossSum, ParsedLoss, TermKey, plain_count

KNOWN = ("one", "once")
"""The kinds of terms whose denominator does not depend on the batch."""


@dataclass(frozen=True)
class Schema:
    """Which terms and metrics there are, in the order in which their numbers stand in a message."""

    named: bool = False
    terms: tuple[tuple[TermKey, str], ...] = ()
    metrics: tuple[tuple[str, str], ...] = ()
    measured: bool = False
    """Whether some rank measures its micro-batches' shares, for which all come together once more."""

    def __or__(self, other: Schema) -> Schema:
        measured = self.measured or other.measured
        if not other.terms:
            return Schema(self.named, self.terms, _joined(self.metrics, other.metrics), measured)
        if self.terms and self.named != other.named:
            raise SyncError(
                "One rank's loss function returned a dict of terms and another's none, so the terms cannot be told "
                f"apart: {self.terms} and {other.terms}. Return the same form on every rank."
            )
        return Schema(other.named, _joined(self.terms, other.terms), _joined(self.metrics, other.metrics), measured)

    @property
    def size(self) -> int:
        """How many numbers it takes."""
        return 3 * len(self.terms) + 2 * len(self.metrics)


@dataclass
class LossTotals:
    """Totals and counts over a window: of this rank's micro-batches, or of all ranks' after the agreement."""

    schema: Schema = field(default_factory=Schema)
    totals: dict[TermKey, Tensor] = field(default_factory=dict)
    weighted: dict[TermKey, Tensor] = field(default_factory=dict)
    counts: dict[TermKey, Count] = field(default_factory=dict)
    metrics: dict[str, tuple[Tensor, Count]] = field(default_factory=dict)

    def denominator(self, key: TermKey, kind: str) -> Count:
        """What a term is divided by: its items, or 1 for a total."""
        return 1.0 if kind == "one" else self.counts.get(key, 0.0)

    @property
    def alive(self) -> Count:
        """A number or truth value that is 0 if nothing in the window was there to learn from."""
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
        for name, _ in schema.metrics:
            numbers += self.metrics.get(name, (0.0, 0.0))
        return torch.tensor([float(n) for n in numbers], dtype=torch.float64)

    @classmethod
    def of_numbers(cls, schema: Schema, numbers: Tensor) -> LossTotals:
        """Read sums from a message."""
        sums, rest = cls(schema), iter(numbers.unbind())
        for key, _ in schema.terms:
            sums.totals[key], sums.weighted[key], sums.counts[key] = next(rest), next(rest), float(next(rest))
        sums.metrics = {name: (next(rest), float(next(rest))) for name, _ in schema.metrics}
        return sums

    def report(self, device: torch.device | None) -> dict[str, Any]:
        """Work out loss, terms, items and metrics: `Result`'s fields of these names."""
        means: dict[TermKey, Tensor] = {}
        shares: dict[TermKey, Tensor] = {}
        for key, kind in self.schema.terms:
            total, weighted, denominator = self.totals[key], self.weighted[key], self.denominator(key, kind)
            means[key] = quotient(total, denominator)
            shares[key] = means[key] if weighted is total else quotient(weighted, denominator)
        loss = _sum(list(shares.values())).clone() if shares else torch.zeros((), device=device)
        return {
            "loss": loss,
            "terms": self._as_returned(means, shares),
            "items": self.items(),
            "metrics": {
                name: quotient(self.metrics[name][0], 1.0 if kind == "one" else self.metrics[name][1])
                for name, kind in self.schema.metrics
            },
        }

    def items(self) -> tuple[Tensor, ...] | dict[str, Tensor]:
        """Return each term's items, in the form in which the loss function returned the terms."""
        kinds = self.schema.terms
        return self._as_returned({key: _count(1.0 if kind in KNOWN else self.counts[key]) for key, kind in kinds})

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


class _NotedTerm(NamedTuple):
    """What is kept of a term: detached, so that its graph can go."""

    kind: str
    total: Tensor
    weight: Count
    items: Count


@dataclass(frozen=True)
class MicroBatchSize:
    """What one micro-batch held.

    Attributes:
        index: which rows of the batch it took, or of the loader's own micro-batch where a window of these was cut.
        items: each term's items in it, in the form of `Result.items`; 0 for a term that it did not have.
    """

    index: Sequence[int]
    items: tuple[Tensor, ...] | dict[str, Tensor]

    @property
    def rows(self) -> int:
        """How many rows it took."""
        return len(self.index)


class Sizes(Sequence[MicroBatchSize]):
    """The sizes of a window's micro-batches, in the order in which they ran; made when they are asked for.

    Example:
        >>> import torch, wholebatch as wb
        >>> model, rows = torch.nn.Linear(3, 1), torch.randn(10, 3)
        >>> result = wb.backward(model, lambda model, x: model(x).square(), rows, micro_batch_size=4)
        >>> [size.rows for size in result.sizes], [float(size.items[0]) for size in result.sizes]
        ([4, 4, 2], [4.0, 4.0, 2.0])
    """

    def __init__(
        self,
        schema: Schema | None = None,
        indices: Sequence[Sequence[int]] = (),
        terms: Sequence[Mapping[TermKey, _NotedTerm]] = (),
    ) -> None:
        self._schema, self._indices, self._terms = schema or Schema(), indices, terms

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, place: int) -> MicroBatchSize: ...
    @overload
    def __getitem__(self, place: slice) -> list[MicroBatchSize]: ...
    def __getitem__(self, place: int | slice) -> MicroBatchSize | list[MicroBatchSize]:
        """Return what one micro-batch held, or several."""
        if isinstance(place, slice):
            return [self[each] for each in range(len(self))[place]]
        terms = self._terms[place] if self._terms else {}
        counts = {key: terms[key].items if key in terms else 0.0 for key, _ in self._schema.terms}
        return MicroBatchSize(self._indices[place], LossTotals(self._schema, counts=counts).items())

    def __repr__(self) -> str:
        return f"Sizes(rows={[len(index) for index in self._indices]})"


class LossAccumulator:
    """Collects what the loss function says, micro-batch by micro-batch, without reading a number from the device.

    Args:
        holds_counts: whether stated items are held against what a mean was divided by.
    """

    def __init__(self, holds_counts: bool = True) -> None:
        self._indices: list[Sequence[int]] = []
        self._terms: list[dict[TermKey, _NotedTerm]] = []
        self._metrics: list[dict[str, _NotedTerm]] = []
        self._forms = Forms(holds_counts)

    def add(self, answer: ParsedLoss | None, index: Sequence[int] = ()) -> ParsedLoss | None:
        """Note one micro-batch's sums; return what of it is to be learned from.

        Args:
            answer: about the micro-batch.
            index: which rows it took.

        Raises:
            LossError: if its terms do not fit those that were noted before.
        """
        self._indices.append(index)
        if answer is None:
            self._terms.append({})
            return None
        self._forms.check(answer)
        repeated = [key for key, term in answer.terms.items() if term.kind == "once" and self._has(key)]
        for key in repeated:
            self._forms.compare(key, self._first(key), answer.terms[key])
        if repeated:
            answer = answer.without(repeated)
        self._terms.append({key: _noted(term) for key, term in answer.terms.items()})
        self._metrics.append({name: _noted(metric) for name, metric in answer.metrics.items()})
        return answer if answer.terms else None

    def mark(self) -> tuple[int, int]:
        """Return how much has been noted, to rewind to."""
        return len(self._terms), len(self._metrics)

    def rewind(self, mark: tuple[int, int]) -> None:
        """Forget what has been noted since a mark."""
        del self._terms[mark[0] :], self._metrics[mark[1] :], self._indices[mark[0] :]

    @property
    def losses(self) -> list[list[Tensor]]:
        """Each micro-batch's totals."""
        return [[noted.total for noted in terms.values()] for terms in self._terms]

    def sizes(self, schema: Schema) -> Sizes:
        """Say what each micro-batch held, of the terms that the whole batch has."""
        return Sizes(schema, self._indices, self._terms)

    def sums(self) -> LossTotals:
        """Add up what was noted."""
        terms, metrics = _by_key(self._terms), _by_key(self._metrics)
        kinds = tuple((key, notes[0].kind) for key, notes in terms.items())
        metric_kinds = tuple((name, notes[0].kind) for name, notes in metrics.items())
        sums = LossTotals(Schema(bool(self._forms.named), kinds, metric_kinds))
        for key, notes in terms.items():
            sums.totals[key] = _sum([note.total for note in notes])
            sums.weighted[key] = _weighted(notes, sums.totals[key])
            sums.counts[key] = count_total([note.items for note in notes])
        for name, notes in metrics.items():
            sums.metrics[name] = _sum([n.total * n.weight for n in notes]), count_total([n.items for n in notes])
        return sums

    @property
    def flags(self) -> Flags:
        """What a device has yet to say about the answers."""
        return self._forms.flags

    def _has(self, key: TermKey) -> bool:
        return any(key in terms for terms in self._terms)

    def _first(self, key: TermKey) -> Tensor:
        return next(terms[key].total for terms in self._terms if key in terms)


def stated_sums(answers: Iterable[Any]) -> LossTotals:
    """Add up what ``items=`` returned for each micro-batch: counts under names or in the order of the terms.

    Raises:
        LossError: for anything that is no number, nor numbers in a sequence or under names.
    """
    counts: dict[TermKey, list[Count]] = {}
    for answer in answers:
        if isinstance(answer, Mapping):
            pairs: list[tuple[str | int, Any]] = [(str(name), count) for name, count in answer.items()]
        else:
            pairs = [*enumerate(answer if isinstance(answer, (list, tuple)) else [answer])]
        for place, count in pairs:
            counts.setdefault((place, 0), []).append(_stated_number(count))
    schema = Schema(named=any(isinstance(place, str) for place, _ in counts), terms=tuple((k, "mean") for k in counts))
    return LossTotals(schema, counts={key: count_total(found) for key, found in counts.items()})


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


K = TypeVar("K")


def _by_key(notes: Sequence[Mapping[K, _NotedTerm]]) -> dict[K, list[_NotedTerm]]:
    found: dict[K, list[_NotedTerm]] = {}
    for each in notes:
        for key, note in each.items():
            found.setdefault(key, []).append(note)
    return found


def _noted(term: LossSum) -> _NotedTerm:
    kind = term.kind if term.kind in KNOWN else "mean"
    weight = term.weight.detach() if isinstance(term.weight, Tensor) else term.weight
    return _NotedTerm(kind, term.total.detach(), weight, term.count)


def _sum(totals: Sequence[Tensor]) -> Tensor:
    return totals[0] if len(totals) == 1 else torch.stack(list(totals)).sum()


def _weighted(notes: Sequence[_NotedTerm], total: Tensor) -> Tensor:
    first = notes[0].weight
    if isinstance(first, float) and all(isinstance(note.weight, float) and note.weight == first for note in notes):
        return total if first == 1.0 else total * first
    return torch.stack([note.total * note.weight for note in notes]).sum()


def _count(count: Count) -> Tensor:
    return count if isinstance(count, Tensor) else torch.tensor(count, dtype=torch.float64)


def _device_of(counts: Sequence[Any]) -> torch.device:
    return next((c.device for c in counts if isinstance(c, Tensor)), torch.device("cpu"))


def _stated_number(count: Any) -> Count:
    try:
        return plain_count(count)
    except LossError as error:
        raise LossError(f"items= must return a number, or one for each term. {error}") from None


def _joined(first: tuple[Any, ...], second: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(first + second))
