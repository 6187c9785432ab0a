"""What there is to learn: rows, a model, and a loss that states its own denominator."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor, nn

import wholebatch as wb
from wholebatch.train.errors import ConfigError

Batch: TypeAlias = "dict[str, Tensor]"
Loss: TypeAlias = "wb.LossSum | tuple[wb.LossSum, dict[str, Tensor]]"


class Task(ABC):
    """One kind of training: how its rows are made, collated, learned from and measured.

    Attributes:
        train: the rows to train on.
        held: the rows that are only measured.
        model: the network, still on the CPU.
        size: where a batch is cut: rows or `wb.Tokens`.
        peak_lr: the learning rate unless the user says another.
        origin: in words, where the rows come from.
        network: in words, what the model is.
        unit: what `count` counts: tokens or rows.
    """

    train: Sequence[Any]
    held: Sequence[Any]
    model: nn.Module
    size: int | wb.Tokens
    peak_lr: float
    origin: str
    network: str
    unit: str

    @abstractmethod
    def whole(self, rows: int) -> int | wb.Tokens:
        """Return the size of a micro-batch that holds so many rows, however long they are."""

    @abstractmethod
    def checkpoint(self) -> None:
        """Let the model's blocks compute their activations again in the backward.

        Raises:
            ConfigError: if it has no blocks that would.
        """

    def tile(self) -> None:
        """Run the model's blocks over tiles of positions.

        Raises:
            ConfigError: if its rows have no positions.
        """
        raise ConfigError("tiled is on, but only rows of text have positions to be cut at. Leave it out.")

    @abstractmethod
    def collate(self, samples: list[Any]) -> Batch:
        """Make one micro-batch of samples."""

    @abstractmethod
    def loss(self, model: Any, micro_batch: Batch) -> Loss:
        """Return the loss of one micro-batch; any model of the same form may be passed."""

    def objective(self) -> Any:
        """Return what a step learns from: the loss function, or a loss over all rows."""
        return self.loss

    def backward(self, model: nn.Module, samples: list[Any], size: int | wb.Tokens) -> None:
        """Leave the gradient of a batch in a model that this process has for itself."""
        wb.backward(model, self.loss, samples, size, collate=self.collate, sync="alone")

    @abstractmethod
    def count(self, samples: Sequence[Any]) -> tuple[int, int]:
        """Return how many units of one micro-batch's rows are real, and how many there are with padding."""

    @abstractmethod
    def measure(self, model: nn.Module) -> dict[str, float]:
        """Measure the model on the held-out rows."""

    @abstractmethod
    def told(self, measured: dict[str, float]) -> str:
        """Say in words what `measure` returned."""

    @abstractmethod
    def shortened(self, samples: Sequence[Any]) -> list[Any]:
        """Return the samples cut so short that the whole batch fits into memory at once in float64."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Return what changes if any row does."""

    def sample(self, model: nn.Module) -> str | None:
        """Return something the model made, if it makes anything."""
        return None

    def export(self, folder: Path) -> None:
        """Write beside the weights what others need to open them; most tasks add nothing."""
        return


def digest(parts: Iterable[bytes]) -> str:
    """Return a short fingerprint of rows in their order."""
    hashed = hashlib.blake2b(digest_size=12)
    for part in parts:
        hashed.update(len(part).to_bytes(8, "big"))
        hashed.update(part)
    return hashed.hexdigest()
