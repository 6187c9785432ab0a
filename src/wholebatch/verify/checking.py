"""Is this gradient the whole batch's? Measured against the plain reading of the mathematics."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from torch import nn
from typing_extensions import Unpack

from wholebatch.batch.sizes import Size
from wholebatch.errors import InexactError, plainly
from wholebatch.loss.terms import LossFunction
from wholebatch.model.comparison import Comparison
from wholebatch.options import Options, checked
from wholebatch.verify.finding import Finding
from wholebatch.verify.measuring import CheckRun

UNTRIED = ("nothing-to-compare",)
"""Rules of findings that say nothing of the gradient."""


@dataclasses.dataclass(frozen=True)
class Check:
    """How far the gradient that `backward` leaves is from the whole batch's.

    Attributes:
        error: norm of the difference over the norm of the truth, all parameters together.
        by_parameter: the same for each parameter, over the norm of the whole truth, so that they add up by squares.
        comparison: error, ratio of norms, cosine.
        tolerance: what rounding explains, from the model's precision, the number of micro-batches, and how far the
            whole batch itself is from double precision (`own_error`).
        findings: what does not fit, with its cause where one explains the measurement.
        notes: how the measurement was made, where that matters.
        micro_batches, reference_micro_batches: in how many micro-batches each side ran.
        not_shown: what could not be tried, in words.
        without_gradient: parameters that require a gradient and get none, here and in the whole batch.
    """

    error: float
    by_parameter: dict[str, float]
    comparison: Comparison
    tolerance: float
    own_error: float
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    micro_batches: int
    reference_micro_batches: int
    not_shown: tuple[str, ...] = ()
    without_gradient: tuple[str, ...] = ()

    @property
    def reference_pieces(self) -> int:
        """The former name of `reference_micro_batches`."""
        return self.reference_micro_batches

    @property
    def verdict(self) -> Literal["exact", "not exact", "not shown"]:
        """Whether the gradient is the whole batch's: shown, refuted, or neither."""
        faults = [finding for finding in self.findings if finding.rule not in UNTRIED]
        if faults or (not self.not_shown and not self.findings and not self.error <= self.tolerance):
            return "not exact"
        return "not shown" if self.not_shown or self.findings else "exact"

    @property
    def ok(self) -> bool:
        """Whether the verdict is *exact*: nothing but rounding lies between, and nothing was left untried."""
        return self.verdict == "exact"

    def __str__(self) -> str:
        said = {"exact": "exact", "not exact": "not the whole batch's", "not shown": "not shown"}[self.verdict]
        head = (
            f"gradient error {self.error:.1e} in {self.micro_batches} micro-batches (rounding explains "
            f"{self.tolerance:.1e}): {said}"
        )
        untried = [f"  not shown: {each}" for each in self.not_shown]
        return "\n".join([head, *(f"  {finding.line()}" for finding in self.findings), *untried, *self.notes])


@plainly
def check(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    micro_batch_size: Size = None,
    *,
    strict: bool = False,
    **options: Unpack[Options],
) -> Check:
    """Hold `backward`'s gradient of a batch against one forward and one backward over all of it, in double precision.

    `backward` runs on the model as it is, with random draws held still on both sides, and both are read plainly with
    each row's own; everything it moves is put back: parameters, buffers, attributes, optimizers, gradients, the batch,
    the random state. The whole batch is neither cut nor rebuilt for the other side. Besides the gradient, items and
    loss are compared, parameters outside of the model, which parameters get a gradient at all, and what else has moved.
    With draws on, micro-batches are run again with the draws they made. The verdict is *exact*, *not exact* with the
    cause, or *not shown* with what could not be tried: rows that don't fit in memory together, draws that can't be held
    still, a gradient of zeros.

    Costs four to eight passes over the batch, one in double precision, and a copy of the model in that; three more
    where something draws, two or three more where something does not fit.

    Args:
        model: plain, compiled, or wrapped in ``DistributedDataParallel``: each rank then calls this with its share,
            and is told of the batch of all ranks. It must fit in one micro-batch, or is read one row at a time.
        loss_fn: as for `backward`.
        batch: as for `backward`; a few hundred rows say as much as many.
        micro_batch_size: as for `backward`.
        strict: raise unless the gradient is shown to be the whole batch's.
        **options: as for `backward`.

    Returns:
        The verdict, the errors, overall and by parameter, and what causes them.

    Raises:
        InexactError: with ``strict``, for another verdict than *exact*; always, for what `backward` refuses to run in
            micro-batches.
        SyncError: for a model whose parameters are spread over ranks.

    Example:
        >>> import torch, wholebatch as wb
        >>> model, rows = torch.nn.Linear(3, 1), torch.randn(10, 3)
        >>> wb.check(model, lambda model, x: model(x).square(), rows, micro_batch_size=4).verdict
        'exact'
    """
    found = CheckRun(model, loss_fn, batch, micro_batch_size, checked(options)).take()
    report = Check(
        error=found.size.error,
        by_parameter=found.by_parameter,
        comparison=found.size,
        tolerance=found.yardstick.tolerance,
        own_error=found.yardstick.own_error,
        findings=tuple(found.findings),
        notes=tuple(found.notes),
        micro_batches=found.micro_batches,
        reference_micro_batches=found.truth.micro_batches,
        not_shown=tuple(found.not_shown),
        without_gradient=found.truth.missing,
    )
    if strict and not report.ok:
        raise InexactError(
            f"{report}\nThis gradient is {report.verdict}: see the findings, report.not_shown and report.by_parameter."
        )
    return report
