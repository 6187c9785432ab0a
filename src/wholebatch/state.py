"""One snapshot of all that a forward pass moves on besides gradients: random state and buffers."""

from __future__ import annotations

import random
import sys
from typing import Any, NamedTuple

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
        self._buffers = _held(model if buffers else None)

    def restore(self) -> None:
        """Go back to the moment of the snapshot; buffers keep their identity."""
        self.restore_random()
        self.restore_buffers()

    @torch.no_grad()
    def restore_buffers(self) -> None:
        """Go back to the buffers alone and leave the random state as it is now."""
        for held in self._buffers:
            held.buffer.copy_(held.saved)
            if getattr(held.module, held.name) is not held.buffer:
                setattr(held.module, held.name, held.buffer)

    def moved(self, model: nn.Module) -> list[str]:
        """Name the buffers of real numbers that a forward has changed since; on a device, those changed in place."""
        paths = {id(module): f"{path}." if path else "" for path, module in model.named_modules()}
        return [paths[id(held.module)] + held.name for held in self._buffers if held.moved()]

    def restore_random(self) -> None:
        """Go back to the random state alone and leave the buffers as they are now."""
        random.setstate(self._python)
        torch.set_rng_state(self._torch)
        for device, state in self._devices:
            getattr(torch, device.type).set_rng_state(state, device)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


class _Held(NamedTuple):
    """One buffer, what it held, and how often it had been written to."""

    module: nn.Module
    name: str
    buffer: Tensor
    saved: Tensor
    version: int

    def moved(self) -> bool:
        now = getattr(self.module, self.name)
        if now is None or not now.is_floating_point() or now.shape != self.saved.shape:
            return False  # a counter, or a cache that grew
        if now.device.type != "cpu":
            return now is not self.buffer or now._version != self.version
        return not bool(((now == self.saved) | (now.isnan() & self.saved.isnan())).all())


def _held(model: nn.Module | None) -> list[_Held]:
    modules = () if model is None else model.modules()
    return [
        _Held(module, name, buffer, buffer.detach().clone(), buffer._version)
        for module in modules
        for name, buffer in module.named_buffers(recurse=False)
        if not buffer.is_meta
    ]


def _accelerators(model: nn.Module | None) -> list[torch.device]:
    if model is None:
        return []
    tensors = [*model.parameters(), *model.buffers()]
    return sorted({t.device for t in tensors if t.device.type not in ("cpu", "meta")}, key=str)


def _generator_state(device: torch.device) -> Tensor:
    state: Tensor = getattr(torch, device.type).get_rng_state(device)
    return state
