"""Find out by measuring what a ready-made scalar loss is the mean of.

A model that returns one number does not say what it averages over. Signatures, class names and declarations mislead,
but the number itself does not: a mean over n items is the weighted mean of the means over its parts, and so is its
gradient; a sum divided by n if it is told n is the sum of its parts. A way of counting is believed only if it explains
a batch by two uneven parts of it, in value and in gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from wholebatch.errors import LossError
from wholebatch.model.comparison import distance

Inputs: TypeAlias = "Mapping[str, Any]"
Counter: TypeAlias = "Callable[[Inputs], Tensor | float]"

IGNORED = -100
LABELS = ("labels", "label", "start_positions")
"""What models call the targets of a row."""

FAR = 2.0**40  # a count so large that a loss divided by it vanishes beside anything that is not divided

HOW_TO_STATE = (
    "State what the loss averages over: return wb.mean(values, weights), wb.from_mean(loss, items=n) or a sum of such "
    "terms from compute_loss, or give exact(Trainer, items=...) the function that counts a micro-batch's items. If its "
    "rows meet each other (negatives of the batch, statistics of the batch, sorted rows) or it has several means, no "
    "count can mend it: exact(Trainer, coupled=True) takes the loss of all rows of a window at once, as "
    "wb.coupled_backward does."
)


@dataclass(frozen=True)
class Count:
    """A way of counting what a micro-batch's loss averages over: what is counted, and the target that is not."""

    kind: str
    ignored: int = IGNORED

    def __call__(self, inputs: Inputs) -> Tensor | float:
        """Count a micro-batch."""
        return _KINDS[self.kind](inputs, self.ignored)

    def __str__(self) -> str:
        return self.kind if self.ignored == IGNORED else f"{self.kind} but {self.ignored}"


def targets_of(inputs: Inputs) -> Tensor:
    """Return the labels, or any tensor with rows where a model calls its targets otherwise."""
    named = (inputs.get(name) for name in LABELS)
    found = next((value for value in named if isinstance(value, Tensor) and value.dim()), None)
    return found if found is not None else next(v for v in inputs.values() if isinstance(v, Tensor) and v.dim())


def has_rows(inputs: Any) -> bool:
    """Say whether anything can be counted in a micro-batch."""
    return isinstance(inputs, Mapping) and any(isinstance(v, Tensor) and v.dim() for v in inputs.values())


def _answers(inputs: Inputs, ignored: int) -> Tensor | float:
    """Count answers whose beginning lies inside of the text; those that lie behind its end are no targets."""
    length = next(v for v in inputs.values() if isinstance(v, Tensor) and v.dim() > 1).shape[1]
    begins, ends = (inputs[name].reshape(-1) < length for name in ("start_positions", "end_positions"))
    if int(begins.sum()) != int(ends.sum()):
        raise LossError(
            f"{int(begins.sum())} answers begin within the {length} positions of the text and {int(ends.sum())} end "
            "there: two means with items of their own. Drop these answers, or return two terms from compute_loss: "
            "wb.losses.cross_entropy(start_logits, start) + wb.losses.cross_entropy(end_logits, end)."
        )
    return float(begins.sum())


_KINDS: dict[str, Callable[[Inputs, int], Tensor | float]] = {
    "ready_labels": lambda inputs, ignored: torch.sum(inputs["shift_labels"] != ignored),
    "shifted_labels": lambda inputs, ignored: torch.sum(inputs["labels"][..., 1:] != ignored),
    "all_labels": lambda inputs, ignored: (targets_of(inputs) != ignored).sum(),
    "answers": _answers,
    "rows": lambda inputs, ignored: float(targets_of(inputs).shape[0]),
    "pairs": lambda inputs, ignored: targets_of(inputs).shape[0] / 2,
    "one": lambda inputs, ignored: 1.0,
}


def contract(inputs: Inputs, causal: bool, ignored: Sequence[int] = ()) -> list[Count]:
    """Return the ways of counting to be tried, the one that the Trainer's contract names first.

    Labels shifted by the collator count as they are, a causal model's after the shift, any other's as they stand;
    targets that the loss was seen to ignore come next.
    """
    if "shift_labels" in inputs:
        return [Count("ready_labels")]
    labels = inputs.get("labels")
    answers = ["answers"] if {"start_positions", "end_positions"} <= inputs.keys() else []
    if not isinstance(labels, Tensor) or not labels.dim():
        return [Count(kind) for kind in (*answers, "rows", "one")]
    kinds = ["all_labels"]
    if labels.dim() > 1:
        kinds = ["shifted_labels", "all_labels"] if causal else ["all_labels", "shifted_labels"]
    others = [value for value in ignored if value != IGNORED]
    return [Count(kind, value) for value in (IGNORED, *others) for kind in kinds] + [Count("rows"), Count("one")]


class Said(NamedTuple):
    """What a loss said about some rows: its value, and its gradient by parameters in one row of numbers."""

    value: float
    gradient: Tensor

    def __add__(self, other: Any) -> Said:
        return Said(self.value + other.value, self.gradient + other.gradient)

    def __mul__(self, factor: Any) -> Said:
        return Said(self.value * factor, self.gradient * factor)


class Compared(NamedTuple):
    """Some rows and two parts of them: each as inputs and as what the loss said, whole first."""

    inputs: tuple[Inputs, Inputs, Inputs]
    said: tuple[Said, Said, Said]

    def counts(self, counter: Counter) -> list[float]:
        """Count the whole and its parts."""
        return [float(counter(inputs)) for inputs in self.inputs]

    def error(self, counter: Counter, summed: bool = False) -> float:
        """Return how far this way of counting is from explaining the whole by its parts; infinite if it cannot."""
        counts = self.counts(counter)
        whole, first, second = self.said
        scale = max(abs(said.value) for said in self.said)
        if summed:
            return apart(whole, first + second, scale)
        if not counts[0] or abs(counts[0] - counts[1] - counts[2]) > 1e-6 * counts[0]:
            return float("inf")
        return apart(whole, first * (counts[1] / counts[0]) + second * (counts[2] / counts[0]), scale)


def undivided(near: Said, far: Said) -> float:
    """Return the part of a loss, from 0 to 1, that does not get smaller with the number of items that it is told."""
    if near.value:
        return far.value / near.value
    size = float(near.gradient.norm())
    return float(far.gradient.norm()) / size if size else 1.0


def believed(compared: Compared, order: Sequence[Count], tolerance: float) -> list[Count]:
    """Return the ways of counting that explain a mean or a sum by its parts, the likeliest first."""
    errors = {count: compared.error(count, summed=count.kind == "one") for count in order}
    return [count for count in order if errors[count] <= tolerance]


def by_division(divisors: Sequence[float], compared: Compared, order: Sequence[Count], tolerance: float) -> list[Count]:
    """Return the ways of counting that give what the loss divides by when it is told nothing."""

    def fits(count: Count) -> bool:
        pairs = zip(compared.counts(count), divisors, strict=True)
        return all(abs(counted - divisor) <= tolerance * abs(divisor) for counted, divisor in pairs)

    return [count for count in order if fits(count)]


def apart(whole: Said, parts: Said, scale: float) -> float:
    """The larger of two relative distances: of the values and of the gradients."""
    return max(abs(whole.value - parts.value) / max(scale, 1e-30), distance([parts.gradient], [whole.gradient]))
