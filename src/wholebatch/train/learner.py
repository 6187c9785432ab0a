"""What changes with a step: weights, optimizer, learning rate, draws, and how many steps were taken."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

import wholebatch as wb
from wholebatch.train.config import Config
from wholebatch.train.errors import RunError
from wholebatch.train.machine import device_named, peak_memory_bytes
from wholebatch.train.order import Order
from wholebatch.train.task import Tally, Task
from wholebatch.train.words import DEFAULT_BATCH


@dataclass(frozen=True)
class Rate:
    """The learning rate as a share of its peak: a straight rise, then constant or half a cosine down to a tenth.

    Args:
        warmup: steps of the rise.
        steps: of the whole run.
        falls: whether it falls after the rise.
    """

    warmup: int
    steps: int
    falls: bool

    def __call__(self, step: int) -> float:
        """Return the share for a step, counted from 0."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if not self.falls:
            return 1.0
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done)))


class Learner:
    """Take the steps of a run, one batch each, and save and restore all that decides the next one.

    Args:
        config: settled by `words.translate`.
        task: what to learn.
    """

    def __init__(self, config: Config, task: Task) -> None:
        self.task = task
        self.order = Order(len(task.train), config.batch_size or DEFAULT_BATCH, config.seed)
        self.steps = config.steps or config.epochs * self.order.steps_per_epoch
        self.device = device_named(config.device)
        self.model = task.model.to(self.device)
        self.optimizer = AdamW(
            self.model.parameters(), lr=config.lr or task.peak_lr, betas=(0.9, 0.95), weight_decay=config.weight_decay
        )
        self.schedule = LambdaLR(self.optimizer, Rate(config.warmup, self.steps, config.schedule == "cosine"))
        self.tally = Tally(task)
        self.step = wb.Step(
            self.model,
            self.optimizer,
            task.loss,
            micro_batch_size=task.size,
            max_grad_norm=config.max_grad_norm,
            scheduler=self.schedule,
            collate=self.tally,
        )
        self.taken = 0

    def advance(self) -> dict[str, Any]:
        """Take one step and return what to tell of it.

        Raises:
            RunError: if the loss or the gradient is not finite; the weights are those before the step.
        """
        batch = self._batch(self.taken)
        self.tally.reset()
        begun = time.perf_counter()
        try:
            result = self.step(batch)
        except wb.NonFiniteError as error:
            raise RunError(f"Step {self.taken + 1} could not be taken. {error} A smaller lr may help.") from error
        seconds = time.perf_counter() - begun
        self.taken += 1
        return {
            "step": self.taken,
            "epoch": round(self.taken / self.order.steps_per_epoch, 4),
            "loss": float(result.loss),
            **{name: float(value) for name, value in result.metrics.items()},
            "lr": result.lrs[0],
            "grad_norm": result.grad_norm,
            "stepped": result.stepped,
            "reason": result.reason,
            "rows": result.rows,
            "pieces": self.tally.pieces,
            "tokens": self.tally.real,
            "padding": 1 - self.tally.real / self.tally.padded,
            "seconds": round(seconds, 4),
            "tokens_per_second": round(self.tally.real / seconds, 1),
            "peak_memory_bytes": peak_memory_bytes(self.device),
        }

    def measure(self) -> dict[str, float]:
        """Measure the held-out rows, without dropout."""
        self.model.eval()
        measured = self.task.measure(self.model)
        self.model.train()
        return measured

    def state_dict(self) -> dict[str, Any]:
        """Return all but the weights that decides the next step; tensors and plain values."""
        return {
            "taken": self.taken,
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "step": self.step.state_dict(),
            "draws": torch.get_rng_state(),
            "device_draws": torch.cuda.get_rng_state_all() if self.device.type == "cuda" else [],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where `state_dict` was called; the weights come from elsewhere."""
        self.taken = state["taken"]
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.step.load_state_dict(state["step"])
        # Last, since what stands above may draw.
        torch.set_rng_state(state["draws"])
        if state["device_draws"] and self.device.type == "cuda":
            torch.cuda.set_rng_state_all(state["device_draws"])

    def _batch(self, step: int) -> Sequence[Any]:
        return [self.task.train[row] for row in self.order.batch(step)]
