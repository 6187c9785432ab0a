"""Where tensors wait between the stages: as they are, or in host memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class TensorStore:
    """Keeps tensors where they are."""

    def put(self, value: Any) -> Any:
        """Hand a value over for a while."""
        return value.detach() if isinstance(value, Tensor) else value

    def take(self, held: Any) -> Any:
        """Have it back, on its own device; it may be taken more than once."""
        return held


@dataclass(frozen=True)
class _Away:
    """A tensor in host memory and where it belongs."""

    copy: Tensor
    device: torch.device


class HostTensorStore(TensorStore):
    """Keeps tensors in host memory, pinned where there is a device to copy from it without waiting.

    The device then holds what one stage of one micro-batch needs, whatever the size of the batch.
    """

    def put(self, value: Any) -> Any:
        """Copy a tensor to the host."""
        if not isinstance(value, Tensor):
            return value
        return _Away(self._copy(value.detach()), value.device)

    def take(self, held: Any) -> Any:
        """Copy it back to its device."""
        return held.copy.to(held.device, non_blocking=True) if isinstance(held, _Away) else held

    def _copy(self, value: Tensor) -> Tensor:
        if value.device.type == "cpu":
            return value
        pinned = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, pin_memory=True)
        return pinned.copy_(value, non_blocking=True)
