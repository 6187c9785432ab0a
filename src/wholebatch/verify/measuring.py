"""One check: the same batch by `backward` and by the plain reading, and all that lies between.

1. The whole batch is read on a copy of the model, in double precision and in the model's own.
2. `backward` runs on the model itself, which is then put back as it was.
3. Gradients, items, loss, and what has moved are compared; a difference is explained.
4. With draws on, the micro-batches are run again with the draws they made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from wholebatch.batch.groups import sizes_in_words
from wholebatch.batch.sizes import Auto, Size, Tokens
from wholebatch.batch.window import MicroBatch, Window, micro_batches_of
from wholebatch.errors import WholeBatchError
from wholebatch.first_window import reasons
from wholebatch.first_window.draws import FixedDraws, uncompiled
from wholebatch.gradient.preconditions import refuse_inexact
from wholebatch.loss.terms import LossFunction
from wholebatch.model.comparison import Comparison, compare, errors_of, joined, rounding_of
from wholebatch.options import Options
from wholebatch.verify import causes
from wholebatch.verify.answers import asked_twice
from wholebatch.verify.copies import copied
from wholebatch.verify.cutting import as_wide, first_size, said_of_cut
from wholebatch.verify.drawing import drawn_apart, portions_of, replayed
from wholebatch.verify.explaining import FOREIGN, Case, bent_by_hooks, explain, where_rows_meet
from wholebatch.verify.finding import Finding
from wholebatch.verify.precision import Rounded, Yardstick
from wholebatch.verify.reference import OtherName, Reference, plain_gradient, rows_or_one, whole_micro_batches
from wholebatch.verify.running import Bench, Ran, numbered, over_ranks, several_ranks, shares, together
from wholebatch.verify.truth import TruthReader
from wholebatch.verify.watching import HookSums, checkpoints_heard


class CheckRun:
    """One check; :meth:`take` fills the attributes that a report is made of."""

    def __init__(self, model: nn.Module, loss_fn: LossFunction, batch: Any, size: Size, options: Options) -> None:
        self.stage = Bench(model, loss_fn, batch, size, options)
        self.loss_fn, self.batch, self.size_wanted, self.options = loss_fn, batch, size, options
        self.plain, self.wrapped = self.stage.plain, isinstance(model, DistributedDataParallel)
        self.names, self.collate = options.get("whole", ()), options.get("collate")
        cut = self.cut()
        refuse_inexact(self.stage.model_info, cut, options, isinstance(size, Auto))
        self.rows = [micro_batch.index for micro_batch in cut]
        self.dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        self.findings: list[Finding] = []
        self.carried: list[str] = []
        self.drawn = False
        self.run: list[Any] = []
        self.comparable = True
        self.size = Comparison(math.inf, 0.0, 0.0)
        self.rounding = rounding_of(self.dtype)
        self.by_parameter = dict[str, float]()
        self.micro_batches = len(cut)
        self.reader = TruthReader(
            self.stage, loss_fn, batch, self.dtype, self.names, self.collate, wrapped=self.wrapped
        )
        self.notes, self.not_shown = self.reader.notes, self.reader.not_shown

    @property
    def whole(self) -> Any:
        """The whole batch in one micro-batch; None where it had to be read in several."""
        return self.reader.whole

    @property
    def reading(self) -> dict[str, Any]:
        """How the whole batch was read."""
        return self.reader.reading

    def cut(self) -> list[MicroBatch]:
        """Return the micro-batches that `backward` will run."""
        return micro_batches_of(self.batch, self.size_wanted, whole=self.names, collate=self.collate)

    def take(self) -> CheckRun:
        """Measure, compare, explain; leave everything as it was."""
        if several_ranks() > 1 and not self.wrapped:
            self.notes.append(
                f"The model is not wrapped, though there are {several_ranks()} ranks: compared with this rank's own "
                "share of the batch."
            )
        try:
            with uncompiled(), checkpoints_heard() as heard:
                self.measure()
            if heard and self.truth.missing:
                self.findings.append(causes.lost_in_checkpoint(self.truth.missing))
        finally:
            self.stage.back()
        self.tell_missing()
        return self

    def measure(self) -> None:
        """Read the whole batch, run `backward`, and compare."""
        with FixedDraws() as steady:
            whole = self.reader.untouched()
            self.truth, own = together(lambda: self.reader.truths(whole), self.wrapped)
            rounded = Rounded(self.stage.model, self.loss_fn, self.dtype, self.reading, self.stage.back)
            self.yardstick = Yardstick(self.rounding, rounded, self.truth, own, self.whole)
            self.ask_twice()
        self.say_draws(sorted(steady.seen))
        if steady.redrawn:
            self.findings.append(causes.redrawn(sorted(steady.redrawn)))
        ran = self.ours()
        if ran is not None:
            with FixedDraws():
                self.compare(ran)
            self.own_draws(steady)
            self.with_draws(bool(steady.seen))

    def ask_twice(self) -> None:
        """Look whether a micro-batch says the same again; else nothing, or another thing, is to be compared."""
        cut = self.cut()
        if not cut:
            return
        answers = asked_twice(self.stage, self.plain, self.loss_fn, cut[0], self.rounding.sums)
        self.carried = list(answers.carried)
        if answers.finding is not None:
            self.findings.append(answers.finding)
        if answers.not_shown:
            self.comparable = False
            self.not_shown.append(answers.not_shown)

    @property
    def meets(self) -> bool:
        """Whether micro-batches run stage by stage, so that they can't be run again one by one."""
        several = self.micro_batches > 1 or self.wrapped  # all ranks alike, whatever their shares
        return several and (self.options.get("batch_norm") or "").startswith("exact")

    def ours(self) -> Ran | None:
        """Run `backward` with draws held still, and note what it does besides; None if the user's code fails in it."""
        on = self.stage.copy() if self.meets else None
        try:
            if on is not None:
                self.stage.run(on)  # what is captured of a model with draws held still would serve for nothing else
            with FixedDraws():
                ran = self.stage.run(on)
        except FOREIGN as error:
            if isinstance(error, WholeBatchError):
                raise
            sizes = [len(index) for index in self.rows]
            said = sizes_in_words(sizes, self.unit)
            self.findings.append(causes.fails_in_micro_batches(error, said, self.cut_through(sizes)))
            return None
        moved = [each.name for each in ran.moved if each.kind == "parameter"]
        if ran.watched.cleared:
            self.findings.append(causes.cleared())
        if ran.watched.added:
            self.findings.append(causes.goes_backward())
        if moved or ran.stepped:
            self.findings.append(causes.weights_moved(moved, ran.stepped))
        if ran.written:
            self.findings.append(causes.batch_written(ran.written))
        elif ran.taken:
            self.notes.append(
                f"The loss function takes things out of the caller's batch, or adds some: {ran.taken[0]}."
            )
        return ran

    @property
    def unit(self) -> str:
        """What micro-batches are cut of, in words."""
        return "rows" if self.collate is None else "samples"

    def cut_through(self, sizes: Sequence[int]) -> str:
        """Say what a micro-batch that does not run is cut through; "" where it was cut by others, or nothing is."""
        if isinstance(self.batch, Window) or self.wrapped:
            return ""
        device = next((parameter.device for parameter in self.plain.parameters()), None)

        def run(micro_batch: Any) -> None:
            try:
                self.loss_fn(self.plain, copied(micro_batch, None, device))
            finally:
                self.stage.back()

        return said_of_cut(run, self.cut()[0], sizes, None if self.collate else self.batch)

    def compare(self, ran: Ran) -> None:
        """Hold gradient, items, loss and buffers of both sides against each other."""
        truth, yardstick = self.truth, self.yardstick
        self.micro_batches = ran.result.micro_batches
        yardstick.widen_for(self.micro_batches)
        self.size = compare(*joined(ran.gradients, truth.gradients))
        self.by_parameter = errors_of(ran.gradients, truth.gradients)
        micro_batches = self.run = shares(lambda: ran.micro_batches, self.wrapped)
        if any(over_ranks(bool(self.findings) or not self.comparable, self.wrapped)):
            return
        if yardstick.is_nothing(ran.gradients):
            self.findings.append(causes.nothing(truth))
        elif not all(bool(gradient.isfinite().all()) for gradient in truth.gradients.values()):
            self.not_shown.append("The gradient of the whole batch is not finite, so nothing can be compared with it.")
        elif not yardstick.explains(self.size, micro_batches):
            self.explain(ran, micro_batches)
        else:
            if yardstick.is_rough:
                self.not_shown.append(
                    f"In {self.dtype} the plain reading itself is {yardstick.own_error:.1g} away from one in more bits,"
                    " and no difference below that can be seen: check in float64, or with another batch."
                )
            self.compare_the_rest(ran)
            self.compare_what_hooks_see(ran, micro_batches)

    def compare_the_rest(self, ran: Ran) -> None:
        """Where the gradients agree, look at what was reported of them, and at what else has moved."""
        truth = self.truth
        whole = [n for (_, place), n in truth.counts.items() if not isinstance(ran.result.items, dict) or not place]
        loss = float(ran.result.loss)
        if causes.counts_differ(ran.items, whole):
            self.findings.append(causes.miscounted(whole, ran.items, self.size))
        elif not self.yardstick.explains_loss(loss):
            self.findings.append(causes.another_loss(loss, float(truth.loss)))
        missing = [name for name in ran.missing if bool(truth.gradients[name].any())]
        if missing:
            self.findings.append(causes.none_here(missing, self.size))
        moved = self.other_buffers(ran)
        if moved and self.options.get("batch_norm") not in ("micro", "pooled", "exact-per-rank"):
            self.findings.append(causes.other_buffers(moved))
        if truth.micro_batches > 1 and (self.micro_batches > 1 or self.wrapped):
            self.look_for_coupling()

    def compare_what_hooks_see(self, ran: Ran, micro_batches: Sequence[Any]) -> None:
        """Show hooks the plain reading of the same micro-batches: what they see must not depend on how it is
        divided.
        """
        if not ran.seen.sums or self.wrapped or self.findings:
            return
        seen = HookSums()
        try:
            plain_gradient(self.stage.model, self.loss_fn, micro_batches, observe=seen.on, **self.reading)
        except (*FOREIGN, OtherName):
            self.not_shown.append("What hooks are shown of gradients: the micro-batches can't be read one by one.")
            return
        finally:
            self.stage.back()
        names = ran.seen.apart(seen, max(10 * self.yardstick.tolerance, 1e-9))
        if names:
            self.findings.append(causes.shown_otherwise(names))

    def other_buffers(self, ran: Ran) -> list[str]:
        """Name the buffers that stand elsewhere than after the whole batch."""
        pairs = [(name, ran.buffers[name], after) for name, after in self.truth.buffers.items() if name in ran.buffers]
        near = max(1e-4 if self.dtype != torch.float64 else 1e-9, 10 * self.yardstick.tolerance)
        return [
            name
            for name, ours, whole in pairs
            if ours.shape == whole.shape and not torch.allclose(ours, whole, near, near, equal_nan=True)
        ]

    def explain(self, ran: Ran, micro_batches: Sequence[Any]) -> None:
        """Name the cause, if one explains the measurement."""
        scales = (1.0, 1e6)
        bent = bent_by_hooks(self.plain, self.truth.gradients, scales) if self.micro_batches > 1 else []
        self.stage.back()
        if bent:
            self.findings.append(causes.hooked(bent, self.size))
            return
        case = Case(
            model=self.stage.model,
            loss_fn=self.loss_fn,
            micro_batches=micro_batches,
            whole=self.whole,
            truth=self.truth,
            ours=ran.gradients,
            size=self.size,
            tolerance=self.yardstick.tolerance,
            rows=() if self.wrapped or isinstance(self.batch, Window) else self.rows,
            padded=self.as_wide,
            names=self.names,
            reading=self.reading,
            back=self.stage.back,
            unit=self.unit,
        )
        finding = explain(case)
        self.findings.append(finding)
        if self.drawn and finding.rule == reasons.MEETING.rule:
            self.notes.append(str(reasons.DRAWN))

    def as_wide(self) -> list[Any] | None:
        """Make the same micro-batches padded as in the whole batch; None where no padding was taken off."""
        if isinstance(self.batch, Window) or self.wrapped or self.whole is None:
            return None
        if not (isinstance(first_size(self.size_wanted), Tokens) or self.collate):
            return None
        return as_wide(self.whole, self.rows, () if self.collate else self.names)

    def look_for_coupling(self) -> None:
        """Ask by experiment whether rows meet, where the reference, too, had to run in micro-batches."""
        self.notes.append(
            f"The reference ran in {self.truth.micro_batches} micro-batches, in which rows of different "
            f"micro-batches can't meet."
        )
        examples = shares(lambda: whole_micro_batches(self.batch, self.names, self.collate), self.wrapped)
        largest = max(examples, key=rows_or_one)
        if rows_or_one(largest) < 2:
            self.not_shown.append("Whether rows of different micro-batches meet: they can't be joined, nor exchanged.")
            return
        found = where_rows_meet(self.plain, self.loss_fn, largest, self.names, self.meets)
        self.stage.back()
        if found is not None:
            amount = (
                "found by exchanging rows; how much it matters is hidden, as the reference ran in micro-batches too"
            )
            self.findings.append(causes.meeting(found, amount, 0.1))

    def say_draws(self, seen: Sequence[str]) -> None:
        """Note what draws, and where that can't be held still."""
        self.drawn = bool(seen)
        if not seen:
            return
        drawn = ", ".join(seen[:4])
        if self.options.get("batch_norm") == "exact-lock-step":
            self.comparable = False
            self.not_shown.append(
                f"The model draws random numbers ({drawn}), which can't be held still in the threads of lock-step. "
                'Choose batch_norm="exact", or check without them.'
            )
        else:
            self.notes.append(f"The model draws random numbers ({drawn}): they were held still on both sides.")

    def own_draws(self, steady: FixedDraws) -> None:
        """Read the batch and its micro-batches again, each row with draws of its own: those must add up, too."""
        skipped = not steady.seen or bool(self.findings) or bool(self.not_shown)
        if any(over_ranks(skipped, self.wrapped)):
            return
        rows = numbered(self.cut(), self.wrapped)
        portions = portions_of(self.whole, self.run, rows, () if self.collate else self.names)

        def read(batches: Sequence[Any], loss_fn: LossFunction) -> Reference:
            try:
                return plain_gradient(self.stage.model, loss_fn, batches, **self.reading)
            finally:
                self.stage.back()

        if len(rows) > 1:
            finding, untold = drawn_apart(read, self.loss_fn, portions, self.yardstick.tolerance, steady)
            self.findings += [] if finding is None else [finding]
            self.not_shown += untold

    def with_draws(self, draws: bool) -> None:
        """Run the micro-batches again with the draws they made: the window must be their sum."""
        nothing_to_run = not draws or self.meets or isinstance(self.size_wanted, Auto)
        if any(over_ranks(nothing_to_run or bool(self.findings) or bool(self.not_shown), self.wrapped)) or self.wrapped:
            return
        near = max(4 * self.yardstick.tolerance, 1e-5 if self.dtype != torch.float64 else 0.0)
        size = replayed(self.stage, self.loss_fn, {**self.reading, "dtype": self.dtype, "as_is": True})
        if size is not None and not size.error <= near:
            self.findings.append(causes.other_with_draws(size))
        elif size is not None:
            self.notes.append("With draws on, the window is the sum of its micro-batches run again with their draws.")

    def tell_missing(self) -> None:
        """Note what moves without being read, and parameters that nobody gives a gradient."""
        missing = self.truth.missing
        if missing:
            self.notes.append(
                f"{len(missing)} parameters require a gradient and get none, in the whole batch either (first: "
                f"{missing[0]!r}): the loss does not use them, or uses them without a graph."
            )
        if self.carried:
            self.notes.append(
                f"{len(self.carried)} places move with each call of the loss function (first: {self.carried[0]!r}), "
                f"so {self.micro_batches} times in this window; the loss did not change with them here."
            )
