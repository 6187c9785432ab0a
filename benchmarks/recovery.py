"""What running out of memory costs: the window in which it happens, and the windows after it. About two minutes.

Memory runs out once in the last micro-batch: in its forward, after which it alone runs again, or late in its backward,
when most parameters have its gradient already and the window is run again. Windows take turns: both of these, one in
which nothing happens (Auto too), and one that is redone by hand in half the size, as other tools do. Afterwards Auto is
held against the plain number that it has found. The error is that of the gradient, against the undisturbed window's.

    python benchmarks/recovery.py --rounds 9
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from record import RESULTS, Clock, Seconds, quartiles, save, significant
from torch import Tensor, nn

import wholebatch as wb
from wholebatch.train.model import Decoder

WORDS = 256
SHAPES = {"8 equal micro-batches": [8] * 8, "the last of 8 micro-batches 2.5 x as long": [8] * 7 + [20]}
"""Rows of each micro-batch."""


class Failing:
    """Runs out of memory in one forward or backward, counted from the start of a window."""

    def __init__(self) -> None:
        self.at: int | None = None
        self.forward = False
        self.calls = {True: 0, False: 0}

    def arm(self, call: int | None, forward: bool = False) -> None:
        self.at, self.forward, self.calls = call, forward, {True: 0, False: 0}

    def visit(self, forward: bool) -> None:
        self.calls[forward] += 1
        if forward == self.forward and self.calls[forward] - 1 == self.at:
            raise torch.OutOfMemoryError("Injected: out of memory.")


class Place(torch.autograd.Function):
    """Stands behind the embedding, where the backward comes last."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, failing: Failing) -> Tensor:
        ctx.failing = failing
        failing.visit(forward=True)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.failing.visit(forward=False)
        return grad, None


def loss_fn(model: nn.Module, tokens: Tensor) -> wb.LossSum:
    return wb.losses.causal_lm(model(tokens), tokens)


class Bench:
    """The model, and one window a call."""

    def __init__(self, shape: list[int], length: int, width: int, layers: int) -> None:
        torch.manual_seed(0)
        self.failing = Failing()
        self.model = Decoder(WORDS, width, layers, heads=4)
        self.model.embedding.register_forward_hook(lambda module, inputs, x: Place.apply(x, self.failing))
        self.window = wb.Window(torch.randint(WORDS, (rows, length)) for rows in shape)

    def run(self, size: Any, fail: bool, forward: bool = False) -> tuple[Seconds, list[Tensor]]:
        """Run one window, and let its last micro-batch fail."""
        self.model.zero_grad()
        self.failing.arm(len(self.window) - 1 if fail else None, forward)
        with Clock() as clock:
            wb.backward(self.model, loss_fn, self.window, size, verify="never")
        return clock.seconds, self.gradients()

    def redone(self, size: int) -> tuple[Seconds, list[Tensor]]:
        """Run until it fails, then the whole window again in halves."""
        self.model.zero_grad()
        self.failing.arm(len(self.window) - 1)
        with Clock() as clock:
            try:
                wb.backward(self.model, loss_fn, self.window, verify="never")
            except torch.OutOfMemoryError:
                wb.backward(self.model, loss_fn, self.window, size // 2, verify="never")
        return clock.seconds, self.gradients()

    def gradients(self) -> list[Tensor]:
        return [p.grad.clone() for p in self.model.parameters() if p.grad is not None]


def measure(name: str, shape: list[int], rounds: int, size: tuple[int, int, int]) -> dict[str, Any]:
    bench, order, largest = Bench(shape, *size), random.Random(0), max(shape)
    found = largest // 2
    tasks: dict[str, Callable[[], tuple[Seconds, list[Tensor]]]] = {
        "undisturbed": lambda: bench.run(wb.Auto(largest), fail=False),
        "at_once": lambda: bench.run(wb.Auto(largest), fail=True, forward=True),
        "recovered": lambda: bench.run(wb.Auto(largest), fail=True),
        "redone": lambda: bench.redone(largest),
        "after": lambda: bench.run(wb.Auto(found), fail=False),
        "fixed": lambda: bench.run(found, fail=False),
    }
    runs = []
    for _ in range(rounds + 1):
        runs.append({key: tasks[key]() for key in order.sample(list(tasks), len(tasks))})
    times = [{key: seconds for key, (seconds, _) in run.items()} for run in runs[1:]]
    calm, recovered = runs[-1]["undisturbed"][1], runs[-1]["recovered"][1]
    return {
        "window": name,
        "seconds": quartiles(each["undisturbed"].wall for each in times),
        **ratios(times, "at_once", "undisturbed"),
        **ratios(times, "recovered", "undisturbed"),
        **ratios(times, "redone", "undisturbed"),
        **ratios(times, "after", "fixed"),
        "gradient_error": significant(distance(recovered, calm)),
    }


def ratios(times: list[dict[str, Seconds]], one: str, other: str) -> dict[str, Any]:
    return {
        f"{one}_ratio": quartiles(each[one].wall / each[other].wall for each in times),
        f"{one}_cpu_ratio": quartiles(each[one].cpu / each[other].cpu for each in times),
    }


def distance(one: list[Tensor], other: list[Tensor]) -> float:
    apart = torch.stack([(a - b).norm() for a, b in zip(one, other, strict=True)]).norm()
    return float(apart / torch.stack([b.norm() for b in other]).norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = []
    for name, shape in SHAPES.items():
        rows.append(measure(name, shape, options.rounds, (options.length, options.width, options.layers)))
        row = rows[-1]
        print(
            f"{name}: at once {row['at_once_ratio']} cpu {row['at_once_cpu_ratio']}\n"
            f"  recovered {row['recovered_ratio']} cpu {row['recovered_cpu_ratio']}\n"
            f"  redone {row['redone_ratio']}\n"
            f"  after {row['after_ratio']} cpu {row['after_cpu_ratio']}, gradient error {row['gradient_error']:.0e}",
            flush=True,
        )
    settings = {key: getattr(options, key) for key in ("rounds", "length", "width", "layers")}
    print(save("recovery", settings, rows, options.out))


if __name__ == "__main__":
    main()
