"""What `accumulate_in=torch.float32` is worth for bfloat16 parameters, and what it costs. About a minute.

The error is against the float64 sum of the very gradients that the micro-batches computed in bfloat16: the error of
adding up alone. It is taken before the one rounding with which the sum goes into ``.grad``, and after it. Steps without
and with the option take turns.

    python benchmarks/precision.py --micro-batches 8 64 256
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import torch
from record import RESULTS, Clock, quartiles, save, significant
from torch import Tensor, nn

import wholebatch as wb
from wholebatch.gradient.separable import accumulate
from wholebatch.model.gradients import GradientAccumulator
from wholebatch.train.model import Decoder

WORDS = 256


def loss_fn(model: nn.Module, tokens: Tensor) -> wb.LossSum:
    return wb.losses.causal_lm(model(tokens), tokens)


def summed_in_float64(model: nn.Module, batch: Tensor, micro_batches: int) -> list[Tensor]:
    """Add up in float64 what each micro-batch gives in bfloat16, divided by a power of two, which rounds nothing."""
    parameters = list(model.parameters())
    items = len(batch) * (batch.shape[1] - 1)
    power = 2.0 ** (items.bit_length())
    sums = [torch.zeros_like(p, dtype=torch.float64) for p in parameters]
    for micro_batch in batch.split(len(batch) // micro_batches):
        total = loss_fn(model, micro_batch).total
        for held, gradient in zip(
            sums, torch.autograd.grad(total, parameters, torch.full_like(total, 1 / power)), strict=True
        ):
            held += gradient
    return [held * (power / items) for held in sums]


def error(found: list[Tensor], reference: list[Tensor]) -> float:
    apart = torch.stack([(a.double() - b).norm() for a, b in zip(found, reference, strict=True)]).norm()
    return significant(float(apart / torch.stack([b.norm() for b in reference]).norm()))


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def errors(model: nn.Module, batch: Tensor, micro_batches: int) -> dict[str, float]:
    reference, size = summed_in_float64(model, batch, micro_batches), len(batch) // micro_batches
    model.zero_grad()
    wb.backward(model, loss_fn, batch, size)
    narrow = error(gradients(model), reference)
    model.zero_grad()
    pending = accumulate(model, loss_fn, batch, size, GradientAccumulator(), accumulate_in=torch.float32)
    pending.merge()
    wide = error(pending.gradients.held(), reference)
    pending.gradients.round()
    return {"bfloat16": narrow, "float32, the sum": wide, "float32, in .grad": error(gradients(model), reference)}


def times(model: nn.Module, batch: Tensor, micro_batches: int, rounds: int) -> dict[str, Any]:
    order, pairs = random.Random(0), []
    for _ in range(rounds + 1):
        pair = {}
        for dtype in order.sample([None, torch.float32], 2):
            model.zero_grad()
            with Clock() as clock:
                wb.backward(model, loss_fn, batch, len(batch) // micro_batches, accumulate_in=dtype)
            pair[dtype] = clock.seconds
        pairs.append(pair)
    wall = quartiles(pair[torch.float32].wall / pair[None].wall for pair in pairs[1:])
    return {"ratio": wall, "cpu_ratio": quartiles(pair[torch.float32].cpu / pair[None].cpu for pair in pairs[1:])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--rows", type=int, default=2, help="of a micro-batch")
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows: list[dict[str, Any]] = []
    for micro_batches in options.micro_batches:
        torch.manual_seed(0)
        model = Decoder(WORDS, options.width, options.layers, heads=4).to(torch.bfloat16)
        batch = torch.randint(WORDS, (options.rows * micro_batches, options.length))
        rows.append(
            {
                "pieces": micro_batches,
                **errors(model, batch, micro_batches),
                **times(model, batch, micro_batches, options.rounds),
            }
        )
        print(rows[-1], flush=True)
    settings = {key: getattr(options, key) for key in ("rows", "length", "width", "layers", "rounds")}
    print(save("precision", settings, rows, options.out))


if __name__ == "__main__":
    main()
