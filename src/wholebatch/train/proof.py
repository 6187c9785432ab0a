"""The proof: one batch's gradient, ours and that of the usual loop, held against one backward in float64."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import wholebatch as wb
from wholebatch.batch.tree import move
from wholebatch.batch.window import micro_batches_of
from wholebatch.model.gradients import device_of
from wholebatch.train.task import Loss, Task


@dataclass(frozen=True)
class Proof:
    """Errors relative to the norm of the whole batch's gradient.

    Attributes:
        rows: of the batch.
        micro_batches: that both ours and the usual loop ran.
        error: of `wb.backward`.
        usual: of the mean of the micro-batches' means, over the same micro-batches.
    """

    rows: int
    micro_batches: int
    error: float
    usual: float

    def __str__(self) -> str:
        return f"gradient error {self.error:.0e} (the usual loop: {self.usual:.2g})"


def prove(task: Task, model: nn.Module, samples: Sequence[Any], size: int | wb.Tokens | None = None) -> Proof:
    """Compute the gradient of a batch in three ways, on copies of the model, without dropout.

    The reference is one forward and one backward over all rows in float64, with nothing of this library but the
    sums that the loss function states.

    Args:
        task: makes micro-batches and losses.
        model: trained or not; it is left as it is.
        samples: the rows of one batch.
        size: where it is cut; by default where the task would.
    """
    batch = task.shortened(samples)
    size = _several(task, batch, size or task.size)
    reference = _gradient(_reference_of(task, model, batch))
    ours, usual = copy.deepcopy(model).eval(), copy.deepcopy(model).eval()
    for each in (ours, usual):
        each.zero_grad(set_to_none=True)
    task.backward(ours, batch, size)
    micro_batches = _usual_loop(task, usual, batch, size)
    return Proof(
        rows=len(batch),
        micro_batches=micro_batches,
        error=_distance(_gradient(ours), reference),
        usual=_distance(_gradient(usual), reference),
    )


def _reference_of(task: Task, model: nn.Module, batch: list[Any]) -> nn.Module:
    # On the CPU, where float64 costs no more than twice the time, and there is more memory.
    whole = copy.deepcopy(model).to("cpu", torch.float64).eval()
    whole.zero_grad(set_to_none=True)
    torch.autograd.backward(_term(task.loss(whole, task.collate(batch))).value)
    return whole


def _usual_loop(task: Task, model: nn.Module, batch: list[Any], size: int | wb.Tokens) -> int:
    """Divide each micro-batch's mean by the number of micro-batches, as is usually done."""
    micro_batches = micro_batches_of(batch, size, collate=task.collate)
    for micro_batch in micro_batches:
        loss = task.loss(model, move(micro_batch.load(), device_of(model)))
        torch.autograd.backward(_term(loss).value / len(micro_batches))
    return len(micro_batches)


def _several(task: Task, batch: list[Any], size: int | wb.Tokens) -> int | wb.Tokens:
    """The size that the run used, or a quarter of the batch where that would be one micro-batch and prove nothing."""
    several = len(micro_batches_of(batch, size, collate=task.collate)) > 1
    return size if several else max(1, len(batch) // 4)


def _term(loss: Loss) -> wb.Mean:
    return loss if isinstance(loss, wb.Mean) else loss[0]


def _gradient(model: nn.Module) -> Tensor:
    """All gradients as one vector in float64."""
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return torch.cat([grad.detach().to("cpu", torch.float64).flatten() for grad in grads])


def _distance(gradient: Tensor, reference: Tensor) -> float:
    return float((gradient - reference).norm() / reference.norm())
