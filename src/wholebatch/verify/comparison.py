"""Two gradients held against each other: how long, how far apart, in which direction."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A gradient against the true one: error is the norm of the difference over the norm of the truth."""

    error: float
    ratio: float
    cosine: float

    def __str__(self) -> str:
        if self.cosine > 1 - 5e-4 and abs(self.ratio - 1) > 1e-3:
            size = (
                f"{self.ratio:.3g} x too large" if self.ratio > 1 else f"{1 / max(self.ratio, 1e-30):.3g} x too small"
            )
            return f"gradient {size}, cosine {self.cosine:.3f}"
        return f"gradient error {self.error:.2g}, norm {self.ratio:.3g} x, cosine {self.cosine:.3f}"


def compare(gradient: Tensor, truth: Tensor) -> Comparison:
    """Return error, norm ratio and cosine of one gradient vector against the true one, in float64.

    Example:
        >>> import torch
        >>> compare(torch.tensor([2.0, 0.0]), torch.tensor([1.0, 0.0]))
        Comparison(error=1.0, ratio=2.0, cosine=1.0)
    """
    gradient, truth = gradient.double(), truth.double()
    size, own = float(truth.norm()), float(gradient.norm())
    if size == 0 or own == 0:
        return Comparison(0.0 if size == own else 1.0, 1.0 if size == own else 0.0, 1.0)
    cosine = float(gradient @ truth) / size / own
    return Comparison(float((gradient - truth).norm()) / size, own / size, cosine)


def scale(ratio: float) -> Comparison:
    """Return the comparison of a gradient that differs by a factor only."""
    return Comparison(abs(ratio - 1), ratio, 1.0)


def joined(gradients: dict[str, Tensor], truth: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return both gradients as vectors of the same order."""
    ours = [flat(gradients[name]) for name in truth]
    return torch.cat(ours or [torch.zeros(1)]), torch.cat([flat(value) for value in truth.values()] or [torch.zeros(1)])


def flat(value: Tensor) -> Tensor:
    """Return a gradient as a vector of float64, a complex one as its real and imaginary parts."""
    return (torch.view_as_real(value) if value.is_complex() else value).reshape(-1).double()


def errors_of(gradients: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    """Return each parameter's distance over the norm of the whole truth, largest first."""
    size = float(joined(truth, truth)[1].norm()) or 1.0
    errors = {name: float((flat(gradients[name]) - flat(truth[name])).norm()) / size for name in truth}
    return dict(sorted(errors.items(), key=lambda item: -item[1]))
