"""The backward of a micro-batch's share: from its terms, each begun with weight / denominator."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.amp import GradScaler

from wholebatch.errors import LossError
from wholebatch.loss.counts import Count, precise
from wholebatch.loss.denominators import Denominators, Divisors
from wholebatch.loss.terms import ParsedLoss, TermKey
from wholebatch.loss.totals import KNOWN

Seeds = list["Tensor | None"]


class BackwardSeeds:
    """Works out what a micro-batch's backward starts from.

    A backward that starts from ``weight / denominator`` at a term's sum needs no division in its graph.

    Args:
        scaler: whose scale the losses are multiplied with.
        divides: what the reduction over ranks divides gradients by.
        drops_empty: whether terms without items in the whole batch are left out; not where a wrapper waits for them.
    """

    def __init__(self, scaler: GradScaler | None, divides: int, drops_empty: bool) -> None:
        self._scaler, self._divides, self._drops_empty = scaler, divides, drops_empty
        self._some = self._constant = False
        self._units: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self._made: dict[tuple[torch.device, torch.dtype, float], Tensor] = {}

    def of(self, answer: ParsedLoss, denominators: Denominators) -> tuple[list[Tensor], Seeds]:
        """Return the tensors to go back from, and what to begin with at each; none for an answer that is constant."""
        divisors = denominators.of(answer)
        empty = _empty(divisors) if self._drops_empty and len(divisors) > 1 else ()
        outputs: list[Tensor] = []
        seeds: Seeds = []
        for key, (output, weight) in weighted(answer).items():
            if output.requires_grad and key not in empty:
                outputs.append(output)
                seeds.append(self._seed(output, weight, divisors[key]))
        self._some |= bool(outputs)
        self._constant |= not outputs and _has_items(answer)
        return outputs, seeds

    def check(self) -> None:
        """Raise if the window is over and nothing in it depended on a parameter, though it had items.

        Raises:
            LossError: saying what may be the cause.
        """
        if self._constant and not self._some:
            off = " Gradients are disabled here: torch.no_grad()." if not torch.is_grad_enabled() else ""
            raise LossError(
                "The loss of this window does not depend on any parameter that requires a gradient, in no micro-batch."
                f"{off} Compute it from the model's output, and look whether the model is frozen (requires_grad)."
            )

    def _seed(self, output: Tensor, weight: float, divisor: Count) -> Tensor:
        if isinstance(divisor, Tensor):
            exact = divisor.to(output.device, precise(output.device))
            ratio = torch.where(exact != 0, weight * self._divides / exact, 0.0)
            return (self._unit(output) * ratio).to(output.dtype)
        number = weight * self._divides / divisor if divisor else 0.0
        place = (output.device, output.dtype, number)
        if place not in self._made:
            self._made[place] = self._unit(output) * number
        return self._made[place]

    def _unit(self, output: Tensor) -> Tensor:
        """One, times the scaler's scale."""
        place = (output.device, output.dtype)
        if place not in self._units:
            one = torch.ones((), device=output.device, dtype=output.dtype)
            self._units[place] = one if self._scaler is None else self._scaler.scale(one).to(output.dtype)
        return self._units[place]


def weighted(answer: ParsedLoss) -> dict[TermKey, tuple[Tensor, float]]:
    """Split each weighted term into a tensor to go back from and a number to begin with."""
    return {
        key: (term.total, term.weight) if isinstance(term.weight, float) else (term.total * term.weight, 1.0)
        for key, term in answer.terms.items()
    }


def _empty(divisors: Divisors) -> set[TermKey]:
    """Name the terms without any item in a batch whose other terms have some: what they hold may not even be finite."""
    empty = {key for key, divisor in divisors.items() if isinstance(divisor, float) and divisor == 0}
    return empty if len(empty) < len(divisors) else set()


def _has_items(answer: ParsedLoss) -> bool:
    counts = [term.count for term in answer.terms.values() if term.kind not in KNOWN]
    return not counts or any(isinstance(count, Tensor) or count != 0 for count in counts)
