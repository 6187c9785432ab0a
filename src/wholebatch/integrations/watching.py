"""What couples the micro-batches of a loop that runs them itself: seen in its first window, not guessed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from wholebatch.batch.window import MicroBatch
from wholebatch.errors import InexactError
from wholebatch.gradient.preconditions import refuse_inexact, refuse_moved
from wholebatch.model.inspection import ModelInfo, uses_batch_statistics
from wholebatch.model.reached import nodes_of
from wholebatch.model.state import State
from wholebatch.options import Options


def refuse_unserved(name: str, batch_norm: str | None, options: Mapping[str, Any]) -> None:
    """Raise for options of `wb.backward` that a loop which runs its micro-batches itself cannot serve.

    Raises:
        TypeError: naming them; for `verify` with what can be proven, and where.
    """
    if "verify" in options:
        raise TypeError(
            f"{name} has no verify= (here {options['verify']!r}): it sees the loss of each micro-batch and never the "
            "rows behind it, so it can't run them again, and proves nothing. Give whole windows to this integration's "
            "backward(...), which proves the first one, or hold a batch against one backward with wb.check."
        )
    if options:
        raise TypeError(
            f"{name} has no {', '.join(f'{option}=' for option in options)}: the loop cuts and runs its micro-batches "
            "itself. Options of wb.backward go to this integration's backward(...)."
        )
    if batch_norm not in (None, "micro"):
        raise TypeError(
            f"{name} has no batch_norm={batch_norm!r}: micro-batches run one by one in a loop that is not ours. Choose "
            '"micro", or give whole windows to this integration\'s backward(...).'
        )


class Between:
    """Looks whether anything acts on a window between its micro-batches, where only its end may.

    What clips, zeroes or steps behind every micro-batch has a gradient before it that is not the batch's yet.

    Args:
        mending: where such things belong in this loop, for the error.
    """

    def __init__(self, mending: str) -> None:
        self._mending = mending
        self._left: list[tuple[Tensor, tuple[int, ...]]] = []

    def note(self, parameters: Iterable[Tensor]) -> None:
        """Note how a micro-batch has left parameters and gradients."""
        self._left = [(parameter, _written(parameter)) for parameter in parameters]

    def over(self) -> None:
        """Note that the window is over: from here on everything may be written to."""
        self._left = []

    def look(self) -> None:
        """Look at them again before the next micro-batch goes back.

        Raises:
            InexactError: if gradients were written to or replaced, or parameters changed.
        """
        changed = [(parameter, left) for parameter, left in self._left if _written(parameter) != left]
        self.over()
        if not changed:
            return
        stepped = sum(left[0] != parameter._version for parameter, left in changed)
        what = f"{stepped} parameters have been stepped" if stepped else f"{len(changed)} gradients have been changed"
        raise InexactError(
            f"Between two micro-batches of one window {what}, before the window's gradient was complete: micro-batches "
            f"that are clipped, zeroed, stepped or added to one by one are not their batch. {self._mending}"
        )


def _written(parameter: Tensor) -> tuple[int, ...]:
    """Say which tensor a gradient is, and how often it and its parameter have been written to."""
    grad = parameter.grad
    return (parameter._version, -1, -1) if grad is None else (parameter._version, id(grad), grad._version)


class FirstWindow:
    """Looks at the micro-batches of the first window that has several, and refuses what makes them depend on the cut.

    1. `begin` at the start of a window: layers that are registered, hooks that step within the backward.
    2. `look` at each loss before its backward: BatchNorm layers that ran with the statistics of their rows, wherever
       they are held, and buffers that a forward moves.

    Args:
        options: `batch_norm="micro"` lets every micro-batch normalise by itself.
        mending: how this integration is told so, for the error.
    """

    def __init__(self, options: Options, mending: str) -> None:
        self._options, self._mending = options, mending
        self._start: State | None = None
        self._micro_batches = 0
        self._over = False

    def begin(self, models: Sequence[nn.Module], micro_batches: int, hooks: bool = True) -> None:
        """Begin a window of so many micro-batches over all ranks.

        Raises:
            InexactError: for BatchNorm layers in training mode, and for hooks that read each micro-batch's gradient.
        """
        self._over = self._over or self._start is not None
        if self._over or micro_batches < 2:
            return
        self._micro_batches = micro_batches
        together = nn.ModuleList(models)
        model_info = ModelInfo(together if len(models) > 1 else models[0])
        if hooks:
            micro_batch = MicroBatch(lambda index: None, range(1))
            refuse_inexact(model_info, [micro_batch, micro_batch], {**self._options, "batch_norm": "micro"})
        layers = [model_info.path(each) for each in model_info.modules if uses_batch_statistics(each) and each.training]
        self._refuse_statistics(layers)
        self._start = State(model_info)

    def look(self, *losses: Any) -> None:
        """Look at what a micro-batch's losses were computed by.

        Raises:
            InexactError: for BatchNorm by the statistics of the micro-batch, and for buffers that have moved.
        """
        if self._over or self._start is None or self._options.get("batch_norm") is not None:
            return
        found = [name for loss in losses if isinstance(loss, Tensor) for name in _batch_statistics(loss)]
        self._refuse_statistics(found)
        refuse_moved(self._start, self._micro_batches)

    def _refuse_statistics(self, layers: Sequence[str]) -> None:
        if not layers or self._options.get("batch_norm") is not None:
            return
        raise InexactError(
            f"{len(layers)} BatchNorm layer{'s' * (len(layers) > 1)} using batch statistics (first: {layers[0]!r}) "
            f"would normalise each of {self._micro_batches} micro-batches alone, not their batch. {self._mending}, or "
            "put the layers into eval mode."
        )


def _batch_statistics(loss: Tensor) -> Iterator[str]:
    """Name the steps of a loss's graph that normalised by the statistics of their rows."""
    for node in nodes_of([loss]):
        name = node.name()
        if "SyncBatchNorm" in name or ("BatchNorm" in name and getattr(node, "_saved_training", False)):
            yield name
