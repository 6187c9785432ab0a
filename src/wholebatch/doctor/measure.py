"""Compare two gradients: how long, how far apart, in which direction."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from .shares import Division


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A gradient against the true one: error is the norm of the difference over the norm of the truth."""

    error: float
    ratio: float
    cosine: float

    def __str__(self) -> str:
        if self.cosine > 1 - 5e-4 and abs(self.ratio - 1) > 1e-3:
            size = f"{self.ratio:.3g} x too large" if self.ratio > 1 else f"{1 / self.ratio:.3g} x too small"
            return f"gradient {size}, cosine {self.cosine:.3f}"
        return f"gradient error {self.error:.2g}, norm {self.ratio:.3g} x, cosine {self.cosine:.3f}"


def compare(gradient: Tensor, truth: Tensor) -> Comparison:
    """Return error, norm ratio and cosine of one gradient vector against the true one."""
    gradient, truth = gradient.double(), truth.double()
    size, own = float(truth.norm()), float(gradient.norm())
    if size == 0 or own == 0:
        return Comparison(0.0 if size == own else 1.0, 1.0 if size == own else 0.0, 1.0)
    cosine = float(gradient @ truth) / size / own
    return Comparison(float((gradient - truth).norm()) / size, own / size, cosine)


def scale(ratio: float) -> Comparison:
    """Return the comparison of a gradient that differs by a factor only."""
    return Comparison(abs(ratio - 1), ratio, 1.0)


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
