"""What a situation is: a window, and its loss in our words, in plain torch over everything, and as is usual."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.oracle import Reference, in_precision, whole_batch

Loss = Callable[[nn.Module, Any], Any]


class Situation:
    """One window of micro-batches, and three readings of its loss.

    A subclass says `build` (called from a fixed seed), `loss` (what the user of the library writes), `whole` (the loss
    that is meant, over all micro-batches at once) and `usual` (the micro-batch's loss in a hand-written loop, which
    divides it by the number of micro-batches). Its docstring says what goes wrong there; `source` is a public report.
    """

    source = ""
    seed = 0
    terms = 1
    """How many denominators the loss has."""
    wrapped = True
    """Whether the loss calls the model as a wrapper for ranks wants it: through its forward."""

    def build(self) -> tuple[nn.Module, list[Any]]:
        """Return a fresh model and the window's micro-batches."""
        raise NotImplementedError

    def loss(self, model: nn.Module, micro_batch: Any) -> Any:
        """Return the micro-batch's loss as `wholebatch` wants it."""
        raise NotImplementedError

    def whole(self, model: nn.Module, window: list[Any]) -> torch.Tensor:
        """Return the loss that is meant, a scalar, in one forward of everything."""
        raise NotImplementedError

    def usual(self, model: nn.Module, micro_batch: Any) -> torch.Tensor:
        """Return the micro-batch's loss in the usual loop, a scalar."""
        raise NotImplementedError

    def items(self, micro_batch: Any) -> Any:
        """Return what the micro-batch adds to each denominator, as the option `items` wants it."""
        raise NotImplementedError

    @property
    def forms(self) -> dict[str, Loss]:
        """The forms in which the same loss can be returned, by name."""
        return {"": self.loss}

    @property
    def counts_known(self) -> bool:
        """Whether the situation says its `items` beforehand."""
        return type(self).items is not Situation.items

    def start(self, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, list[Any]]:
        """Return a fresh model and window in this precision, always the same."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model, window = self.build()
        return in_precision(model, dtype), in_precision(window, dtype)

    def ran(self, window: list[Any]) -> int:
        """Return how many of the micro-batches hold rows."""
        return len(window)

    def reference(self, model: nn.Module, window: list[Any]) -> Reference:
        """Return the whole batch's loss and gradient."""
        return whole_batch(model, self.whole, window)

    def usual_loop(self, model: nn.Module, window: list[Any]) -> None:
        """Accumulate as people do: each micro-batch's loss over the number of micro-batches."""
        for micro_batch in window:
            (self.usual(model, micro_batch) / len(window)).backward()

    def __repr__(self) -> str:
        return type(self).__name__


def every_form(situations: list[Situation]) -> dict[str, tuple[Situation, Loss]]:
    """Return each situation with each form of its loss, under a readable id."""
    return {
        f"{situation!r}-{form}".rstrip("-"): (situation, loss)
        for situation in situations
        for form, loss in situation.forms.items()
    }


def columns(rows: list[Any]) -> tuple[torch.Tensor, ...]:
    """Concatenate the micro-batches (tuples of tensors) column by column."""
    return tuple(torch.cat(column) for column in zip(*rows, strict=True))
