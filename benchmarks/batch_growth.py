"""A batch that grows against one that does not, at equal rows: the built-in language model. About half an hour.

Each run takes the same rows in the same order, in other batches, with AdamW and a rate that belongs to the batch
(square root rule) and else is constant. What is compared is the loss on held-out rows at the end, over several seeds.

    python benchmarks/batch_growth.py --seeds 2
"""

from __future__ import annotations

import argparse
import random
import statistics
from dataclasses import replace
from typing import Any

import torch
from record import save, significant

from wholebatch.train import Config
from wholebatch.train.run import TASKS
from wholebatch.train.trainer import Trainer

BATCHES = ["16", "64", "256", "16,64@64,256@128", "16..256@noise"]
"""How the rows are taken."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--rows", type=int, default=8192, help="that each run takes")
    parser.add_argument("--lr", type=float, default=0.005, help="at a batch of 16")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    base = Config(width=48, layers=2, heads=2, context=256, schedule="constant", warmup=0, device="cpu", lr=chosen.lr)
    runs: dict[str, list[dict[str, Any]]] = {batch: [] for batch in BATCHES}
    for seed in range(chosen.seeds):
        for batch in random.Random(seed).sample(BATCHES, len(BATCHES)):
            runs[batch].append(run(replace(base, seed=seed), batch, chosen.rows))
            print(batch, runs[batch][-1], flush=True)
    rows = [{"batch": batch, **summary(of)} for batch, of in runs.items()]
    save("batch_growth", {**vars(chosen), "model": "48 features, 2 blocks, rows of at most 256 bytes"}, rows)


def run(config: Config, batch: str, rows: int) -> dict[str, Any]:
    """Train on so many rows; return the loss on the held-out ones, and the steps that it took."""
    config = replace(config, batch_size=batch, scale_lr="sqrt", base_batch=16, steps=10**6, max_tokens=2048)
    torch.manual_seed(config.seed)
    learner = Trainer(config, TASKS[config.task](config))
    learner.model.train()
    while learner.rows < rows:
        told = learner.advance()
    measured = learner.measure()
    noise = learner.noise.estimate()
    return {
        "steps": learner.taken,
        "rows": learner.rows,
        "last_batch": told["rows"],
        "held_out": measured["bits_per_byte"],
        "noise_scale": significant(noise.rows) if noise.windows else None,
    }


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    losses = [each["held_out"] for each in runs]
    return {
        "steps": [each["steps"] for each in runs],
        "held_out": [significant(loss) for loss in losses],
        "mean": significant(statistics.mean(losses)),
        "spread": significant(statistics.stdev(losses)) if len(losses) > 1 else None,
        "last_batch": [each["last_batch"] for each in runs],
        "noise_scale": [each["noise_scale"] for each in runs],
    }


if __name__ == "__main__":
    main()
