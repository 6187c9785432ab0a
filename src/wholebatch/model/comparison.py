"""Two gradients held against each other: how far apart, how long, in which direction, and what rounding explains.

Every check measures by this file: the first window's proof, `wb.check`, the doctor, the program, the integrations.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Rounding(NamedTuple):
    """How far apart, relatively, rounding alone may bring two gradients of one precision.

    Attributes:
        sums: the same rows, added up in another order: a batch and its micro-batches, layer by layer alike.
        parts: a few rows whole and in parts, without a second opinion: kernels choose other orders for other sizes.
        loop: somebody else's loop, which may compute in other kernels, or partly in fewer bits.
        rough: from where on the precision itself hides what there is to see.
    """

    sums: float
    parts: float
    loop: float
    rough: float


ROUNDING = {
    torch.float64: Rounding(sums=1e-12, parts=1e-8, loop=1e-9, rough=1e-6),
    torch.float32: Rounding(sums=2e-6, parts=1e-4, loop=1e-4, rough=1e-2),
    torch.float16: Rounding(sums=1e-3, parts=5e-2, loop=1e-2, rough=1e-1),
    torch.bfloat16: Rounding(sums=1e-2, parts=5e-2, loop=3e-2, rough=1e-1),
}

ON_DEVICES = 5e-3
"""What `parts` are on an accelerator, whose kernels may multiply in fewer bits than they return."""


def rounding_of(dtype: torch.dtype) -> Rounding:
    """Return the row of a precision; that of float32 for what is not listed and not shorter.

    Example:
        >>> import torch
        >>> rounding_of(torch.float64).sums
        1e-12
    """
    shorter = torch.bfloat16 if dtype.itemsize < 4 else torch.float32
    return ROUNDING.get(dtype, ROUNDING[shorter])


def tolerance_of(tensors: Sequence[Tensor]) -> float:
    """Say how far apart values may be that were made in parts, in the shortest precision among them."""
    shortest = min((tensor.dtype for tensor in tensors), key=lambda dtype: dtype.itemsize)
    on_host = all(tensor.device.type == "cpu" for tensor in tensors)
    return rounding_of(shortest).parts if on_host else max(rounding_of(shortest).parts, ON_DEVICES)


def summed(rounding: float, micro_batches: int) -> float:
    """Say what rounding explains after so many micro-batches have been added up: errors grow with their square root."""
    return rounding * math.sqrt(max(micro_batches, 4)) / 2


def distance(gradients: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    """Measure the norm of the difference over the norm of the truth, all tensors together, in float64.

    Infinite for other shapes; 1 where the truth is zero and the gradient is not.

    Example:
        >>> import torch
        >>> distance([torch.tensor([3.0, 0.0])], [torch.tensor([2.0, 0.0])])
        0.5
    """
    if [gradient.shape for gradient in gradients] != [true.shape for true in truth]:
        return math.inf
    apart = math.hypot(*(_norm(gradient, true) for gradient, true in zip(gradients, truth, strict=True)))
    size = math.hypot(*(_norm(true) for true in truth))
    return apart / size if size else float(apart != 0)


def _norm(gradient: Tensor, truth: Tensor | None = None) -> float:
    wide = torch.complex128 if gradient.is_complex() else torch.float64
    own = gradient.detach().to_dense().to("cpu", wide)
    return float(torch.linalg.vector_norm(own if truth is None else own - truth.detach().to_dense().to("cpu", wide)))


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
    error = distance([gradient], [truth])
    if size == 0 or own == 0:
        return Comparison(error, 1.0 if size == own else 0.0, 1.0)
    return Comparison(error, own / size, float(gradient @ truth) / size / own)


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
