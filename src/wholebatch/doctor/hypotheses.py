"""Why is this gradient not the reference's? Compute what each cause would give, and see which one it is.

A cause is named only if its gradient explains the measured one to rounding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.batch.window import Window
from wholebatch.doctor.first_window import Exhibit
from wholebatch.model.comparison import Comparison, compare, errors_of, joined, rounding_of, summed
from wholebatch.verify.explaining import where_rows_meet
from wholebatch.verify.finding import Change, Finding
from wholebatch.verify.reference import Reference, plain_gradient, rows_or_one, whole_gradient, whole_micro_batches

MOST_MICRO_BATCHES_MEANT = 128
DRAWN = "The model draws random numbers: the reference ran in the loop's micro-batches with the loop's draws."


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """A cause, and the gradient that a loop with this fault would have."""

    rule: str
    what: str
    gradient: Tensor


@dataclasses.dataclass(frozen=True)
class Measurement:
    """A window's gradient against the reference's.

    cause: the hypothesis that explains it, None where it is right or none does. residual: how far off the best one is.
    by_parameter: each parameter's distance over the norm of the whole reference.
    """

    comparison: Comparison
    tolerance: float
    cause: Hypothesis | None
    residual: float
    micro_batches: int
    by_parameter: dict[str, float]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether only rounding lies between."""
        return self.comparison.error <= self.tolerance

    def finding(self) -> Finding | None:
        """Return the finding that the measurement makes, None when it is right."""
        if self.ok:
            return None
        rule = self.cause.rule if self.cause is not None else "unexplained"
        what = (
            self.cause.what if self.cause is not None else "the gradient is not the reference's, and I do not know why"
        )
        amount = f"{self.comparison} (measured against the reference; the cause explains it to {self.residual:.0e})"
        if self.cause is None:
            amount = (
                f"{self.comparison} (measured against the reference; the best hypothesis is {self.residual:.0e} off)"
            )
        into = "wb.backward(model, loss_fn, batch, micro_batch_size=...)"
        if rule == "rows-meet":
            into = f'{into[:-1]}, batch_norm="exact")  # or wb.coupled_backward(model, encode, loss_fn, batch, ...)'
        return Finding(rule, what, amount, 10.0 + self.comparison.error, None, Change("loss.backward()", into))


class ReplayedLoop:
    """A loss function that starts each micro-batch from the random state that the loop had there."""

    def __init__(self, loss_fn: Callable[[Any, Any], Any], draws: Sequence[Tensor]) -> None:
        self.loss_fn = loss_fn
        self.draws = draws
        self.calls = 0

    def __call__(self, model: Any, micro_batch: Any) -> Any:
        """Call the loss function under the draws of this micro-batch."""
        torch.random.set_rng_state(self.draws[self.calls % len(self.draws)])
        self.calls += 1
        return self.loss_fn(model, micro_batch)


def measure(exhibit: Exhibit, loss_fn: Callable[[Any, Any], Any], world: int = 1, bound: float = 0.0) -> Measurement:
    """Compare the window's gradient with that of the user's own loss function, and find the cause.

    Args:
        exhibit: the window.
        loss_fn: follows the return contract of :mod:`wholebatch.loss.terms`; may return a plain mean where the window's
            micro-batches can be joined into one batch.
        world: over how many ranks the loop averages.
        bound: the norm that the loop clips to, 0 for none.

    Raises:
        ValueError: when the window holds nothing to measure.
    """
    micro_batches = exhibit.micro_batches()
    if exhibit.model is None or not micro_batches or not exhibit.gradient:
        seen = f"{len(micro_batches)} micro-batches and {len(exhibit.gradient)} gradients were seen"
        raise ValueError(f"There is nothing to measure: {seen}. The reference needs one whole window.")
    state = torch.random.get_rng_state()
    truth = reference_of(exhibit, exhibit.model, loss_fn, micro_batches)
    names = [name for name in truth.gradients if name in exhibit.gradient]
    whole = {name: truth.gradients[name] for name in names}
    measured, right = joined(exhibit.gradient, whole)
    size = compare(measured, right)
    rounding = rounding_of(next(iter(exhibit.gradient.values())).dtype)
    tolerance = summed(rounding.loop, len(micro_batches))
    cause: Hypothesis | None = None
    residual = size.error
    if size.error > tolerance:
        ideas = CandidateGradients(
            right,
            read_micro_batches(exhibit, exhibit.model, loss_fn, micro_batches),
            names,
            rows_in(micro_batches),
            world,
            bound,
        )
        cause, residual = ideas.best(measured, tolerance)
        cause = cause or partly(measured, right, exhibit, names, tolerance)
    if cause is not None and cause.rule == "rows-meet":
        where = where_rows_meet(exhibit.model, loss_fn, whole_micro_batches(Window(micro_batches), (), None)[0])
        cause = dataclasses.replace(cause, what=f"{cause.what}. {where}") if where is not None else cause
    torch.random.set_rng_state(state)
    notes = (DRAWN,) if exhibit.random else ()
    return Measurement(size, tolerance, cause, residual, len(micro_batches), errors_of(exhibit.gradient, whole), notes)


def reference_of(
    exhibit: Exhibit, model: nn.Module, loss_fn: Callable[[Any, Any], Any], micro_batches: list[Any]
) -> Reference:
    """Return the whole window's gradient: in one micro-batch, or in the loop's micro-batches and draws where it
    draws.
    """
    if exhibit.random:
        return plain_gradient(model, ReplayedLoop(loss_fn, exhibit.draws), micro_batches)
    return whole_gradient(model, loss_fn, Window(micro_batches))


def read_micro_batches(
    exhibit: Exhibit, model: nn.Module, loss_fn: Callable[[Any, Any], Any], micro_batches: list[Any]
) -> list[Reference]:
    """Return the gradient of each micro-batch's own loss."""
    return [
        plain_gradient(model, ReplayedLoop(loss_fn, [draws]) if exhibit.random else loss_fn, [micro_batch])
        for micro_batch, draws in zip(micro_batches, exhibit.draws, strict=False)
    ]


class CandidateGradients:
    """What the window's gradient would be under each fault, from the gradients of its micro-batches."""

    def __init__(
        self, whole: Tensor, read: Sequence[Reference], names: Sequence[str], rows: int, world: int, bound: float
    ) -> None:
        self.whole = whole
        self.rows = rows
        self.world = world
        self.bound = bound
        self.count = len(read)
        self.means = [torch.cat([answer.gradients[name].reshape(-1).double() for name in names]) for answer in read]
        self.items = [answer.items[0] if answer.items else 0.0 for answer in read]

    def best(self, measured: Tensor, tolerance: float) -> tuple[Hypothesis | None, float]:
        """Return the hypothesis nearest to what was measured, None unless it explains it, and how far off it is."""
        off, nearest = min(((compare(measured, idea.gradient).error, idea) for idea in self.all()), key=itemgetter(0))
        return (nearest if off <= tolerance else None), off

    def all(self) -> Iterator[Hypothesis]:
        """Yield every hypothesis."""
        yield from self.sums()
        yield from self.counts()
        yield from self.losses()

    def sums(self) -> Iterator[Hypothesis]:
        """Yield the ways of adding up the means of the micro-batches."""
        added = sum(self.means, torch.zeros_like(self.whole))
        yield Hypothesis("loss-not-divided", f"the means of {self.count} micro-batches are added up", added)
        if len(set(self.items)) > 1:
            yield Hypothesis(
                "mean-of-means", f"the means of {self.count} micro-batches are averaged", added / self.count
            )
        yield Hypothesis(
            "ranks-counted-twice", "the means of the micro-batches are multiplied by the ranks", added * self.world
        )
        for meant in range(2, MOST_MICRO_BATCHES_MEANT + 1):
            if meant != self.count:
                what = f"the window holds {self.count} micro-batches and is divided by {meant}"
                rule = "last-window-short" if meant > self.count else "loss-not-divided"
                yield Hypothesis(rule, what, added / meant)
        if self.bound:
            yield Hypothesis("clip-per-piece", "each micro-batch is clipped", self.clipped())

    def clipped(self) -> Tensor:
        """Return the sum of micro-batches that is clipped after each but the last."""
        total = torch.zeros_like(self.whole)
        for place, mean in enumerate(self.means, 1):
            total = total + mean / self.count
            if place < self.count:
                total = total * min(1.0, self.bound / max(float(total.norm()), 1e-30))
        return total

    def counts(self) -> Iterator[Hypothesis]:
        """Yield the ways of counting what the sum is divided by."""
        items = sum(self.items)
        shares = zip(self.means, self.items, strict=True)
        total = sum((mean * own for mean, own in shares), torch.zeros_like(self.whole))
        yield Hypothesis(
            "rows-meet",
            "each micro-batch is right by itself, but rows of different micro-batches meet",
            total / max(items, 1),
        )
        yield Hypothesis("sum-not-divided", f"the sum over {items:g} items is divided by nothing", total)
        what = f"the loss is divided by {items + self.rows:g}: labels counted before the shift"
        yield Hypothesis("labels-counted-before-shift", what, total / (items + self.rows))
        if self.world > 1:
            yield Hypothesis("ranks-counted-twice", "averaged over the ranks twice", self.whole / self.world)
            yield Hypothesis("ranks-counted-twice", "multiplied by the ranks", self.whole * self.world)

    def losses(self) -> Iterator[Hypothesis]:
        """Yield the ways of losing micro-batches."""
        for place, mean in ((1, self.means[0]), (self.count, self.means[-1])):
            what = f"only micro-batch {place} of {self.count} is in the gradient"
            yield Hypothesis("zero-grad-per-piece", f"{what}, undivided", mean)
            yield Hypothesis("zero-grad-per-piece", what, mean / self.count)


def partly(measured: Tensor, whole: Tensor, exhibit: Exhibit, names: list[str], tolerance: float) -> Hypothesis | None:
    """Explain a gradient that is right for most parameters and a whole number of times too large for the others."""
    count = len(exhibit.draws)
    explained, repeated, start = whole.clone(), [], 0
    for name in names:
        numel = exhibit.gradient[name].numel()
        part = slice(start, start + numel)
        start += numel
        if compare(measured[part], whole[part] * count).error <= tolerance and float(whole[part].norm()) > 0:
            explained[part] *= count
            repeated.append(name)
    if not repeated or compare(measured, explained).error > tolerance:
        return None
    what = f"{', '.join(repeated[:3])} get the gradient of each of {count} micro-batches, everything else is right"
    return Hypothesis("loss-parameters-counted-again", what, explained)


def rows_in(micro_batches: Sequence[Any]) -> int:
    """Return the rows of all micro-batches."""
    return sum(rows_or_one(micro_batch) for micro_batch in micro_batches)
