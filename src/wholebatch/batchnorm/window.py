"""A window whose model sees the whole batch, for a loop that runs a loss function micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor

from wholebatch.batch.tree import move
from wholebatch.batch.window import MicroBatch
from wholebatch.batchnorm.model_call import ModelCall
from wholebatch.batchnorm.model_proxy import ModelProxy, NothingElseMeets
from wholebatch.batchnorm.plain import PlainWindow
from wholebatch.batchnorm.tensor_store import TensorStore
from wholebatch.errors import InexactError, SyncError
from wholebatch.loss.totals import LossTotals
from wholebatch.model.inspection import ModelInfo
from wholebatch.model.state import State
from wholebatch.ranks.agreement import Next, Ranks, Status

LossFunction = Callable[[Any, Any], Any]


class _CallHeld(BaseException):
    """The loss function has made its call; what follows is for later. Not an Exception: nobody shall catch it."""

    def __init__(self, call: ModelCall) -> None:
        super().__init__()
        self.call = call


class _Undone:
    """Sets back, if the block fails, what layers count before they are refused, and tells ranks that wait for them."""

    def __init__(self, start: State, tell: Callable[[], None] | None = None) -> None:
        self._start, self._tell = start, tell

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, _CallHeld):
            return
        self._start.restore_buffers()
        if self._tell is not None and not isinstance(error, SyncError):
            self._tell()


class Runner(Protocol):
    """Brings the calls of all micro-batches through a model, forward and backward."""

    store: TensorStore
    calls: Sequence[ModelCall]

    def forward(self, calls: Sequence[ModelCall]) -> None:
        """Go as far as nothing but the micro-batch itself is needed; the leaves of the calls wait on the shelf."""

    def output(self, index: int) -> Any:
        """Return the model's answer to a call, with its graph."""

    def fail(self) -> None:
        """Let no other rank wait for this one."""

    def restart(self) -> None:
        """Forget the gradients that have come back to answers."""

    def backward(self) -> None:
        """Bring them back to the parameters."""

    def commit(self) -> None:
        """Write the buffers."""


class WholeWindow(PlainWindow):
    """Runs a loss function on every micro-batch of a window as if the model saw the whole batch.

    1. :meth:`forward` hears the call that the loss function makes for each micro-batch, and brings all of them through
       the model as far as its last stage.
    2. :meth:`loss` runs the loss function of one micro-batch on the model's true answer, as often as it is wanted.
    3. :meth:`backward`, once the losses have gone back to that answer, goes on from there to the parameters.
    4. :meth:`commit` writes the buffers.

    Args:
        model_info: of the model as the loss function shall see it; a wrapper with ``.module`` is looked into.
        loss_fn: called with a stand-in for the model and a micro-batch.
        ranks: who have to be ready before gradients of shared statistics travel.
        runner: brings the calls through the model: the engine of stages, or lock-step.
    """

    meets = True

    def __init__(self, model_info: ModelInfo, loss_fn: LossFunction, ranks: Ranks, runner: Runner) -> None:
        super().__init__(model_info, loss_fn, ranks)
        self.runner = runner
        self.places: dict[int, int] = {}
        self.states: dict[int, State] = {}

    def forward(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Bring all micro-batches as far as the last stage of the model."""
        calls: list[ModelCall] = []
        self.start = State(self.model_info)
        with _Undone(self.start, self.runner.fail):
            for micro_batch in micro_batches:
                state = State(self.model_info, buffers=False)
                call = self._hear(micro_batch)
                if state.drew():  # else nothing has to be set back, which all threads would feel
                    self.states[id(micro_batch)] = state
                if call is not None:
                    self.places[id(micro_batch)] = len(calls)
                    calls.append(call.map(self.runner.store.put))
            self.runner.forward(calls)

    def loss(self, micro_batch: MicroBatch) -> Any:
        """Run the loss function of a micro-batch on the answer that the model gives within the whole batch."""
        place, state = self.places.get(id(micro_batch)), self.states.get(id(micro_batch))
        here = State(self.model_info, buffers=False)
        answers: list[Any] = []

        def answer(call: ModelCall) -> Any:
            self._check(micro_batch, call, len(answers))
            if state is not None:
                here.restore_random()
            answers.append(self.runner.output(self.places[id(micro_batch)]))
            return answers[0]

        if place is not None and state is not None:
            state.restore_random()
        with NothingElseMeets(), _Undone(self.start):
            return self.loss_fn(ModelProxy(self.model, answer), move(micro_batch.load(), self.device))

    def restart(self) -> None:
        """Forget the gradients that have reached the model's answers, before the losses are run again."""
        self.runner.restart()

    def rewind(self) -> None:
        """Find the buffers again that :meth:`forward` found: stages run once more."""
        self.start.restore_buffers()

    def backward(self) -> None:
        """Bring the gradients that reached the model's answers back to its parameters, on all ranks or on none."""
        self.ranks.agree(Status.READY, LossTotals(), then=Next.UNKNOWN)  # the statistics' gradients meet
        with _Undone(self.start, self.runner.fail):
            self.runner.backward()
        self.ranks.resume()

    def commit(self) -> None:
        """Write running statistics and counters, once."""
        self.runner.commit()

    def _hear(self, micro_batch: MicroBatch) -> ModelCall | None:
        def heard(call: ModelCall) -> Any:
            raise _CallHeld(call)

        try:
            with NothingElseMeets():
                self.loss_fn(ModelProxy(self.model, heard), move(micro_batch.load(), self.device))
        except _CallHeld as reached:
            return reached.call
        return None

    def _check(self, micro_batch: MicroBatch, call: ModelCall, earlier: int) -> None:
        if earlier:
            raise InexactError(
                "The loss function calls the model a second time, but what the whole batch meets with there is known "
                "only after the first call. Make it one call: concatenate the inputs, or use a module that calls both."
            )
        before = (
            self.runner.calls[self.places[id(micro_batch)]].map(self.runner.store.take)
            if id(micro_batch) in self.places
            else None
        )
        if before is None or before.form != call.form or not _same(before, call):
            raise InexactError(
                "The loss function called the model with other inputs when it was run again on the same micro-batch. "
                "Draw random numbers from torch, random or numpy.random's global state, which are set back, and keep "
                "nothing between calls."
            )


def _same(before: ModelCall, call: ModelCall) -> bool:
    pairs = zip(before.leaves, call.leaves, strict=True)
    return all(torch.equal(a, b) for a, b in pairs if isinstance(a, Tensor))
