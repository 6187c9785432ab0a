"""The reasons for which wholebatch refuses to go on, each its own class.

Every message says what is wrong with the values, why it matters, and the call that mends it.
"""

from __future__ import annotations

import torch


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
