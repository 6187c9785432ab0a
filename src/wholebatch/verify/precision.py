"""What rounding explains of one batch: read again in another precision, since a bound on paper knows no batch.

Where rows nearly cancel, as in a model that has converged, or where a double precision model computes in fewer bits
for a while, the bound for sums of its precision is too narrow. The same micro-batches in two precisions differ by
rounding alone, so a fault of the micro-batches is no part of that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.model.comparison import Comparison, Rounding, compare, joined, summed
from wholebatch.model.dispatch import OperatorMode
from wholebatch.verify.explaining import FOREIGN
from wholebatch.verify.reference import Gradients, LossFunction, OtherName, Reference, plain_gradient

NOISE = 1e-12
"""A gradient that is this much smaller than the loss is zero, up to the rounding of double precision."""


class Uncast(OperatorMode):
    """Leaves double precision as it is where code asks for fewer bits.

    Example:
        >>> with Uncast():
        ...     torch.zeros(2, dtype=torch.float64).float().dtype
        torch.float64
    """

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        wanted, given = kwargs.get("dtype"), args[0] if args else None
        if isinstance(given, Tensor) and given.dtype is torch.float64 and _is_shorter(wanted):
            kwargs["dtype"] = torch.float64
        return function(*args, **kwargs)


def _is_shorter(dtype: torch.dtype | None) -> bool:
    return dtype is not None and dtype.is_floating_point and dtype.itemsize < 8


class Rounded:
    """Reads micro-batches in another precision and says how far that moves the gradient and the loss.

    Args:
        model, loss_fn: as for `backward`.
        dtype: the model's precision.
        reading: how the whole batch was read, in double precision.
        back: puts everything back after a reading.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        dtype: torch.dtype,
        reading: Mapping[str, Any],
        back: Callable[[], None],
    ) -> None:
        self.model, self.loss_fn, self.dtype, self.reading, self.back = model, loss_fn, dtype, reading, back

    def uncast(self, micro_batches: Sequence[Any]) -> Reference | None:
        """Read in double precision throughout, whatever the code casts to; None where that can't be done."""
        return self._read(micro_batches, Uncast())

    def between(self, micro_batches: Sequence[Any]) -> float:
        """Say how far apart the same micro-batches are in two precisions, relatively, at the model's own rounding.

        Rounding of double precision is that of single precision, times the ratio of their steps.
        """
        wide = self._read(micro_batches)
        short = torch.float32 if self.dtype is torch.float64 else self.dtype
        own = self._read(micro_batches, dtype=short, as_is=short is self.dtype)
        if wide is None or own is None:
            return 0.0
        found = compare(*joined(own.gradients, wide.gradients)).error
        step = torch.finfo(self.dtype).eps / torch.finfo(short).eps
        return found * step if found < float("inf") else 0.0

    def _read(
        self, micro_batches: Sequence[Any], around: AbstractContextManager[Any] | None = None, **changed: Any
    ) -> Reference | None:
        try:
            with around or nullcontext():
                return plain_gradient(self.model, self.loss_fn, micro_batches, **{**self.reading, **changed})
        except (*FOREIGN, OtherName):
            return None
        finally:
            self.back()


class Yardstick:
    """How far rounding alone may move the gradient and the loss of one batch.

    Begins with the bound of the precision, and measures the batch itself only where that does not suffice.

    Args:
        rounding: the bounds of the model's precision.
        rounded: reads again, in other precisions.
        truth: the whole batch in double precision, or as near to it as the code allows.
        own: the whole batch in the model's own precision; None where that is the same, or cannot be read.
        whole: the batch in one micro-batch; None where it had to be read in several.

    Attributes:
        tolerance: what rounding explains of a relative error of the gradient.
        own_error: how far rounding moves the plain reading itself, as far as it was measured.
    """

    def __init__(
        self, rounding: Rounding, rounded: Rounded, truth: Reference, own: Reference | None, whole: Any
    ) -> None:
        self._rounding, self._rounded, self._truth, self._own, self._whole = rounding, rounded, truth, own, whole
        self.tolerance, self.own_error = rounding.sums, 0.0

    def widen_for(self, micro_batches: int) -> None:
        """Allow for sums over this many micro-batches, and for what the model's own precision did to the whole."""
        if self._own is not None:
            self.own_error = self._apart(self._own)
        self.tolerance = max(summed(self._rounding.sums, micro_batches), 4 * self.own_error)

    def explains(self, size: Comparison, micro_batches: Sequence[Any]) -> bool:
        """Tell whether an error is rounding; measures this batch where the bound of the precision is too narrow."""
        if size.error <= self.tolerance:
            return True
        if self._rounded.reading["dtype"] != torch.float64:
            return False
        if self._uncast is not None:
            self.own_error = self._apart(self._uncast)
            if self.own_error > self._rounding.sums:  # one number in few bits may be so far off, and by chance is not
                self.own_error = max(self.own_error, torch.finfo(torch.float32).eps / 2)
        self.own_error = max(self.own_error, self._rounded.between(micro_batches))
        self.tolerance = max(self.tolerance, 4 * self.own_error)
        return size.error <= self.tolerance

    def explains_loss(self, loss: float) -> bool:
        """Tell whether a loss is the whole batch's, as far as readings in other precisions say what rounding is."""
        return self._is_near(loss, self._own) or self._is_near(loss, self._uncast)

    def is_nothing(self, gradients: Gradients) -> bool:
        """Tell whether both gradients are zero, or what rounding leaves of it beside a loss of this size."""
        ours, truth = (float(vector.norm()) for vector in joined(gradients, self._truth.gradients))
        size = self._truth.size
        return truth <= NOISE * size and ours <= 10 * self._rounding.sums * size

    @property
    def is_rough(self) -> bool:
        """Whether the plain reading itself is so far from double precision that agreement with it shows nothing."""
        return self.own_error > self._rounding.rough

    @functools.cached_property
    def _uncast(self) -> Reference | None:
        """The whole batch without a number in fewer bits, where the model itself is in double precision."""
        wide = self._rounded.dtype == self._rounded.reading["dtype"] == torch.float64
        return self._rounded.uncast([self._whole]) if wide and self._whole is not None else None

    def _apart(self, reading: Reference) -> float:
        return compare(*joined(reading.gradients, self._truth.gradients)).error

    def _is_near(self, loss: float, own: Reference | None) -> bool:
        truth = self._truth
        room = 10 * self.tolerance * max(truth.size, abs(float(truth.loss)))
        room += 4 * abs(float(own.loss) - float(truth.loss)) if own is not None else 0.0
        return abs(loss - float(truth.loss)) <= room
