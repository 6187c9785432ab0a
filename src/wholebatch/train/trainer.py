"""What changes with a step: weights, optimizer, learning rate, draws, and how many steps were taken."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

import wholebatch as wb
from wholebatch.amounts import bytes_in
from wholebatch.model.memory import is_out_of_memory, words_of
from wholebatch.planning.arrangement import counted
from wholebatch.train.config import Config, schedule_of
from wholebatch.train.errors import ConfigError, RunError
from wholebatch.train.machine import peak_memory_bytes, room
from wholebatch.train.order import Order
from wholebatch.train.processes import Processes
from wholebatch.train.task import Task


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

    A GPU, or a memory that is named, begins with the whole batch in one micro-batch; else a moderate micro-batch is as
    fast.
    """
    if config.micro_batch_size != "auto" or config.max_tokens is not None:
        return task.size
    limited = device.type != "cpu" or config.memory is not None
    return wb.Auto(task.whole(schedule_of(config).largest) if limited else task.size)


class Trainer:
    """Take the steps of a run, one batch each, and save and restore all that decides the next one.

    Args:
        config: settled by `words.translate`.
        task: what to learn.
        team: who learns it together.
    """

    def __init__(self, config: Config, task: Task, team: Processes | None = None) -> None:
        self.task, self.team = task, team or Processes()
        self.config = config
        self.noise = wb.NoiseScale()
        self.order = Order(len(task.train), schedule_of(config, self.noise), config.seed)
        self.steps = config.steps or self.order.steps_in(config.epochs)
        self.device = self.team.device(config.device)
        self.model = task.model.to(self.device)
        if config.checkpoint:
            task.checkpoint()
        if config.tiled:
            task.tile()
        self.plain = copy.deepcopy(self.model) if self.team.sharded else self.model
        shared = self.team.share(self.model)
        if config.offload and self.device.type == "cpu":
            raise ConfigError(
                "offload is on, but the model is on the cpu: all that autograd saves is on the host already."
            )
        self.room = room(None if config.memory is None else bytes_in(config.memory), self.model, self.device)
        self.optimizer = AdamW(
            self.model.parameters(), lr=config.lr or task.peak_lr, betas=(0.9, 0.95), weight_decay=config.weight_decay
        )
        rate = Rate(config.warmup, self.steps, config.schedule == "cosine")
        self.schedule = LambdaLR(self.optimizer, lambda step: rate(step) * self._by_batch(step))
        objective = task.objective()
        apart = not isinstance(objective, wb.CoupledLoss)  # else no micro-batch has a gradient of its own
        self.step = wb.Step(
            shared,
            self.optimizer,
            objective,
            micro_batch_size=size_of(config, task, self.device),
            max_grad_norm=config.max_grad_norm,
            scheduler=self.schedule,
            collate=task.collate,
            offload=config.offload,
            noise_scale=self.noise if apart else None,
        )
        self.taken = 0
        if not self.order.schedule.settled and not apart:
            raise ConfigError(
                f"batch_size is {config.batch_size}, but the task {config.task} takes its loss over all rows at once, "
                "so that no noise shows between micro-batches. Let the batch grow at steps or with epochs: 16,64@200."
            )

    @property
    def rows(self) -> int:
        """How many rows the steps so far held, over all processes."""
        return self.order.rows_before(self.taken)

    @property
    def _failures(self) -> int:
        """How often memory has run out on a micro-batch, which then came again in parts."""
        size = self.step.micro_batch_size
        return size.failures if isinstance(size, wb.Auto) else 0

    @property
    def size(self) -> int | wb.Tokens:
        """Where batches are cut now: rows, or padded tokens."""
        size = self.step.micro_batch_size
        return size.size if isinstance(size, wb.Auto) else self.task.size

    def advance(self) -> dict[str, Any]:
        """Take one step and return what to tell of it; rows and tokens are those of all processes.

        Raises:
            RunError: if the loss or the gradient is not finite, or memory runs out; the weights are those before it.
        """
        batch = self._batch(self.taken)
        if self.config.nominal_batch is not None:
            for group in self.optimizer.param_groups:
                group["weight_decay"] = self.config.weight_decay * self._asked(self.taken) / self.config.nominal_batch
        due = self.noise.due
        before = self._failures
        begun = time.perf_counter()
        try:
            with self.room():
                result = self.step(batch)
        except wb.NonFiniteError as error:
            raise RunError(f"Step {self.taken + 1} could not be taken. {error} A smaller lr may help.") from error
        except (RuntimeError, MemoryError) as error:
            if not (isinstance(error, wb.OutOfMemoryError) or is_out_of_memory(error)):
                raise
            raise RunError(self._out_of_memory(error)) from error
        seconds = time.perf_counter() - begun
        self.taken += 1
        units = [self.task.count([batch[row] for row in size.index]) for size in result.sizes]
        counted = self.team.total(
            result.rows, sum(u for u, _ in units), sum(u for _, u in units), self._failures - before
        )
        rows, real, padded, retries = map(int, counted)
        return {
            "step": self.taken,
            "epoch": round(self.order.epochs_before(self.taken), 4),
            "loss": float(result.loss),
            **{name: float(value) for name, value in result.metrics.items()},
            "lr": result.lrs[0],
            "grad_norm": result.grad_norm,
            "stepped": result.stepped,
            "reason": result.reason,
            "rows": rows,
            "pieces": [size.rows for size in result.sizes],
            "retries": retries,
            "tokens": real,
            "padding": 1 - real / padded,
            "seconds": round(seconds, 4),
            # A clock may stand still over a short step, as some virtual machines' do; JSON has no word for infinite.
            "tokens_per_second": round(real / seconds, 1) if seconds > 0 else 0.0,
            "peak_memory_bytes": peak_memory_bytes(self.device),
            **(self._noise() if due and self.noise.measured else {}),
        }

    def _noise(self) -> dict[str, float | None]:
        """Return what has been measured of the gradient's noise; None for what JSON has no word for."""
        found = self.noise.estimate()
        said = {"noise_scale": found.rows, "noise_scale_error": found.rows_error, "noise_scale_items": found.items}
        return {name: round(value, 3) if math.isfinite(value) else None for name, value in said.items()}

    def _asked(self, step: int) -> int:
        """Return how many rows a step's batch is meant to have; the last of an epoch may have fewer."""
        return self.order.schedule.at(step, int(self.order.epochs_before(step)))

    def _by_batch(self, step: int) -> float:
        """Return what the batch of a step makes of the learning rate."""
        if self.config.scale_lr is None or self.config.base_batch is None:
            return 1.0
        return wb.scale_lr(1.0, self._asked(step), self.config.base_batch, self.config.scale_lr)

    def measure(self) -> dict[str, float]:
        """Measure the held-out rows, without dropout; one process does, and tells the others."""
        model = self.whole()
        model.eval()
        measured = self.team.by_first(lambda: self.task.measure(model))
        model.train()
        return measured

    def whole(self) -> nn.Module:
        """Return the model in one micro-batch; where it lies in shards, a copy that is current on the first process."""
        if self.team.sharded:
            from wholebatch.train.shards import whole

            return whole(self.model, self.plain)
        return self.model

    def state_dict(self) -> dict[str, Any]:
        """Return all but the weights that decides the next step; tensors and plain values."""
        return {
            "taken": self.taken,
            "optimizer": None if self.team.in_shards else self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "step": self.step.state_dict(),
            "batches": self.order.schedule.state_dict(),
            "draws": self.team.each(torch.get_rng_state()),
            "device_draws": torch.cuda.get_rng_state_all() if self.device.type == "cuda" else [],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where `state_dict` was called; the weights come from elsewhere."""
        self.taken = state["taken"]
        if state["optimizer"] is not None:
            self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.step.load_state_dict(state["step"])
        if "batches" in state:
            self.order.schedule.load_state_dict(state["batches"])
        # Last, since what stands above may draw.
        if self.team.rank < len(state["draws"]):
            torch.set_rng_state(state["draws"][self.team.rank])
        if state["device_draws"] and self.device.type == "cuda":
            torch.cuda.set_rng_state_all(state["device_draws"])

    def _out_of_memory(self, error: RuntimeError | MemoryError) -> str:
        """Say which setting helps."""
        step = f"Step {self.taken + 1}"
        if isinstance(error, wb.OutOfMemoryError):
            return f"{step} could not be taken. {error} Of these, --checkpoint, --offload and --context are flags here."
        size = self.size
        held = counted(size, "row") if isinstance(size, int) else f"{size.budget} padded {self.task.unit}"
        return (
            f"{step} ran out of memory in micro-batches of at most {held}: {words_of(error)} Leave micro_batch_size "
            "and max_tokens out, and such a micro-batch is split; or choose a smaller one."
        )

    def _batch(self, step: int) -> Sequence[Any]:
        rows, size = self.order.batch(step), self.task.size
        mine = self.team.deal(rows, lambda: self._lengths(rows), size)
        return [self.task.train[row] for row in mine]

    def _lengths(self, rows: Sequence[int]) -> Sequence[int]:
        size = self.task.size
        return size.lengths(self.task.train[row] for row in rows) if isinstance(size, wb.Tokens) else []
