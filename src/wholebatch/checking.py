"""Is this gradient the whole batch's? Measured against the plain reading of the mathematics."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from wholebatch.batch import Nest, move
from wholebatch.causes import (
    bent_by_hooks,
    counts_differ,
    coupled,
    hooked,
    meeting,
    miscounted,
    nothing,
    padding,
    unexplained,
    unstable,
    where_rows_meet,
)
from wholebatch.comparison import Comparison, compare, errors_of, joined
from wholebatch.errors import InexactError, SplitError, SyncError
from wholebatch.finding import Finding
from wholebatch.gradient import LossFunction, backward
from wholebatch.options import Options
from wholebatch.reference import (
    Gradients,
    Reference,
    held,
    named_targets,
    plain_gradient,
    rows_or_one,
    set_aside,
    twin_of,
    unwrapped,
    whole_gradient,
    whole_pieces,
)
from wholebatch.refusals import refuse_inexact
from wholebatch.sizes import Auto, Size, Tokens
from wholebatch.state import State
from wholebatch.survey import Survey
from wholebatch.window import Window, pieces_of

# What one rounding at the end of a sum costs, with room for the sums inside a model.
ROUNDING = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}
NAMED = 8


@dataclasses.dataclass(frozen=True)
class Check:
    """How far the gradient that `backward` leaves is from the whole batch's.

    Attributes:
        error: norm of the difference over the norm of the truth, all parameters together.
        by_parameter: the same for each parameter, over the norm of the whole truth, so that they add up by squares.
        comparison: error, ratio of norms, cosine.
        tolerance: what rounding explains, from the model's precision, the number of pieces, and how far the whole
            batch itself is from double precision (`own_error`).
        findings: what does not fit, with its cause where one explains the measurement.
        notes: how the measurement was made, where that matters.
        micro_batches, reference_pieces: in how many pieces each side ran.
    """

    error: float
    by_parameter: dict[str, float]
    comparison: Comparison
    tolerance: float
    own_error: float
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    micro_batches: int
    reference_pieces: int

    @property
    def ok(self) -> bool:
        """Whether nothing but rounding lies between both gradients."""
        return self.error <= self.tolerance and not self.findings

    def __str__(self) -> str:
        head = (
            f"gradient error {self.error:.1e} in {self.micro_batches} micro-batches (rounding explains "
            f"{self.tolerance:.1e}): {'exact' if self.ok else 'not the whole batch'}"
        )
        return "\n".join([head, *(f"  {finding.line()}" for finding in self.findings), *self.notes])


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

    The model, its buffers, its gradients and the random state are as before the call: copies do the work, and hooks on
    parameters are called for these. Finds what `backward` can't see: rows that meet inside the model or the loss,
    counts that don't add up, padding that counts, hooks that clip, draws. A model that answers differently when asked
    twice is compared piece by piece under the same draws, and the report says so. A batch whose whole gradient is zero
    proves nothing, which is a finding too. Costs three to five passes over the batch, one in double precision.

    Args:
        model: in one process; the batch must fit in one piece, or is read one row at a time.
        loss_fn: as for `backward`.
        batch: as for `backward`; a few hundred rows say as much as many.
        micro_batch_size: as for `backward`.
        strict: raise if the gradient is not the whole batch's.
        **options: as for `backward`.

    Returns:
        The errors, overall and by parameter, and what causes them.

    Raises:
        InexactError: with ``strict``, when more than rounding lies between both gradients; always, for what
            `backward` refuses to run in pieces.
        SyncError: on several ranks.

    Example:
        >>> import torch, wholebatch as wb
        >>> model, rows = torch.nn.Linear(3, 1), torch.randn(10, 3)
        >>> wb.check(model, lambda model, x: model(x).square(), rows, micro_batch_size=4).ok
        True
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        world = torch.distributed.get_world_size()
        if world > 1:
            raise SyncError(
                f"check reads the batch of one process, and there are {world} ranks. Call it in one process."
            )
    report = _Measurement(model, loss_fn, batch, micro_batch_size, options).report()
    if strict and not report.ok:
        raise InexactError(
            f"{report}\nThis gradient is not the whole batch's; see the findings, or report.by_parameter."
        )
    return report


class _Measurement:
    """One check: the same batch by `backward` and by the plain reading, and what lies between."""

    def __init__(self, model: nn.Module, loss_fn: LossFunction, batch: Any, size: Size, options: Options) -> None:
        self.model = unwrapped(model)
        self.loss_fn = loss_fn
        self.batch = batch
        self.size = size
        self.options = options
        self.state = State(self.model)
        self.whole, self.collate = options.get("whole", ()), options.get("collate")
        pieces = pieces_of(batch, size, whole=self.whole, collate=self.collate)
        refuse_inexact(Survey(self.model), pieces, options, isinstance(size, Auto))
        self.pieces = [piece.load() for piece in pieces]
        self.rows = [piece.index for piece in pieces]
        self.dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        self.notes: list[str] = []
        self.findings: list[Finding] = []

    def report(self) -> Check:
        """Measure, compare, explain."""
        drawn = self.draws()
        loss_fn = _Replayed(self.loss_fn) if drawn else self.loss_fn
        ours, count = self.ours(loss_fn)
        self.state.restore()
        truth, own = self.truths(loss_fn, drawn)
        comparison = compare(*joined(ours, truth.gradients))
        own_error = compare(*joined(own.gradients, truth.gradients)).error if own is not None else 0.0
        tolerance = max(ROUNDING.get(self.dtype, 2e-6) * math.sqrt(max(count, 4)) / 2, 2 * own_error)
        # Where both sides ran in pieces, what a hook does to gradients of their size is all that can be tried.
        bent = bent_by_hooks(self.model, truth.gradients, (1.0, count if drawn else 1e6)) if count > 1 else []
        if not any(gradient.any() for gradient in (*ours.values(), *truth.gradients.values())):
            self.findings.append(nothing(truth))
        elif bent and (drawn or not comparison.error <= tolerance):
            self.findings.append(hooked(bent, comparison))
        elif not comparison.error <= tolerance:
            self.explain(loss_fn, ours, truth, comparison, tolerance)
        elif count > 1 and truth.pieces > 1:
            self.look_for_coupling()
        self.state.restore()
        by_parameter = errors_of(ours, truth.gradients)
        return Check(
            comparison.error,
            by_parameter,
            comparison,
            tolerance,
            own_error,
            tuple(self.findings),
            tuple(self.notes),
            count,
            truth.pieces,
        )

    def draws(self) -> bool:
        """Run one piece twice: tell whether the model answers differently, and note what follows."""
        if not self.pieces:
            return False
        first, again = (self.loss_of(self.pieces[0], seed=None) for _ in range(2))
        self.state.restore()
        if first == again or math.isnan(first):
            return False
        one, same = (self.loss_of(self.pieces[0], seed=1) for _ in range(2))
        self.state.restore()
        if one != same:
            self.findings.append(unstable(first, again))
            return False
        self.notes.append(
            f"The model draws random numbers ({first:.6g}, then {again:.6g} for the same rows): both sides ran in the "
            "same pieces with the same draws."
        )
        return True

    def loss_of(self, piece: Any, seed: int | None) -> float:
        """Return the loss of one piece, without a graph kept."""
        if seed is not None:
            torch.manual_seed(seed)
        device = next((parameter.device for parameter in self.model.parameters()), None)
        buffers = State(self.model)
        returned = self.loss_fn(self.model, move(piece, device))
        buffers.restore_buffers()
        return number_of(returned)

    def ours(self, loss_fn: LossFunction) -> tuple[Gradients, int]:
        """Return the gradient that `backward` leaves, taken on a copy."""
        twin = twin_of(self.model)
        targets = named_targets(twin, self.model, loss_fn)
        with set_aside(targets.values()):
            result = backward(twin, loss_fn, self.batch, self.size, **_unverified(self.options))
            return {name: held(tensor, torch.float64) for name, tensor in targets.items()}, result.micro_batches

    def truths(self, loss_fn: LossFunction, drawn: bool) -> tuple[Reference, Reference | None]:
        """Return the plain reading in double precision, and in the model's own as a yardstick of rounding."""
        if drawn:
            truth = plain_gradient(self.model, loss_fn, self.pieces)
            own = plain_gradient(self.model, loss_fn, self.pieces, dtype=self.dtype)
            if abs(float(truth.loss) - float(own.loss)) > 1e-3 * abs(float(truth.loss)):
                self.notes.append(f"Draws differ between precisions, so the reference ran in {self.dtype} too.")
                return own, None
            return truth, own
        truth = whole_gradient(self.model, self.loss_fn, self.batch, whole=self.whole, collate=self.collate)
        if truth.pieces > 1:
            self.notes.append(
                f"The reference ran in {truth.pieces} pieces, in which rows of different pieces can't meet."
            )
        if self.dtype == torch.float64 or truth.pieces > 1:
            return truth, None
        return truth, whole_gradient(
            self.model, self.loss_fn, self.batch, dtype=self.dtype, whole=self.whole, collate=self.collate
        )

    def look_for_coupling(self) -> None:
        """Ask by experiment whether rows meet, where the reference, too, had to run in pieces."""
        found = where_rows_meet(
            self.model, self.loss_fn, self.examples(), self.whole, "exact" in (self.options.get("batch_norm") or "")
        )
        if found is not None:
            self.findings.append(
                meeting(
                    found,
                    "found by exchanging rows; how much it matters is hidden, as the reference ran in pieces too",
                    0.1,
                )
            )

    def explain(
        self, loss_fn: LossFunction, ours: Gradients, truth: Reference, size: Comparison, tolerance: float
    ) -> None:
        """Name the cause, if one explains the measurement to rounding."""
        in_pieces = plain_gradient(self.model, loss_fn, self.pieces)
        apart = compare(*joined(ours, in_pieces.gradients)).error
        if apart > max(tolerance, 1e-2 * size.error):
            self.findings.append(unexplained(size, "no hypothesis gives this gradient"))
        elif self.padding_counts(loss_fn, truth, tolerance):
            self.findings.append(padding(size))
        elif counts_differ(truth, in_pieces):
            self.findings.append(miscounted(truth, in_pieces, size))
        else:
            self.findings.append(coupled(self.model, self.pieces, size) or self.met(size))

    def met(self, size: Comparison) -> Finding:
        """Every piece is right by itself, the batch is not their sum: rows meet. Say where, by experiment."""
        where = where_rows_meet(self.model, self.loss_fn, self.examples(), self.whole)
        rows = [rows_or_one(piece) for piece in self.pieces[:NAMED]]
        where = where or "Where they meet could not be tried on this batch."
        return meeting(f"pieces of {rows} rows see only themselves. {where}", str(size), size.error)

    def padding_counts(self, loss_fn: LossFunction, truth: Reference, tolerance: float) -> bool:
        """Try the same pieces padded as in the whole batch: tell whether these give its gradient."""
        size = self.size.start if isinstance(self.size, Auto) else self.size
        if isinstance(self.batch, Window) or truth.pieces > 1 or not (isinstance(size, Tokens) or self.collate):
            return False
        whole = Nest(self.examples(), self.whole)
        try:
            as_wide = [whole.take(index) for index in self.rows]
        except SplitError:  # made by collate=, and not of rows
            return False
        found = plain_gradient(self.model, loss_fn, as_wide)
        return compare(*joined(found.gradients, truth.gradients)).error <= tolerance

    def examples(self) -> Any:
        """Return rows to exchange: all of them, or those of one micro-batch where a window's can't be joined."""
        return whole_pieces(self.batch, self.whole, self.collate)[0]


def _unverified(options: Options) -> Options:
    """The same options, without a proof of the first window beside this one."""
    return {**options, "verify": "never"}


class _Replayed:
    """A loss function whose draws depend on its rows alone, so that both sides draw the same."""

    def __init__(self, loss_fn: LossFunction) -> None:
        self.loss_fn = loss_fn

    def __call__(self, model: Any, piece: Any) -> Any:
        torch.manual_seed(fingerprint(piece))
        return self.loss_fn(model, piece)


def fingerprint(nest: Any) -> int:
    """Return a number that the leaves of a nest determine, the same in every precision that holds them exactly."""
    numbers: list[float] = []
    for leaf in Nest(nest).leaves:
        if isinstance(leaf.value, Tensor):
            flat = leaf.value.detach().reshape(-1)
            numbers += [float(flat.numel()), *flat[:256].double().tolist()]
    return hash(tuple(numbers)) & 0xFFFFFFFF


def number_of(returned: Any) -> float:
    """Return one number that stands for all that a loss function returned."""
    if isinstance(returned, tuple):
        returned = returned[0]
    parts: Sequence[Any] = list(returned.values()) if isinstance(returned, dict) else [returned]
    totals = [term.total for part in parts for term in getattr(part, "parts", ())]
    totals += [part.detach().double().sum() for part in parts if isinstance(part, Tensor)]
    return sum(float(total.detach()) for total in totals)
