"""A place in a graph where gradients are heard and go no further."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class GradientTap(torch.autograd.Function):
    """A tensor without history whose gradient is heard; not a leaf, so that nobody takes it for a parameter."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, hear: Callable[[Tensor], None]) -> Tensor:
        """Return the value without its history."""
        ctx.hear = hear
        return value.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        """Hand the gradient over."""
        ctx.hear(gradient)
        return None, None, None
