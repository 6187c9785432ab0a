"""Tell classes apart: rows of numbers, images, or handwritten digits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import wholebatch as wb
from wholebatch.batch.tree import move
from wholebatch.batch.window import micro_batches_of
from wholebatch.model.gradients import device_of
from wholebatch.train.config import Config, schedule_of
from wholebatch.train.data import held_out
from wholebatch.train.errors import ConfigError
from wholebatch.train.model import classifier, parameters_of
from wholebatch.train.tables import LabelledRow, content, read_table, standardise
from wholebatch.train.task import Batch, Task, digest

MICRO_BATCH_ROWS = 256


class Classify(Task):
    """A small classifier of our own, convolutions for images and dense layers for vectors."""

    unit = "rows"

    def __init__(self, config: Config) -> None:
        for word in ("model", "max_tokens"):
            if getattr(config, word) is not None:
                raise ConfigError(
                    f"{word} is {getattr(config, word)}, but the task classify has no {word}. Leave it out."
                )
        table = read_table(config.data, config.label, config.image_size)
        train, held = held_out(table.samples, config.held_out, content)
        self.train, self.held = standardise(train, train), standardise(train, held)
        shape = self.train[0].features.shape
        self.model = classifier(shape, len(table.classes), config.width, config.layers)
        self.peak_lr = 3e-3
        rows = config.micro_batch_size
        self.size = -(-schedule_of(config).smallest // 4) if rows == "auto" else rows
        inputs = " x ".join(map(str, shape))
        self.network = f"a small classifier of {inputs} inputs, {parameters_of(self.model):,} parameters"
        where = config.data or "scikit-learn's digits"
        self.origin = f"{where}: {len(train):,} rows to train on, {len(held):,} held out, {len(table.classes)} classes"

    def whole(self, rows: int) -> int:
        """Return the rows."""
        return rows

    def checkpoint(self) -> None:
        """Refuse: single layers keep what they would have to be given again."""
        raise ConfigError("checkpoint is on, but the classifiers have no blocks that would keep less. Leave it out.")

    def collate(self, samples: list[LabelledRow]) -> Batch:
        """Stack rows."""
        features = torch.stack([sample.features for sample in samples])
        return {"features": features, "labels": torch.tensor([sample.label for sample in samples])}

    def loss(self, model: Any, micro_batch: Batch) -> tuple[wb.LossSum, dict[str, torch.Tensor]]:
        """Return the cross entropy of every row, and whether it was told right."""
        labels = micro_batch["labels"]
        # The features follow the model's dtype, which is float64 in the reference.
        logits = model(micro_batch["features"].to(next(model.parameters()).dtype))
        return wb.losses.cross_entropy(logits, labels), {"accuracy": (logits.argmax(-1) == labels).float()}

    def count(self, samples: Sequence[Any]) -> tuple[int, int]:
        """Return the rows twice: there is no padding."""
        return len(samples), len(samples)

    @torch.no_grad()
    def measure(self, model: nn.Module) -> dict[str, float]:
        """Return the share of held-out rows told right, and their mean cross entropy."""
        right = total = 0.0
        for micro_batch in micro_batches_of(self.held, MICRO_BATCH_ROWS, collate=self.collate):
            loss, metrics = self.loss(model, move(micro_batch.load(), device_of(model)))
            right += float(metrics["accuracy"].sum())
            total += float(loss.total)
        return {"accuracy": right / len(self.held), "loss": total / len(self.held)}

    def told(self, measured: dict[str, float]) -> str:
        """Say the share of rows told right."""
        return f"{measured['accuracy']:.1%} of the rows right"

    def shortened(self, samples: Sequence[LabelledRow]) -> list[LabelledRow]:
        """Keep at most 256 rows."""
        return list(samples[:MICRO_BATCH_ROWS])

    def fingerprint(self) -> str:
        """Return a hash of all rows and their classes."""
        return digest(content(sample) + str(sample.label).encode() for sample in (*self.train, *self.held))
