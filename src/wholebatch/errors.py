"""The reasons for which wholebatch refuses to go on, each its own class.

Every message says what is wrong with the values, why it matters, and the call that mends it.
"""

from __future__ import annotations

import functools
import linecache
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

OWN = str(Path(__file__).parent)

INSIDE = (OWN, str(Path(torch.__file__).parent))
"""Where frames say nothing to somebody whose call was wrong."""

PASSED_ON = ("__torch_function__", "__torch_dispatch__")
"""What watches call themselves by, which pass on what the user's code calls."""


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


class OwnFault(Exception):
    """Something in wholebatch itself failed while it tried the user's code: not that code's fault."""


@contextmanager
def own_faults_apart() -> Iterator[None]:
    """Let what fails in this library itself be no error of the user's code that runs meanwhile.

    Whoever tries code that may fail, as it was not written for so few rows, takes its errors for an answer. An error
    that one of our own lines makes must be none. Those of torch's operators, which are given the user's numbers, and
    those that we raise on purpose stay what they are.

    Raises:
        OwnFault: in the place of such an error, naming the line.
    """
    try:
        yield
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, AssertionError) as error:
        place = _own_line(error)
        if not place:
            raise
        raise OwnFault(
            f"wholebatch itself failed in {place} ({type(error).__name__}: {error!s:.120}); please report it"
        ) from error


def _own_line(error: BaseException) -> str:
    """Name the line of this library that made an error by itself; "" if other code did, or called what made it."""
    frames = list(traceback.walk_tb(error.__traceback__))
    frame, line = frames[-1]
    code = frame.f_code
    on_purpose = linecache.getline(code.co_filename, line).strip().startswith("raise ")
    if isinstance(error, WholeBatchError) or not _is_own(frame) or code.co_name in PASSED_ON or on_purpose:
        return ""
    first = next((at for at in range(len(frames), 0, -1) if not _is_own(frames[at - 1][0])), 0)
    caller = frames[first - 1][0].f_code.co_filename if first else ""
    if caller and not caller.startswith(INSIDE) and frames[first][0].f_code.co_name not in PASSED_ON:
        return ""  # the user's code called us
    return f"{Path(code.co_filename).relative_to(OWN)}, line {line}"


def _is_own(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(OWN)


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
