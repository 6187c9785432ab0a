"""How far the forwards of a round have come, where each of them is a collective of all ranks."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle


class Passes:
    """Counts the forwards of a model that were begun and finished in a round.

    A rank that fails may leave the others at their next agreement only if they have no forward left before that. A
    loss function may call the model several times; how often, the round before has shown.
    """

    def __init__(self) -> None:
        self.begun = self.ended = self._usual = 0
        self._hooks: list[RemovableHandle] = []

    @property
    def over(self) -> bool:
        """Whether this round's forwards are all finished."""
        return self.ended == self.begun and self.ended >= max(1, self._usual)

    def watch(self, model: nn.Module) -> None:
        """Begin to count."""
        self._hooks = [model.register_forward_pre_hook(self._begin), model.register_forward_hook(self._end)]

    def forget(self) -> None:
        """Stop counting."""
        for hook in self._hooks:
            hook.remove()

    def begin(self) -> None:
        """Begin a round."""
        self._usual = self.ended or self._usual
        self.begun = self.ended = 0

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        self.begun += 1

    def _end(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.ended += 1
