"""What rounding explains of one batch: read again in another precision, since a bound on paper knows no batch.

Where rows nearly cancel, as in a model that has converged, or where a double precision model computes in fewer bits
for a while, the bound for sums of its precision is too narrow. The same micro-batches in two precisions differ by
rounding alone, so a fault of the micro-batches is no part of that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.model.comparison import compare, joined
from wholebatch.model.dispatch import OperatorMode
from wholebatch.verify.explaining import FOREIGN
from wholebatch.verify.reference import LossFunction, OtherName, Reference, plain_gradient


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
