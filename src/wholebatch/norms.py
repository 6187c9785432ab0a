"""Running statistics of BatchNorm layers from the moments of all rows, not from one update a micro-batch.

Each of k micro-batches updates running statistics once: k updates where the whole batch makes one, each with the
variance inside of a micro-batch only. Pooling counts every row once and makes one update. It equals the whole
batch at the first BatchNorm layer; deeper ones see rows that were normalised micro-batch by micro-batch, so there
it only comes closer. ``batch_norm="exact"`` is the way to equality.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from wholebatch.batchnorm.moments import Moments, merged
from wholebatch.model.inspection import ModelInfo

ARGUMENTS = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
"""Those of ``torch.nn.functional.batch_norm``; ``torch.batch_norm`` has weight and bias before the statistics."""


@dataclass
class _RunningStatistics:
    """The buffers of one layer, the moments pooled so far, and the share that its first update asked for."""

    mean: Tensor
    variance: Tensor
    momentum: float
    pooled: Moments


class Pooled(TorchFunctionMode):
    """Pool what BatchNorm layers would add to their running statistics, and add it once, at the end.

    Results and gradients are those of the micro-batches as usual. Nothing is updated if the block ends by an
    exception, and layers have counted nothing then.

    Args:
        modules: all whose layers count how many batches they have seen, registered in the model or not.
        replace: whether the pooled statistics take the place of the old ones, whatever the momentum.
    """

    def __init__(self, modules: Iterable[nn.Module], replace: bool = False) -> None:
        super().__init__()
        self._replace = replace
        self._layers = [m for m in modules if isinstance(getattr(m, "num_batches_tracked", None), Tensor)]
        self._counted: dict[nn.Module, Tensor] = {}
        self._running: dict[int, _RunningStatistics] = {}

    def __enter__(self) -> Pooled:
        self._running.clear()
        self._counted = {layer: _counter(layer).clone() for layer in self._layers}
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        if kind is None:
            self._update()
        else:
            for layer, before in self._counted.items():
                _counter(layer).copy_(before)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let a layer write into buffers of its own when it uses the statistics of a micro-batch."""
        kwargs = kwargs or {}
        if function is not nn.functional.batch_norm:
            return function(*args, **kwargs)
        given = {"training": False, "momentum": 0.1, **dict(zip(ARGUMENTS, args, strict=False)), **kwargs}
        mean, variance = given["running_mean"], given["running_var"]
        if not given["training"] or mean is None:
            return function(*args, **kwargs)
        own: dict[str, Any] = {
            "running_mean": torch.zeros_like(mean),
            "running_var": torch.zeros_like(variance),
            "momentum": 1.0,
        }
        result = function(**{**given, **own})
        x = given["input"]
        count = x.numel() // x.shape[1]
        moments = Moments(count, own["running_mean"], own["running_var"] * (count - 1))
        held = self._running.get(id(mean))
        if held is None:
            self._running[id(mean)] = _RunningStatistics(mean, variance, given["momentum"], moments)
        else:
            held.pooled = merged([held.pooled, moments])
        return result

    def mark(self) -> dict[int, Any]:
        """Return what has been pooled, to rewind to."""
        return {key: replace(held) for key, held in self._running.items()}

    def rewind(self, mark: dict[int, Any]) -> None:
        """Forget the rows that have come since a mark."""
        self._running = mark

    @torch.no_grad()
    def _update(self) -> None:
        for held in self._running.values():
            share = 1.0 if self._replace else held.momentum
            held.mean.lerp_(held.pooled.mean, share)
            held.variance.lerp_(held.pooled.unbiased, share)
        for layer, before in self._counted.items():
            mean = layer.running_mean
            if isinstance(mean, Tensor) and id(mean) in self._running:
                _counter(layer).copy_(before + 1)


def pooled(model_info: ModelInfo, wanted: bool) -> AbstractContextManager[Pooled | None]:
    """Pool running statistics over a block, or leave everything as it is."""
    return Pooled((*model_info.modules, *model_info.outside)) if wanted else nullcontext()


def recalibrate(
    model: nn.Module, loader: Iterable[Any], forward: Callable[[nn.Module, Any], Any] | None = None
) -> None:
    """Set the running statistics of all BatchNorm layers to those of a whole data set.

    Every row counts the same, however uneven the batches, and the variance between batches is counted too:
    ``torch.optim.swa_utils.update_bn`` averages the batches' own statistics instead. Each batch is normalised by
    itself on the way to deeper layers. Takes one forward pass without gradient; other layers are in eval mode
    meanwhile, and all modes are as before afterwards.

    Args:
        model: whose running statistics are replaced.
        loader: yields batches.
        forward: how the model is called on one; by default ``model(batch)``.

    Example:
        >>> model = torch.nn.BatchNorm1d(1)
        >>> wb.norms.recalibrate(model, [torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0], [5.0]])])
        >>> float(model.running_mean), float(model.running_var)
        (3.0, 2.5)
    """
    with _only_norms_training(model), torch.no_grad(), Pooled(model.modules(), replace=True):
        for batch in loader:
            if forward is None:
                model(batch)
            else:
                forward(model, batch)


@contextmanager
def _only_norms_training(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    try:
        for module in modes:
            module.training = isinstance(module, nn.modules.batchnorm._BatchNorm)
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def _counter(layer: nn.Module) -> Tensor:
    return cast("Tensor", layer.num_batches_tracked)
