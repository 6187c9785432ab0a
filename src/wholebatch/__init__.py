"""Train on the batch you meant, on the memory you have.

``wb.backward(model, loss_fn, batch, micro_batch_size=4)`` leaves in ``.grad`` the gradient of the whole batch. It
takes the place of ``loss.backward()``; everything else here is a companion of that sentence.
"""

from __future__ import annotations

import importlib
import typing

from wholebatch import losses, norms
from wholebatch.batch.dealing import DealtBatches
from wholebatch.batch.sizes import Auto, Tokens
from wholebatch.batch.window import Window, windows
from wholebatch.errors import (
    InexactError,
    LossError,
    NonFiniteError,
    OutOfMemoryError,
    SplitError,
    SyncError,
    WholeBatchError,
)
from wholebatch.gradient.coupled import Coupled, coupled_backward
from wholebatch.gradient.pipeline import Pipeline
from wholebatch.gradient.result import Result
from wholebatch.gradient.separable import backward
from wholebatch.loss.terms import Mean, from_mean, mean, once, total
from wholebatch.model.checkpointing import checkpointed
from wholebatch.planning.arrangement import Arrangement
from wholebatch.planning.planner import plan
from wholebatch.policies import NominalBatch, scale_adam, scale_lr
from wholebatch.ranks.sharing import Shares, shares
from wholebatch.step import Step, StepResult
from wholebatch.verify.checking import Check, check
from wholebatch.verify.coupling import Coupling, find_coupling

if typing.TYPE_CHECKING:
    from wholebatch import doctor

__version__ = "0.1.0"

__all__ = [
    "Arrangement",
    "Auto",
    "Check",
    "Coupled",
    "Coupling",
    "DealtBatches",
    "InexactError",
    "LossError",
    "Mean",
    "NominalBatch",
    "NonFiniteError",
    "OutOfMemoryError",
    "Pipeline",
    "Result",
    "Shares",
    "SplitError",
    "Step",
    "StepResult",
    "SyncError",
    "Tokens",
    "WholeBatchError",
    "Window",
    "backward",
    "check",
    "checkpointed",
    "coupled_backward",
    "doctor",
    "find_coupling",
    "from_mean",
    "losses",
    "mean",
    "norms",
    "once",
    "plan",
    "scale_adam",
    "scale_lr",
    "shares",
    "total",
    "windows",
]


def __getattr__(name: str) -> typing.Any:
    """Load the doctor when it is first asked for: a training loop does without it."""
    if name == "doctor":
        return importlib.import_module("wholebatch.doctor")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
