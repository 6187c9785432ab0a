"""How far off a window's gradient is, told from the gradients that its pieces gave."""

from __future__ import annotations

from torch import Tensor

from wholebatch.comparison import Comparison, compare
from wholebatch.doctor.shares import Division


def reweighed(division: Division) -> Comparison | None:
    """Compare the pieces as they were weighed with the pieces as they should be, from the gradients they gave.

    Exact when each backward holds this one term; None when the gradients of the pieces were not kept, or were mixed
    with those of other ranks.
    """
    if division.world > 1:
        return None
    gained: list[Tensor] = []
    for share in division.shares:
        piece = division.windows[min(share.rank, len(division.windows) - 1)].gained(share.piece)
        if piece is None or len(share.piece.backward.terms) != 1:
            return None
        gained.append(piece * division.after)
    total = sum(division.items)
    right = [
        items / total / (weight * division.world) if weight else 0.0
        for items, weight in zip(division.items, division.weights, strict=True)
    ]
    applied = sum(piece / division.world for piece in gained)
    truth = sum(factor * piece for factor, piece in zip(right, gained, strict=True))
    return compare(applied, truth) if isinstance(applied, Tensor) and isinstance(truth, Tensor) else None


def usual_error(division: Division) -> float | None:
    """Return the error that the mean of the pieces' means would have on exactly this data.

    None when the pieces hold equal items, or their gradients were not kept.
    """
    if division.world > 1 or len(division.shares) < 2 or not division.even() or len(set(division.items)) < 2:
        return None
    gained: list[Tensor] = []
    for share in division.shares:
        window = division.windows[min(share.rank, len(division.windows) - 1)]
        piece = window.gained(share.piece)
        if piece is None or len(share.piece.backward.terms) != 1:
            return None
        gained.append(piece)
    total, count = sum(division.items), len(gained)
    usual = sum(piece * (total / count / items) for piece, items in zip(gained, division.items, strict=True))
    whole = sum(gained)
    return compare(usual, whole).error if isinstance(usual, Tensor) and isinstance(whole, Tensor) else None
