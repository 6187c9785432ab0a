"""Train on the batch you meant, on the memory you have.

``wb.backward(model, loss_fn, batch, micro_batch_size=4)`` leaves in ``.grad`` the gradient of the whole batch. It
takes the place of ``loss.backward()``; everything else here is a companion of that sentence. What a loop needs daily
stands here; the rest has modules of its own: ``wb.losses``, ``wb.norms``, ``wb.distributed``, ``wb.policies`` and
``wb.doctor``.
"""

from __future__ import annotations

import importlib
import typing

from wholebatch import distributed, losses, norms, policies
from wholebatch.batch.batch_schedule import BatchSchedule
from wholebatch.batch.sizes import Auto, Tokens
from wholebatch.batch.window import Window, windows
from wholebatch.distributed import DealtBatches, Pipeline, Shares, shares
from wholebatch.errors import (
    InexactError,
    LossError,
    NonFiniteError,
    OutOfMemoryError,
    SplitError,
    SyncError,
    WholeBatchError,
)
from wholebatch.gradient.coupled import CoupledLoss, coupled_backward
from wholebatch.gradient.result import Result
from wholebatch.gradient.separable import backward
from wholebatch.loss.terms import LossSum, from_mean, mean, once, total
from wholebatch.model.checkpointing import checkpointed
from wholebatch.noise_scale import NoiseEstimate, NoiseScale
from wholebatch.planning.arrangement import Arrangement
from wholebatch.planning.planner import plan
from wholebatch.policies import NominalBatch, scale_adam, scale_lr
from wholebatch.step import Step, StepResult
from wholebatch.tiling.blocks import tiled
from wholebatch.verify.checking import Check, check
from wholebatch.verify.coupling import CouplingReport, find_coupling

if typing.TYPE_CHECKING:
    from wholebatch import doctor

__version__ = "0.1.0"

# Former names: they stay, and are the same classes.
Mean = LossSum
Coupled = CoupledLoss
Coupling = CouplingReport

__all__ = [
    "Arrangement",
    "Auto",
    "BatchSchedule",
    "Check",
    "Coupled",
    "CoupledLoss",
    "Coupling",
    "CouplingReport",
    "DealtBatches",
    "InexactError",
    "LossError",
    "LossSum",
    "Mean",
    "NoiseEstimate",
    "NoiseScale",
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
    "distributed",
    "doctor",
    "find_coupling",
    "from_mean",
    "losses",
    "mean",
    "norms",
    "once",
    "plan",
    "policies",
    "scale_adam",
    "scale_lr",
    "shares",
    "tiled",
    "total",
    "windows",
]


def __getattr__(name: str) -> typing.Any:
    """Load the doctor when it is first asked for: a training loop does without it."""
    if name == "doctor":
        return importlib.import_module("wholebatch.doctor")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
