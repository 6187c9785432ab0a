"""Find out by measuring what a ready-made scalar loss is the mean of.

A model that returns one number does not say what it averages over. Signatures and class names mislead, but the number
itself does not: a mean over n items is the weighted mean of the means over its parts, and the sum divided by n if it
is told n. So the loss is asked a few times about the same rows, and a way of counting is believed only if it explains
the answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from wholebatch.batch import join, take
from wholebatch.errors import LossError, SplitError

Inputs: TypeAlias = "Mapping[str, Any]"
Counter: TypeAlias = "Callable[[Inputs], Tensor | float]"
LossOf: TypeAlias = "Callable[[Inputs, Tensor | float | None], Tensor]"

IGNORED = -100
_FAR = 2.0**40  # a count so large that a loss divided by it vanishes beside anything that is not divided


def shifted_labels(inputs: Inputs) -> Tensor | float:
    """Count the labels that a causal model predicts: after the shift, the first of each row is no target."""
    return torch.sum(inputs["labels"][..., 1:] != IGNORED)


def all_labels(inputs: Inputs) -> Tensor | float:
    """Count the labels that are not ignored, as they stand."""
    return (_labels(inputs) != IGNORED).sum()


def ready_labels(inputs: Inputs) -> Tensor | float:
    """Count the labels that a collator has shifted already, as they stand."""
    return torch.sum(inputs["shift_labels"] != IGNORED)


def rows(inputs: Inputs) -> Tensor | float:
    """Count the rows."""
    return float(_labels(inputs).shape[0])


def one(inputs: Inputs) -> Tensor | float:
    """Count a micro-batch as one: the loss is a sum, or the share of a sum."""
    return 1.0


COUNTERS: dict[str, Counter] = {
    counter.__name__: counter for counter in (ready_labels, shifted_labels, all_labels, rows, one)
}


def contract(inputs: Inputs, causal: bool) -> list[str]:
    """Return the ways of counting to be tried, the one that the Trainer's contract names first.

    Labels shifted by the collator count as they are, a causal model's after the shift, any other's as they stand.
    """
    if "shift_labels" in inputs:
        return ["ready_labels"]
    labels = inputs.get("labels")
    if not isinstance(labels, Tensor):
        return ["rows", "one"]
    if labels.dim() < 2:
        return ["all_labels", "rows", "one"]
    order = ["shifted_labels", "all_labels"] if causal else ["all_labels", "shifted_labels"]
    return [*order, "rows", "one"]


def undivided(loss_of: LossOf, inputs: Inputs, items: Tensor | float) -> float:
    """Return the part of the loss, from 0 to 1, that is not divided by the number of items that it is told."""
    return float(loss_of(inputs, items * _FAR)) / float(loss_of(inputs, items))


def recognise(loss_of: LossOf, inputs: Inputs, order: Sequence[str], tolerance: float) -> str:
    """Return the name of the first way of counting that explains the loss.

    Args:
        loss_of: the loss of some rows, given the number of items to divide by, or None; must repeat itself.
        inputs: a micro-batch with something to learn from.
        order: names in `COUNTERS`, the likeliest first.
        tolerance: how far two evaluations of the same loss may lie apart, relative.

    Raises:
        LossError: if none does.
    """
    rest = undivided(loss_of, inputs, COUNTERS[order[0]](inputs))
    if abs(rest) < tolerance:
        found = _by_division(loss_of, inputs, order, tolerance)
    elif abs(rest - 1) < tolerance:
        found = _by_parts(loss_of, inputs, order, tolerance)
    else:
        raise LossError(
            f"A part of {rest:.3g} of the loss is not divided by num_items_in_batch, the rest is: two terms with "
            f"denominators of their own. {HOW_TO_STATE}"
        )
    if found is None:
        raise LossError(
            f"The loss is no mean or sum over {', '.join(order)}, as far as measuring can tell. {HOW_TO_STATE}"
        )
    return found


HOW_TO_STATE = (
    "State what the loss averages over: return wb.mean(values, weights) or wb.from_mean(loss, items=n) from "
    "compute_loss, or give exact(Trainer, items=...) the function that counts a micro-batch's items."
)


def _by_division(loss_of: LossOf, inputs: Inputs, order: Sequence[str], tolerance: float) -> str | None:
    """Compare what the loss divides by when it is told nothing: sum / mean."""
    divisor = float(loss_of(inputs, 1.0)) / float(loss_of(inputs, None))
    return next((name for name in order if abs(float(COUNTERS[name](inputs)) - divisor) <= tolerance * divisor), None)


def _by_parts(loss_of: LossOf, inputs: Inputs, order: Sequence[str], tolerance: float) -> str | None:
    """Compare the loss of two rows with the losses of each."""
    both = _two_rows(inputs)
    parts = [take(both, slice(i, i + 1)) for i in (0, 1)]
    whole, each = float(loss_of(both, None)), [float(loss_of(part, None)) for part in parts]
    for name in order:
        counts = [float(COUNTERS[name](part)) for part in parts]
        share = 1.0 if name == "one" else sum(counts)
        expected = sum(count * loss for count, loss in zip(counts, each, strict=True)) / share if share else 0.0
        if abs(expected - whole) <= tolerance * abs(whole):
            return name
    return None


def _two_rows(inputs: Inputs) -> Any:
    """Return the two rows with the most labels, the lesser one with two of them left: as uneven as can be."""
    labels = _labels(inputs)
    targets = (labels != IGNORED).reshape(len(labels), -1).sum(1)
    best = targets.argsort()[-2:].tolist()
    try:
        both = take(inputs, best) if len(best) == 2 else join([inputs, inputs])
    except SplitError as error:
        raise LossError(f"What the loss averages over cannot be measured: {error} {HOW_TO_STATE}") from error
    if labels.dim() < 2 or labels.is_floating_point() or "labels" not in inputs:
        return both
    return {**both, "labels": _thinned(both["labels"])}


def _thinned(labels: Tensor) -> Tensor:
    labels = labels.clone()
    first = labels[0].reshape(-1)
    first[(first != IGNORED).nonzero().flatten()[2:]] = IGNORED
    labels[0] = first.reshape(labels[0].shape)
    return labels


def _labels(inputs: Inputs) -> Tensor:
    """Return the labels, or any tensor with rows where a model calls its targets otherwise."""
    labels = inputs.get("labels")
    return (
        labels if isinstance(labels, Tensor) else next(v for v in inputs.values() if isinstance(v, Tensor) and v.dim())
    )
