"""One small token problem in the ways that ranks may meet it: how rows are shared out, and what the loss returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wholebatch as wb

WORDS, LENGTH, ROWS = 11, 4, 11

SHARES: dict[str, tuple[int, ...]] = {
    "uneven": (7, 4),
    "more micro-batches on rank 1": (2, 9),
    "no rows on rank 1": (11, 0),
    "no rows on rank 0": (0, 11),
    "four uneven": (3, 4, 0, 4),
}
"""How many rows each rank has."""


class Problem(NamedTuple):
    """A loss as the library takes it, and the same for the whole batch in plain torch."""

    ours: Callable[[nn.Module, Any], Any]
    plain: Callable[[nn.Module, Any], Tensor]


def model_and_rows(dtype: torch.dtype = torch.float64) -> tuple[nn.Sequential, tuple[Tensor, Tensor]]:
    """Return a model in two blocks between an embedding and a head, and rows of which one half holds few items."""
    torch.manual_seed(3)
    blocks = [nn.Sequential(nn.Linear(5, 7), nn.Tanh()), nn.Sequential(nn.Linear(7, 7), nn.Tanh())]
    model = nn.Sequential(nn.Embedding(WORDS, 5), *blocks, nn.Linear(7, WORDS)).to(dtype)
    words, targets = torch.randint(0, WORDS, (ROWS, LENGTH)), torch.randint(0, WORDS, (ROWS, LENGTH))
    targets[torch.rand(ROWS, LENGTH) < torch.linspace(0.1, 0.8, ROWS)[:, None]] = -100
    targets[8:10] = -100
    return model, (words, targets)


def share_of(rows: tuple[Tensor, Tensor], name: str, rank: int) -> tuple[Tensor, Tensor]:
    """Return one rank's rows."""
    words, targets = (part.split(list(SHARES[name]))[rank] for part in rows)
    return words, targets


def logits(model: nn.Module, rows: Any) -> tuple[Tensor, Tensor]:
    """Run the model; logits and targets are flat."""
    return model(rows[0]).flatten(0, 1).clone(), rows[1].flatten()


def _tokens(model: nn.Module, rows: Any) -> Any:
    return wb.losses.cross_entropy(*logits(model, rows))


def _plain_tokens(model: nn.Module, rows: Any) -> Tensor:
    return F.cross_entropy(*logits(model, rows))


def _sharpness(values: Tensor) -> Tensor:
    return values.square().mean(-1)


def _two(model: nn.Module, rows: Any) -> Any:
    found, targets = logits(model, rows)
    return wb.losses.cross_entropy(found, targets) + 0.1 * wb.mean(_sharpness(found))


def _plain_two(model: nn.Module, rows: Any) -> Tensor:
    found, targets = logits(model, rows)
    return F.cross_entropy(found, targets) + 0.1 * _sharpness(found).mean()


def _total(model: nn.Module, rows: Any) -> Any:
    return wb.total(_sharpness(logits(model, rows)[0]))


def _plain_total(model: nn.Module, rows: Any) -> Tensor:
    return _sharpness(logits(model, rows)[0]).sum()


def _skipping(model: nn.Module, rows: Any) -> Any:
    found, targets = logits(model, rows)
    return wb.losses.cross_entropy(found, targets) if bool((targets >= 0).any()) else None


def _with_metrics(model: nn.Module, rows: Any) -> Any:
    found, targets = logits(model, rows)
    right = wb.mean((found.argmax(1) == targets).to(found.dtype), targets >= 0)
    return {"tokens": wb.losses.cross_entropy(found, targets)}, {"accuracy": right}


PROBLEMS = {
    "token mean": Problem(_tokens, _plain_tokens),
    "two denominators": Problem(_two, _plain_two),
    "total": Problem(_total, _plain_total),
    "None where nothing is": Problem(_skipping, _plain_tokens),
    "a dict and metrics": Problem(_with_metrics, _plain_tokens),
}


def own_mean(model: nn.Module, rows: Any) -> Tensor:
    """Average over the rows at hand alone: what the naive twins back-propagate."""
    found, targets = logits(model, rows)
    return F.cross_entropy(found, targets, reduction="sum") / (targets >= 0).sum().clamp(min=1)
