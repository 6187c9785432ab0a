"""Whether anything in a model normalises over the rows it is given: seen while one micro-batch runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from wholebatch.batch.tree import move
from wholebatch.batch.window import MicroBatch
from wholebatch.model.dispatch import OperatorMode
from wholebatch.model.inspection import ModelInfo, uses_batch_statistics
from wholebatch.model.snapshot import Snapshot

_SEEN: WeakKeyDictionary[nn.Module, dict[Hashable, bool]] = WeakKeyDictionary()
"""Which models were seen to normalise nothing. Nothing depends on it but time."""


def nothing_normalises(model_info: ModelInfo, loss_fn: Callable[[Any, Any], Any], micro_batch: MicroBatch) -> bool:
    """Tell whether no BatchNorm runs in a model, registered or not.

    Then rows of different micro-batches do not meet in it, and a model that no graph can be made of needs none. What
    has been seen is remembered for as long as the numbers and switches on the model's modules are the same.
    """
    if any(uses_batch_statistics(layer) for layer in (*model_info.modules, *model_info.outside)):
        return False
    from wholebatch.batchnorm.program_cache import state_of  # loads what captures graphs

    known, state = _SEEN.setdefault(model_info.model, {}), state_of(model_info.model)
    if state not in known:
        start = Snapshot(model_info, loss_fn)
        try:
            watch = _Watch()
            with watch:
                loss_fn(model_info.model, move(micro_batch.load(), model_info.device))
        finally:
            start.restore()
        known.clear()
        known[state] = not watch.seen
    return known[state]


class _Watch(OperatorMode):
    """Notes every BatchNorm operator, below autograd, whoever calls it."""

    seen = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= "batch_norm" in str(function)
        return function(*args, **(kwargs or {}))
