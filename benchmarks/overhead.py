"""What our step costs over a hand-written loop with the very same micro-batches. About four minutes; torch only.

The two take turns step by step, in one process and in random order within each pair, on two equal models. What is kept
is the ratio within each pair: what slows both down falls out of it.

    python benchmarks/overhead.py --noise     our step against itself with the noise of its gradient measured
"""

from __future__ import annotations

import argparse
import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from record import RESULTS, Clock, Seconds, hold_memory, quartiles, save, significant
from torch import Tensor, nn

import wholebatch as wb

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Size:
    """A model, and a batch cut into micro-batches."""

    name: str
    model: Callable[[], nn.Module]
    rows: int
    width: int
    micro_batches: int


def perceptron(width: int, hidden: int, layers: int) -> nn.Module:
    sizes = [width, *[hidden] * layers]
    blocks = [nn.Sequential(nn.Linear(a, b), nn.GELU()) for a, b in pairwise(sizes)]
    return nn.Sequential(*blocks, nn.Linear(hidden, 10))


class Mixer(nn.Module):
    """Residual blocks over a sequence: many small tensors, as in a transformer."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x.unflatten(1, (-1, self.head.in_features))).mean(dim=1))


SIZES = (
    Size("perceptron, 7 layers of 2,048", lambda: perceptron(2048, 2048, 6), rows=256, width=2048, micro_batches=8),
    Size("transformer, 6 blocks of 384", lambda: Mixer(384, 6), rows=16, width=32 * 384, micro_batches=4),
    Size("transformer, 6 blocks of 256", lambda: Mixer(256, 6), rows=64, width=32 * 256, micro_batches=8),
    # Micro-batches so short that nobody would cut them: here the bookkeeping shows.
    Size("perceptron, 5 layers of 1,024", lambda: perceptron(256, 1024, 4), rows=256, width=256, micro_batches=8),
    Size("perceptron, 5 layers of 48", lambda: perceptron(64, 48, 4), rows=64, width=64, micro_batches=8),
)


INTERVAL = wb.NoiseScale().every


def our_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def our_step(model: nn.Module, size: Size) -> Callable[[Batch], Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    step = wb.Step(model, optimizer, our_loss, micro_batch_size=size.rows // size.micro_batches, max_grad_norm=1.0)
    return lambda batch: step(batch).loss


def hand_written(model: nn.Module, size: Size) -> Callable[[Batch], Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    rows = size.rows // size.micro_batches

    def step(batch: Batch) -> Tensor:
        total = torch.zeros(())
        for x, y in zip(batch["x"].split(rows), batch["y"].split(rows), strict=True):
            loss = F.cross_entropy(model(x), y) / size.micro_batches
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


def measuring_step(model: nn.Module, size: Size) -> Callable[[Batch], Tensor]:
    """Our step, with the noise of the gradient measured at the default interval."""
    optimizer, rows = torch.optim.AdamW(model.parameters(), lr=1e-4), size.rows // size.micro_batches
    noise = wb.NoiseScale()
    step = wb.Step(model, optimizer, our_loss, micro_batch_size=rows, max_grad_norm=1.0, noise_scale=noise)
    return lambda batch: step(batch).loss


def measure_noise(size: Size, seconds: float) -> dict[str, object]:
    """Take turns in stretches from one measurement to the next; the first pair warms up."""
    torch.manual_seed(0)
    model = size.model()
    steps = {"plain": our_step(model, size), "measuring": measuring_step(copy.deepcopy(model), size)}
    batch = {"x": torch.randn(size.rows, size.width), "y": torch.randint(10, (size.rows,))}
    order, spent, pairs = random.Random(0), 0.0, []
    while spent < seconds or len(pairs) < 5:
        pair = {name: stretch(steps[name], batch) for name in order.sample(list(steps), 2)}
        spent += pair["plain"].wall + pair["measuring"].wall
        pairs.append(pair)
    counted = pairs[1:]
    return {
        "model": size.name,
        "pairs": len(counted),
        "ratio": quartiles(p["measuring"].wall / p["plain"].wall for p in counted),
        "cpu_ratio": quartiles(p["measuring"].cpu / p["plain"].cpu for p in counted),
        "milliseconds": significant(1000 * quartiles(p["plain"].wall for p in counted)["median"] / INTERVAL),
    }


def stretch(step: Callable[[Batch], Tensor], batch: Batch) -> Seconds:
    with Clock() as clock:
        for _ in range(INTERVAL):
            step(batch)
    return clock.seconds


def timed(step: Callable[[Batch], Tensor], batch: Batch) -> Seconds:
    with Clock() as clock:
        step(batch)
    return clock.seconds


def measure(size: Size, seconds: float) -> dict[str, object]:
    """Take turns until the time is up; the first tenth warms up and is not counted."""
    torch.manual_seed(0)
    model = size.model()
    steps = {"ours": our_step(model, size), "by hand": hand_written(copy.deepcopy(model), size)}
    batch = {"x": torch.randn(size.rows, size.width), "y": torch.randint(10, (size.rows,))}
    order, spent, pairs = random.Random(0), 0.0, []
    while spent < seconds * 1.1 or len(pairs) < 5:
        pair = {name: timed(steps[name], batch) for name in order.sample(list(steps), 2)}
        spent += pair["ours"].wall + pair["by hand"].wall
        pairs.append((spent, pair))
    counted = [pair for at, pair in pairs if at > seconds * 0.1] or [pair for _, pair in pairs[1:]]
    return {
        "model": size.name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "tensors": len(list(model.parameters())),
        "pieces": size.micro_batches,
        "pairs": len(counted),
        "ratio": quartiles(p["ours"].wall / p["by hand"].wall for p in counted),
        "cpu_ratio": quartiles(p["ours"].cpu / p["by hand"].cpu for p in counted),
        "milliseconds": significant(1000 * quartiles(p["by hand"].wall for p in counted)["median"]),
        "extra_milliseconds": significant(
            1000 * quartiles(p["ours"].wall - p["by hand"].wall for p in counted)["median"]
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40.0, help="measuring time for each of the models")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--noise", action="store_true", help="our step against itself with its noise measured")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    hold_memory()
    rows = []
    for size in SIZES:
        rows.append(measure_noise(size, options.seconds) if options.noise else measure(size, options.seconds))
        print(f"{size.name:24} wall {rows[-1]['ratio']}  cpu {rows[-1]['cpu_ratio']}", flush=True)
    name = "noise_overhead" if options.noise else "overhead"
    print(save(name, {"seconds": options.seconds, "every": INTERVAL}, rows, options.out))


if __name__ == "__main__":
    main()
