"""Operations in which rows meet: each knows its small statistic, so that the rows need not be together.

The engine knows nothing else about them. BatchNorm is the first; whatever can be written as below is the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, fx
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from wholebatch.batchnorm.moments import Moments, merged, moments_of
from wholebatch.loss.counts import Count

Statistic = tuple[Any, ...]
"""Numbers and small tensors; NamedTuples keep their type."""


class Operation:
    """An operation whose rows meet only in a statistic of all of them.

    For the micro-batches x_1 ... x_k of a batch, with operands w such as weights:

        s   = merge(partial(x_1), ..., partial(x_k))        forward, once all micro-batches have come this far
        y_i = apply(x_i, s, w)
        g   = sum_i dL/ds                                   backward, once all micro-batches have come back this far
        dL/dx_i = (dL/dx_i through apply at fixed s) + pull(x_i, s, g)

    ``apply`` is differentiable in the input, the statistic and the operands. The defaults serve every statistic
    that is a sum over rows; others say how they merge and how a gradient comes back.
    """

    def partial(self, x: Tensor) -> Statistic:
        """Take the statistic of one micro-batch; differentiable if ``pull`` is the default."""
        raise NotImplementedError

    def merge(self, parts: Sequence[Statistic]) -> Statistic:
        """Make the statistic of the whole batch from those of its micro-batches, or of ranks."""
        return tuple(sum(column[1:], start=column[0]) for column in zip(*parts, strict=True))

    def apply(self, x: Tensor, statistic: Statistic, *operands: Any) -> Tensor:
        """Compute the micro-batch's result with the statistic of the whole batch."""
        raise NotImplementedError

    def alone(self, x: Tensor, *operands: Any) -> Tensor:
        """Compute the result as if the micro-batch were the whole batch, with its graph."""
        return self.apply(x, self.partial(x), *operands)

    def pull(self, x: Tensor, statistic: Statistic, gradient: Sequence[Tensor | None]) -> Tensor:
        """Bring the gradient of the whole statistic back to the rows of one micro-batch."""
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            parts = zip(self.partial(leaf), gradient, strict=True)
            told = [(part, grad) for part, grad in parts if grad is not None and part.requires_grad]
            outputs, seeds = zip(*told, strict=True)
            return torch.autograd.grad(outputs, leaf, seeds)[0]

    def commit(self, statistic: Statistic, buffers: Mapping[str, Tensor]) -> None:
        """Write into buffers what the operation keeps of the window; called once a window, in order."""


Reader = Callable[[fx.Node, Mapping[fx.Node, str]], "tuple[Operation, fx.Node, tuple[Any, ...]] | None"]
"""Reads a node of the graph: its operation, its input and its operands, or None if rows do not meet in it."""


@dataclass(frozen=True)
class BatchNorm(Operation):
    """Batch normalisation with the moments of the whole batch.

    Attributes:
        eps: added to the variance.
        momentum: the share of the window in the running statistics; None averages over all windows.
        running: names of the buffers of running mean and running variance; None where not kept.
        counter: name of the buffer that counts windows, where momentum is None.
        turn: which use of the layer in one forward this is.
    """

    eps: float
    momentum: float | None
    running: tuple[str, str] | None
    counter: str = ""
    turn: int = 1

    ARGUMENTS: ClassVar = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")

    @classmethod
    def read(cls, node: fx.Node, buffers: Mapping[fx.Node, str]) -> tuple[Operation, fx.Node, tuple[Any, ...]] | None:
        """Recognise ``aten.batch_norm`` with batch statistics."""
        given: dict[str, Any] = {**dict(zip(cls.ARGUMENTS, node.args, strict=False)), **node.kwargs}
        momentum = unmarked(given["momentum"])
        if not given["training"] and momentum is None:
            return None
        mean: Any = given.get("running_mean")
        variance: Any = given.get("running_var")
        running = (buffers[mean], buffers[variance]) if mean in buffers and variance in buffers else None
        operation = cls(given["eps"], given["momentum"] if momentum is None else momentum, running)
        return operation, given["input"], (given.get("weight"), given.get("bias"))

    def partial(self, x: Tensor) -> Moments:
        """Take count, mean and squared deviations of each channel."""
        return moments_of(x.detach())

    def merge(self, parts: Sequence[Statistic]) -> Moments:
        """Merge moments without subtracting squares."""
        return merged([Moments(*part) for part in parts])

    def apply(self, x: Tensor, statistic: Statistic, *operands: Any) -> Tensor:
        """Normalise a micro-batch with the whole batch's mean and variance."""
        result: Tensor = cast("Any", _Normalise).apply(x, *statistic, *operands, self.eps)
        return result

    def alone(self, x: Tensor, *operands: Any) -> Tensor:
        """Normalise with the micro-batch's own moments."""
        weight, bias = operands
        return torch.batch_norm(x, weight, bias, None, None, True, 0.0, self.eps, False)

    def pull(self, x: Tensor, statistic: Statistic, gradient: Sequence[Tensor | None]) -> Tensor:
        """Use d mean / dx = 1 / n and d deviations / dx = 2 (x - mean)."""
        moments = Moments(*statistic)
        _, of_mean, of_deviations = gradient
        assert of_mean is not None and of_deviations is not None  # apply always gives both
        shape = (1, -1) + (1,) * (x.dim() - 2)
        towards_mean = (of_mean / moments.number).view(shape)
        apart = x - moments.mean.view(shape)
        return torch.addcmul(towards_mean, apart, (2 * of_deviations).view(shape)).to(x.dtype)

    def commit(self, statistic: Statistic, buffers: Mapping[str, Tensor]) -> None:
        """Move running mean and variance on, once a window."""
        if self.running is None:
            return
        moments = Moments(*statistic)
        mean, variance = self.running
        share = 1.0 / (float(buffers[self.counter]) + self.turn) if self.momentum is None else self.momentum
        for name, new in ((mean, moments.mean), (variance, moments.unbiased)):
            buffers[name].mul_(1 - share).add_(new, alpha=share)


class AnySize(TorchFunctionMode):
    """Let BatchNorm take a single value per channel: the micro-batch may hold one row, the batch does not.

    Args:
        marking: whether such a call is only to be captured: as one with running statistics and a momentum that
            :func:`unmarked` reads, because torch's shape function for batch statistics divides by zero.
    """

    def __init__(self, marking: bool) -> None:
        super().__init__()
        self.marking = marking

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Go past the check of ``torch.nn.functional.batch_norm``."""
        given = arguments_of(function, args, kwargs or {})
        if given is None or function is torch.batch_norm:
            return function(*args, **(kwargs or {}))
        x, running = given["input"], given["running_mean"]
        if self.marking and given["training"] and running is not None and x.numel() == x.shape[1]:
            given |= {"training": False, "momentum": -given["momentum"]}
        arguments = [given[name] for name in BatchNorm.ARGUMENTS]
        return cast("Any", torch.batch_norm)(*arguments, torch.backends.cudnn.enabled)


def arguments_of(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Name the arguments of a call of BatchNorm's function, in either of its two forms; None for any other function."""
    if function is torch.batch_norm:
        names = BatchNorm.ARGUMENTS
    elif function is torch.nn.functional.batch_norm:
        names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    else:
        return None
    defaults = {"weight": None, "bias": None, "training": False, "momentum": 0.1, "eps": 1e-5}
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


def unmarked(momentum: float) -> float | None:
    """Read the momentum of a captured call with a single value per channel; None for any other call."""
    return -momentum if math.copysign(1.0, momentum) < 0 else None


class _Normalise(torch.autograd.Function):
    """``w (x - mean) / sqrt(deviations / n + eps) + b``, differentiable in mean and deviations too."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, count: Count, mean: Tensor, deviations: Tensor, weight: Any, bias: Any, eps: float
    ) -> Tensor:
        variance = deviations / count
        ctx.save_for_backward(x, mean, variance, weight)
        ctx.count, ctx.eps, ctx.biased = count, eps, bias is not None
        return torch.batch_norm(x, weight, bias, mean, variance, False, 0.0, eps, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, variance, weight = ctx.saved_tensors
        scale = torch.ones_like(mean) if weight is None else weight
        dx, dweight, dbias = torch.ops.aten.native_batch_norm_backward(
            grad, x, scale, mean, variance, None, None, False, ctx.eps, [True, True, True]
        )
        spread = torch.rsqrt(variance + ctx.eps)
        of_mean = -scale * spread * dbias
        of_deviations = -scale * spread.square() * dweight / (2 * ctx.count)
        of_weight, of_bias = None if weight is None else dweight, dbias if ctx.biased else None
        return dx, None, of_mean, of_deviations, of_weight, of_bias, None


OPERATIONS: Mapping[Any, Reader] = {torch.ops.aten.batch_norm.default: BatchNorm.read}
"""The operations of the graph in which rows may meet."""
