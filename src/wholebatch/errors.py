"""The reasons for which wholebatch refuses to go on, each its own class.

Every message says what is wrong with the values, why it matters, and the call that mends it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

INSIDE = (str(Path(__file__).parent), str(Path(torch.__file__).parent))
"""Where frames say nothing to somebody whose call was wrong."""


class WholeBatchError(Exception):
    """Base of every error that wholebatch raises on purpose; catch it to catch them all."""


class LossError(WholeBatchError, ValueError):
    """The loss function returned something whose denominator cannot be known."""


class SplitError(WholeBatchError, ValueError):
    """The batch cannot be cut into micro-batches: its leaves disagree, or there is nothing to cut."""


class InexactError(WholeBatchError, RuntimeError):
    """Running this in micro-batches would not give the gradient of the whole batch."""


class NonFiniteError(WholeBatchError, ArithmeticError):
    """The loss or the gradient of the window is infinite or not a number."""


class SyncError(WholeBatchError, RuntimeError):
    """The ranks cannot, or did not, agree on one step."""


class OutOfMemoryError(WholeBatchError, torch.OutOfMemoryError):
    """One row alone does not fit into memory."""


def plainly(function: Callable[P, R]) -> Callable[P, R]:
    """Let the errors of wholebatch leave a public function with the frames of the user's own code alone.

    What is wrong stands in the message, and where it was written in the user's frames: the call, and the line of the
    loss function if it came that far. Other errors keep all of theirs.
    """

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except WholeBatchError as error:
            raise error.with_traceback(_outside(error.__traceback__)) from error.__cause__

    return called


def _outside(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of wholebatch and torch."""
    frames = []
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(INSIDE):
            frames.append(trace)
        trace = trace.tb_next
    kept: TracebackType | None = None
    for each in reversed(frames):
        kept = TracebackType(kept, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return kept
