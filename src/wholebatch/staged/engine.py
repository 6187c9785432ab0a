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

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.errors import InexactError
from wholebatch.staged.call import Call
from wholebatch.staged.operations import Operation, Statistic
from wholebatch.staged.program import Program, Stage
from wholebatch.staged.ranks import Alone
from wholebatch.staged.shelf import Shelf


@dataclass
class Meeting:
    """An operation with the statistic of the whole batch: a stage calls ``apply``."""

    operation: Operation
    statistic: Statistic

    @classmethod
    def over(cls, operation: Operation, statistic: Statistic) -> Meeting:
        """Make the statistic a leaf, at which the gradients of all pieces add up."""
        leaves = [s.detach().requires_grad_(s.is_floating_point()) if isinstance(s, Tensor) else s for s in statistic]
        return cls(operation, type(statistic)(*leaves) if hasattr(statistic, "_fields") else tuple(leaves))

    def apply(self, x: Tensor, *operands: Any) -> Tensor:
        """Compute the piece's result."""
        return self.operation.apply(x, self.statistic, *operands)

    @property
    def gradient(self) -> list[Tensor | None]:
        """What the pieces have said about the statistic so far."""
        return [s.grad if isinstance(s, Tensor) else None for s in self.statistic]


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
        model: whose parameters and buffers the stages use.
        shelf: where tensors wait that cross from stage to stage.
        ranks: with whom statistics are shared.
    """

    def __init__(self, model: nn.Module, shelf: Shelf | None = None, ranks: Alone | None = None) -> None:
        self.model = model
        self.shelf, self.ranks = shelf or Shelf(), ranks or Alone()
        self.pieces: list[Piece] = []
        self.meetings: list[Meeting] = []

    def forward(self, pieces: Sequence[tuple[Program, Call]]) -> None:
        """Bring all pieces as far as their last stage."""
        self.pieces = [Piece(program, call, self._shelved(program.arguments(call.leaves))) for program, call in pieces]
        couplings = self.pieces[0].program.signature if self.pieces else ()
        for index, coupling in enumerate(self.ranks.couplings(couplings)):
            parts = [self._advance(piece, index, coupling.operation) for piece in self.pieces]
            statistic = self.ranks.merge(coupling.operation, parts)
            self.meetings.append(Meeting.over(coupling.operation, statistic))

    def output(self, index: int) -> Any:
        """Run the last stage of a piece, in the caller's grad mode, and return the model's answer."""
        piece = self.pieces[index]
        last = len(piece.program.stages) - 1
        leaves = self._leaves(piece, last)
        results = self._run(piece, last, leaves)
        piece.written = tuple(value.detach() for value in results[piece.program.results :])
        return piece.program.answer(results[: piece.program.results])

    def backward(self) -> None:
        """Bring the gradients from the last stage's inputs back to all parameters."""
        for index in reversed(range(len(self.meetings))):
            meeting = self.meetings[index]
            gradient = self.ranks.sum(meeting.gradient)
            for piece in self.pieces:
                self._meet(piece, index, meeting, gradient)
                self._retreat(piece, index)

    def scale(self, factor: float | Tensor) -> None:
        """Multiply all gradients that are still on their way."""
        for piece in self.pieces:
            for name, gradient in piece.gradients.items():
                piece.gradients[name] = self.shelf.put(self.shelf.take(gradient) * factor)
        for meeting in self.meetings:
            for gradient in meeting.gradient:
                if gradient is not None:
                    gradient.mul_(factor)

    @torch.no_grad()
    def commit(self) -> None:
        """Write running statistics and other buffers, as one forward over the whole batch would have.

        Raises:
            InexactError: if pieces disagree about a buffer that is none of an operation's own.
        """
        buffers = dict(self.model.named_buffers()) | dict(self.model.named_parameters())
        for meeting in self.meetings:
            meeting.operation.commit(meeting.statistic, buffers)
        for name, values in self._written().items():
            if any(not torch.equal(value, values[0]) for value in values[1:]):
                raise InexactError(
                    f"Buffer {name!r} is updated from the rows of each micro-batch (after {len(values)} of them its "
                    "values differ), and what the whole batch would have made of it is not known."
                )
            buffers[name].copy_(values[0])

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
        return statistic

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
                torch.autograd.backward(*zip(*told, strict=True))
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
        fetched = []
        for name in piece.program.stages[index].inputs:
            if name.startswith("meeting_"):
                fetched.append(self.meetings[int(name.removeprefix("meeting_"))])
            elif name in piece.program.captured.bound:
                fetched.append(piece.program.bound(self.model, name))
            else:
                value = self.shelf.take(piece.values[name])
                wanted = graph and name in piece.program.needed
                fetched.append(self._listening(piece, name, value) if wanted else value)
        return fetched

    def _listening(self, piece: Piece, name: str, value: Tensor) -> Tensor:
        leaf = value.detach().requires_grad_()

        def hear(leaf: Tensor) -> None:
            if leaf.grad is not None:
                self._collect(piece, name, leaf.grad)
            leaf.grad = None

        leaf.register_post_accumulate_grad_hook(hear)
        return leaf

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
