"""Peak of what autograd saves, and time of a step: the whole batch, fixed micro-batches, and ours under a cap. About a
minute.

All ways compute the same gradient of the same batch; how far each is from the whole batch's stands in the result. The
cap is a share of what the whole batch saves; micro-batches that pass it run out of memory as on a device of that size,
and what a checkpointed block saves when it runs again counts too. The fixed micro-batches are the largest that stay
below the cap, as a user would find them by trial. Ways take turns in random order; ratios are taken within each round.

    python benchmarks/memory.py --rounds 9 --cap 0.15
"""

from __future__ import annotations

import argparse
import copy
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from record import RESULTS, Clock, quartiles, save, significant
from torch import Tensor, nn

import wholebatch as wb
from wholebatch.model.memory import SavedBytes
from wholebatch.planning.arrangement import counted
from wholebatch.planning.planner import parts_of
from wholebatch.train.model import Decoder

WORDS = 256


def loss_fn(model: nn.Module, tokens: Tensor) -> wb.LossSum:
    return wb.losses.causal_lm(model(tokens), tokens)


@dataclass
class Way:
    """One way to run a batch.

    Attributes:
        name: for the table.
        size: of a micro-batch.
        again: whether blocks compute their activations again.
        cap: bytes that may be saved.
    """

    name: str
    size: Any
    again: bool = False
    cap: int | None = None

    @contextmanager
    def running(self, model: nn.Module) -> Iterator[SavedBytes]:
        """Run in the block this way, and count what is saved."""
        with ExitStack() as stack:
            if self.again:
                stack.enter_context(wb.checkpointed(model))
            yield stack.enter_context(SavedBytes(self.cap, ignored=[*model.parameters()]))

    def step(self, model: nn.Module, batch: Tensor) -> dict[str, Any]:
        """Compute one gradient; say what it took."""
        model.zero_grad()
        with self.running(model) as saved, Clock() as clock:
            result = wb.backward(model, loss_fn, batch, self.size)
        return {"peak": saved.peak, "seconds": clock.seconds, "pieces": result.micro_batches}


def saved_by(model: nn.Module, batch: Tensor, way: Callable[[], AbstractContextManager[Any]] = nullcontext) -> int:
    with way(), SavedBytes(ignored=[*model.parameters()]) as saved:
        wb.backward(model, loss_fn, batch)
    model.zero_grad()
    return saved.peak


def ways(model: nn.Module, batch: Tensor, cap: int) -> list[Way]:
    rows = len(batch)
    fits = [n for n in range(1, rows + 1) if rows % n == 0 and saved_by(model, batch[:n]) <= cap]
    planned = wb.plan(model, loss_fn, batch, sum(parts_of(model, batch=batch).values()) + cap).best
    return [
        Way("whole batch, one micro-batch", None),
        Way(f"fixed micro-batches of {fits[-1]}", fits[-1]),
        Way("Auto", wb.Auto(rows), cap=cap),
        Way("Auto, checkpointed", wb.Auto(rows), again=True, cap=cap),
        Way(f"as planned: {planned.way}", planned.micro_batch_size, again=planned.way == "checkpointing", cap=cap),
    ]


def distance(model: nn.Module, reference: list[Tensor]) -> float:
    differences = [
        (p.grad - g).norm() for p, g in zip(model.parameters(), reference, strict=True) if p.grad is not None
    ]
    return float(torch.stack(differences).norm() / torch.stack([g.norm() for g in reference]).norm())


def measure(model: nn.Module, batch: Tensor, cap: int, rounds: int) -> list[dict[str, Any]]:
    """Take turns; the first round, in which Auto finds its size, is told apart."""
    all_ways = ways(model, batch, cap)
    wb.backward(model, loss_fn, batch)
    reference = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    first, errors = {}, {}
    for way in all_ways:
        first[way.name] = way.step(model, batch)
        errors[way.name] = distance(model, reference)
    order = random.Random(0)
    runs = []
    for _ in range(rounds):
        runs.append({way.name: way.step(model, batch) for way in order.sample(all_ways, len(all_ways))})
    whole = all_ways[0].name
    return [
        {
            "way": way.name,
            "cap": way.cap,
            "pieces": runs[-1][way.name]["pieces"],
            "peak": max(run[way.name]["peak"] for run in [first, *runs]),
            "seconds": quartiles(run[way.name]["seconds"].wall for run in runs),
            "ratio": quartiles(run[way.name]["seconds"].wall / run[whole]["seconds"].wall for run in runs),
            "cpu_ratio": quartiles(run[way.name]["seconds"].cpu / run[whole]["seconds"].cpu for run in runs),
            "first_step_seconds": significant(first[way.name]["seconds"].wall),
            "gradient_error": significant(errors[way.name]),
        }
        for way in all_ways
    ]


def draw(rows: list[dict[str, Any]], cap: int, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    memory, time = figure.subplots(1, 2, sharey=True)
    names = [row["way"] for row in rows]
    colours = ["0.6", "0.6", *["#1f77b4"] * (len(rows) - 2)]
    bars = memory.barh(names, [row["peak"] / 2**20 for row in rows], color=colours)
    memory.bar_label(bars, [f"{row['peak'] / 2**20:.0f}" for row in rows], padding=12)
    memory.axvline(cap / 2**20, color="black", linestyle="--", label=f"the cap, {cap / 2**20:.1f} MiB")
    memory.set(xlabel="saved for the backward at the peak, MiB")
    memory.margins(x=0.2)
    memory.legend(loc="lower right")
    ratios = [row["cpu_ratio"] for row in rows]
    medians = [ratio["median"] for ratio in ratios]
    spread = [(ratio["median"] - ratio["low"], ratio["high"] - ratio["median"]) for ratio in ratios]
    bars = time.barh(names, medians, xerr=list(zip(*spread, strict=True)), color=colours)
    time.bar_label(
        bars,
        [f"  {row['cpu_ratio']['median']:.2f} ({counted(row['pieces'], 'micro-batch')})" for row in rows],
        padding=6,
    )
    time.set(xlabel="CPU time of a step, whole batch = 1", xlim=(0, 1.7 * max(medians)))
    time.invert_yaxis()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cap", type=float, default=0.15, help="share of what the whole batch saves")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result and its picture")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model = Decoder(WORDS, options.width, options.layers, heads=4)
    batch = torch.randint(WORDS, (options.rows, options.length))
    cap = int(options.cap * saved_by(copy.deepcopy(model), batch))
    rows = measure(model, batch, cap, options.rounds)
    for row in rows:
        print(
            f"{row['way']:28} {row['pieces']:3} micro-batches, peak {row['peak'] / 2**20:7.1f} MiB, "
            f"{row['cpu_ratio']['median']:.2f} x the CPU time, gradient error {row['gradient_error']:.0e}"
        )
    settings = {
        "rows": options.rows,
        "length": options.length,
        "parameters": sum(p.numel() for p in model.parameters()),
        "cap": cap,
        "rounds": options.rounds,
    }
    print(save("memory", settings, rows, options.out))
    draw(rows, cap, options.out / "memory.png")
    print(options.out / "memory.png")


if __name__ == "__main__":
    main()
