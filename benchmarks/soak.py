"""Train in a memory that shrinks and grows at random, and hold every step against an undisturbed run. Two minutes.

Two models start alike and see the same batches of real text of uneven length, in float64. One has all the memory it
wants and runs each batch in one micro-batch. The other's memory changes between steps, within them, and in the middle
of a backward, down to what one row needs. After every step both losses, the numbers of the rows that were trained on,
and at the end all weights are compared: no row may be lost or come twice, whatever failed.

    python benchmarks/soak.py --seconds 3600
"""

from __future__ import annotations

import argparse
import math
import random
import time
from pathlib import Path
from typing import Any

import torch
from record import RESULTS, save, significant
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import wholebatch as wb
from wholebatch.model.memory import SavedBytes
from wholebatch.train.corpus import docstrings
from wholebatch.train.model import Decoder

IGNORED = -100
CHANGES = 0.005
"""How likely each saved tensor is to find that the memory has changed."""
REGIME = 8
"""Steps after which the run begins anew with the whole batch as its size, as after a restart."""

Row = tuple[int, Tensor]
Batch = tuple[Tensor, Tensor]


class Weather(SavedBytes):
    """A limit that changes at random between what one row needs and what the whole batch needs."""

    def __init__(self, model: nn.Module, least: int, most: int, seed: int) -> None:
        super().__init__(most, ignored=[*model.parameters()])
        self.least, self.most, self.draws = least, most, random.Random(seed)
        self.changes = self.failures = 0

    def change(self) -> None:
        self.changes += 1
        self.limit = int(math.exp(self.draws.uniform(math.log(self.least), math.log(self.most))))

    def pack(self, tensor: Tensor) -> Any:
        if self.draws.random() < CHANGES:
            self.change()
        try:
            return super().pack(tensor)
        except torch.OutOfMemoryError:
            self.failures += 1
            raise


def collate(rows: list[Row]) -> Batch:
    numbers = torch.tensor([number for number, _ in rows], dtype=torch.float64)
    return numbers, pad_sequence([tokens for _, tokens in rows], batch_first=True, padding_value=IGNORED)


def loss_fn(model: nn.Module, batch: Batch) -> Any:
    """The loss, and sums that tell any row that is lost or comes twice: of its number, and of its square."""
    numbers, labels = batch
    loss = wb.losses.causal_lm(model(labels.clamp(min=0)), labels)
    return loss, {"numbers": numbers, "squares": numbers.square()}


def corpus(rows: int, longest: int) -> list[Row]:
    texts = [text.encode()[:longest] for text in docstrings() if text][:rows]
    return [(number, torch.tensor(list(text))) for number, text in enumerate(texts)]


class Learner:
    """A model, its optimizer, and one step a call."""

    def __init__(self, options: argparse.Namespace, size: Any) -> None:
        torch.manual_seed(options.seed)
        self.model = Decoder(256, options.width, options.layers, heads=2).double()
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.step = wb.Step(self.model, optimizer, loss_fn, micro_batch_size=size, max_grad_norm=1.0, collate=collate)


def soak(options: argparse.Namespace) -> dict[str, Any]:
    rows, draws = corpus(options.rows, options.longest), random.Random(options.seed)
    calm, disturbed = Learner(options, None), Learner(options, None)
    weather = Weather(disturbed.model, *limits(calm.model, rows, options.batch), options.seed)
    worst = {"loss": 0.0, "grad_norm": 0.0, "rows": 0.0}
    micro_batches: list[int] = []
    started, order = time.monotonic(), list[Row]()
    while time.monotonic() - started < options.seconds or not micro_batches:
        order = order or draws.sample(rows, len(rows))
        batch, order = order[: options.batch], order[options.batch :]
        if len(micro_batches) % REGIME == 0:
            tokens = wb.Tokens(options.batch * options.longest, length=lambda row: len(row[1]))
            disturbed.step.micro_batch_size = wb.Auto(draws.choice([tokens, options.batch]))
        weather.change()
        with weather:
            result = disturbed.step(batch)
        expected = calm.step(batch)
        micro_batches.append(result.micro_batches)
        worst["loss"] = max(worst["loss"], apart(float(result.loss), float(expected.loss)))
        worst["grad_norm"] = max(worst["grad_norm"], apart(result.grad_norm, expected.grad_norm))
        worst["rows"] = max(worst["rows"], *(miscounted(result, batch)))
        assert weather.live == 0, f"{weather.live} bytes are still held after step {len(micro_batches)}"
    return {
        "steps": len(micro_batches),
        "rows": disturbed.step.rows,
        "changes_of_memory": weather.changes,
        "out_of_memory": weather.failures,
        "pieces": {"least": min(micro_batches), "most": max(micro_batches)},
        "loss_apart": significant(worst["loss"]),
        "grad_norm_apart": significant(worst["grad_norm"]),
        "rows_lost_or_repeated": worst["rows"],
        "weights_apart": significant(weights_apart(disturbed.model, calm.model)),
        "last_loss": significant(float(expected.loss)),
    }


def miscounted(result: Any, batch: list[Row]) -> tuple[float, float]:
    """How far the sums over the rows' numbers are from what they must be."""
    numbers = torch.tensor([number for number, _ in batch], dtype=torch.float64)
    found = [float(result.metrics[name]) * len(batch) for name in ("numbers", "squares")]
    wanted = [float(numbers.sum()), float(numbers.square().sum())]
    return abs(round(found[0]) - wanted[0]), abs(round(found[1]) - wanted[1])


def limits(model: nn.Module, rows: list[Row], batch: int) -> tuple[int, int]:
    """What the longest row needs, and twice what a batch of its kind does."""
    longest = max(rows, key=lambda row: len(row[1]))
    with SavedBytes(ignored=[*model.parameters()]) as saved:
        wb.backward(model, loss_fn, [longest], collate=collate)
    model.zero_grad()
    return int(1.05 * saved.peak), int(1.2 * saved.peak * batch)


def apart(one: float, other: float) -> float:
    return abs(one - other) / abs(other)


@torch.no_grad()
def weights_apart(one: nn.Module, other: nn.Module) -> float:
    pairs = list(zip(one.parameters(), other.parameters(), strict=True))
    difference = torch.stack([(a - b).norm() for a, b in pairs]).norm()
    return float(difference / torch.stack([b.norm() for _, b in pairs]).norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--longest", type=int, default=192)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    row = soak(options)
    print("\n".join(f"{name:24}{value}" for name, value in row.items()))
    settings = {key: getattr(options, key) for key in ("seconds", "batch", "longest", "width", "layers", "seed")}
    print(save("soak", settings, [row], options.out))


if __name__ == "__main__":
    main()
