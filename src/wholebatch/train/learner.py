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
from wholebatch.arrangement import counted
from wholebatch.memory import is_out_of_memory
from wholebatch.train.config import Config
from wholebatch.train.errors import ConfigError, RunError
from wholebatch.train.machine import bytes_in, device_named, peak_memory_bytes, room
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


def size_of(config: Config, task: Task, device: torch.device) -> int | wb.Tokens | wb.Auto:
    """Return where batches are cut: where the user said, else where memory lets them.

    A GPU, or a memory that is named, begins with the whole batch in one piece; else a moderate piece is as fast.
    """
    if config.micro_batch_size != "auto" or config.max_tokens is not None:
        return task.size
    limited = device.type != "cpu" or config.memory is not None
    return wb.Auto(task.whole(config.batch_size or DEFAULT_BATCH) if limited else task.size)


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
        if config.checkpoint:
            task.checkpoint()
        if config.offload and self.device.type == "cpu":
            raise ConfigError(
                "offload is on, but the model is on the cpu: all that autograd saves is on the host already."
            )
        self.room = room(None if config.memory is None else bytes_in(config.memory), self.model, self.device)
        self.optimizer = AdamW(
            self.model.parameters(), lr=config.lr or task.peak_lr, betas=(0.9, 0.95), weight_decay=config.weight_decay
        )
        self.schedule = LambdaLR(self.optimizer, Rate(config.warmup, self.steps, config.schedule == "cosine"))
        self.tally = Tally(task)
        self.step = wb.Step(
            self.model,
            self.optimizer,
            task.loss,
            micro_batch_size=size_of(config, task, self.device),
            max_grad_norm=config.max_grad_norm,
            scheduler=self.schedule,
            collate=self.tally,
            offload=config.offload,
        )
        self.taken = 0

    @property
    def size(self) -> int | wb.Tokens:
        """Where batches are cut now: rows, or padded tokens."""
        size = self.step.micro_batch_size
        return size.size if isinstance(size, wb.Auto) else self.task.size

    def advance(self) -> dict[str, Any]:
        """Take one step and return what to tell of it.

        Raises:
            RunError: if the loss or the gradient is not finite, or memory runs out; the weights are those before it.
        """
        batch = self._batch(self.taken)
        self.tally.reset()
        begun = time.perf_counter()
        try:
            with self.room():
                result = self.step(batch)
        except wb.NonFiniteError as error:
            raise RunError(f"Step {self.taken + 1} could not be taken. {error} A smaller lr may help.") from error
        except RuntimeError as error:
            if not (isinstance(error, wb.OutOfMemoryError) or is_out_of_memory(error)):
                raise
            raise RunError(self._out_of_memory(error)) from error
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
            "retries": self.tally.retries,
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

    def _out_of_memory(self, error: RuntimeError) -> str:
        """Say which setting helps."""
        step = f"Step {self.taken + 1}"
        if isinstance(error, wb.OutOfMemoryError):
            return f"{step} could not be taken. {error} Of these, --checkpoint, --offload and --context are flags here."
        rows = counted(([*self.tally.pieces] or [0])[-1], "row")
        first = str(error).split("\n", 1)[0]
        return (
            f"{step} ran out of memory in a piece of {rows}: {first} Leave micro_batch_size and max_tokens out, and "
            "such a piece is split; or choose a smaller one."
        )

    def _batch(self, step: int) -> Sequence[Any]:
        return [self.task.train[row] for row in self.order.batch(step)]
