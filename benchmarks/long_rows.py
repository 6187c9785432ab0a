"""The head of a language model over one long row: memory and time, all logits at once and chunk by chunk. Ten minutes.

One row of tokens goes through a head and its cross entropy, forward and backward, with the gradient of hidden states
and head. Ways: all logits at once; chunks of tokens whose logits are computed again in the backward
(``torch.utils.checkpoint``); torch's own ``F.linear_cross_entropy``, where torch has it; ours. The peak is that of
torch's allocator, from what its profiler saw allocated and freed, temporary memory inside operations included; it
counts from the start of the step, so without hidden states and head. Ways take turns in random order; ratios are taken
within each round.

    python benchmarks/long_rows.py --tokens 2048 --width 256 --rounds 7

Then a whole decoder, one row at a time: as much memory as it takes for a row of so many tokens, all logits at once, is
the cap; the row is doubled, way by way, as long as the peak stays below it.

    python benchmarks/long_rows.py --decoder --tokens 256 --width 64
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from record import RESULTS, Clock, quartiles, save, significant
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import wholebatch as wb
from wholebatch.train.model import Block, Decoder

CHUNK = 256
"""Tokens of a chunk where they are computed again: as many as ours takes by itself at this width."""

Way = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), labels)


def checkpointed(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    def summed(hidden: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight), labels, reduction="sum")

    parts = zip(hidden.split(CHUNK), labels.split(CHUNK), strict=True)
    return torch.stack([checkpoint(summed, *part, use_reentrant=False) for part in parts]).sum() / len(labels)


def torch_s_own(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.linear_cross_entropy(hidden, weight, labels, options=torch.nn.LinearCrossEntropyOptions())


def ours(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return wb.losses.linear_cross_entropy(hidden, weight, labels).value


def ways() -> dict[str, Way]:
    found: dict[str, Way] = {"all logits at once": plain, "checkpointed chunks": checkpointed}
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):
        found["torch's linear_cross_entropy"] = torch_s_own
    return {**found, "wholebatch": ours}


class Row:
    """One row: hidden states as a model leaves them, a head, labels."""

    def __init__(self, tokens: int, width: int, vocabulary: int) -> None:
        torch.manual_seed(0)
        self.hidden = torch.randn(tokens, width).requires_grad_()
        self.weight = (torch.randn(vocabulary, width) * width**-0.5).requires_grad_()
        self.labels = torch.randint(vocabulary, (tokens,))

    def step(self, way: Way) -> list[Tensor]:
        return list(torch.autograd.grad(way(self.hidden, self.weight, self.labels), (self.hidden, self.weight)))

    def peak(self, way: Way) -> int:
        return peak_of(lambda: self.step(way))


def peak_of(step: Callable[[], object]) -> int:
    """Say how many bytes more than at its start torch's allocator held during a step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak


class Causal(torch.nn.Module):
    """The program's decoder, which can return hidden states in the place of logits."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.decoder = Decoder(vocabulary, width, layers=4, heads=4)
        self.head, self.decoder.head = self.decoder.head, torch.nn.Identity()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.decoder(tokens)


def of_all_logits(model: Any, tokens: Tensor) -> wb.LossSum:
    return wb.losses.causal_lm(model.head(model(tokens)), tokens)


def of_hidden_states(model: Any, tokens: Tensor) -> wb.LossSum:
    return wb.losses.causal_lm_head(model(tokens), model.head.weight, tokens, model.head.bias)


def longest_rows(tokens: int, width: int, vocabulary: int, most: int = 16) -> list[dict[str, Any]]:
    """Double a row, way by way, as long as a step stays below the peak of the plain way's row."""
    ways: dict[str, tuple[Callable[[Any, Tensor], wb.LossSum], list[Callable[[Any], Any]]]] = {
        "all logits at once": (of_all_logits, []),
        "checkpointed blocks, all logits": (of_all_logits, [wb.checkpointed]),
        "loss of the hidden states": (of_hidden_states, []),
        "and tiles": (of_hidden_states, [wb.tiled]),
        "and checkpointed blocks": (of_hidden_states, [lambda model: wb.checkpointed(model, Block)]),
        "and both": (of_hidden_states, [lambda model: wb.checkpointed(model, Block), wb.tiled]),
    }
    cap, rows = 0, []
    for name, (loss, wrappers) in ways.items():
        torch.manual_seed(0)
        model = Causal(width, vocabulary)
        handles = [wrapper(model) for wrapper in wrappers]
        length, peak = tokens, 0
        while length <= most * tokens:
            row = torch.randint(vocabulary, (1, length))
            model.zero_grad()
            wb.backward(model, loss, row[:, :64], verify="never")  # what is tried once is tried now
            model.zero_grad()
            found = peak_of(lambda: wb.backward(model, loss, row, verify="never"))  # noqa: B023
            cap = cap or found
            if found > cap:
                break
            peak, length = found, 2 * length
        for handle in reversed(handles):
            handle.remove()
        rows.append({"way": name, "tokens": length // 2, "peak": peak, "cap": cap, "ratio": length // 2 / tokens})
        print(f"{name:34} {length // 2:7,} tokens ({length // 2 / tokens:g} x) in {peak / 2**20:.0f} MiB", flush=True)
    return rows


def distance(found: list[Tensor], truth: list[Tensor]) -> float:
    apart = torch.stack([(a.double() - b).norm() for a, b in zip(found, truth, strict=True)]).norm()
    return significant(float(apart / torch.stack([b.norm() for b in truth]).norm()))


def measure(tokens: int, width: int, vocabulary: int, rounds: int) -> list[dict[str, Any]]:
    row, tried = Row(tokens, width, vocabulary), ways()
    precise = Row(tokens, width, vocabulary)
    precise.hidden, precise.weight = (t.detach().double().requires_grad_() for t in (row.hidden, row.weight))
    truth = precise.step(plain)
    errors = {name: distance(row.step(way), truth) for name, way in tried.items()}
    peaks = {name: row.peak(way) for name, way in tried.items()}
    order, runs = random.Random(0), []
    for _ in range(rounds):
        times = {}
        for name in order.sample(list(tried), len(tried)):
            with Clock() as clock:
                row.step(tried[name])
            times[name] = clock.seconds
        runs.append(times)
    first = next(iter(tried))
    return [
        {
            "vocabulary": vocabulary,
            "way": name,
            "peak": peaks[name],
            "peak_ratio": significant(peaks[name] / peaks[first]),
            "seconds": quartiles(times[name].cpu for times in runs),
            "cpu_ratio": quartiles(times[name].cpu / times[first].cpu for times in runs),
            "gradient_error": errors[name],
        }
        for name in tried
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[32000, 128256])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--decoder", action="store_true", help="the longest rows of a whole decoder")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.decoder:
        vocabulary = options.vocabularies[-1]
        settings = {"tokens": options.tokens, "width": options.width, "vocabulary": vocabulary}
        print(save("longest_rows", settings, longest_rows(options.tokens, options.width, vocabulary), options.out))
        return
    rows = []
    for vocabulary in options.vocabularies:
        rows += measure(options.tokens, options.width, vocabulary, options.rounds)
    for row in rows:
        print(
            f"{row['vocabulary']:7,} words, {row['way']:28} peak {row['peak'] / 2**20:7.0f} MiB, "
            f"{row['peak_ratio']:.3f}, CPU time {row['cpu_ratio']['median']:.2f}, error {row['gradient_error']:.0e}"
        )
    settings = {"tokens": options.tokens, "width": options.width, "chunk": CHUNK, "rounds": options.rounds}
    print(save("long_rows", settings, rows, options.out))


if __name__ == "__main__":
    main()
