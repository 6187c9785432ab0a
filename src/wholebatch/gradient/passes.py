"""The forwards and the backwards of a window whose rows are separate; neither knows of the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from wholebatch.batch.window import MicroBatch
from wholebatch.batchnorm.plain import PlainWindow
from wholebatch.errors import LossError
from wholebatch.first_window.conduct import WatchedLoss
from wholebatch.first_window.watch import Unwatched
from wholebatch.gradient.preconditions import refuse_foreign, refuse_moved
from wholebatch.gradient.share_norms import Unmeasured
from wholebatch.loss.denominators import Denominators
from wholebatch.loss.seeds import BackwardSeeds, weighted
from wholebatch.loss.shapes import Shapes
from wholebatch.loss.terms import ParsedLoss, read
from wholebatch.loss.totals import LossAccumulator
from wholebatch.model.gradients import GradientAccumulator
from wholebatch.model.inspection import ModelInfo
from wholebatch.model.reached import Step, external_parameters, reentrant
from wholebatch.model.state import State
from wholebatch.ranks.agreement import Ranks, Travel


class Forwards:
    """Runs loss functions, and looks whether what they say can be believed.

    Args:
        model_info: of the model.
        loss: the user's own, with what it did besides.
        window: calls it, or all of them together where rows meet in BatchNorm.
        ranks: of the window.
        watch: looks at the first window of its kind.
        keeps_state: whether the window may have to begin again, or its buffers be looked at.
        looks_at_buffers: whether nobody has chosen what becomes of running values.
    """

    def __init__(
        self,
        model_info: ModelInfo,
        loss: WatchedLoss,
        window: PlainWindow,
        ranks: Ranks,
        watch: Unwatched,
        keeps_state: bool,
        looks_at_buffers: bool,
    ) -> None:
        self.shapes = Shapes()
        self._model_info, self._loss, self._window, self._ranks, self._watch = model_info, loss, window, ranks, watch
        self._keeps_state = keeps_state
        self._start: State | None = None
        # After the first forward, and after the last.
        self._looks = 2 if keeps_state and looks_at_buffers else 0

    def begin(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Run what is common to all micro-batches, and remember where the window begins."""
        self._window.forward(micro_batches)
        self._start = State(self._model_info) if self._keeps_state else None

    def rewind(self) -> None:
        """Go back to the random state and the buffers that the window began with."""
        if self._start is not None:
            self._start.restore()

    def run(self, micro_batch: MicroBatch | None, tally: LossAccumulator, of: int) -> ParsedLoss | None:
        """Run one of `of` micro-batches, or none where other ranks still have some."""
        with self._watch.forward():
            parsed = None if micro_batch is None else self._heard(micro_batch, tally)
        self._ranks.run_dummy_forward()
        if self._looks > 1:
            self._look_at_buffers(of)
        return parsed

    def end(self, micro_batches: Sequence[MicroBatch], ran: int) -> None:
        """Look at what only the last forward shows."""
        if self._looks > 0:
            self._look_at_buffers(ran)
        self._watch.finish(self.say, micro_batches)

    def say(self, micro_batch: MicroBatch) -> ParsedLoss | None:
        """Read what the loss function returns."""
        return read(self._window.loss(micro_batch), alone=micro_batch.rows == 1)

    def again(self, micro_batch: MicroBatch) -> Callable[[], Any] | None:
        """Say how to run a micro-batch once more without a trace; None where other ranks would have to join."""
        if self._ranks.world > 1 or self._window.meets:
            return None

        def run() -> None:
            state = State(self._model_info)
            self._window.loss(micro_batch)
            state.restore()

        return run

    def _heard(self, micro_batch: MicroBatch, tally: LossAccumulator) -> ParsedLoss | None:
        said = self.say(micro_batch)
        self.shapes.note(said, micro_batch.rows, self._loss.micro_batch)
        self._loss.micro_batch = None
        return tally.add(said, micro_batch.index)

    def _look_at_buffers(self, micro_batches: int) -> None:
        """Refuse a model that keeps running values of its own."""
        self._looks -= 1
        if self._start is not None and micro_batches > 1:
            refuse_moved(self._start, micro_batches)


class Backwards:
    """Goes back from shares of the loss, and lets gradients travel when they are to.

    Args:
        seeds: where each backward begins.
        travel: when the gradients of all ranks are added up.
        noise: measures the shares as they arrive.
    """

    def __init__(
        self,
        model_info: ModelInfo,
        seeds: BackwardSeeds,
        gradients: GradientAccumulator,
        ranks: Ranks,
        travel: Travel,
        watch: Unwatched,
        noise: Unmeasured,
    ) -> None:
        self.seeds, self.travel = seeds, travel
        self._model_info, self._gradients, self._ranks, self._watch = model_info, gradients, ranks, watch
        self._noise = noise

    def prepare(self, parsed: ParsedLoss) -> set[Step]:
        """Find leaves outside of the model that this backward will add to, so that they are mended or taken back too.

        Every micro-batch is looked through: a later one may be the first to reach a leaf. Returns what it is made of.
        """
        self._gradients.release()
        outputs, steps = [output for output, _ in weighted(parsed).values()], set[Step]()
        found = external_parameters(outputs, self._model_info, steps)
        foreign = [leaf for leaf in found if not self._ranks.owns(leaf)]
        self._gradients.include(foreign)
        if self._ranks.world > 1:
            refuse_foreign(foreign)
        return steps

    def run(self, parsed: ParsedLoss | None, denominators: Denominators, last: bool = False) -> None:
        """Go back from a share; the last time, all ranks reduce what has been summed."""
        outputs, seeds = ([], []) if parsed is None else self.seeds.of(parsed, denominators)
        if parsed is not None:
            self._noise.begins(parsed)
        self._run(outputs, seeds, last)
        self._noise.ends()

    def _run(self, outputs: list[Tensor], seeds: list[Tensor | None], last: bool) -> None:
        if last and outputs and self._ranks.world > 1 and self.travel is Travel.LAST and reentrant(outputs):
            self._go_back(outputs, seeds)  # its inner backwards would each look to the reducer like the whole one
            outputs = []
        if last and not outputs:
            outputs, seeds = self._ranks.zero_output(), [None]
        if last:
            self._ranks.prepare_reducer(outputs)
        if outputs:
            self._go_back(outputs, seeds)

    def _go_back(self, outputs: Sequence[Tensor], seeds: Sequence[Tensor | None]) -> None:
        try:
            with self._watch.backward():
                torch.autograd.backward(outputs, seeds)
        except RuntimeError as error:
            if "backward through the graph a second time" in str(error):
                raise LossError(
                    "Two micro-batches share a graph that was made outside of loss_fn, and the first backward has freed"
                    " it. Compute all that carries gradient inside of loss_fn, from the model and the micro-batch."
                ) from error
            raise
