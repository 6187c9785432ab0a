"""What normalises by the rows of a micro-batch, wherever the layer is kept: seen by the call."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from wholebatch.errors import PASSED_ON
from wholebatch.first_window.lines import TORCH

TRAINING = 5
"""Where every function of torch that normalises over the batch takes whether it is by the rows' own statistics."""


class NormWatch(TorchFunctionMode):
    """Note every call that normalises by the statistics of the rows it is given, registered as a layer or not.

    Sees the call, so it finds layers that no module has registered: a helper's, a class's, a bare function's.

    Args:
        hold: let each such call use its running statistics instead, those of an untrained layer where it has none.

    Attributes:
        seen: where each such call was made, and the running mean that it was given.

    Example:
        >>> with NormWatch() as norms:
        ...     _ = torch.nn.BatchNorm1d(3)(torch.randn(4, 3))
        >>> len(norms.seen)
        1
    """

    def __init__(self, hold: bool = False) -> None:
        super().__init__()
        self.seen: list[tuple[str, Tensor | None]] = []
        self._hold = hold

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at what is called, and go on."""
        kwargs = kwargs or {}
        if "batch_norm" in getattr(function, "__name__", "") and _given(args, kwargs, "training", TRAINING) is True:
            place = 1 if function is F.batch_norm else 3  # torch's own functions take weight and bias before it
            mean = _given(args, kwargs, "running_mean", place)
            self.seen.append((place_of(sys._getframe(1)), mean))
            if self._hold:
                args, kwargs = _running(args, kwargs, place, mean)
        return function(*args, **kwargs)


def _given(args: Any, kwargs: dict[str, Any], name: str, place: int) -> Any:
    return kwargs.get(name, args[place] if len(args) > place else None)


def _running(args: Any, kwargs: dict[str, Any], place: int, mean: Tensor | None) -> tuple[Any, dict[str, Any]]:
    """Change the arguments of a normalising call so that it uses running statistics."""
    given: Tensor = _given(args, kwargs, "input", 0)
    changed: dict[str, tuple[int, Any]] = {"training": (TRAINING, False)}
    if mean is None:
        width = given.shape[1]
        changed |= {"running_mean": (place, given.new_zeros(width)), "running_var": (place + 1, given.new_ones(width))}
    for name, (at, value) in changed.items():
        args, kwargs = (
            ((*args[:at], value, *args[at + 1 :]), kwargs) if len(args) > at else (args, {**kwargs, name: value})
        )
    return args, kwargs


def place_of(frame: FrameType | None) -> str:
    """Name the layer that a call was made by, and the line of the user's own that called it."""
    layer, own = "", ""
    while frame is not None and not own:
        code = frame.f_code
        owner, path = frame.f_locals.get("self"), Path(code.co_filename)
        if isinstance(owner, nn.modules.batchnorm._NormBase):
            layer = type(owner).__name__
        if TORCH not in path.parents and code.co_name not in PASSED_ON:
            own = f"{code.co_name}, {path.name}, line {frame.f_lineno}"
        frame = frame.f_back
    return f"{layer or 'batch_norm'} (called in {own})"
