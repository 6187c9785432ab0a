"""Predict the next token of texts."""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import wholebatch as wb
from wholebatch.batch.tree import move
from wholebatch.batch.window import micro_batches_of
from wholebatch.model.gradients import device_of
from wholebatch.train.config import Config
from wholebatch.train.corpus import docstrings
from wholebatch.train.data import held_out, read_texts
from wholebatch.train.language import Bytes, HuggingFace, Language
from wholebatch.train.task import Batch, Task, digest

IGNORED = -100
MICRO_BATCH_TOKENS = 4096
PROOF_TOKENS = 16384
MEASURED_ROWS = 512


class Row(NamedTuple):
    """One text: its tokens, and how many bytes of it they stand for."""

    tokens: Tensor
    bytes: int


class Text(Task):
    """A language model, byte by byte with our own decoder or token by token with a Hugging Face folder."""

    unit = "tokens"

    def __init__(self, config: Config) -> None:
        texts = docstrings() if config.data is None else read_texts(config.data, config.column, config.rows)
        train, held = held_out(texts, config.held_out, str.encode)
        self.language: Language = Bytes(config) if config.model is None else HuggingFace(config, config.model)
        self.peak_lr = 1e-2 if config.model is None else 5e-5
        self.model, self.network = self.language.model, self.language.name
        self.prompt = config.prompt
        self.size = _size(config)
        self.too_long = 0
        self.train = [self._row(text) for text in train]
        self.held = [self._row(text) for text in held[:MEASURED_ROWS]]
        where = config.data or f"the docstrings of Python {platform.python_version()}"
        self.origin = f"{where}: {len(train):,} rows to train on, {len(held):,} held out{self._exceptions()}"

    def whole(self, rows: int) -> wb.Tokens:
        """Return the padded tokens of so many rows of the longest kind."""
        return by_tokens(rows * self.language.context)

    def checkpoint(self) -> None:
        """Checkpoint the decoder's blocks, or switch the Hugging Face model's own checkpointing on."""
        self.language.checkpoint()

    def tile(self) -> None:
        """Run the feed-forward blocks over tiles."""
        self.language.tile()

    def collate(self, samples: list[Row]) -> Batch:
        """Pad rows on the right to the longest of them."""
        tokens = [sample.tokens for sample in samples]
        # Padding is clamped to token 0: no real position sees it, and its label does not count.
        labels = pad_sequence(tokens, batch_first=True, padding_value=IGNORED)
        return {"tokens": labels.clamp(min=0), "labels": labels}

    def loss(self, model: Any, micro_batch: Batch) -> wb.LossSum:
        """Return the cross entropy of every next token that is real."""
        labels = micro_batch["labels"]
        return self.language.loss(model, micro_batch["tokens"], labels, IGNORED)

    def count(self, samples: Sequence[Row]) -> tuple[int, int]:
        """Return real and padded tokens."""
        lengths = [len(sample.tokens) for sample in samples]
        return sum(lengths), len(lengths) * max(lengths)

    @torch.no_grad()
    def measure(self, model: nn.Module) -> dict[str, float]:
        """Return the bits that the model needs for a byte of the held-out rows, their ends included."""
        nats = 0.0
        for micro_batch in micro_batches_of(self.held, by_tokens(MICRO_BATCH_TOKENS), collate=self.collate):
            nats += float(self.loss(model, move(micro_batch.load(), device_of(model))).total)
        return {"bits_per_byte": nats / math.log(2) / max(1, sum(row.bytes for row in self.held))}

    def told(self, measured: dict[str, float]) -> str:
        """Say the bits per byte."""
        return f"{measured['bits_per_byte']:.3f} bits per byte"

    def shortened(self, samples: Sequence[Row]) -> list[Row]:
        """Cut rows so that all of them, padded to one length, have at most 16,384 tokens."""
        longest = max(16, PROOF_TOKENS // len(samples))
        return [Row(row.tokens[:longest], row.bytes) for row in samples]

    def fingerprint(self) -> str:
        """Return a hash of all tokens."""
        return digest(row.tokens.numpy().tobytes() for row in (*self.train, *self.held))

    @torch.no_grad()
    def sample(self, model: nn.Module) -> str:
        """Return what the model writes after the prompt."""
        return self.language.proceed(model, self.prompt, length=200)

    def export(self, folder: Path) -> None:
        """Write what `from_pretrained` needs beside the weights."""
        self.language.export(folder)

    def _exceptions(self) -> str:
        """Say how many rows are cut, and how many are more than a micro-batch should hold."""
        context = self.language.context
        limit = context if isinstance(self.size, int) else self.size.budget
        alone = sum(len(row.tokens) > limit for row in self.train)
        cut = f"; {self.too_long:,} longer than {context} tokens are cut there" if self.too_long else ""
        return f"{cut}; {alone:,} longer than the {limit} tokens of a micro-batch run alone" if alone else cut

    def _row(self, text: str) -> Row:
        tokens, size = self.language.encode(text), len(text.encode())
        if len(tokens) > self.language.context:
            self.too_long += 1
            tokens = tokens[: self.language.context]
            size = len(self.language.decode(tokens).encode())
        return Row(torch.tensor(tokens, dtype=torch.long), size)


def by_tokens(budget: int) -> wb.Tokens:
    """Cut by padded tokens, counted in the samples of this task."""
    return wb.Tokens(budget, length=lambda row: len(row.tokens))


def _size(config: Config) -> int | wb.Tokens:
    rows = config.micro_batch_size
    return by_tokens(config.max_tokens or MICRO_BATCH_TOKENS) if rows == "auto" else rows
