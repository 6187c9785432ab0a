"""Why a gradient of micro-batches is not that of the whole batch: every cause is tried, and named if it gives the
number.

1. Counts: the micro-batches' own gradients, weighted otherwise, are the whole batch's.
2. Padding: the same rows, padded as in the whole batch, give its gradient.
3. Shapes: the loss has as many values whatever the number of rows; a list was cut through its rows, or time was cut.
4. Rows that meet: each micro-batch is right by itself, and the batch is not their sum.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.batch.groups import sizes_in_words
from wholebatch.errors import WholeBatchError
from wholebatch.loss.terms import LossSum
from wholebatch.model.comparison import Comparison, compare, joined
from wholebatch.model.inspection import unwrapped, uses_batch_statistics
from wholebatch.verify import causes
from wholebatch.verify.coupling import find_coupling
from wholebatch.verify.finding import Finding
from wholebatch.verify.gluing import Unlike, rows_in, taken
from wholebatch.verify.reference import (
    Gradients,
    LossFunction,
    Reference,
    hooks_of,
    plain_gradient,
    rows_or_one,
    terms_in,
)

EXPLAINED = 1e-6
"""How near a cause must come to the whole batch's gradient; both are read in double precision."""

MOST = 64
"""Micro-batches times terms beyond which counts are not solved for."""

FOREIGN = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What a user's code may raise on a batch that it was not written for."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A gradient in micro-batches that is not the whole batch's.

    Attributes:
        model, loss_fn: the user's.
        micro_batches: the micro-batches as the loss function was given them.
        whole: the untouched batch; None where it could not be read in one micro-batch.
        truth, ours: the two gradients; size: how far apart; tolerance: what rounding explains.
        rows: which rows of the whole batch each micro-batch holds, where that is known.
        padded: makes the same micro-batches as wide as the whole batch; None where no padding was taken off.
        names: leaves that go whole.
        reading: how `plain_gradient` is to read.
        back: undoes what the loss function moves.
        unit: what a batch is made of, in words: rows, or samples that are collated.
    """

    model: nn.Module
    loss_fn: LossFunction
    micro_batches: Sequence[Any]
    whole: Any
    truth: Reference
    ours: Gradients
    size: Comparison
    tolerance: float
    rows: Sequence[Sequence[int]] = ()
    padded: Callable[[], Sequence[Any] | None] = lambda: None
    names: Sequence[str] = ()
    reading: dict[str, Any] = dataclasses.field(default_factory=dict)
    back: Callable[[], None] = lambda: None
    unit: str = "rows"

    def read(self, micro_batches: Sequence[Any], loss_fn: LossFunction | None = None) -> Reference:
        """Take micro-batches together by the plain reading."""
        try:
            return plain_gradient(self.model, loss_fn or self.loss_fn, micro_batches, **self.reading)
        finally:
            self.back()

    def error(self, gradients: Gradients) -> float:
        """Measure how far a gradient is from the whole batch's."""
        return compare(*joined(gradients, self.truth.gradients)).error

    def gives_the_truth(self, micro_batches: Sequence[Any]) -> bool:
        """Tell whether other micro-batches give the whole batch's gradient; not if they can't be read."""
        try:
            return self.error(self.read(micro_batches).gradients) <= max(self.tolerance, EXPLAINED)
        except (*FOREIGN, WholeBatchError):
            return False


def explain(case: Case) -> Finding:
    """Name the cause of a difference, in the order of this module; say so where none explains it."""
    try:
        in_micro_batches = case.read(case.micro_batches)
    except (*FOREIGN, WholeBatchError) as error:
        return causes.unexplained(case.size, f"the micro-batches can't be read by themselves: {error!r:.160}")
    apart = compare(*joined(case.ours, in_micro_batches.gradients)).error
    if not apart <= max(case.tolerance, 1e-2 * case.size.error):
        return causes.unexplained(case.size, "the micro-batches, read plainly, give another gradient than backward")
    for cause in (counted, padded, shaped, cut_through, behind_time):
        finding = cause(case, in_micro_batches)
        if finding is not None:
            return finding
    return met(case)


def counted(case: Case, in_micro_batches: Reference) -> Finding | None:
    """Solve for the weights with which the micro-batches would make up the whole batch; None if there are none."""
    keys = list(in_micro_batches.counts)
    if len(keys) == 1 and _is_multiple(case, in_micro_batches):
        return causes.miscounted(case.truth.items, in_micro_batches.items, case.size)
    parts = [(micro_batch, key) for micro_batch in range(len(case.micro_batches)) for key in keys]
    truth = joined(case.truth.gradients, case.truth.gradients)[1]
    if not 2 <= len(parts) <= MOST or len(truth) < 2 * len(parts):
        return None
    read = [case.read([case.micro_batches[micro_batch]], _Only(case.loss_fn, key)) for micro_batch, key in parts]
    columns = torch.stack([joined(each.gradients, case.truth.gradients)[0] for each in read], 1)
    weights = torch.linalg.lstsq(columns, truth[:, None], driver="gelsd").solution[:, 0]
    losses = torch.stack([each.loss.double() for each in read])
    if compare(columns @ weights, truth).error > EXPLAINED or not _are_counts(weights, losses, case.truth):
        return None
    held = [each.counts.get(key, 0.0) for each, (_, key) in zip(read, parts, strict=True)]
    total = {key: sum(n for n, (_, k) in zip(held, parts, strict=True) if k == key) for key in keys}
    stated = [n / (total[key] or 1.0) for n, (_, key) in zip(held, parts, strict=True)]
    if max(abs(float(w) - s) for w, s in zip(weights, stated, strict=True)) <= EXPLAINED:
        return None
    rows = [rows_or_one(case.micro_batches[micro_batch]) for micro_batch, _ in parts]
    shifted = len(keys) == 1 and _in_proportion(weights, [n - r for n, r in zip(held, rows, strict=True)])
    return causes.miscounted(case.truth.items, in_micro_batches.items, case.size, held, weights.tolist(), shifted)


def _is_multiple(case: Case, in_micro_batches: Reference) -> bool:
    """Tell whether the micro-batches count a multiple of the whole batch's items, and all is right but for that."""
    whole, stated = case.truth.items, in_micro_batches.items
    if len(whole) != 1 or not whole[0] or not causes.counts_differ(stated, whole):
        return False
    factor = stated[0] / whole[0]
    return case.error({name: factor * gradient for name, gradient in case.ours.items()}) <= EXPLAINED


def _are_counts(weights: Tensor, losses: Tensor, truth: Reference) -> bool:
    """Tell counts from a loss that is a function of the whole mean, whose micro-batches add up with weights too.

    Weights of a mean add up to 1; what is divided by a number that is the same for all micro-batches has equal ones.
    """
    whole = bool((weights.sum() - 1).abs() <= EXPLAINED)
    alike = bool((weights - weights[0]).abs().max() <= EXPLAINED * weights[0].abs())
    loss = abs(float(weights @ losses) - float(truth.loss)) <= EXPLAINED * max(truth.size, 1e-30)
    return (whole or alike) and loss and bool((weights >= -EXPLAINED).all())


def _in_proportion(weights: Tensor, counts: Sequence[float]) -> bool:
    total = sum(counts)
    return total > 0 and all(abs(float(w) - n / total) <= EXPLAINED for w, n in zip(weights, counts, strict=True))


class _Only:
    """One term of a loss."""

    def __init__(self, loss_fn: LossFunction, key: Any) -> None:
        self.loss_fn, self.key = loss_fn, key

    def __call__(self, model: Any, micro_batch: Any) -> Any:
        term = terms_in(self.loss_fn(model, micro_batch), bare=True).get(self.key)
        return None if term is None else LossSum(term.total, term.count)


def padded(case: Case, in_micro_batches: Reference) -> Finding | None:
    """Try the same micro-batches padded as in the whole batch."""
    as_wide = case.padded()
    return causes.padding(case.size) if as_wide is not None and case.gives_the_truth(as_wide) else None


def shaped(case: Case, in_micro_batches: Reference) -> Finding | None:
    """Look whether a term has values of one shape in batches of different sizes."""
    rows, part = rows_in(case.whole, case.names), rows_in(case.micro_batches[0], case.names)
    if rows is None or part is None or rows == part:
        return None
    for whole, micro_batch in zip(case.truth.shapes, in_micro_batches.shapes, strict=False):
        if whole is not None and whole == micro_batch and len(whole):
            return causes.same_shape(whole, rows, part, case.size)
    return None


def cut_through(case: Case, in_micro_batches: Reference) -> Finding | None:
    """Try the rows of lists instead of what lies in their entries."""
    rows = rows_in(case.whole, case.names)
    if rows is None or not case.rows or case.names:
        return None
    try:
        by_entries = [taken(case.whole, index, rows) for index in case.rows]
    except (Unlike, *FOREIGN):
        return None
    return causes.through_rows(case.size) if case.gives_the_truth(by_entries) else None


def behind_time(case: Case, in_micro_batches: Reference) -> Finding | None:
    """Cut plain tensors on their second dimension instead of the first."""
    named = case.whole if isinstance(case.whole, dict) else {}
    deep = [value for value in named.values() if isinstance(value, Tensor) and value.dim() > 1]
    widths = {value.shape[1] for value in deep}
    if len(widths) != 1 or min(widths) < 2 or not case.rows or case.names:
        return None
    halves = [
        {
            key: value.tensor_split(2, 1)[half] if isinstance(value, Tensor) and value.dim() > 1 else value
            for key, value in named.items()
        }
        for half in (0, 1)
    ]
    return causes.behind_time(widths.pop(), case.size) if case.gives_the_truth(halves) else None


def met(case: Case) -> Finding:
    """Every micro-batch is right by itself, the batch is not their sum: rows meet. Say where, by experiment."""
    model = unwrapped(case.model)
    sizes = sizes_in_words([len(index) for index in case.rows] or list(map(rows_or_one, case.micro_batches)), case.unit)
    layers = causes.coupled(model, sizes, case.size)
    if layers is not None:
        return layers
    where = None
    for batch in _examples(case):
        where = where_rows_meet(model, case.loss_fn, batch, case.names)
        if where is not None:
            break
    where = where or "Where they meet could not be tried on this batch."
    return causes.meeting(f"micro-batches of {sizes} see only themselves. {where}", str(case.size), case.size.error)


def _examples(case: Case) -> Iterator[Any]:
    """Rows to exchange: all of them, or those of one micro-batch where a window's can't be joined."""
    yield case.micro_batches[0] if case.whole is None else case.whole


def where_rows_meet(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    whole: Sequence[str] = (),
    batch_norm_is_exact: bool = False,
) -> str | None:
    """Return what the detector says of a copy of the model, None if nothing meets or nothing could be tried."""
    twin = copy.deepcopy(model)
    for module in twin.modules():
        if batch_norm_is_exact and uses_batch_statistics(module):
            module.eval()
    try:
        found = find_coupling(twin, loss_fn, batch, whole)
    except (*FOREIGN, WholeBatchError):
        return None  # a batch that can't be cut in halves, or a loss that can't be taken of other rows
    return str(found) if found else None


def bent_by_hooks(model: nn.Module, gradients: Gradients, scales: Sequence[float]) -> list[str]:
    """Name the parameters whose hooks don't do to a sum what they do to its parts, tried on multiples of gradients."""
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and hooks_of(parameter)
        if not all(adds_up(parameter, scale * gradients[name]) for scale in scales)
    ]


def adds_up(parameter: Tensor, gradient: Tensor) -> bool:
    """Tell whether the hooks of a parameter give for a gradient the sum of what they give for two parts of it."""
    gradient = gradient.to(parameter.device)
    shares = torch.linspace(-1, 2, gradient.numel(), dtype=gradient.real.dtype, device=gradient.device)
    part = gradient * shares.view_as(gradient)
    whole, *parts = (_through_hooks(parameter, each) for each in (gradient, part, gradient - part))
    return bool((sum(parts) - whole).abs().max() <= 1e-6 * max(float(each.abs().max()) for each in (whole, *parts)))


def _through_hooks(parameter: Tensor, gradient: Tensor) -> Tensor:
    for hook in hooks_of(parameter):
        changed = hook(gradient.clone())
        gradient = gradient if changed is None else changed
    return gradient
