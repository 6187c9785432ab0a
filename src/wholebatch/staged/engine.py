"""All pieces of a batch through the stages of a model, forward and backward.

The methods of :class:`Engine` in their order are the algorithm:

1. :meth:`Engine.forward`: stage by stage, all pieces without graph, keeping what crosses; after each stage the
   statistic of the whole batch.
2. :meth:`Engine.output`: the last stage of one piece, with graph; the loss and its backward are the caller's.
3. :meth:`Engine.backward`: stage by stage in reverse, all pieces again, each with its graph and its own draws; before
   each stage the gradient of the statistic goes back to the rows.
4. :meth:`Engine.commit`: buffers, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from wholebatch.errors import InexactError
from wholebatch.staged.call import Call
from wholebatch.staged.listening import Listener
from wholebatch.staged.operations import OPERATIONS, Operation, Reader, Statistic
from wholebatch.staged.program import Program, Stage
from wholebatch.staged.programs import programs_for
from wholebatch.staged.ranks import Alone
from wholebatch.staged.shelf import Shelf


@dataclass
class Meeting:
    """An operation with the statistic of the whole batch, and what all pieces have said about it."""

    operation: Operation
    statistic: Statistic
    gradient: list[Tensor | None]

    def hear(self, place: int, gradient: Tensor) -> None:
        """Add up what a piece says."""
        held = self.gradient[place]
        self.gradient[place] = gradient if held is None else held + gradient


@dataclass
class _Heard:
    """A meeting as one run of a stage sees it: the gradient of its statistic is listened for."""

    operation: Operation
    statistic: Sequence[Any]

    def apply(self, x: Tensor, *operands: Any) -> Tensor:
        """Compute the piece's result; called by the stage."""
        return self.operation.apply(x, tuple(self.statistic), *operands)


@dataclass
class Piece:
    """One micro-batch on its way: the values that wait for it and the gradients that came back."""

    program: Program
    call: Call
    values: dict[str, Any]
    gradients: dict[str, Any] = field(default_factory=dict)
    draws: dict[int, list[tuple[torch.device, Tensor]]] = field(default_factory=dict)
    written: tuple[Any, ...] = ()


class Engine:
    """Runs the pieces of one batch through programs with the same couplings.

    Args:
        model: whose parameters and buffers the stages use; the module itself, not a wrapper.
        shelf: where tensors wait that cross from stage to stage.
        sparing: whether only those wait that cross a few cuts, and the others are made once more.
        ranks: with whom statistics are shared.
        operations: those in which rows may meet.
    """

    def __init__(
        self,
        model: nn.Module,
        shelf: Shelf | None = None,
        sparing: bool = False,
        ranks: Alone | None = None,
        operations: Mapping[Any, Reader] = OPERATIONS,
    ) -> None:
        self.model, self.operations, self.sparing = model, operations, sparing
        self.calls: Sequence[Call] = ()
        self.shelf, self.ranks = shelf or Shelf(), ranks or Alone()
        self.pieces: list[Piece] = []
        self.meetings: list[Meeting] = []
        self.anchor = torch.zeros((), requires_grad=True)

    def forward(self, calls: Sequence[Call]) -> None:
        """Bring all pieces as far as their last stage; the leaves of their calls wait on the shelf."""
        self.calls = calls
        programs = programs_for(self.model, calls, self.operations, self.shelf.take)
        self.pieces = [
            Piece(program, call, program.arguments(call.leaves)) for program, call in zip(programs, calls, strict=True)
        ]
        couplings = self.pieces[0].program.signature if self.pieces else ()
        for index, coupling in enumerate(self.ranks.couplings(couplings)):
            parts = [self._advance(piece, index, coupling.operation) for piece in self.pieces]
            statistic = self.ranks.merge(coupling.operation, parts)
            self.meetings.append(Meeting(coupling.operation, statistic, [None] * len(statistic)))

    def output(self, index: int) -> Any:
        """Run the last stage of a piece, in the caller's grad mode, and return the model's answer."""
        piece = self.pieces[index]
        last = len(piece.program.stages) - 1
        leaves = self._leaves(piece, last)
        results = self._run(piece, last, leaves)
        piece.written = tuple(value.detach() for value in results[piece.program.results :])
        return piece.program.answer(results[: piece.program.results])

    def fail(self) -> None:
        """Let no other rank wait for this one."""
        self.ranks.fail()

    def restart(self) -> None:
        """Forget the gradients that have come back to the last stage's inputs."""
        for piece in self.pieces:
            piece.gradients.clear()
        for meeting in self.meetings:
            meeting.gradient = [None] * len(meeting.statistic)

    def backward(self) -> None:
        """Bring the gradients from the last stage's inputs back to all parameters."""
        for index in reversed(range(len(self.meetings))):
            meeting = self.meetings[index]
            gradient = self.ranks.sum(meeting.gradient)
            for piece in self.pieces:
                self._regain(piece, index)
                self._meet(piece, index, meeting, gradient)
                self._retreat(piece, index)

    @torch.no_grad()
    def commit(self) -> None:
        """Write running statistics and other buffers, as one forward over the whole batch would have.

        Raises:
            InexactError: if pieces disagree about a buffer that is none of an operation's own.
        """
        buffers = dict(self.model.named_buffers()) | dict(self.model.named_parameters())
        for meeting in self.meetings:
            meeting.operation.commit(meeting.statistic, buffers)
        written = self._written()
        shared = self.ranks.written({name: values[0] for name, values in written.items()})
        for name, value in shared.items():
            values = written.get(name, [value])
            if any(not torch.equal(other, value) for other in values[1:]):
                raise InexactError(
                    f"Buffer {name!r} is updated from the rows of each micro-batch (after {len(values)} of them its "
                    "values differ), and what the whole batch would have made of it is not known."
                )
            buffers[name].copy_(value)

    def _written(self) -> dict[str, list[Tensor]]:
        written: dict[str, list[Tensor]] = {}
        for piece in self.pieces:
            for name, value in zip(piece.program.written, piece.written, strict=False):
                written.setdefault(name, []).append(value)
        return written

    def _advance(self, piece: Piece, index: int, operation: Operation) -> Statistic:
        """Run a stage without graph and take the statistic of what comes to the coupling."""
        stage, program = piece.program.stages[index], piece.program
        with torch.no_grad():
            results = dict(
                zip(stage.outputs, self._run(piece, index, self._leaves(piece, index, graph=False)), strict=True)
            )
        name = program.couplings[index].input
        x = results[name] if name in results else self.shelf.take(piece.values[name])
        statistic = operation.partial(x)
        piece.values.update(self._shelved(results))
        for used in stage.inputs:
            if program.uses.get(used) == index and not self._kept(piece, used):
                del piece.values[used]
        return statistic

    def _kept(self, piece: Piece, name: str) -> bool:
        """Tell whether a value waits for the way back: all do, or those of kept cuts and of the last span."""
        cuts = piece.program.few
        last_span = piece.program.births[name] > max(cuts, default=-1)
        return not self.sparing or last_span or piece.program.crosses(name, cuts)

    def _regain(self, piece: Piece, index: int) -> None:
        """Coming back to a kept cut, make once more what lies between it and the one before."""
        cuts = piece.program.few
        if not self.sparing or index not in cuts:
            return
        first = max((cut for cut in cuts if cut < index), default=-1) + 1
        for stage in range(first, index):
            with torch.no_grad():
                results = self._run(piece, stage, self._leaves(piece, stage, graph=False))
            made = dict(zip(piece.program.stages[stage].outputs, results, strict=True))
            piece.values.update(self._shelved({n: v for n, v in made.items() if n not in piece.values}))

    def _meet(self, piece: Piece, index: int, meeting: Meeting, gradient: Sequence[Tensor | None]) -> None:
        """Add what comes back to the rows of a piece through the statistic."""
        name = piece.program.couplings[index].input
        if name in piece.program.needed and any(grad is not None for grad in gradient):
            x = self.shelf.take(piece.values[name])
            self._collect(piece, name, meeting.operation.pull(x, meeting.statistic, gradient))

    def _retreat(self, piece: Piece, index: int) -> None:
        """Run a stage again with its graph, from the gradients of what it had made."""
        stage = piece.program.stages[index]
        names = [name for name in stage.outputs if name in piece.gradients]
        if names:
            results = dict(zip(stage.outputs, self._run(piece, index, self._leaves(piece, index)), strict=True))
            told = [(results[n], self.shelf.take(piece.gradients.pop(n))) for n in names if results[n].requires_grad]
            if told:
                outputs, seeds = zip(*told, strict=True)
                torch.autograd.backward(outputs, seeds)
        for name in stage.outputs:
            piece.values.pop(name, None)

    def _run(self, piece: Piece, index: int, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Run a stage of a piece; where it draws, it draws the same the second time."""
        stage = piece.program.stages[index]
        versions = _versions(leaves)
        with piece.call.ambient(), self._same_draws(piece, index, stage):
            results = stage.run(*leaves)
        if _versions(leaves) != versions:
            raise InexactError(
                f"Stage {index} writes into tensors that were made before it, which no second run survives."
            )
        return results

    @contextmanager
    def _same_draws(self, piece: Piece, index: int, stage: Stage) -> Iterator[None]:
        """Remember where a stage's draws began, or begin there again and go on afterwards as if nothing was drawn.

        The last stage is left to the caller, who runs it as often as the loss needs.
        """
        if not stage.random or index == len(piece.program.stages) - 1:
            yield
        elif index not in piece.draws:
            piece.draws[index] = self._generators()
            yield
        else:
            now = self._generators()
            _set_generators(piece.draws[index])
            yield
            _set_generators(now)

    def _generators(self) -> list[tuple[torch.device, Tensor]]:
        devices = {torch.device("cpu"), *(t.device for t in (*self.model.parameters(), *self.model.buffers()))}
        return [(d, _module(d).get_rng_state(*_index(d))) for d in devices if d.type != "meta"]

    def _leaves(self, piece: Piece, index: int, graph: bool = True) -> list[Any]:
        """Fetch a stage's inputs; those through which gradients flow hand them to the piece."""
        return [self._fetch(piece, name, graph) for name in piece.program.stages[index].inputs]

    def _fetch(self, piece: Piece, name: str, graph: bool) -> Any:
        if name.startswith("meeting_"):
            meeting = self.meetings[int(name.removeprefix("meeting_"))]
            return _Heard(
                meeting.operation, [self._listen(s, partial(meeting.hear, i)) for i, s in enumerate(meeting.statistic)]
            )
        if name in piece.program.captured.bound:
            return piece.program.bound(self.model, name)
        value = self.shelf.take(piece.values[name])
        wanted = graph and name in piece.program.needed
        return self._listen(value, partial(self._collect, piece, name)) if wanted else value

    def _listen(self, value: Any, hear: Callable[[Tensor], None]) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return cast("Any", Listener).apply(self.anchor, value, hear)

    def _collect(self, piece: Piece, name: str, gradient: Tensor) -> None:
        held = piece.gradients.pop(name, None)
        piece.gradients[name] = self.shelf.put(gradient if held is None else self.shelf.take(held) + gradient)

    def _shelved(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self.shelf.put(value) for name, value in values.items()}


def _versions(values: Sequence[Any]) -> int:
    """A number that changes whenever one of the tensors is written into."""
    return sum(value._version for value in values if isinstance(value, Tensor))


def _set_generators(states: Sequence[tuple[torch.device, Tensor]]) -> None:
    for device, state in states:
        _module(device).set_rng_state(state, *_index(device))


def _module(device: torch.device) -> Any:
    return torch if device.type == "cpu" else getattr(torch, device.type)


def _index(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "cpu" else (device,)
