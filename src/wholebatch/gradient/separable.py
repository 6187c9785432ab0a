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
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.amp import GradScaler
from typing_extensions import Unpack

from wholebatch.batch.sizes import WAYS, Size
from wholebatch.batch.window import MicroBatch
from wholebatch.batchnorm import window_for
from wholebatch.errors import SyncError, plainly
from wholebatch.first_window import proven
from wholebatch.first_window.conduct import WatchedLoss, refuse_no_function, refuse_silence
from wholebatch.first_window.proof import Unlike
from wholebatch.first_window.trial import Trial
from wholebatch.first_window.watch import Unwatched, watch_for
from wholebatch.gradient.out_of_memory import OutOfMemoryRetry, Record, RestartWindow
from wholebatch.gradient.passes import Backwards, Forwards
from wholebatch.gradient.result import Pending, Result
from wholebatch.gradient.setup import Setup, refuse_no_model, set_up
from wholebatch.gradient.share_norms import averaged, share_norms
from wholebatch.gradient.whole_leaves import noted_whole_leaves
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
from wholebatch.loss.earlier import leave
from wholebatch.loss.seeds import BackwardSeeds
from wholebatch.loss.terms import LossFunction, ParsedLoss
from wholebatch.loss.totals import LossAccumulator, LossTotals, stated_sums
from wholebatch.model.gradient_hooks import hooks_that_read
from wholebatch.model.gradients import GradientAccumulator, all_or_nothing, total_norm
from wholebatch.norms import Pooled, pooled
from wholebatch.options import Options, checked
from wholebatch.ranks.agreement import Next, Status, Travel


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
        pending = accumulate(model, loss_fn, batch, micro_batch_size, gradients, scaler=scaler, **options)
        leave(model, pending.flags)
        return pending.finish()

    return all_or_nothing(work)


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
    refuse_no_model(model)
    refuse_no_function(loss_fn)
    setup = set_up(model, [loss_fn], micro_batch_size, checked(options), scaler)
    info, ranks, splits = setup.model_info, setup.ranks, setup.auto is not None
    with ranks:
        micro_batches = setup.cut(batch, micro_batch_size, splits)
        leaves = [*info.parameters, *also, *ranks.leaves()]
        few = len(micro_batches)
        new_trial = partial(Trial, info, loss_fn, ranks, setup.scaler, setup.options, leaves, micro_batches=few)
        proof = proven(new_trial, batch, micro_batches, splits=splits)
        setup.begin(gradients, also)
        watch = watch_for(info, loss_fn, len(micro_batches), setup.options, ranks, splits=splits)
        with noted_whole_leaves(setup, loss_fn, batch, micro_batches):
            pending = _WindowRun(setup, loss_fn, micro_batches, gradients, watch, proof, also).pending()
        gradients.end()
        return pending.noted(info, watch.said or proof.said)


class _Recount(Exception):
    """The terms need every denominator before the first backward.

    Args:
        told: whether the other ranks know it already.
    """

    def __init__(self, told: bool) -> None:
        super().__init__("the window needs its denominators first")
        self.told = told


class _WindowRun:
    """One window, from its first forward to its last backward: count, loop, boundary."""

    def __init__(
        self,
        setup: Setup,
        loss_fn: LossFunction,
        micro_batches: Sequence[MicroBatch],
        gradients: GradientAccumulator,
        watch: Unwatched,
        proof: Unlike,
        also: Sequence[Tensor],
    ) -> None:
        info, ranks, options = setup.model_info, setup.ranks, setup.options
        self.setup, self.ranks, self.gradients, self.proof = setup, ranks, gradients, proof
        self.loss_fn, self.micro_batches = loss_fn, list(micro_batches)
        self.extent = sum(micro_batch.size for micro_batch in micro_batches)
        self.recovery = None if setup.auto is None else OutOfMemoryRetry(setup.auto, info, gradients)
        loss = WatchedLoss(loss_fn, gradients.parameters)
        self.window = window_for(info, loss, micro_batches, options, ranks, setup.auto is not None)
        self.travel = _travel_of(setup, self.window.meets)
        self.single = len(micro_batches) < 2 and setup.auto is None and self.travel is Travel.LAST
        self.hooks_read = not self.single and bool(hooks_that_read(info, gradients.parameters.values()))
        self.forwards = Forwards(
            info,
            loss,
            self.window,
            ranks,
            watch,
            keeps_state=not self.single or ranks.world > 1,
            looks_at_buffers=options.get("batch_norm") is None,
        )
        seeds = BackwardSeeds(setup.scaler, ranks.divides, drops_empty=ranks.world == 1)
        self.also, self.noise = also, share_norms(setup, also, self.window.meets)
        self.backwards = Backwards(info, seeds, gradients, ranks, self.travel, watch, self.noise)
        gradients.include(ranks.leaves())

    def pending(self) -> Pending:
        """Run the window, and measure its noise if that is due."""
        with self.noise, nullcontext() if self.recovery is None else self.recovery.below:
            pending = self._pending()
        self.noise.over()
        return pending

    def _pending(self) -> Pending:
        """Run the window in one pass if its terms allow, else know the denominators first."""
        self.forwards.begin(self.micro_batches)
        known = self._known_beforehand()
        while True:
            try:
                return self._attempt(known or self._provisional())
            except RestartWindow as redo:
                self.micro_batches = [part for micro_batch in self.micro_batches for part in redo.fitting(micro_batch)]
            except _Recount as recount:
                if not recount.told:  # here, where no agreement that fails is taken for a micro-batch that does
                    self.ranks.agree(Status.RECOUNT, LossTotals())
                self.forwards.rewind()
                known = self._counted()
            self.gradients.restart()
            self.noise.restart()
            self.forwards.rewind()
            self.window.restart()

    # Count

    def _known_beforehand(self) -> Denominators | None:
        """Know the denominators before the first backward, where they are stated or cannot be mended afterwards."""
        items = self.setup.options.get("items")
        if items is not None:
            here = stated_sums(items(micro_batch.load()) for micro_batch in self.micro_batches)
            return self._known(here, "items=", stated_divisors)
        if not self.window.meets or self.ranks.world == 1:
            return None
        known = self._counted()  # gradients of shared statistics add up only if divided by the same numbers
        self.forwards.rewind()
        return known

    def _counted(self) -> Denominators:
        """Know the denominators from a forward pass over every micro-batch, graphs dropped one by one."""
        tally = LossAccumulator()

        def look(micro_batch: MicroBatch | None) -> None:
            self._forward(micro_batch, tally)
            if self.ranks.per_micro_batch or self.ranks.meets:  # else some would go on to a forward without the others
                self.ranks.agree(Status.READY, LossTotals(), then=Next.UNKNOWN)  # the next round says it

        for micro_batch in self.ranks.rounds(self.micro_batches, self.window.loss):
            if self.recovery is None or micro_batch is None:
                look(micro_batch)
            else:
                self.recovery.run(micro_batch, [tally, self.noise], look)
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

    def _provisional(self) -> Provisional:
        exact_last = self.single or (self.ranks.world > 1 and self.travel is Travel.LAST)
        # Gradients that wait where rows meet are not yet in any sum that a correction could be applied to.
        adapts = not (self.window.meets or self.ranks.meets) and self.travel is not Travel.EVERY
        return Provisional(self.ranks.world, exact_last, not self.single, self.extent, adapts, self.hooks_read)

    # Loop

    def _run_micro_batches(
        self, tally: LossAccumulator, denominators: Denominators, pool: Pooled | None
    ) -> tuple[ParsedLoss | None, int]:
        """Run the micro-batches; return the last answer if its backward waits for the agreement, and how many ran."""
        waiting: ParsedLoss | None = None

        def whole_micro_batch(micro_batch: MicroBatch) -> None:
            self.backwards.run(self._observed(micro_batch, tally, denominators), denominators)

        if self.recovery is not None:
            records: list[Record] = [tally, self.noise] if pool is None else [tally, self.noise, pool]
            ran = sum(self.recovery.run(micro_batch, records, whole_micro_batch) for micro_batch in self.micro_batches)
            self.recovery.rest()
            return None, ran
        answered = self._met if self.ranks.meets or self.travel is Travel.EVERY else self._observed
        for micro_batch in self.ranks.rounds(self.micro_batches, self.window.loss):
            if self.travel is Travel.LAST:
                self.backwards.run(waiting, denominators)
                waiting = answered(micro_batch, tally, denominators)
            else:
                each = self.travel is Travel.EVERY
                self.backwards.run(answered(micro_batch, tally, denominators), denominators, last=each)
        return waiting, len(self.micro_batches)

    def _forward(self, micro_batch: MicroBatch | None, tally: LossAccumulator) -> ParsedLoss | None:
        answer = self.forwards.run(micro_batch, tally, len(self.micro_batches))
        if micro_batch is not None:
            self.noise.heard(answer, micro_batch.rows)
        if answer is not None:
            self.proof.note(micro_batch, answer, self.backwards.prepare(answer))
        return answer

    def _observed(
        self, micro_batch: MicroBatch | None, tally: LossAccumulator, denominators: Denominators
    ) -> ParsedLoss | None:
        """Run one forward, and look whether the provisional denominator still serves."""
        answer = self._forward(micro_batch, tally)
        if not self._serves(denominators, answer, micro_batch):
            raise _Recount(told=False)
        return answer

    def _met(
        self, micro_batch: MicroBatch | None, tally: LossAccumulator, denominators: Denominators
    ) -> ParsedLoss | None:
        """Run one forward in step with the other ranks, and divide by the same number as they."""
        answer = self._forward(micro_batch, tally)
        status = Status.READY if self._serves(denominators, answer, micro_batch) else Status.RECOUNT
        agreement = self.ranks.agree(status, LossTotals(), denominators.guess, then=Next.UNKNOWN)
        if agreement.recount:
            raise _Recount(told=True)
        if self.travel is Travel.EVERY:
            self.ranks.settle()
        denominators.use_agreed(agreement.number)
        return answer

    def _serves(self, denominators: Denominators, answer: ParsedLoss | None, micro_batch: MicroBatch | None) -> bool:
        if answer is None or micro_batch is None:
            return True
        observed = denominators.observe(answer, self.extent / max(micro_batch.size, 1))
        correction = denominators.correction()
        if correction != 1.0:
            self._scale(correction)
        return observed

    def _scale(self, factor: Count) -> None:
        """Multiply all that has been summed so far."""
        self.gradients.scale(factor)
        self.noise.scale(factor)

    # Boundary

    def _attempt(self, denominators: Denominators) -> Pending:
        """Run every micro-batch, agree with all ranks before gradients travel, and leave one factor to be applied."""
        tally = LossAccumulator(self.setup.options.get("verify") != "never")
        with pooled(self.setup.model_info, self.setup.options.get("batch_norm") == "pooled") as pool:
            waiting, ran = self._run_micro_batches(tally, denominators, pool)
        self.forwards.end(self.micro_batches, ran)
        self.window.backward()
        with self.gradients.paused():
            self.proof.finish()
        here = tally.sums()
        if self.noise.measures:
            here.schema = replace(here.schema, measured=True)
        sums = self._agreed(here, denominators, ran)
        factor = self._travelled(waiting, denominators, sums)
        self.window.commit()
        if self.ranks.world == 1:
            self.backwards.seeds.check()
        if not sums.schema.terms and self.micro_batches:
            again = self.forwards.again(self.micro_batches[0])
            refuse_silence(self.loss_fn, self.setup.model_info, again)
        rows = sum(micro_batch.rows for micro_batch in self.micro_batches)
        said = sums.report(self.setup.model_info.device)
        ways = () if self.setup.auto is None else WAYS[self.setup.auto.way]
        result = Result(**said, micro_batches=ran, rows=rows, sizes=tally.sizes(sums.schema), ways=ways)
        return Pending(result, self.gradients, factor, sums.alive, tally.losses, tally.flags)

    def _agreed(self, here: LossTotals, denominators: Denominators, ran: int) -> LossTotals:
        """Add the window's sums up over ranks.

        Raises:
            _Recount: on all ranks, if what was divided by provisional numbers cannot be mended by one factor.
        """
        if ran > 1 or self.ranks.world > 1:
            self.forwards.shapes.check()
        denominators.check(here)
        agreement = self.ranks.agree(Status.READY, here, float(denominators.loose), then=Next.UNKNOWN)
        unlike = self.ranks.world > 1 and agreement.number and not uniform(agreement.sums, self.ranks.world)
        if agreement.recount or unlike:
            self.ranks.resume()
            raise _Recount(told=True)
        self.ranks.settle()
        return agreement.sums

    def _travelled(self, waiting: ParsedLoss | None, denominators: Denominators, sums: LossTotals) -> float | Tensor:
        """Let gradients travel; return the factor by which they are still off."""
        factor = denominators.settle(sums)
        if self.ranks.world > 1 and self.travel is not Travel.EVERY:
            self._scale(factor)
            factor = 1.0
        if self.travel is Travel.LAST:
            self.backwards.run(waiting, denominators, last=True)
        if self.travel is Travel.APART or self.ranks.per_micro_batch:
            self.ranks.reduce(self.gradients)
        if sums.schema.measured:
            self._measure(sums, factor)
        self.ranks.conclude(self.gradients)
        return factor

    def _measure(self, sums: LossTotals, factor: Count) -> None:
        """Learn how far the shares of all ranks scatter; every rank takes part if one of them measures."""
        numbers = self.noise.numbers(sums)
        square = total_norm(self.gradients.held(averaged(self.setup, self.also)), numbers.device).square()
        self.noise.learn(self.ranks.total(numbers), square, sums, factor)


def _travel_of(setup: Setup, meets: bool) -> Travel:
    """Say when gradients travel: as the wrapper has it, unless its own reduction cannot serve.

    Raises:
        SyncError: for a size that is found by trying, where all ranks go in step.
    """
    ranks, options = setup.ranks, setup.options
    if meets:
        return Travel.APART
    if ranks.world == 1 or (setup.auto is None and options.get("accumulate_in") is None):
        return ranks.travel
    if setup.auto is not None and (ranks.per_micro_batch or ranks.meets or options.get("sync") == "every"):
        raise SyncError(
            'micro_batch_size=Auto(...) splits a micro-batch on the rank where it failed, but sync="every" and '
            'SyncBatchNorm keep all ranks in step. Pass sync="last", or a fixed size.'
        )
    return Travel.EVERY if ranks.per_micro_batch else Travel.APART
