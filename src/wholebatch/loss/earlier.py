"""What a window has left unsaid: flags on a device that its end did not wait for, read when the next one begins.

`wb.Step` reads them with the norm of the gradient, before anything is stepped. `wb.backward` makes nobody wait: at the
end of a window they set out for the host, and at the beginning of the next they are there, or as good as.
"""

from __future__ import annotations

import weakref

import torch
from torch import nn

from wholebatch.errors import LossError
from wholebatch.loss.flags import Flags

LATEST = 2
"""How many windows back the host waits at last: until then the device has the work of a whole window before it."""

WITH_EVENTS = ("cuda", "xpu")
"""Devices that copy to the host while they go on, and can be asked whether that is done; others are read when due."""


class _Left:
    """The flags of one window, on their way to the host."""

    def __init__(self, flags: Flags) -> None:
        device = flags.values[0].device
        together = torch.stack([value.reshape(()).to(device, torch.bool, non_blocking=True) for value in flags.values])
        self.flags, self.windows_since, self.read = flags, 0, together
        self.arrived = torch.Event(device) if device.type in WITH_EVENTS else None
        if self.arrived is not None:
            self.read = together.to("cpu", non_blocking=True)  # into memory that torch pins
            self.arrived.record()

    def is_due(self) -> bool:
        """Whether it can be read without waiting, or has to be."""
        here = self.read.device.type == "cpu" if self.arrived is None else bool(self.arrived.query())
        return here or self.windows_since >= LATEST

    def settle(self) -> None:
        """Read them.

        Raises:
            LossError: if one holds.
        """
        if self.arrived is not None:
            self.arrived.synchronize()
        when = (
            "the window before this one"
            if self.windows_since == 1
            else f"the window {self.windows_since} before this one"
        )
        try:
            self.flags.settle([float(holds) for holds in self.read.tolist()])
        except LossError as error:
            raise LossError(
                f"In {when}, whose gradient may have been stepped with (a device says it only afterwards; wb.Step "
                f"reads it before the step): {error}"
            ) from None


EARLIER: weakref.WeakKeyDictionary[nn.Module, list[_Left]] = weakref.WeakKeyDictionary()
"""What windows of each model have left, for as long as the model lives."""


def leave(model: nn.Module, flags: Flags) -> None:
    """Send what a window has not read to the host without waiting; nothing where all is on the host."""
    if flags.values and not flags.values[0].is_meta:
        EARLIER.setdefault(model, []).append(_Left(flags))


def settle_earlier(model: nn.Module) -> None:
    """Read what earlier windows of a model have left, before anything of this one runs.

    Raises:
        LossError: if a flag of theirs holds; the others are forgotten.
    """
    for left in EARLIER.pop(model, []):
        left.windows_since += 1
        if left.is_due():
            left.settle()
        else:
            EARLIER.setdefault(model, []).append(left)
