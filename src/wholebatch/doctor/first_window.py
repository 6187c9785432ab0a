"""Keep one window whole, so that it can be measured: the model before it, its batches, its draws, its gradient."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.doctor.parameters import Parameters
from wholebatch.model.inspection import unwrapped
from wholebatch.verify.reference import twin_of


@dataclasses.dataclass
class Exhibit:
    """The first window of a loop.

    model: a copy as it was before the first forward. batches: what data loaders gave, or what the model was called
    with where no loader was seen. draws: the random state at the beginning of each forward.
    gradient: by parameter name, as it was before the last clip; bound: what that clips to.
    """

    model: nn.Module | None = None
    original: nn.Module | None = None
    batches: list[Any] = dataclasses.field(default_factory=list)
    inputs: list[Any] = dataclasses.field(default_factory=list)
    draws: list[Tensor] = dataclasses.field(default_factory=list)
    random: bool = False
    gradient: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    fresh: bool = False
    bound: float = 0.0
    closed: bool = False

    def forward_begins(self, module: nn.Module) -> None:
        """Copy the model before its first forward, and remember the random state."""
        if self.closed or not torch.is_grad_enabled():
            return
        if self.model is None:
            self.original = unwrapped(module)
            self.model = twin_of(self.original)
        self.draws.append(torch.random.get_rng_state())

    def forward_ends(self, args: tuple[Any, ...], kwargs: dict[str, Any], random: bool) -> None:
        """Remember what the model was called with."""
        if not self.closed and torch.is_grad_enabled():
            self.random = self.random or random
            self.inputs.append(dict(kwargs) if kwargs and not args else args[0] if len(args) == 1 else args)

    def drawn(self, batch: Any) -> None:
        """Remember a batch, as it was."""
        if not self.closed:
            self.batches.append(copy.deepcopy(batch))

    def keep_gradient(self, parameters: Parameters) -> None:
        """Copy the gradients as they are now."""
        if self.closed or self.original is None:
            return
        self.fresh = True
        for name, parameter in self.original.named_parameters():
            if id(parameter) in parameters.numbers and parameter.requires_grad:
                gradient = parameter.grad
                dense = torch.zeros_like(parameter) if gradient is None else gradient
                self.gradient[name] = (dense.to_dense() if dense.is_sparse else dense).detach().cpu().clone()

    def close(self, parameters: Parameters) -> None:
        """End the window, with the gradients of before the last clip, or of now where none was clipped."""
        if not self.fresh:
            self.keep_gradient(parameters)
        self.closed = self.original is not None

    def micro_batches(self) -> list[Any]:
        """Return the micro-batches of the window: as many as forwards were made, though loaders run ahead."""
        count = len(self.draws)
        return self.batches[:count] if len(self.batches) >= count > 0 else self.inputs
