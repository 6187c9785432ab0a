"""A pytest plugin: every Lightning Trainer of a test run gets the callback, every loss states that it is one item.

With one item each, windows of equal micro-batches are what Lightning's own division makes of them, so that tests of
numbers hold too. Short last windows differ by design: there Lightning divides by the micro-batches of a full one.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy

import wholebatch as wb
from wholebatch.integrations.lightning import Exact, whole


def with_callback(own: Any) -> Any:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        own(self, *args, **kwargs)
        self.callbacks.append(Exact(log=None, batch_norm="micro"))

    init.__wrapped__ = own  # type: ignore[attr-defined]
    return init


def with_items(own: Any) -> Any:
    def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        returned, module = own(self, *args, **kwargs), self.lightning_module
        loss = returned.get("loss") if isinstance(returned, dict) else returned
        if not module.automatic_optimization or not isinstance(loss, torch.Tensor) or not loss.requires_grad:
            return returned
        stated = whole(module, wb.from_mean(loss.mean(), items=1))
        return {**returned, "loss": stated} if isinstance(returned, dict) else stated

    return training_step


Trainer.__init__ = with_callback(Trainer.__init__)
Strategy.training_step = with_items(Strategy.training_step)
