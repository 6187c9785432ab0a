"""Find the docstring that belongs to a signature, among those of the whole batch."""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wholebatch as wb
from wholebatch.batch.tree import move
from wholebatch.batch.window import micro_batches_of
from wholebatch.model.gradients import device_of
from wholebatch.train.config import Config, schedule_of
from wholebatch.train.corpus import signatures
from wholebatch.train.data import held_out
from wholebatch.train.errors import ConfigError
from wholebatch.train.extras import require
from wholebatch.train.model import parameters_of
from wholebatch.train.task import Batch, Task, digest

BUCKETS = 1 << 14
LONGEST = 400
MICRO_BATCH_ROWS = 64
MEASURED_ROWS = 512


class Pair(NamedTuple):
    """A signature and the docstring that was written for it."""

    signature: str
    docstring: str


class Contrast(Task):
    """Two sides brought into one space by a loss over all rows: every other docstring of the batch is a wrong answer.

    The loss of a micro-batch alone would have its own few wrong answers; `wb.CoupledLoss` takes it over all of them.
    """

    unit = "pairs"

    def __init__(self, config: Config) -> None:
        for word in ("data", "max_tokens"):
            if getattr(config, word) is not None:
                raise ConfigError(
                    f"{word} is {getattr(config, word)}, but the task contrastive has no {word}. Leave it out."
                )
        found = [Pair(*pair) for pair in signatures()]
        train, held = held_out(found, config.held_out, content)
        self.train, self.held = train, held[:MEASURED_ROWS]
        self.model: nn.Module = Trigrams(config.width) if config.model is None else Sentences(config.model)
        self.peak_lr = 1e-2 if config.model is None else 2e-5
        rows = config.micro_batch_size
        self.size = -(-schedule_of(config).smallest // 4) if rows == "auto" else rows
        kind = "hashed trigrams and two dense layers" if config.model is None else f"the encoder of {config.model}"
        self.network = f"{kind}, {parameters_of(self.model):,} parameters"
        self.origin = (
            f"signatures and docstrings of Python {platform.python_version()}: {len(train):,} pairs to train on, "
            f"{len(self.held):,} held out"
        )

    def whole(self, rows: int) -> int:
        """Return the pairs."""
        return rows

    def checkpoint(self) -> None:
        """Refuse: the second pass keeps one micro-batch at a time as it is."""
        raise ConfigError("checkpoint is on, but the task contrastive keeps one micro-batch's graph. Leave it out.")

    def collate(self, samples: list[Pair]) -> Batch:
        """Make both sides' inputs as the model wants them."""
        encoder = cast("TextEncoder", self.model)
        sides = zip(*((pair.signature, pair.docstring) for pair in samples), strict=True)
        left, right = (encoder.inputs([text[:LONGEST] for text in side]) for side in sides)
        return {f"{side}.{name}": rows for side, part in (("l", left), ("r", right)) for name, rows in part.items()}

    def loss(self, model: Any, micro_batch: Batch) -> wb.LossSum:
        """Return the loss of a micro-batch as if it were the batch: what the usual loop takes."""
        (left, scale), right = encode_signatures(model, micro_batch), encode_docstrings(model, micro_batch)
        return wb.LossSum(contrast(left, scale, right) * len(right), len(right))

    def objective(self) -> wb.CoupledLoss:
        """Return the loss over all pairs, over all ranks."""
        return wb.CoupledLoss([encode_signatures, encode_docstrings], contrast, gather=True)

    def backward(self, model: nn.Module, samples: list[Any], size: int | wb.Tokens) -> None:
        """Leave the gradient of the loss over all pairs."""
        loss = self.objective()
        wb.coupled_backward(model, loss.encode, loss.loss_fn, samples, size, collate=self.collate, sync="alone")

    def count(self, samples: Sequence[Any]) -> tuple[int, int]:
        """Return the pairs twice: there is no padding that counts."""
        return len(samples), len(samples)

    @torch.no_grad()
    def measure(self, model: nn.Module) -> dict[str, float]:
        """Return for how many held-out signatures the nearest of all held-out docstrings is the right one."""
        sides: list[tuple[Tensor, Tensor]] = []
        for micro_batch in micro_batches_of(self.held, MICRO_BATCH_ROWS, collate=self.collate):
            pairs = move(micro_batch.load(), device_of(model))
            sides.append((encode_signatures(model, pairs)[0], encode_docstrings(model, pairs)))
        left, right = (torch.cat(side) for side in zip(*sides, strict=True))
        nearest = (left @ right.T).argmax(1).cpu()
        return {"recall_at_1": float((nearest == torch.arange(len(nearest))).float().mean())}

    def told(self, measured: dict[str, float]) -> str:
        """Say the share that is found."""
        return f"{measured['recall_at_1']:.1%} of the docstrings found among {len(self.held)}"

    def shortened(self, samples: Sequence[Pair]) -> list[Pair]:
        """Keep all pairs: they are short."""
        return list(samples)

    def fingerprint(self) -> str:
        """Return a hash of all pairs."""
        return digest(content(pair) for pair in (*self.train, *self.held))


def content(pair: Pair) -> bytes:
    """Return what tells a pair from another."""
    return f"{pair.signature}\n{pair.docstring}".encode()


def encode_signatures(model: Any, micro_batch: Batch) -> tuple[Tensor, Tensor]:
    """Encode one side; the learned scale goes with it, once a row, so that it learns wherever the model is wrapped."""
    encoded, scale = model(_side(micro_batch, "l"))
    return encoded, scale.expand(len(encoded))


def encode_docstrings(model: Any, micro_batch: Batch) -> Tensor:
    """Encode the other side."""
    encoded: Tensor = model(_side(micro_batch, "r"))[0]
    return encoded


def contrast(left: Tensor, scale: Tensor, right: Tensor) -> Tensor:
    """Tell each row's partner from all others, both ways."""
    similar = scale.mean().exp() * left @ right.T
    wanted = torch.arange(len(left), device=left.device)
    return (F.cross_entropy(similar, wanted) + F.cross_entropy(similar.T, wanted)) / 2


def _side(micro_batch: Batch, side: str) -> Batch:
    return {name[2:]: rows for name, rows in micro_batch.items() if name[0] == side}


class TextEncoder(nn.Module):
    """Texts as points on a sphere, and the scale that distances on it are read with."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(math.log(10.0)))

    def inputs(self, texts: list[str]) -> Batch:
        """Make what the encoder reads of texts, one row each."""
        raise NotImplementedError


class Trigrams(TextEncoder):
    """The mean of learned vectors of all groups of three letters, and two dense layers: small, and quick to learn."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.groups = nn.Embedding(BUCKETS, width, padding_idx=0)
        self.head = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def inputs(self, texts: list[str]) -> Batch:
        """Number the groups of letters of each text."""
        rows = [[_bucket(text[i : i + 3].encode()) for i in range(max(1, len(text) - 2))] for text in texts]
        longest = max(map(len, rows))
        return {"groups": torch.tensor([row + [0] * (longest - len(row)) for row in rows])}

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return a unit vector a row, and the logarithm of the scale."""
        groups = batch["groups"]
        mean = self.groups(groups).sum(1) / (groups > 0).sum(1, keepdim=True).sqrt()
        return F.normalize(self.head(mean), dim=1), self.log_scale


class Sentences(TextEncoder):
    """A local Hugging Face encoder, such as a sentence-transformer's folder; the mean over its tokens."""

    def __init__(self, folder: Any) -> None:
        super().__init__()
        transformers = require("transformers", "hf", "A Hugging Face folder")
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.body = transformers.AutoModel.from_pretrained(folder, local_files_only=True)
        for name, parameter in self.body.named_parameters():
            parameter.requires_grad_(not name.startswith("pooler."))  # the mean of all tokens is taken instead

    def inputs(self, texts: list[str]) -> Batch:
        """Tokenise texts and pad them to the longest."""
        told = self.tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
        return {name: told[name] for name in ("input_ids", "attention_mask")}

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return a unit vector a row, and the logarithm of the scale."""
        hidden = self.body(**batch).last_hidden_state
        mask = batch["attention_mask"][:, :, None].to(hidden.dtype)
        return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1), self.log_scale


def _bucket(group: bytes) -> int:
    """Hash three letters to a number that is the same in every process; 0 is for padding."""
    value = 0
    for letter in group:
        value = (value * 257 + letter) % 1_000_003
    return 1 + value % (BUCKETS - 1)
