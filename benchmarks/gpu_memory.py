"""Run a model of 100 million parameters into real CUDA out-of-memory, and recover. Needs a CUDA device; a minute.

The allocator is held to a share of the device. `Auto` begins with the whole batch in one micro-batch, which does not
fit, and finds what does. Printed and kept: the size found, peaks, the time of the first window beside that of a window
in the same micro-batches, and how far the gradient is from that of micro-batches of one row.

This has not been run on a GPU yet: none was at hand. There is no result of it in ``results/``.

    python benchmarks/gpu_memory.py --gibibytes 8
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from record import RESULTS, Clock, save, significant
from torch import Tensor, nn

import wholebatch as wb
from wholebatch.train.model import Decoder

WORDS, WIDTH, LAYERS, HEADS = 8192, 768, 12, 12


def loss_fn(model: nn.Module, tokens: Tensor) -> wb.LossSum:
    return wb.losses.causal_lm(model(tokens), tokens)


def window(model: nn.Module, batch: Tensor, size: Any) -> dict[str, Any]:
    """Compute one gradient; say how long it took, what the device held at most, and in how many micro-batches."""
    model.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    with Clock() as clock:
        result = wb.backward(model, loss_fn, batch, size)
        torch.cuda.synchronize()
    return {
        "seconds": significant(clock.seconds.wall),
        "peak": torch.cuda.max_memory_allocated(),
        "pieces": result.micro_batches,
        "loss": float(result.loss),
    }


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.cpu() for p in model.parameters() if p.grad is not None]


def distance(one: list[Tensor], other: list[Tensor]) -> float:
    apart = torch.stack([(a.double() - b.double()).norm() for a, b in zip(one, other, strict=True)]).norm()
    return significant(float(apart / torch.stack([b.double().norm() for b in other]).norm()))


def measure(rows: int, length: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model = Decoder(WORDS, WIDTH, LAYERS, HEADS).cuda()
    batch = torch.randint(WORDS, (rows, length)).pin_memory()
    window(model, batch[:1], None)  # what the libraries allocate for themselves comes before the first measurement
    single = window(model, batch, 1)
    reference = gradients(model)
    auto = wb.Auto(rows)
    found = [{"window": "micro-batches of one row", "gradient_error": 0.0, **single}]
    for name in ("Auto, the first window", "Auto, the second window"):
        found.append(
            {"window": name, **window(model, batch, auto), "gradient_error": distance(gradients(model), reference)}
        )
    fixed = window(model, batch, auto.size)
    found.append(
        {"window": f"micro-batches of {auto.size}", **fixed, "gradient_error": distance(gradients(model), reference)}
    )
    with wb.checkpointed(model):
        again = wb.Auto(rows)
        for name in ("checkpointed, the first window", "checkpointed, the second window"):
            found.append({"window": name, **window(model, batch, again)})
            found[-1]["gradient_error"] = distance(gradients(model), reference)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gibibytes", type=float, default=8.0, help="what the allocator may hold")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit(
            "gpu_memory.py needs a CUDA device: it runs into the device's real out-of-memory, which nothing else has. "
            "On a CPU, memory.py, recovery.py and soak.py limit what autograd saves instead."
        )
    there = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, options.gibibytes * 2**30 / there))
    rows = measure(options.rows, options.length)
    for row in rows:
        print(
            f"{row['window']:32} {row['pieces']:3} micro-batches, {row['seconds']:7.3f} s, "
            f"peak {row['peak'] / 2**30:.2f} GiB, gradient error {row['gradient_error']:.0e}"
        )
    settings = {key: getattr(options, key) for key in ("gibibytes", "rows", "length")}
    print(save("gpu_memory", settings, rows, options.out))


if __name__ == "__main__":
    main()
