"""One snapshot of all that a forward pass moves on besides gradients: random state and buffers."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
from torch import Tensor, nn


class State:
    """Random state and module buffers at one moment, to be gone back to.

    Used wherever a forward pass must leave no trace or be repeated with the same draws: the counting pass,
    a repeated micro-batch, losses over all rows. Covers Python's ``random``, torch on the CPU and on the
    model's devices, NumPy's global state if NumPy is loaded, and every buffer of the model.

    Args:
        model: whose devices and buffers are taken; None for the random state alone.
        buffers: whether its buffers are wanted.
    """

    def __init__(self, model: nn.Module | None = None, buffers: bool = True) -> None:
        self._python = random.getstate()
        self._torch = torch.get_rng_state()
        self._devices = [(device, _generator_state(device)) for device in _accelerators(model)]
        numpy = sys.modules.get("numpy")
        self._numpy: Any = None if numpy is None else numpy.random.get_state()
        self._buffers = [(m, name, b, b.detach().clone()) for m, name, b in _buffers(model if buffers else None)]

    def restore(self) -> None:
        """Go back to the moment of the snapshot; buffers keep their identity."""
        self.restore_random()
        self.restore_buffers()

    @torch.no_grad()
    def restore_buffers(self) -> None:
        """Go back to the buffers alone and leave the random state as it is now."""
        for module, name, buffer, saved in self._buffers:
            buffer.copy_(saved)
            if getattr(module, name) is not buffer:
                setattr(module, name, buffer)

    def restore_random(self) -> None:
        """Go back to the random state alone and leave the buffers as they are now."""
        random.setstate(self._python)
        torch.set_rng_state(self._torch)
        for device, state in self._devices:
            getattr(torch, device.type).set_rng_state(state, device)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


def _buffers(model: nn.Module | None) -> list[tuple[nn.Module, str, Tensor]]:
    modules = () if model is None else model.modules()
    return [(m, name, b) for m in modules for name, b in m.named_buffers(recurse=False) if not b.is_meta]


def _accelerators(model: nn.Module | None) -> list[torch.device]:
    if model is None:
        return []
    tensors = [*model.parameters(), *model.buffers()]
    return sorted({t.device for t in tensors if t.device.type not in ("cpu", "meta")}, key=str)


def _generator_state(device: torch.device) -> Tensor:
    state: Tensor = getattr(torch, device.type).get_rng_state(device)
    return state
