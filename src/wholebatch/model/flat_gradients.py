"""Gradients that lie in one flat buffer, which an optimizer reads as a whole: they are cleared where they lie."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def in_a_buffer(parameter: Tensor) -> bool:
    """Tell whether a gradient is a part, or a view, of memory that somebody may read as a whole.

    Example:
        >>> parameter, buffer = torch.ones(2, requires_grad=True), torch.zeros(6)
        >>> parameter.grad = buffer[2:4]
        >>> in_a_buffer(parameter)
        True
    """
    grad = parameter.grad
    if grad is None or grad.layout is not torch.strided or hasattr(grad, "to_local"):
        return False
    return grad._base is not None or grad.untyped_storage().nbytes() > grad.nbytes


class Buffers:
    """Clears an optimizer's gradients at the boundary, and keeps those in their place that somebody has put there.

    A gradient that was there before the window, as a part of a buffer, is a promise of the user's or the optimizer's
    that it stays there; so is one that the optimizer's first step has put into the place of what it was given. What
    autograd makes may be a part of something too, and promises nothing.

    Args:
        optimizer: whose gradients they are.
        first: whether it has yet to take its first step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, first: bool) -> None:
        self._optimizer, self._first = optimizer, first
        self._promised = {id(p): p.grad for p in self._parameters() if in_a_buffer(p)}
        self._handed: dict[int, Tensor | None] = {}

    def hand_over(self) -> None:
        """Note what the optimizer is about to get."""
        if self._first:
            self._handed = {id(p): p.grad for p in self._parameters() if p.grad is not None}

    def clear(self) -> None:
        """Let go of all gradients but those that must stay where they lie, which become zero."""
        kept = [(p, p.grad) for p in self._parameters() if self._stays(p)]
        self._optimizer.zero_grad(set_to_none=True)
        for parameter, grad in kept:
            parameter.grad = None if grad is None else grad.zero_()

    def _stays(self, parameter: Tensor) -> bool:
        key, grad = id(parameter), parameter.grad
        if grad is None:
            return False
        if grad is self._promised.get(key):
            return True
        return key in self._handed and grad is not self._handed[key] and in_a_buffer(parameter)

    def _parameters(self) -> Sequence[Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]
