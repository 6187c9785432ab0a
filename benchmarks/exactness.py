"""How far the usual loop and wholebatch are from the whole batch's gradient, situation by situation. Takes seconds.

The truth is one backward over the whole batch in float64, on a copy of the model; both contestants run in float32. The
usual loop is what most code does: the mean of each micro-batch, divided by the number of micro-batches the loop is set
to.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from record import RESULTS, quartiles, save, significant
from torch import Tensor, nn

import wholebatch as wb

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Situation:
    """One objective in three spellings, and the micro-batches in which it is run."""

    name: str
    model: Callable[[], nn.Module]
    micro_batches: Callable[[], list[Batch]]
    ours: Callable[[nn.Module, wb.Window[Batch]], object]
    mean: Callable[[nn.Module, Batch], Tensor]
    k: int | None = None
    """The number of micro-batches that the usual loop divides by, where that is not the number there is."""


class Tagger(nn.Module):
    """Words to one of nine tags, with a look to the left."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.read, self.tag = nn.Embedding(200, 32), nn.GRU(32, 32, batch_first=True), nn.Linear(32, 9)

    def forward(self, words: Tensor) -> Tensor:
        return self.tag(self.read(self.embed(words))[0])


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 48), nn.GELU(), nn.Linear(48, 4))


def convolutions() -> nn.Module:
    layers = [nn.Unflatten(1, (1, 12)), nn.Conv1d(1, 8, 3), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 8, 3)]
    return nn.Sequential(*layers, nn.BatchNorm1d(8), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4))


def sentences(rows: int = 32, size: int = 4, emptied: int = 0) -> list[Batch]:
    """Sentences of log-normal length in micro-batches; the labels of the first micro-batches are all ignored if asked
    for."""
    lengths = torch.exp(torch.randn(rows) * 0.9 + 2.3).round().clamp(2, 60).long()
    words, tags = torch.randint(200, (rows, 60)), torch.randint(9, (rows, 60))
    tags[torch.arange(60) >= lengths[:, None]] = -100
    tags[: emptied * size] = -100
    return cut({"words": words, "tags": tags}, size)


def points(rows: int, size: int) -> list[Batch]:
    """Points with a class; the classes are skewed, and a third of the rows has a box."""
    label = torch.multinomial(torch.tensor([0.7, 0.2, 0.07, 0.03]), rows, replacement=True)
    batch = {"x": torch.randn(rows, 12) + label[:, None], "label": label, "box": torch.rand(rows, 4)}
    return cut({**batch, "has_box": (torch.rand(rows) < 0.3).float()}, size)


def cut(batch: Batch, size: int) -> list[Batch]:
    split = {name: tensor.split(size) for name, tensor in batch.items()}
    return [dict(zip(split, parts, strict=True)) for parts in zip(*split.values(), strict=True)]


def joined(micro_batches: list[Batch]) -> Batch:
    return {name: torch.cat([micro_batch[name] for micro_batch in micro_batches]) for name in micro_batches[0]}


def tags(model: nn.Module, batch: Batch) -> wb.LossSum:
    return wb.losses.token_classification(model(batch["words"]), batch["tags"])


def tags_mean(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["words"]).transpose(1, 2), batch["tags"])


def each(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["label"], reduction="none")


def rows_mean(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["label"])


CLASS_WEIGHTS = torch.tensor([1.0, 4.0, 10.0, 25.0])


def weighted(model: nn.Module, batch: Batch) -> wb.LossSum:
    scores = model(batch["x"])
    return wb.losses.cross_entropy(scores, batch["label"], weight=CLASS_WEIGHTS.to(scores.dtype))


def weighted_mean(model: nn.Module, batch: Batch) -> Tensor:
    scores = model(batch["x"])
    return F.cross_entropy(scores, batch["label"], weight=CLASS_WEIGHTS.to(scores.dtype))


def boxes(model: nn.Module, batch: Batch) -> dict[str, wb.LossSum]:
    scores = model(batch["x"])
    off = F.smooth_l1_loss(scores, batch["box"], reduction="none").sum(dim=1)
    named = F.cross_entropy(scores, batch["label"], reduction="none")
    return {"class": wb.mean(named), "box": 2.0 * wb.mean(off, weights=batch["has_box"])}


def boxes_mean(model: nn.Module, batch: Batch) -> Tensor:
    scores = model(batch["x"])
    off = F.smooth_l1_loss(scores, batch["box"], reduction="none").sum(dim=1)
    box = (off * batch["has_box"]).sum() / batch["has_box"].sum().clamp(min=1)
    return F.cross_entropy(scores, batch["label"]) + 2.0 * box


def two_views(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    return model(batch["x"]), model(batch["x"].flip(1))


def agreement(views: Tensor, others: Tensor) -> Tensor:
    """Every row has to find its own second view among those of all rows."""
    return F.cross_entropy(5 * F.normalize(views) @ F.normalize(others).T, torch.arange(len(views)))


def pairs_mean(model: nn.Module, batch: Batch) -> Tensor:
    return agreement(*two_views(model, batch))


def coupled(model: nn.Module, window: wb.Window[Batch]) -> object:
    return wb.coupled_backward(model, two_views, agreement, window)


def backward(
    loss_fn: Callable[[nn.Module, Batch], Any], **options: Any
) -> Callable[[nn.Module, wb.Window[Batch]], object]:
    return lambda model, window: wb.backward(model, loss_fn, window, **options)


SITUATIONS = (
    Situation("tokens, sentences of uneven length", Tagger, sentences, backward(tags), tags_mean),
    Situation(
        "2 of 8 micro-batches with nothing to learn from",
        Tagger,
        partial(sentences, emptied=2),
        backward(tags),
        tags_mean,
    ),
    Situation(
        "short last window: 3 micro-batches of 8", classifier, partial(points, 48, 16), backward(each), rows_mean, k=8
    ),
    Situation("short last micro-batch: 50 rows by 16", classifier, partial(points, 50, 16), backward(each), rows_mean),
    Situation("class weights 1 : 4 : 10 : 25", classifier, partial(points, 64, 8), backward(weighted), weighted_mean),
    Situation("boxes in a third of the rows", classifier, partial(points, 64, 8), backward(boxes), boxes_mean),
    Situation("BatchNorm", convolutions, partial(points, 64, 8), backward(each, batch_norm="exact"), rows_mean),
    Situation("in-batch negatives", classifier, partial(points, 64, 8), coupled, pairs_mean),
)


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])


def doubled(batch: Batch) -> Batch:
    return {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in batch.items()}


def errors(situation: Situation, seed: int) -> tuple[float, float]:
    """Return the relative error of the usual loop and of wholebatch."""
    torch.manual_seed(seed)
    model, micro_batches = situation.model(), situation.micro_batches()
    whole, ours = copy.deepcopy(model).double(), copy.deepcopy(model)
    situation.mean(whole, doubled(joined(micro_batches))).backward()
    for micro_batch in micro_batches:
        (situation.mean(model, micro_batch) / (situation.k or len(micro_batches))).backward()
    situation.ours(ours, wb.Window(micro_batches))
    true = gradient(whole)
    usual_error, our_error = (float((gradient(m) - true).norm() / true.norm()) for m in (model, ours))
    return usual_error, our_error


def measure(situation: Situation, seeds: int) -> dict[str, object]:
    usual, ours = zip(*(errors(situation, seed) for seed in range(seeds)), strict=True)
    finite = all(map(math.isfinite, usual))
    return {
        "situation": situation.name,
        "usual": quartiles(usual) if finite else None,
        "wholebatch": {"largest": significant(max(ours))},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10, help="models and batches drawn for each situation")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(situation, options.seeds) for situation in SITUATIONS]
    for row in rows:
        print(f"{row['situation']:42} usual {row['usual'] or 'NaN'}  wholebatch {row['wholebatch']}")
    print(save("exactness", {"seeds": options.seeds, "dtype": "float32"}, rows, options.out))


if __name__ == "__main__":
    main()
