"""The heart: the gradient of a whole batch from micro-batches. Read this file first.

A training loss over a batch is ``L = sum_k w_k * S_k / N_k``, where ``S_k`` and ``N_k`` are sums over the whole
batch. A micro-batch sees only its share of them. Its backward is exact if its share of ``S_k`` is divided by the
``N_k`` of the whole batch, which is known only at the end, so:

* One unknown denominator: divide every share by the same provisional number, and multiply the sum of gradients
  once by provisional / true. One pass, no look-ahead, and values stay in the range of a mean.
* Several: they are needed before the first backward. ``items=`` states them, or a counting pass finds them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from typing_extensions import Unpack

from wholebatch.batch.sizes import Auto, Size
from wholebatch.batch.window import MicroBatch, micro_batches_of
from wholebatch.batchnorm import window_for
from wholebatch.errors import LossError, SyncError, plainly
from wholebatch.first_window import proven
from wholebatch.first_window.conduct import WatchedLoss, refuse_no_function, refuse_silence
from wholebatch.first_window.trial import Trial
from wholebatch.first_window.watch import Unwatched, watch_for
from wholebatch.gradient.out_of_memory import OutOfMemoryRetry, Record, RestartWindow
from wholebatch.gradient.preconditions import refuse_foreign, refuse_inexact, refuse_moved
from wholebatch.loss.counts import Count
from wholebatch.loss.denominators import (
    Denominators,
    Divisors,
    Known,
    Provisional,
    counted_divisors,
    stated_divisors,
    uniform,
)
from wholebatch.loss.flags import Flags
from wholebatch.loss.seeds import BackwardSeeds, weighted
from wholebatch.loss.shapes import Shapes
from wholebatch.loss.terms import ParsedLoss, read
from wholebatch.loss.totals import LossAccumulator, LossTotals, Sizes, stated_sums
from wholebatch.model.gradient_hooks import hooks_that_read
from wholebatch.model.gradients import GradientAccumulator, all_or_nothing, external_parameters, reentrant
from wholebatch.model.inspection import ModelInfo
from wholebatch.model.references import reach_of
from wholebatch.model.state import State
from wholebatch.norms import Pooled, pooled
from wholebatch.options import Options, checked, checked_scaler
from wholebatch.ranks.agreement import Ranks, Status, Travel
from wholebatch.ranks.reduction import ranks_of

LossFunction: TypeAlias = "Callable[[Any, Any], Any]"


@dataclass(frozen=True)
class Result:
    """What a window's loss function said, over the whole batch on all ranks.

    Attributes:
        loss: the loss of the whole batch, one number.
        terms: each term's mean, without its weight: a tuple, or a dict if the loss function returned one.
        items: each term's denominator, in the same form.
        metrics: each metric's mean.
        micro_batches: how many micro-batches this rank ran.
        rows: how many rows this rank ran.
        sizes: the rows and items of each of them, in the order in which they ran; empty where a schedule of torch's own
            runs them, and without items where the loss is one of all rows.
        verified: what the first window has proven of windows like this one, or what could not be tried and why.
        without_gradient: names of the model's parameters that require a gradient and got none from this window.

    All tensors are detached, without dimensions, and still on the device: reading one waits for it.
    """

    loss: Tensor
    terms: tuple[Tensor, ...] | dict[str, Tensor]
    items: tuple[Tensor, ...] | dict[str, Tensor]
    metrics: dict[str, Tensor]
    micro_batches: int
    rows: int
    sizes: Sizes = field(default_factory=Sizes, kw_only=True)
    verified: str = field(default="", kw_only=True)
    without_gradient: tuple[str, ...] = field(default=(), kw_only=True)


@plainly
def backward(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    micro_batch_size: Size = None,
    *,
    scaler: GradScaler | None = None,
    **options: Unpack[Options],
) -> Result:
    """Leave in ``.grad`` the gradient of the whole batch, a micro-batch in memory at a time.

    Takes the place of ``loss.backward()``: gradients are added to what ``.grad`` holds, and clipping, stepping
    and zeroing stay with you. The batch is cut, ``loss_fn(model, micro_batch)`` is called for each micro-batch, and
    each micro-batch's share is divided by the items of the whole batch, over all ranks. Makes no host synchronisation
    in one process. If anything fails, ``.grad`` is as before the call. Losses with several denominators cost a second
    forward pass unless ``items=`` states the counts.

    Args:
        model: plain or wrapped in ``DistributedDataParallel``. Parameters that the loss reaches outside of the
            model are served too, whichever micro-batch reaches them.
        loss_fn: returns the loss of one micro-batch together with what it averages over, see
            :mod:`wholebatch.loss.terms`.
        batch: any nest of tensors and sequences with rows on the first dimension, or a :class:`Window`.
        micro_batch_size: rows (an int), ``Tokens(...)`` or ``Auto(...)``; None runs a window as it is and any other
            batch in one micro-batch.
        scaler: a ``GradScaler`` whose scale the losses are multiplied with; unscaling stays with you.
        **options: see :class:`wholebatch.options.Options`.

    Returns:
        The loss, its terms and the metrics of the whole batch, detached.

    Raises:
        LossError: if what a loss averages over cannot be known.
        SplitError: if the batch cannot be cut.
        InexactError: if micro-batches would not give the gradient of the batch.
        SyncError: if the ranks do not agree, or another rank failed.

    Example:
        >>> import torch, wholebatch as wb
        >>> model, rows = torch.nn.Linear(3, 1), torch.randn(10, 3)
        >>> result = wb.backward(model, lambda model, x: model(x).square(), rows, micro_batch_size=4)
        >>> result.micro_batches, result.rows
        (3, 10)
    """

    def work(gradients: GradientAccumulator) -> Result:
        return accumulate(model, loss_fn, batch, micro_batch_size, gradients, scaler=scaler, **options).finish()

    return all_or_nothing(work)


@dataclass
class Pending:
    """A window whose gradients are still off by one common factor.

    ``finish`` brings them to the true denominator; a further factor, such as that of clipping, joins the same pass.
    """

    result: Result
    gradients: GradientAccumulator
    coefficient: Count
    alive: Count
    losses: list[list[Tensor]]
    flags: Flags

    def finish(self, factor: Count = 1.0) -> Result:
        """Multiply the window's sum and add it to what ``.grad`` held before; all of that may still be taken back."""
        self.merge(factor)
        self.gradients.round()
        return self.result

    def noted(self, model_info: ModelInfo, verified: str) -> Pending:
        """Say in the result what has been proven, and which of the model's parameters got no gradient."""
        missing = {id(p) for p in model_info.parameters if p.requires_grad and self.gradients.take(p) is None}
        names = [name for name, p in model_info.model.named_parameters() if id(p) in missing] if missing else []
        self.result = replace(self.result, verified=verified, without_gradient=tuple(names))
        return self

    def merge(self, factor: Count = 1.0) -> None:
        """Do all that ``finish`` does but the rounding of sums that are wider than their parameters."""
        if isinstance(self.alive, float) and not self.alive:
            self.gradients.zero()
        elif not _is_one(self.coefficient) or not _is_one(factor):
            self.gradients.scale(self.coefficient * factor)
        if isinstance(self.alive, Tensor):
            self.gradients.mask(self.alive)
        self.gradients.merge()
        self.coefficient = 1.0


def accumulate(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    micro_batch_size: Size,
    gradients: GradientAccumulator,
    *,
    scaler: GradScaler | None = None,
    also: Sequence[Tensor] = (),
    **options: Unpack[Options],
) -> Pending:
    """Run all micro-batches of a window and leave the last multiplication to the caller.

    Args:
        gradients: nothing yet; what takes the window back if anything fails, until the caller is done.
        also: further tensors whose gradients belong to the window, such as an optimizer's.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}; pass the torch.nn.Module whose gradient is wanted.")
    refuse_no_function(loss_fn)
    chosen, scaler = checked(options), checked_scaler(scaler)
    reach = reach_of(loss_fn)
    model_info = ModelInfo(model, reach.modules, reach.leaves)
    ranks = ranks_of(model_info, chosen.get("sync", "last"))
    auto = micro_batch_size if isinstance(micro_batch_size, Auto) else None
    wide = chosen.get("accumulate_in") or ranks.accumulate_in
    with ranks:
        micro_batches = micro_batches_of(
            batch, micro_batch_size, whole=chosen.get("whole", ()), collate=chosen.get("collate")
        )
        refuse_inexact(model_info, micro_batches, chosen, auto is not None)
        learning = [*model_info.parameters, *also]
        leaves = [*learning, *ranks.leaves()]
        trial = Trial(model_info, loss_fn, ranks, scaler, chosen, leaves, micro_batches=len(micro_batches))
        verified = proven(trial, batch, micro_batches, splits=auto is not None)
        del trial  # and what it has copied
        gradients.begin(model_info.parameters, also, ranks.views, wide)
        run = _WindowRun(model_info, loss_fn, micro_batches, scaler, ranks, gradients, auto, chosen)
        run.first = watch_for(model_info, loss_fn, len(micro_batches), chosen, ranks, splits=auto is not None)
        pending = run.pending().noted(model_info, run.first.said or verified)
        gradients.end()
        return pending


class _Recount(Exception):
    """The terms need every denominator before the first backward."""


class _WindowRun:
    """One window, from its first forward to its last backward."""

    def __init__(
        self,
        model_info: ModelInfo,
        loss_fn: LossFunction,
        micro_batches: Sequence[MicroBatch],
        scaler: GradScaler | None,
        ranks: Ranks,
        gradients: GradientAccumulator,
        auto: Auto | None,
        options: Options,
    ) -> None:
        self.model_info, self.micro_batches = model_info, list(micro_batches)
        self.ranks, self.gradients, self.options = ranks, gradients, options
        self.recovery = None if auto is None else OutOfMemoryRetry(auto, model_info, gradients)
        self.device = model_info.device
        self.shares = BackwardSeeds(scaler, ranks.divides, drops_empty=ranks.world == 1)
        self.extent = sum(micro_batch.size for micro_batch in micro_batches)
        distributed = ranks.world > 1
        self.travel = ranks.travel
        self.loss_fn, self.shapes = loss_fn, Shapes()
        self.watched = WatchedLoss(loss_fn, gradients.parameters)
        self.window = window_for(model_info, self.watched, micro_batches, options, ranks, auto is not None)
        if self.window.meets:
            self.travel = Travel.APART
        elif distributed and (auto is not None or options.get("accumulate_in") is not None):
            self.travel = self._without_reducer(auto)
        self.single = len(micro_batches) < 2 and auto is None and self.travel is Travel.LAST
        self.read = not self.single and bool(hooks_that_read(model_info, gradients.parameters.values()))
        self.alone = self.single and not distributed
        self.start: State | None = None
        # At buffers: after the first forward, and after the last.
        self.looks = 0 if self.alone or options.get("batch_norm") is not None else 2
        self.first = Unwatched()
        gradients.include(ranks.leaves())

    def pending(self) -> Pending:
        """Run the window in one pass if its terms allow, else know the denominators first."""
        items = self.options.get("items")
        self.window.forward(self.micro_batches)
        self.start = None if self.alone else State(self.model_info)
        known = None if items is None else self._stated(items)
        if known is None and self.window.meets and self.ranks.world > 1:
            known = self._counted()  # gradients of shared statistics add up only if divided by the same numbers
            self._rewind()
        while True:
            try:
                return self._attempt(known or self._provisional())
            except RestartWindow as redo:
                self.micro_batches = [part for micro_batch in self.micro_batches for part in redo.fitting(micro_batch)]
            except _Recount:
                self._rewind()
                known = self._counted()
            self.gradients.restart()
            self._rewind()
            self.window.restart()

    def _rewind(self) -> None:
        """Go back to the random state and the buffers that the window began with."""
        if self.start is not None:
            self.start.restore()

    def _attempt(self, denominators: Denominators) -> Pending:
        """Run every micro-batch, agree with all ranks before gradients travel, and leave one factor to be applied."""
        tally = LossAccumulator()
        with pooled(self.model_info, self.options.get("batch_norm") == "pooled") as pool:
            waiting, micro_batches = self._run_micro_batches(tally, denominators, pool)
        if self.looks > 0:
            self._refuse_moved_buffers(micro_batches)
        self.first.finish(self._said, self.micro_batches)
        self.window.backward()
        here = tally.sums()
        if micro_batches > 1 or self.ranks.world > 1:
            self.shapes.check()
        denominators.check(here)
        agreement = self.ranks.agree(Status.READY, here, float(denominators.loose))
        sums = agreement.sums
        if agreement.recount or (self.ranks.world > 1 and agreement.number and not uniform(sums, self.ranks.world)):
            raise _Recount
        self.ranks.settle()
        factor = denominators.settle(sums)
        if self.ranks.world > 1 and self.travel is not Travel.EVERY:
            self.gradients.scale(factor)
            factor = 1.0
        if self.travel is Travel.LAST:
            self._propagate(waiting, denominators, last=True)
        if self.travel is Travel.APART or self.ranks.per_micro_batch:
            self.ranks.reduce(self.gradients)
        self.ranks.conclude(self.gradients)
        self.window.commit()
        if self.ranks.world == 1:
            self.shares.check()
        if not sums.schema.terms and self.micro_batches:
            refuse_silence(self.loss_fn, self.model_info, self._again())
        rows = sum(micro_batch.rows for micro_batch in self.micro_batches)
        sizes = tally.sizes(sums.schema)
        result = Result(**sums.report(self.device), micro_batches=micro_batches, rows=rows, sizes=sizes)
        return Pending(result, self.gradients, factor, sums.alive, tally.losses, tally.flags)

    def _run_micro_batches(
        self, tally: LossAccumulator, denominators: Denominators, pool: Pooled | None
    ) -> tuple[ParsedLoss | None, int]:
        """Run the micro-batches; return the last answer if its backward waits for the agreement, and how many ran."""
        waiting: ParsedLoss | None = None

        def whole_micro_batch(micro_batch: MicroBatch) -> None:
            self._propagate(self._admitted(micro_batch, tally, denominators), denominators)

        if self.recovery is not None:
            records: list[Record] = [tally] if pool is None else [tally, pool]
            ran = sum(self.recovery.run(micro_batch, records, whole_micro_batch) for micro_batch in self.micro_batches)
            self.recovery.rest()
            return None, ran
        answered = self._met if self.ranks.meets or self.travel is Travel.EVERY else self._admitted
        for micro_batch in self.ranks.rounds(self.micro_batches, self.window.loss):
            if self.travel is Travel.LAST:
                self._propagate(waiting, denominators)
                waiting = answered(micro_batch, tally, denominators)
            else:
                each = self.travel is Travel.EVERY
                self._propagate(answered(micro_batch, tally, denominators), denominators, last=each)
        return waiting, len(self.micro_batches)

    def _provisional(self) -> Provisional:
        exact_last = self.single or (self.ranks.world > 1 and self.travel is Travel.LAST)
        adapts = not self.ranks.meets and self.travel is not Travel.EVERY
        return Provisional(self.ranks.world, exact_last, not self.single, self.extent, adapts, self.read)

    def _admitted(
        self, micro_batch: MicroBatch | None, tally: LossAccumulator, denominators: Denominators
    ) -> ParsedLoss | None:
        answer = self._forward(micro_batch, tally)
        if not self._admits(answer, micro_batch, denominators):
            self.ranks.agree(Status.RECOUNT, LossTotals())
            raise _Recount
        return answer

    def _met(
        self, micro_batch: MicroBatch | None, tally: LossAccumulator, denominators: Denominators
    ) -> ParsedLoss | None:
        """Run one forward in step with the other ranks, and divide by the same number as they."""
        answer = self._forward(micro_batch, tally)
        status = Status.READY if self._admits(answer, micro_batch, denominators) else Status.RECOUNT
        agreement = self.ranks.agree(status, LossTotals(), denominators.guess)
        if agreement.recount:
            raise _Recount
        if self.travel is Travel.EVERY:
            self.ranks.settle()
        denominators.use_agreed(agreement.number)
        return answer

    def _admits(self, answer: ParsedLoss | None, micro_batch: MicroBatch | None, denominators: Denominators) -> bool:
        if answer is None or micro_batch is None:
            return True
        observed = denominators.observe(answer, self.extent / max(micro_batch.size, 1))
        correction = denominators.correction()
        if correction != 1.0:
            self.gradients.scale(correction)
        return observed

    def _forward(self, micro_batch: MicroBatch | None, tally: LossAccumulator) -> ParsedLoss | None:
        with self.first.forward():
            answer = None if micro_batch is None else self._heard(micro_batch, tally)
        self.ranks.run_dummy_forward()
        if answer is not None:
            self._explore(answer)
        if self.looks > 1:
            self._refuse_moved_buffers(len(self.micro_batches))
        return answer

    def _heard(self, micro_batch: MicroBatch, tally: LossAccumulator) -> ParsedLoss | None:
        """Run the loss function of a micro-batch, and look whether what it says can be believed."""
        said = self._said(micro_batch)
        self.shapes.note(said, micro_batch.rows, self.watched.micro_batch)
        self.watched.micro_batch = None
        return tally.add(said, micro_batch.index)

    def _again(self) -> Callable[[], Any] | None:
        """Say how to run the first micro-batch once more without a trace; None where other ranks would have to join."""
        if self.ranks.world > 1 or self.window.meets:
            return None

        def run() -> None:
            state = State(self.model_info)
            self.window.loss(self.micro_batches[0])
            state.restore()

        return run

    def _said(self, micro_batch: MicroBatch) -> ParsedLoss | None:
        return read(self.window.loss(micro_batch))

    def _explore(self, answer: ParsedLoss) -> None:
        """Find leaves outside of the model that this backward will add to, so that they are mended or taken back too.

        Every micro-batch is looked through: a later one may be the first to reach a leaf.
        """
        self.gradients.release()
        outputs = [output for output, _ in weighted(answer).values()]
        foreign = [leaf for leaf in external_parameters(outputs, self.model_info) if not self.ranks.owns(leaf)]
        self.gradients.include(foreign)
        if self.ranks.world > 1:
            refuse_foreign(foreign)

    def _propagate(self, answer: ParsedLoss | None, denominators: Denominators, last: bool = False) -> None:
        """Go back from an answer's share; the last time, all ranks reduce what has been summed."""
        outputs, seeds = ([], []) if answer is None else self.shares.of(answer, denominators)
        if last and outputs and self.ranks.world > 1 and self.travel is Travel.LAST and reentrant(outputs):
            self._backward(outputs, seeds)  # its inner backwards would each look to the reducer like the whole one
            outputs = []
        if last and not outputs:
            outputs, seeds = self.ranks.zero_output(), [None]
        if last:
            self.ranks.prepare_reducer(outputs)
        if outputs:
            self._backward(outputs, seeds)

    def _backward(self, outputs: Sequence[Tensor], seeds: Sequence[Tensor | None]) -> None:
        try:
            with self.first.backward():
                torch.autograd.backward(outputs, seeds)
        except RuntimeError as error:
            if "backward through the graph a second time" in str(error):
                raise LossError(
                    "Two micro-batches share a graph that was made outside of loss_fn, and the first backward has freed"
                    " it. Compute all that carries gradient inside of loss_fn, from the model and the micro-batch."
                ) from error
            raise

    def _without_reducer(self, auto: Auto | None) -> Travel:
        if auto is not None and (self.ranks.per_micro_batch or self.ranks.meets or self.options.get("sync") == "every"):
            raise SyncError(
                'micro_batch_size=Auto(...) splits a micro-batch on the rank where it failed, but sync="every" and '
                'SyncBatchNorm keep all ranks in step. Pass sync="last", or a fixed size.'
            )
        return Travel.EVERY if self.ranks.per_micro_batch else Travel.APART

    def _stated(self, items: Callable[[Any], Any]) -> Denominators:
        """Know the denominators from ``items=`` alone."""
        here = stated_sums(items(micro_batch.load()) for micro_batch in self.micro_batches)
        return self._known(here, "items=", stated_divisors)

    def _counted(self) -> Denominators:
        """Know the denominators from a forward pass over every micro-batch, graphs dropped one by one."""
        tally = LossAccumulator()

        def look(micro_batch: MicroBatch | None) -> None:
            self._forward(micro_batch, tally)
            if self.ranks.per_micro_batch or self.ranks.meets:
                self.ranks.agree(
                    Status.READY, LossTotals()
                )  # so that none goes on to the next forward without the others

        for micro_batch in self.ranks.rounds(self.micro_batches, self.window.loss):
            if self.recovery is None or micro_batch is None:
                look(micro_batch)
            else:
                self.recovery.run(micro_batch, [tally], look)
        sums = tally.sums()
        before = sums if self.recovery is None else None  # in other micro-batches, other dropout is drawn
        return self._known(sums, "The counting pass", counted_divisors, before)

    def _known(
        self,
        here: LossTotals,
        source: str,
        of: Callable[[LossTotals, ParsedLoss], Divisors],
        before: LossTotals | None = None,
    ) -> Denominators:
        everywhere = self.ranks.agree(Status.READY, here).sums
        return Known(partial(of, everywhere), partial(of, here), source, before)

    def _refuse_moved_buffers(self, micro_batches: int) -> None:
        """Look, after the first forward and after the last, whether the model keeps running values of its own."""
        self.looks -= 1
        if self.start is not None and micro_batches > 1:
            refuse_moved(self.start, micro_batches)


def _is_one(factor: Count) -> bool:
    return isinstance(factor, float) and factor == 1.0
