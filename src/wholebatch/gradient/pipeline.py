"""The whole batch's gradient on every stage of a pipeline, over as many of its steps as the batch needs.

A schedule of ``torch.distributed.pipelining`` runs a fixed number of micro-batches of one fixed shape. A batch of any
size is laid into that shape: rows and positions that fill it up are cut from the outputs before the loss sees them,
so they weigh nothing. Losses are divided by one number that all ranks know beforehand, and each stage multiplies its
sum of gradients once by that number over the true one, which its last stage alone has seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import GradScaler

from wholebatch.batch.tree import BatchTree, move
from wholebatch.errors import LossError, SplitError, SyncError
from wholebatch.gradient.result import Result
from wholebatch.loss.denominators import Denominators, Known, Provisional, stated_divisors, uniform
from wholebatch.loss.seeds import BackwardSeeds
from wholebatch.loss.terms import ParsedLoss, read
from wholebatch.loss.totals import LossAccumulator, LossTotals, stated_sums
from wholebatch.model.gradients import GradientAccumulator, all_or_nothing, device_of, scale_, total_norm
from wholebatch.ranks.agreement import Next, ProcessGroups, Status, message_device
from wholebatch.ranks.reduction import refuse_older


class Pipeline:
    """Run a schedule of ``torch.distributed.pipelining`` so that each window is one exact batch.

    Builds the schedule itself, with ``scale_grads=False``: the default divides sums that are divided already, and
    divides those of earlier steps again. Every rank of a pipeline brings the same batch; the ranks of other
    replicas bring theirs, of any size. Clipping, stepping and zeroing stay with you, on each rank's own stages.

    Args:
        schedule: a schedule class: ``ScheduleGPipe``, ``Schedule1F1B``, ``ScheduleInterleaved1F1B``, ...
        stages: this rank's stage, or its stages for an interleaved schedule; their modules plain, not wrapped.
        loss_fn: ``loss_fn(output, targets)`` of one micro-batch, returning what :mod:`wholebatch.loss.terms` describes.
        micro_batches: how many the schedule has in flight in one step.
        micro_batch_size: rows of each.
        length: positions of each, for batches that are narrower from window to window: dimension 1 of the inputs is
            filled up with zeros, and that of the outputs cut back.
        data_parallel: the group of this stage's replicas, whose gradients are averaged once a window.

    Raises:
        SyncError: for a torch before 2.8, or a stage that is wrapped.

    Example:
        >>> build = "wb.Pipeline(Schedule1F1B, stage, loss_fn, micro_batches=4, micro_batch_size=8)"
        >>> run = "pipeline.backward(inputs, targets); pipeline.clip(1.0); optimizer.step(); optimizer.zero_grad()"
    """

    def __init__(
        self,
        schedule: type[Any],
        stages: Any,
        loss_fn: Callable[[Any, Any], Any],
        *,
        micro_batches: int,
        micro_batch_size: int,
        length: int | None = None,
        data_parallel: dist.ProcessGroup | None = None,
    ) -> None:
        refuse_older("A pipeline without a second division")
        self.stages = list(stages) if isinstance(stages, (list, tuple)) else [stages]
        self.loss_fn = loss_fn
        self.micro_batches, self.micro_batch_size, self.length = micro_batches, micro_batch_size, length
        _refuse_wrapped([stage.submod for stage in self.stages])
        self.parameters = [p for stage in self.stages for p in stage.submod.parameters() if p.requires_grad]
        near = device_of(self.stages[0].submod)
        device = message_device(self.stages[0].group, near)
        self._pipeline = ProcessGroups([self.stages[0].group], device)
        self._replicas = ProcessGroups([data_parallel] if data_parallel is not None else [], device)
        self._ranks = ProcessGroups([*self._pipeline.groups, *self._replicas.groups], device)
        self._device = near
        self._losses = _Losses(loss_fn)
        taken = self.stages if isinstance(stages, (list, tuple)) else stages
        self.schedule = schedule(taken, micro_batches, loss_fn=self._losses, scale_grads=False)

    def backward(
        self,
        inputs: Any,
        targets: Any,
        *,
        items: Callable[[Any], Any] | None = None,
        scaler: GradScaler | None = None,
    ) -> Result:
        """Leave in ``.grad`` of every stage's parameters the gradient of the whole batch, over all replicas.

        Args:
            inputs: a tensor, a tuple of positional arguments, or a dict of keyword arguments of the first stage.
            targets: any nest with as many rows; what ``loss_fn`` takes.
            items: a function of the targets that returns the counts of the terms; needed for several denominators.
            scaler: a ``GradScaler`` whose scale the losses are multiplied with.

        Returns:
            Loss, terms, items and metrics of the whole batch on every rank; micro-batches and rows of this pipeline.

        Raises:
            SplitError: if inputs and targets disagree on their rows.
            LossError: if what the loss averages over cannot be known.
            SyncError: on all ranks, if the loss function failed on one.
        """
        return all_or_nothing(lambda gradients: self._backward(gradients, inputs, targets, items, scaler))

    def _backward(
        self,
        gradients: GradientAccumulator,
        inputs: Any,
        targets: Any,
        items: Callable[[Any], Any] | None,
        scaler: GradScaler | None,
    ) -> Result:
        with self._ranks:
            gradients.begin(self.parameters)
            rows = BatchTree((inputs, targets)).count_rows()
            denominators = self._denominators(rows, targets, items)
            self._losses.begin(
                targets, denominators, BackwardSeeds(scaler, self._replicas.world, False), self._width(inputs)
            )
            steps = -(-rows // (self.micro_batches * self.micro_batch_size))
            for step in range(steps):
                self._step(inputs, rows, step)
            sums = self._ranks.agree(
                Status.READY, self._losses.sums(), float(denominators.loose), then=Next.UNKNOWN
            ).sums
            if denominators.loose and not uniform(sums, self._replicas.world):
                raise LossError(
                    f"The loss has the terms {[key for key, _ in sums.schema.terms]} with several denominators, which "
                    "the first stages of a pipeline cannot wait for. State the counts: items=lambda targets: [...]."
                )
            self._ranks.settle()
            gradients.scale(denominators.settle(sums))
            self._replicas.average(gradients.held(self._replicas.complete(gradients, self.parameters)))
            if not sums.alive:
                gradients.zero()
            gradients.merge()
            self._ranks.conclude(gradients)
        return Result(**sums.report(self._device), micro_batches=steps * self.micro_batches, rows=rows)

    def clip(self, max_norm: float) -> float:
        """Clip the gradient of all stages together to a 2-norm.

        Returns:
            The norm before, the same number on every rank.
        """
        grads = [p.grad for p in self.parameters if p.grad is not None]
        square = total_norm(grads, self._device or torch.device("cpu")).double().square()
        norm = float(self._pipeline.total(square).sqrt())
        if norm > max_norm:
            scale_(grads, max_norm / (norm + 1e-6))
        return norm

    def _denominators(self, rows: int, targets: Any, items: Callable[[Any], Any] | None) -> Denominators:
        """Divide by what ``items=`` states, else by the number of rows, until the items are known."""
        here = stated_sums([items(targets)] if items is not None and rows and self._is_last else [])
        agreement = self._ranks.agree(Status.READY, here, micro_batches=rows)
        if items is not None:
            return Known(partial(stated_divisors, agreement.sums), lambda answer: {}, "items=")
        denominators = Provisional(self._replicas.world, exact_last=False, loose=True)
        denominators.use_agreed(float(max(1, sum(agreement.micro_batches) // self._pipeline.world)))
        return denominators

    @property
    def _is_last(self) -> bool:
        return any(stage.is_last for stage in self.stages)

    def _width(self, inputs: Any) -> int | None:
        """How many positions of the outputs are real; None for all."""
        if self.length is None:
            return None
        widths = {leaf.shape[1] for leaf in BatchTree((inputs,)).leaves if len(leaf.shape) > 1}
        if len(widths) != 1 or max(widths) > self.length:
            raise SplitError(
                f"The inputs are {sorted(widths)} positions wide, and this pipeline is {self.length}. Give every input "
                f"one width of at most length={self.length}."
            )
        return widths.pop()

    def _step(self, inputs: Any, rows: int, step: int) -> None:
        """Run the schedule once, over rows that are filled up with the first one."""
        size = self.micro_batches * self.micro_batch_size
        real = range(step * size, min((step + 1) * size, rows))
        index = torch.tensor([*real, *[-1] * (size - len(real))])
        arguments: dict[str, Any] = {}
        positional: tuple[Any, ...] = ()
        if any(stage.is_first for stage in self.stages):
            taken = self._filled(move(BatchTree(inputs).take(index.clamp(min=0).tolist()), self._device))
            arguments = dict(taken) if isinstance(taken, dict) else {}
            positional = () if isinstance(taken, dict) else taken if isinstance(taken, tuple) else (taken,)
        if self._is_last:
            arguments["target"] = index
        self.schedule.step(*positional, **arguments)

    def _filled(self, inputs: Any) -> Any:
        if self.length is None:
            return inputs
        if isinstance(inputs, dict):
            return {name: self._filled(part) for name, part in inputs.items()}
        if isinstance(inputs, tuple):
            return tuple(self._filled(part) for part in inputs)
        missing = self.length - inputs.shape[1]
        return F.pad(inputs, [0, 0] * (inputs.dim() - 2) + [0, missing])


class _Losses:
    """The loss function as the schedule calls it: on outputs and row numbers, -1 for rows that fill up.

    It never raises: the other stages would wait for a gradient for ever. What went wrong is told at the agreement.
    A schedule may call it for a micro-batch more than once, to learn shapes; the last call counts.
    """

    def __init__(self, loss_fn: Callable[[Any, Any], Any]) -> None:
        self._loss_fn = loss_fn
        self._answers: dict[int, ParsedLoss] = {}
        self._errors: dict[int, Exception] = {}

    def begin(self, targets: Any, denominators: Denominators, shares: BackwardSeeds, width: int | None) -> None:
        """Begin a window."""
        self._answers.clear()
        self._errors.clear()
        self._targets, self._denominators, self._shares, self._width = BatchTree(targets), denominators, shares, width

    def __call__(self, output: Any, numbers: Tensor) -> Tensor:
        rows = [number for number in numbers.tolist() if number >= 0]
        nothing = sum(leaf.flatten()[:0].sum() for leaf in _tensors(output))
        if not rows:
            return torch.as_tensor(nothing)
        self._errors.pop(rows[0], None)
        loss = nothing
        with _KeptError(self._errors, rows[0]):
            loss = loss + self._share(output, rows)
        return torch.as_tensor(loss)

    def sums(self) -> LossTotals:
        """Add up what the window's micro-batches said.

        Raises:
            Exception: what the loss function raised, if it did.
        """
        for error in self._errors.values():
            raise error
        tally = LossAccumulator()
        for _, answer in sorted(self._answers.items()):
            tally.add(answer)
        return tally.sums()

    def _share(self, output: Any, rows: list[int]) -> Any:
        real = BatchTree((output,)).take(range(len(rows)))[0]
        if self._width is not None:
            real = real[:, : self._width]
        device = next(tensor.device for tensor in _tensors(output))
        answer = read(self._loss_fn(real, move(self._targets.take(rows), device)), len(rows))
        if answer is None:
            return 0.0
        if rows[0]:
            answer = answer.without([key for key, term in answer.terms.items() if term.kind == "once"])
        self._answers[rows[0]] = _detached(answer)
        outputs, seeds = self._shares.of(answer, self._denominators) if answer.terms else ([], [])
        return sum(torch.sum(part * seed) for part, seed in zip(outputs, seeds, strict=True) if seed is not None)


class _KeptError(AbstractContextManager["_KeptError"]):
    """Keep an error for later instead of raising it now."""

    def __init__(self, errors: dict[int, Exception], key: int) -> None:
        self._errors, self._key = errors, key

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, Exception):
            self._errors[self._key] = error
        return isinstance(error, Exception)


def _detached(answer: ParsedLoss) -> ParsedLoss:
    """Let go of the graph."""
    terms = {
        key: replace(
            term,
            total=term.total.detach(),
            weight=term.weight.detach() if isinstance(term.weight, Tensor) else term.weight,
        )
        for key, term in answer.terms.items()
    }
    return replace(answer, terms=terms)


def _tensors(output: Any) -> list[Tensor]:
    return [leaf.value for leaf in BatchTree((output,)).leaves if isinstance(leaf.value, Tensor)]


def _refuse_wrapped(modules: Sequence[nn.Module]) -> None:
    for module in modules:
        if isinstance(module, nn.parallel.DistributedDataParallel) or hasattr(module, "set_requires_gradient_sync"):
            raise SyncError(
                f"The stage's module is wrapped ({type(module).__name__}), whose own reduction would run with each "
                "step. Give the plain module, and the group of its replicas: data_parallel=mesh.get_group('data')."
            )
