"""All micro-batches of a batch through the stages of a model, forward and backward.

The methods of :class:`Executor` in their order are the algorithm:

1. :meth:`Executor.forward`: stage by stage, all micro-batches without graph, keeping what crosses; after each stage the
   statistic of the whole batch.
2. :meth:`Executor.output`: the last stage of one micro-batch, with graph; the loss and its backward are the caller's.
3. :meth:`Executor.backward`: stage by stage in reverse, all micro-batches again, each with its graph and its own draws;
   before each stage the gradient of the statistic goes back to the rows.
4. :meth:`Executor.commit`: buffers, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from wholebatch.batchnorm.gradient_tap import GradientTap
from wholebatch.batchnorm.model_call import ModelCall
from wholebatch.batchnorm.operations import OPERATIONS, Operation, Reader, Statistic
from wholebatch.batchnorm.partition import GraphStage, Program
from wholebatch.batchnorm.program_cache import programs_for
from wholebatch.batchnorm.statistics_sync import Alone
from wholebatch.batchnorm.tensor_store import TensorStore
from wholebatch.errors import InexactError


@dataclass
class SharedStatistic:
    """An operation with the statistic of the whole batch, and what all micro-batches have said about it."""

    operation: Operation
    statistic: Statistic
    gradient: list[Tensor | None]

    def hear(self, place: int, gradient: Tensor) -> None:
        """Add up what a micro-batch says."""
        held = self.gradient[place]
        self.gradient[place] = gradient if held is None else held + gradient


@dataclass
class _HeardStatistic:
    """A meeting as one run of a stage sees it: the gradient of its statistic is listened for."""

    operation: Operation
    statistic: Sequence[Any]

    def apply(self, x: Tensor, *operands: Any) -> Tensor:
        """Compute the micro-batch's result; called by the stage."""
        return self.operation.apply(x, tuple(self.statistic), *operands)


@dataclass
class StagedMicroBatch:
    """One micro-batch on its way: the values that wait for it and the gradients that came back."""

    program: Program
    call: ModelCall
    values: dict[str, Any]
    gradients: dict[str, Any] = field(default_factory=dict)
    draws: dict[int, list[tuple[torch.device, Tensor]]] = field(default_factory=dict)
    written: tuple[Any, ...] = ()


class Executor:
    """Runs the micro-batches of one batch through programs with the same couplings.

    Args:
        model: whose parameters and buffers the stages use; the module itself, not a wrapper.
        store: where tensors wait that cross from stage to stage.
        sparing: whether only those wait that cross a few cuts, and the others are made once more.
        ranks: with whom statistics are shared.
        operations: those in which rows may meet.
    """

    def __init__(
        self,
        model: nn.Module,
        store: TensorStore | None = None,
        sparing: bool = False,
        ranks: Alone | None = None,
        operations: Mapping[Any, Reader] = OPERATIONS,
    ) -> None:
        self.model, self.operations, self.sparing = model, operations, sparing
        self.calls: Sequence[ModelCall] = ()
        self.store, self.ranks = store or TensorStore(), ranks or Alone()
        self.micro_batches: list[StagedMicroBatch] = []
        self.meetings: list[SharedStatistic] = []
        self.anchor = torch.zeros((), requires_grad=True)

    def forward(self, calls: Sequence[ModelCall]) -> None:
        """Bring all micro-batches as far as their last stage; the leaves of their calls wait on the shelf."""
        self.calls = calls
        programs = programs_for(self.model, calls, self.operations, self.store.take)
        self.micro_batches = [
            StagedMicroBatch(program, call, program.arguments(call.leaves))
            for program, call in zip(programs, calls, strict=True)
        ]
        couplings = self.micro_batches[0].program.signature if self.micro_batches else ()
        for index, coupling in enumerate(self.ranks.couplings(couplings)):
            parts = [self._advance(micro_batch, index, coupling.operation) for micro_batch in self.micro_batches]
            statistic = self.ranks.merge(coupling.operation, parts)
            self.meetings.append(SharedStatistic(coupling.operation, statistic, [None] * len(statistic)))

    def output(self, index: int) -> Any:
        """Run the last stage of a micro-batch, in the caller's grad mode, and return the model's answer."""
        micro_batch = self.micro_batches[index]
        last = len(micro_batch.program.stages) - 1
        leaves = self._leaves(micro_batch, last)
        results = self._run(micro_batch, last, leaves)
        micro_batch.written = tuple(value.detach() for value in results[micro_batch.program.results :])
        return micro_batch.program.answer(results[: micro_batch.program.results])

    def fail(self) -> None:
        """Let no other rank wait for this one."""
        self.ranks.fail()

    def restart(self) -> None:
        """Forget the gradients that have come back to the last stage's inputs."""
        for micro_batch in self.micro_batches:
            micro_batch.gradients.clear()
        for meeting in self.meetings:
            meeting.gradient = [None] * len(meeting.statistic)

    def backward(self) -> None:
        """Bring the gradients from the last stage's inputs back to all parameters."""
        for index in reversed(range(len(self.meetings))):
            meeting = self.meetings[index]
            gradient = self.ranks.sum(meeting.gradient)
            for micro_batch in self.micro_batches:
                self._regain(micro_batch, index)
                self._meet(micro_batch, index, meeting, gradient)
                self._retreat(micro_batch, index)

    @torch.no_grad()
    def commit(self) -> None:
        """Write running statistics and other buffers, as one forward over the whole batch would have.

        Raises:
            InexactError: if micro-batches disagree about a buffer that is none of an operation's own.
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
        for micro_batch in self.micro_batches:
            for name, value in zip(micro_batch.program.written, micro_batch.written, strict=False):
                written.setdefault(name, []).append(value)
        return written

    def _advance(self, micro_batch: StagedMicroBatch, index: int, operation: Operation) -> Statistic:
        """Run a stage without graph and take the statistic of what comes to the coupling."""
        stage, program = micro_batch.program.stages[index], micro_batch.program
        with torch.no_grad():
            results = dict(
                zip(
                    stage.outputs,
                    self._run(micro_batch, index, self._leaves(micro_batch, index, graph=False)),
                    strict=True,
                )
            )
        name = program.couplings[index].input
        x = results[name] if name in results else self.store.take(micro_batch.values[name])
        statistic = operation.partial(x)
        micro_batch.values.update(self._shelved(results))
        for used in stage.inputs:
            if program.uses.get(used) == index and not self._kept(micro_batch, used):
                del micro_batch.values[used]
        return statistic

    def _kept(self, micro_batch: StagedMicroBatch, name: str) -> bool:
        """Tell whether a value waits for the way back: all do, or those of kept cuts and of the last span."""
        cuts = micro_batch.program.few
        last_span = micro_batch.program.births[name] > max(cuts, default=-1)
        return not self.sparing or last_span or micro_batch.program.crosses(name, cuts)

    def _regain(self, micro_batch: StagedMicroBatch, index: int) -> None:
        """Coming back to a kept cut, make once more what lies between it and the one before."""
        cuts = micro_batch.program.few
        if not self.sparing or index not in cuts:
            return
        first = max((cut for cut in cuts if cut < index), default=-1) + 1
        for stage in range(first, index):
            with torch.no_grad():
                results = self._run(micro_batch, stage, self._leaves(micro_batch, stage, graph=False))
            made = dict(zip(micro_batch.program.stages[stage].outputs, results, strict=True))
            micro_batch.values.update(self._shelved({n: v for n, v in made.items() if n not in micro_batch.values}))

    def _meet(
        self, micro_batch: StagedMicroBatch, index: int, meeting: SharedStatistic, gradient: Sequence[Tensor | None]
    ) -> None:
        """Add what comes back to the rows of a micro-batch through the statistic."""
        name = micro_batch.program.couplings[index].input
        if name in micro_batch.program.needed and any(grad is not None for grad in gradient):
            x = self.store.take(micro_batch.values[name])
            self._collect(micro_batch, name, meeting.operation.pull(x, meeting.statistic, gradient))

    def _retreat(self, micro_batch: StagedMicroBatch, index: int) -> None:
        """Run a stage again with its graph, from the gradients of what it had made."""
        stage = micro_batch.program.stages[index]
        names = [name for name in stage.outputs if name in micro_batch.gradients]
        if names:
            results = dict(
                zip(stage.outputs, self._run(micro_batch, index, self._leaves(micro_batch, index)), strict=True)
            )
            told = [
                (results[n], self.store.take(micro_batch.gradients.pop(n))) for n in names if results[n].requires_grad
            ]
            if told:
                outputs, seeds = zip(*told, strict=True)
                torch.autograd.backward(outputs, seeds)
        for name in stage.outputs:
            micro_batch.values.pop(name, None)

    def _run(self, micro_batch: StagedMicroBatch, index: int, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Run a stage of a micro-batch; where it draws, it draws the same the second time."""
        stage = micro_batch.program.stages[index]
        versions = _versions(leaves)
        with micro_batch.call.ambient(), self._same_draws(micro_batch, index, stage):
            results = stage.run(*leaves)
        if _versions(leaves) != versions:
            raise InexactError(
                f"Stage {index} writes into tensors that were made before it, which no second run survives."
            )
        return results

    @contextmanager
    def _same_draws(self, micro_batch: StagedMicroBatch, index: int, stage: GraphStage) -> Iterator[None]:
        """Remember where a stage's draws began, or begin there again and go on afterwards as if nothing was drawn.

        The last stage is left to the caller, who runs it as often as the loss needs.
        """
        if not stage.random or index == len(micro_batch.program.stages) - 1:
            yield
        elif index not in micro_batch.draws:
            micro_batch.draws[index] = self._generators()
            yield
        else:
            now = self._generators()
            _set_generators(micro_batch.draws[index])
            yield
            _set_generators(now)

    def _generators(self) -> list[tuple[torch.device, Tensor]]:
        devices = {torch.device("cpu"), *(t.device for t in (*self.model.parameters(), *self.model.buffers()))}
        return [(d, _module(d).get_rng_state(*_index(d))) for d in devices if d.type != "meta"]

    def _leaves(self, micro_batch: StagedMicroBatch, index: int, graph: bool = True) -> list[Any]:
        """Fetch a stage's inputs; those through which gradients flow hand them to the micro-batch."""
        return [self._fetch(micro_batch, name, graph) for name in micro_batch.program.stages[index].inputs]

    def _fetch(self, micro_batch: StagedMicroBatch, name: str, graph: bool) -> Any:
        if name.startswith("meeting_"):
            meeting = self.meetings[int(name.removeprefix("meeting_"))]
            return _HeardStatistic(
                meeting.operation, [self._listen(s, partial(meeting.hear, i)) for i, s in enumerate(meeting.statistic)]
            )
        if name in micro_batch.program.captured.bound:
            return micro_batch.program.bound(self.model, name)
        value = self.store.take(micro_batch.values[name])
        wanted = graph and name in micro_batch.program.needed
        return self._listen(value, partial(self._collect, micro_batch, name)) if wanted else value

    def _listen(self, value: Any, hear: Callable[[Tensor], None]) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return cast("Any", GradientTap).apply(self.anchor, value, hear)

    def _collect(self, micro_batch: StagedMicroBatch, name: str, gradient: Tensor) -> None:
        held = micro_batch.gradients.pop(name, None)
        micro_batch.gradients[name] = self.store.put(gradient if held is None else self.store.take(held) + gradient)

    def _shelved(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self.store.put(value) for name, value in values.items()}


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
