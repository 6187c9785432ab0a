"""One measuring of a bare number: what it is the mean of, by a whole micro-batch and two uneven parts of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.errors import LossError, SplitError
from wholebatch.integrations import probing
from wholebatch.integrations.infer_denominator import (
    FAR,
    HOW_TO_STATE,
    Compared,
    Count,
    Counter,
    Inputs,
    Said,
    believed,
    by_division,
    undivided,
)
from wholebatch.integrations.moe_balance import Router, recognise_router

ENOUGH = 4_000_000
"""Elements of a gradient that are compared: all of a small model's, the smallest parameters of a large one."""

UNFIT = (RuntimeError, ValueError, IndexError, TypeError, KeyError, AssertionError)
"""What a loss may raise about rows that it cannot be asked about alone, such as one half of a pair."""


@dataclass(frozen=True)
class Reading:
    """What a bare number was found to be.

    Attributes:
        counters: the ways of counting that explain it, the likeliest first; none if the user counts.
        divides: whether it is divided by the number of items that it is told.
        stated: whether it is no bare number, and says itself what it averages over.
        shared: whether it is declared to be a share of the window's, and does not ask how many items there are.
        router: the experts' share in it.
    """

    counters: tuple[Count, ...] = ()
    divides: bool = False
    stated: bool = False
    shared: bool = False
    router: Router | None = None

    def joined(self, other: Reading) -> Reading | None:
        """Return what explains both; None if nothing does."""
        counters = tuple(count for count in self.counters if count in other.counters)
        experts = [None if each.router is None else each.router.top_k for each in (self, other)]
        alike = replace(self, counters=(), router=None) == replace(other, counters=(), router=None)
        alike = alike and experts[0] == experts[1]
        return replace(self, counters=counters) if alike and bool(counters) == bool(self.counters) else None


@dataclass(frozen=True)
class Question:
    """A loss that is to be measured, and what is known of it beforehand.

    Attributes:
        model: whose loss it is.
        ask: returns the loss of a micro-batch and the model's outputs, told so many items.
        items: counts what it averages over, if the user declared it.
        own: whether it is the model's own.
        declared: what the class says of it: a share of the window's, not one, or nothing (None).
        sharded: whether the model is, and cannot be asked for a gradient.
        half: whether it is computed in half precision.
    """

    model: nn.Module
    ask: Callable[[nn.Module, Inputs, Any], tuple[Any, Any]]
    items: Counter | None
    own: bool
    declared: bool | None
    sharded: bool
    half: bool


class Recognition:
    """One measuring: what a loss is the mean of, by a whole and two parts of it.

    Args:
        question: the loss that is asked.
        order: the ways of counting that may explain it, the likeliest first.
        ignored: targets that the loss was seen to ignore.
        outputs: what the model returned besides the loss; None where the loss is not its own.
    """

    def __init__(self, question: Question, order: list[Count], ignored: Sequence[int], outputs: Any) -> None:
        self._question, self._order, self._ignored, self._outputs = question, order, ignored, outputs
        self._items, self._own = question.items, question.own
        self._declared, self._sharded = question.declared, question.sharded
        model = question.model
        self._parameters = [] if self._sharded else few(model)
        self._tolerance, self._near = tolerances(model, question.half)

    def reading(self, batches: Sequence[Inputs]) -> Reading:
        """Say what the loss is the mean of.

        Raises:
            LossError: if no count explains it.
        """
        first, ignored = self._items or self._order[0], probing.known_ignored(self._ignored, batches)
        self._refuse_filler(probing.widened(batches, ignored))
        try:
            cut = probing.uneven(batches, ignored)
        except SplitError as error:
            return self._of_one(batches[-1], error)
        rest = self._undivided(cut[0], first)
        if self._declared and self._items is None and abs(rest - 1) < self._tolerance:
            return Reading(shared=True)
        if abs(rest) < self._tolerance:
            return self._divided(cut)
        if abs(rest - 1) < self._tolerance:
            return self._averaged(cut, batches)
        return self._routed(batches[-1], rest)

    def _refuse_filler(self, widths: tuple[Inputs, Inputs] | None) -> None:
        """Refuse a loss that changes with the width that its micro-batch is filled up to."""
        if widths is None:
            return
        try:
            narrow, wide = (self._said(inputs, 1.0) for inputs in widths)
        except UNFIT:
            return
        if abs(narrow.value - wide.value) > self._near * max(abs(narrow.value), abs(wide.value)):
            raise LossError(
                f"The loss looks at padding: a micro-batch says {narrow.value:.6g}, and {wide.value:.6g} when it is as "
                "wide as another one of its window, so that micro-batches are no parts of one batch. Pad all of them "
                "to one width in the collator (padding='max_length'), or let the model mask what is filled up."
            )

    def _of_one(self, inputs: Inputs, error: SplitError) -> Reading:
        """Take a micro-batch that cannot be cut at the word of its loss, which is asked for its divisor."""
        if self._items is not None:
            return Reading()
        rest = self._undivided(inputs, self._order[0])
        if self._declared and abs(rest - 1) < self._tolerance:
            return Reading(shared=True)
        if abs(rest) > self._tolerance:
            raise LossError(f"What the loss averages over cannot be measured: {error} {HOW_TO_STATE}") from error
        if not self._own:
            return Reading((self._order[0],), divides=True)
        divisor = self._said(inputs, 1.0).value / self._said(inputs, None).value
        fits = [c for c in self._order if abs(float(c(inputs)) - divisor) <= self._tolerance * divisor]
        return self._found(fits, divides=True)

    def _undivided(self, inputs: Inputs, counter: Counter) -> float:
        items = max(float(counter(inputs)), 1.0)
        return undivided(self._said(inputs, items), self._said(inputs, items * FAR))

    def _divided(self, cut: probing.Cut) -> Reading:
        sums = self._compared(cut, 1.0)
        if sums is None or sums.error(lambda inputs: 1.0, summed=True) > self._near:
            raise LossError(
                f"The loss is divided by num_items_in_batch, but it is no sum over its rows. {HOW_TO_STATE}"
            )
        if self._items is not None:
            return Reading(divides=True)
        if not self._own or self._declared:
            return Reading((self._order[0],), divides=True)  # by the Trainer's contract it is told how many labels
        means = [self._said(inputs, None).value for inputs in cut]
        divisors = [said.value / mean for said, mean in zip(sums.said, means, strict=True)]
        return self._found(by_division(divisors, sums, self._order, self._tolerance), divides=True)

    def _averaged(self, cut: probing.Cut, batches: Sequence[Inputs]) -> Reading:
        told = None if self._own else 1.0
        compared = self._compared(cut, told)
        if compared is not None and self._items is None:
            found = believed(compared, self._order, self._near)
            if found:
                return self._told_apart(compared, found)
        pairs = probing.in_pairs(batches, probing.known_ignored(self._ignored, batches))
        halves = None if pairs is None else self._compared(pairs, told)
        if self._items is not None:
            return self._counted([compared, halves])
        if halves is not None:
            self._order.append(Count("pairs"))
        return self._found(believed(halves, self._order[-1:], self._near) if halves else [])

    def _counted(self, cuts: Sequence[Compared | None]) -> Reading:
        """Prove what the user counts: by rows, or by pairs."""
        counter = self._items
        asked = [compared for compared in cuts if compared is not None]
        if counter is None or not asked or any(compared.error(counter) <= self._near for compared in asked):
            return Reading()
        counts = asked[0].counts(counter)
        raise LossError(
            f"items= counts {counts[0]:g} in a micro-batch and {counts[1]:g} and {counts[2]:g} in two parts of it, but "
            f"the loss of the whole is not that of its parts weighted so. {HOW_TO_STATE}"
        )

    def _told_apart(self, compared: Compared, found: list[Count]) -> Reading:
        """Take what was found, unless without gradients the rows' losses are too alike to tell."""
        values = [said.value for said in compared.said[1:]]
        shares = {tuple(round(c / max(counts[0], 1.0), 6) for c in counts) for counts in map(compared.counts, found)}
        if self._sharded and len(shares) > 1 and abs(values[0] - values[1]) < 1e-3 * max(map(abs, values)):
            raise LossError(
                f"Two parts of a micro-batch have the losses {values[0]:.6g} and {values[1]:.6g}, too alike to tell "
                f"what is averaged over, and a sharded model is not asked for its gradient. {HOW_TO_STATE}"
            )
        return self._found(found)

    def _routed(self, inputs: Inputs, rest: float) -> Reading:
        """Explain a part that is not divided by the experts' load."""
        outputs, known = self._outputs, ("aux_loss", "router_logits")
        if not self._own or any(name not in outputs for name in known):
            raise LossError(
                f"A part of {rest:.3g} of the loss is not divided by num_items_in_batch, the rest is: two terms with "
                f"denominators of their own. {HOW_TO_STATE}"
            )
        with torch.no_grad():
            told = max(float(self._order[0](inputs)), 1.0)
            outputs = self._question.ask(self._question.model, inputs, told)[1]
        aside = self._said(inputs, told * FAR).value
        router = recognise_router(outputs, inputs.get("attention_mask"), aside, self._tolerance)
        divisor = (self._said(inputs, 1.0).value - aside) / (self._said(inputs, None).value - aside)
        fits = [c for c in self._order if abs(float(c(inputs)) - divisor) <= self._tolerance * divisor]
        return replace(self._found(fits, divides=True), router=router)

    def _found(self, counters: Sequence[Count], divides: bool = False) -> Reading:
        if counters:
            return Reading(tuple(counters), divides)
        names = ", ".join(map(str, self._order))
        raise LossError(f"The loss is no mean or sum over {names}, as far as measuring can tell. {HOW_TO_STATE}")

    def _compared(self, cut: probing.Cut, told: float | None) -> Compared | None:
        try:
            whole, first, rest = (self._said(inputs, told) for inputs in cut)
        except UNFIT:
            return None  # the loss cannot be asked about such rows alone
        return Compared(cut, (whole, first, rest))

    def _said(self, inputs: Inputs, told: float | None) -> Said:
        with torch.set_grad_enabled(bool(self._parameters)):
            loss: Tensor = self._question.ask(self._question.model, inputs, told)[0]
        return said_by(loss, self._parameters)


def said_by(loss: Tensor, parameters: Sequence[Tensor]) -> Said:
    """Return a loss's value and its gradient by parameters."""
    if not parameters or not loss.requires_grad:
        return Said(float(loss.detach()), torch.zeros(1))
    grads: Sequence[Tensor | None] = torch.autograd.grad(loss, parameters, allow_unused=True)
    pairs = zip(parameters, grads, strict=True)
    flat = [(torch.zeros_like(p) if g is None else g).detach().float().flatten().cpu() for p, g in pairs]
    return Said(float(loss.detach()), torch.cat(flat))


def tolerances(model: nn.Module, half: bool) -> tuple[float, float]:
    """Return how far two numbers may lie apart by rounding: of one computation, and of a whole and its parts."""
    fine = all(p.dtype in (torch.float32, torch.float64) for p in model.parameters()) and not half
    return (2e-5, 2e-4) if fine else (1e-2, 3e-2)


def few(model: nn.Module) -> list[Tensor]:
    """Return parameters to compare gradients by: the smallest first, until there are enough elements."""
    learning = sorted((p for p in model.parameters() if p.requires_grad), key=lambda p: p.numel())
    chosen: list[Tensor] = []
    held = 0
    for parameter in learning:
        if chosen and held + parameter.numel() > ENOUGH:
            break
        chosen.append(parameter)
        held += parameter.numel()
    return chosen
