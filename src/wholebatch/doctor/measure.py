"""How far off a window's gradient is, told from the gradients that its micro-batches gave."""

from __future__ import annotations

from torch import Tensor

from wholebatch.doctor.weights import Division
from wholebatch.model.comparison import Comparison, compare


def reweighed(division: Division) -> Comparison | None:
    """Compare the micro-batches as they were weighed with the micro-batches as they should be, from the gradients they
    gave.

    Exact when each backward holds this one term; None when the gradients of the micro-batches were not kept, or were
    mixed with those of other ranks.
    """
    if division.world > 1:
        return None
    gained: list[Tensor] = []
    for share in division.shares:
        micro_batch = division.windows[min(share.rank, len(division.windows) - 1)].gained(share.micro_batch)
        if micro_batch is None or len(share.micro_batch.backward.terms) != 1:
            return None
        gained.append(micro_batch * division.after)
    total = sum(division.items)
    right = [
        items / total / (weight * division.world) if weight else 0.0
        for items, weight in zip(division.items, division.weights, strict=True)
    ]
    applied = sum(micro_batch / division.world for micro_batch in gained)
    truth = sum(factor * micro_batch for factor, micro_batch in zip(right, gained, strict=True))
    return compare(applied, truth) if isinstance(applied, Tensor) and isinstance(truth, Tensor) else None


def usual_error(division: Division) -> float | None:
    """Return the error that the mean of the micro-batches' means would have on exactly this data.

    None when the micro-batches hold equal items, or their gradients were not kept.
    """
    if division.world > 1 or len(division.shares) < 2 or not division.even() or len(set(division.items)) < 2:
        return None
    gained: list[Tensor] = []
    for share in division.shares:
        window = division.windows[min(share.rank, len(division.windows) - 1)]
        micro_batch = window.gained(share.micro_batch)
        if micro_batch is None or len(share.micro_batch.backward.terms) != 1:
            return None
        gained.append(micro_batch)
    total, count = sum(division.items), len(gained)
    usual = sum(
        micro_batch * (total / count / items) for micro_batch, items in zip(gained, division.items, strict=True)
    )
    whole = sum(gained)
    return compare(usual, whole).error if isinstance(usual, Tensor) and isinstance(whole, Tensor) else None
