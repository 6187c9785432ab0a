"""The proof: one batch's gradient, ours and that of the usual loop, held against one backward in float64."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import wholebatch as wb
from wholebatch.batch.window import micro_batches_of
from wholebatch.model.comparison import compare, joined
from wholebatch.train.task import Task
from wholebatch.verify.reference import Gradients, held, named_targets, plain_gradient, whole_gradient


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

    def record(self) -> dict[str, float]:
        """Return what stands in a run's summary, under the names that it has had from the start."""
        return {"rows": self.rows, "pieces": self.micro_batches, "error": self.error, "usual": self.usual}


def prove(task: Task, model: nn.Module, samples: Sequence[Any], size: int | wb.Tokens | None = None) -> Proof:
    """Compute the gradient of a batch in three ways, on copies of the model, without dropout.

    The reference is that of `wb.check`: one forward and one backward over all rows in float64.

    Args:
        task: makes micro-batches and losses.
        model: trained or not; it is left as it is.
        samples: the rows of one batch.
        size: where it is cut; by default where the task would.
    """
    batch = task.shortened(samples)
    size = _several(task, batch, size or task.size)
    # On the CPU, where float64 costs no more than twice the time, and there is more memory.
    truth = whole_gradient(copy.deepcopy(model).cpu().eval(), task.loss, batch, collate=task.collate)
    ours = copy.deepcopy(model).eval()
    ours.zero_grad(set_to_none=True)
    task.backward(ours, batch, size)
    gradients = {name: held(parameter, torch.float64) for name, parameter in named_targets(ours, ()).items()}
    whole = {name: truth.gradients[name] for name in gradients}  # the task reaches a model of its own, which is idle
    usual, micro_batches = _usual_loop(task, copy.deepcopy(model).eval(), batch, size)
    return Proof(
        rows=len(batch),
        micro_batches=micro_batches,
        error=compare(*joined(gradients, whole)).error,
        usual=compare(*joined(usual, whole)).error,
    )


def _usual_loop(task: Task, model: nn.Module, batch: list[Any], size: int | wb.Tokens) -> tuple[Gradients, int]:
    """Divide each micro-batch's mean by the number of micro-batches, as is usually done."""
    micro_batches = micro_batches_of(batch, size, collate=task.collate)
    total: Gradients = {}
    for micro_batch in micro_batches:
        mean = plain_gradient(model, task.loss, [micro_batch.load()], in_place=True)
        total = {name: gradient + total.get(name, 0.0) for name, gradient in mean.gradients.items()}
    return {name: gradient / len(micro_batches) for name, gradient in total.items()}, len(micro_batches)


def _several(task: Task, batch: list[Any], size: int | wb.Tokens) -> int | wb.Tokens:
    """The size that the run used, or a quarter of the batch where that would be one micro-batch and prove nothing."""
    several = len(micro_batches_of(batch, size, collate=task.collate)) > 1
    return size if several else max(1, len(batch) // 4)
