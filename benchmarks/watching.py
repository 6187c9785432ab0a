"""What `wb.doctor.watch()` costs a loop: steps with and without it, in turns. Ten seconds; torch only."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from record import RESULTS, Clock, quartiles, save
from torch import nn

import wholebatch as wb

SIZES = {"transformer, 3 blocks of 96": (96, 3, 8), "transformer, 4 blocks of 192": (192, 4, 8)}


def loop(width: int, blocks: int, rows: int) -> Callable[[], None]:
    """A plain loop's step of four micro-batches."""
    layer = nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True)
    model = nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inputs = torch.randn(rows, 32, width)

    def step() -> None:
        for _ in range(4):
            (model(inputs).square().mean() / 4).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(name: str, step: Callable[[], None], pairs: int) -> dict[str, object]:
    ratios = []
    step()
    for _ in range(pairs):
        with Clock() as plain:
            step()
        with wb.doctor.watch():
            step()
            with Clock() as watched:
                step()
        ratios.append(watched.seconds.cpu / plain.seconds.cpu)
    return {"loop": name, "pairs": pairs, "cpu_ratio": quartiles(ratios)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=25)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = [measure(name, loop(*size), options.pairs) for name, size in SIZES.items()]
    for row in rows:
        print(row)
    print(save("watching", {"pairs": options.pairs}, rows, options.out))


if __name__ == "__main__":
    main()
