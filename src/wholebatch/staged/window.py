"""A window whose model sees the whole batch, for a loop that runs a loss function piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.batch import move
from wholebatch.errors import InexactError
from wholebatch.precision import device_of
from wholebatch.staged.call import Call
from wholebatch.staged.engine import Engine
from wholebatch.staged.operations import OPERATIONS, Reader
from wholebatch.staged.programs import programs_for
from wholebatch.staged.ranks import Alone
from wholebatch.staged.shelf import Shelf
from wholebatch.staged.standin import NothingElseMeets, StandIn
from wholebatch.state import State
from wholebatch.window import Piece

LossFunction = Callable[[Any, Any], Any]


class _Heard(BaseException):
    """The loss function has made its call; what follows is for later. Not an Exception: nobody shall catch it."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call


class WholeWindow:
    """Runs a loss function on every piece of a window as if the model saw the whole batch.

    1. :meth:`forward` hears the call that the loss function makes for each piece, and brings all of them through
       the model as far as its last stage.
    2. :meth:`loss` runs the loss function of one piece on the model's true answer, as often as it is wanted.
    3. :meth:`backward`, once the losses have gone back to that answer, goes on from there to the parameters.
    4. :meth:`commit` writes the buffers.

    Args:
        model: as the loss function shall see it; a wrapper with ``.module`` is looked into.
        loss_fn: called with a stand-in for the model and a micro-batch.
        shelf: where tensors wait that cross from stage to stage.
        ranks: with whom statistics are shared.
        operations: those in which rows may meet.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        *,
        shelf: Shelf | None = None,
        ranks: Alone | None = None,
        operations: Mapping[Any, Reader] = OPERATIONS,
    ) -> None:
        self.model, self.inner = model, unwrapped(model)
        self.loss_fn, self.operations, self.device = loss_fn, operations, device_of(model)
        self.engine = Engine(self.inner, shelf, ranks)
        self.places: dict[int, int] = {}
        self.states: dict[int, State] = {}

    def forward(self, pieces: Sequence[Piece]) -> None:
        """Bring all pieces as far as the last stage of the model."""
        calls: list[Call] = []
        for piece in pieces:
            self.states[id(piece)] = State(self.inner, buffers=False)
            call = self._hear(piece)
            if call is not None:
                self.places[id(piece)] = len(calls)
                calls.append(call)
        programs = programs_for(self.inner, calls, self.operations) if calls else []
        self.engine.forward(list(zip(programs, calls, strict=True)))

    def loss(self, piece: Piece) -> Any:
        """Run the loss function of a piece on the answer that the model gives within the whole batch."""
        place, here = self.places.get(id(piece)), State(self.inner, buffers=False)
        answers: list[Any] = []

        def answer(call: Call) -> Any:
            self._check(piece, call, len(answers))
            here.restore_random()
            answers.append(self.engine.output(self.places[id(piece)]))
            return answers[0]

        if place is not None:
            self.states[id(piece)].restore_random()
        with NothingElseMeets():
            return self.loss_fn(StandIn(self.model, answer), move(piece.load(), self.device))

    def restart(self) -> None:
        """Forget the gradients that have reached the model's answers, before the losses are run again."""
        self.engine.restart()

    def backward(self) -> None:
        """Bring the gradients that reached the model's answers back to its parameters."""
        self.engine.backward()

    def commit(self) -> None:
        """Write running statistics and counters, once."""
        self.engine.commit()

    def _hear(self, piece: Piece) -> Call | None:
        def heard(call: Call) -> Any:
            raise _Heard(call)

        try:
            with NothingElseMeets():
                self.loss_fn(StandIn(self.model, heard), move(piece.load(), self.device))
        except _Heard as reached:
            return reached.call
        return None

    def _check(self, piece: Piece, call: Call, earlier: int) -> None:
        if earlier:
            raise InexactError(
                "The loss function calls the model a second time, but what the whole batch meets with there is known "
                "only after the first call. Make it one call: concatenate the inputs, or use a module that calls both."
            )
        before = self.engine.pieces[self.places[id(piece)]].call if id(piece) in self.places else None
        if before is None or before.form != call.form or not _same(before, call):
            raise InexactError(
                "The loss function called the model with other inputs when it was run again on the same micro-batch. "
                "Draw random numbers from torch, random or numpy.random's global state, which are set back, and keep "
                "nothing between calls."
            )


def unwrapped(model: nn.Module) -> nn.Module:
    """Look into DistributedDataParallel and torch.compile."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def _same(before: Call, call: Call) -> bool:
    return all(torch.equal(a, b) for a, b in zip(before.leaves, call.leaves, strict=True) if isinstance(a, Tensor))
