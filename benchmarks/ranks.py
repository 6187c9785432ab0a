"""What a window costs on two ranks, against the best loop by hand; and what dealing rows out saves. Six minutes.

Two gloo processes on one machine. All ways of one kind take turns step by step, in random order within each turn, on
equal models and the very same rows; the time of a step is that of the slower rank. What is kept is the ratio to the
hand-written loop within each turn: what slows all down falls out of it. gloo shows no overlap of computing with
sending, and two processes on one machine no network: on GPUs, measure again.
"""

from __future__ import annotations

import argparse
import copy
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
import torch.nn.functional as F
from record import RESULTS, hold_memory, quartiles, save, significant
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence

import wholebatch as wb
from wholebatch.batch.dealing import deal

RANKS, VOCABULARY, WIDTH, BLOCKS = 2, 1024, 256, 4
MICRO_BATCHES, ROWS, LENGTH = 4, 4, 64
"""Each rank's micro-batches in a window, their rows, and the positions of a row."""

Rows = tuple[Tensor, Tensor]
Way = Callable[[Rows], object]


class Model(nn.Module):
    """A small causal transformer: 3.7 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.ModuleList(copy.deepcopy(layer) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.words(words)
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1])
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        return self.head(hidden)


def loss_fn(model: nn.Module, rows: Rows) -> wb.LossSum:
    return wb.losses.cross_entropy(model(rows[0]).flatten(0, 1), rows[1].flatten())


def ours(model: nn.Module, sync: str) -> Way:
    return lambda rows: wb.backward(model, loss_fn, rows, micro_batch_size=ROWS, sync=sync)


def by_hand(model: nn.Module, local: Callable[[bool], Any], divides: int) -> Way:
    """Count the tokens of all ranks first, then divide sums by them: exact, and as short as it can be written."""

    def window(rows: Rows) -> None:
        items = (rows[1] >= 0).sum().float()
        dist.all_reduce(items)
        micro_batches = list(zip(rows[0].split(ROWS), rows[1].split(ROWS), strict=True))
        for number, (words, targets) in enumerate(micro_batches):
            with local(number < len(micro_batches) - 1):
                total = F.cross_entropy(model(words).flatten(0, 1), targets.flatten(), reduction="sum")
                (total * (divides / items)).backward()

    return window


def replicated(model: nn.Module) -> dict[str, Way]:
    wrapped = [DistributedDataParallel(copy.deepcopy(model)) for _ in range(4)]
    once = by_hand(wrapped[0], lambda waits: wrapped[0].no_sync() if waits else nullcontext(), RANKS)
    each = by_hand(wrapped[1], lambda waits: nullcontext(), RANKS)
    return {
        "by hand, no_sync": once,
        "by hand, each micro-batch": each,
        "last": ours(wrapped[2], "last"),
        "every": ours(wrapped[3], "every"),
    }


def sharded(model: nn.Module) -> dict[str, Way]:
    mesh = init_device_mesh("cpu", (RANKS,))
    models = [copy.deepcopy(model) for _ in range(4)]
    for each in models:
        for block in each.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(each, mesh=mesh)

    def once(waits: bool) -> Any:
        models[0].set_requires_gradient_sync(not waits)
        return nullcontext()

    return {
        "by hand, no_sync": by_hand(models[0], once, RANKS),
        "by hand, each micro-batch": by_hand(models[1], lambda waits: nullcontext(), RANKS),
        "last": ours(models[2], "last"),
        "every": ours(models[3], "every"),
    }


def seconds_of(way: Way, rows: Rows) -> float:
    """The time of the slower rank."""
    dist.barrier()
    begun = time.perf_counter()
    way(rows)
    taken = torch.tensor(time.perf_counter() - begun)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken)


def turns(ways: dict[str, Way], batches: Iterator[Any], count: int, base: str) -> dict[str, list[float]]:
    """Measure all ways in turns; return each one's times over those of the base."""
    draw, ratios = random.Random(0), {name: [] for name in ways}
    for turn in range(count + 1):
        rows = next(batches)
        taken = {name: seconds_of(ways[name], rows) for name in draw.sample(sorted(ways), len(ways))}
        if turn:  # the first one warms up
            for name in ways:
                ratios[name].append(taken[name] / taken[base])
    return ratios


def windows(rank: int) -> Iterator[Rows]:
    """Yield this rank's rows of each window, a fifth of whose targets count nothing."""
    draws = torch.Generator().manual_seed(rank)
    while True:
        words = torch.randint(0, VOCABULARY, (MICRO_BATCHES * ROWS, LENGTH), generator=draws)
        targets = torch.randint(0, VOCABULARY, words.shape, generator=draws)
        targets[torch.rand(words.shape, generator=draws) < 0.2] = -100
        yield words, targets


def uneven() -> Iterator[list[Tensor]]:
    """Yield whole batches of rows whose lengths differ as those of real texts do."""
    draws = torch.Generator().manual_seed(7)
    while True:
        lengths = (torch.randn(48, generator=draws) * 0.9 + 3.0).exp().int().clamp(2, 128).tolist()
        yield [torch.randint(1, VOCABULARY, (length + 1,), generator=draws) for length in lengths]


def dealing(model: nn.Module, rank: int) -> dict[str, Callable[[list[Tensor]], object]]:
    """The same batch in the loader's order, and dealt out; both cut by tokens."""
    wrapped, size = DistributedDataParallel(model), wb.Tokens(512, length=len)

    def collate(rows: list[Tensor]) -> Rows:
        padded = pad_sequence(rows, batch_first=True)
        targets = padded[:, 1:].clone()
        targets[targets == 0] = -100
        return padded[:, :-1], targets

    def run(mine: list[Tensor]) -> object:
        return wb.backward(wrapped, loss_fn, mine, size, collate=collate)

    def dealt(batch: list[Tensor]) -> object:
        return run([batch[row] for row in deal([len(row) for row in batch], RANKS, size)[rank]])

    return {
        "loader order": lambda batch: run(batch[rank * len(batch) // RANKS : (rank + 1) * len(batch) // RANKS]),
        "dealt": dealt,
    }


def measure(rank: int, folder: str, count: int, answers: Any) -> None:
    """Be one rank."""
    torch.set_num_threads(1)
    hold_memory()
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model = Model()
    rows: list[dict[str, object]] = []
    for kind, ways in (("DistributedDataParallel", replicated(model)), ("fully_shard", sharded(model))):
        ratios = turns(ways, windows(rank), count, base="by hand, no_sync")
        rows += [{"kind": kind, "way": name, "time_ratio": quartiles(found)} for name, found in ratios.items()]
    ratios = turns(dealing(model, rank), uneven(), count, base="loader order")
    rows += [{"kind": "dealing", "way": name, "time_ratio": quartiles(found)} for name, found in ratios.items()]
    if rank == 0:
        answers.put(rows)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=40, help="how often each way is measured")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        answers = processes.get_context("spawn").SimpleQueue()
        processes.spawn(measure, (folder, given.turns, answers), nprocs=RANKS)
        rows = answers.get()
    for row in rows:
        print(f"{row['kind']:<24}{row['way']:<22}{row['time_ratio']['median']:.3f}")
    parameters = sum(parameter.numel() for parameter in Model().parameters())
    settings = {
        "ranks": RANKS,
        "parameters": parameters,
        "pieces": MICRO_BATCHES,
        "rows_of_a_piece": ROWS,
        "positions": LENGTH,
        "turns": given.turns,
        "tokens": significant(MICRO_BATCHES * ROWS * LENGTH * RANKS),
    }
    print(save("ranks", settings, rows, given.out))


if __name__ == "__main__":
    main()
