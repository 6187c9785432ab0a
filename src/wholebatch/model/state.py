"""One snapshot of all that a forward pass moves on besides gradients: random state and buffers."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from wholebatch.model.inspection import ModelInfo


class State:
    """Random state and module buffers at one moment, to be gone back to.

    Used wherever a forward pass must leave no trace or be repeated with the same draws: the counting pass,
    a repeated micro-batch, losses over all rows. Covers Python's ``random``, torch on the CPU and on the
    model's devices, NumPy's global state if NumPy is loaded, and every buffer of the model.

    Args:
        model: whose devices and buffers are taken, or a survey of it; None for the random state alone.
        buffers: whether its buffers are wanted.
    """

    def __init__(self, model: nn.Module | ModelInfo | None = None, buffers: bool = True) -> None:
        self._model_info = model if isinstance(model, ModelInfo) else ModelInfo(nn.Module() if model is None else model)
        self._python = random.getstate()
        self._torch = torch.get_rng_state()
        self._devices = [(device, _generator_state(device)) for device in _accelerators(self._model_info)]
        self._numpy = _numpy_state()
        self._buffers = _held(self._model_info) if buffers else []

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

    def moved(self) -> list[str]:
        """Name the counters and buffers of real numbers that changed since; on a device, those changed in place."""
        return [self._model_info.path(held.module, held.name) for held in self._buffers if held.moved()]

    def drew(self) -> bool:
        """Tell whether random numbers have been drawn since."""
        return (
            self.drew_elsewhere()
            or not torch.equal(torch.get_rng_state(), self._torch)
            or any(not torch.equal(_generator_state(device), state) for device, state in self._devices)
        )

    def drew_elsewhere(self) -> bool:
        """Tell whether random numbers other than torch's have been drawn since: Python's own, or NumPy's."""
        return random.getstate() != self._python or pickle.dumps(_numpy_state()) != pickle.dumps(self._numpy)

    def restore_random(self) -> None:
        """Go back to the random state alone and leave the buffers as they are now."""
        random.setstate(self._python)
        torch.set_rng_state(self._torch)
        for device, state in self._devices:
            getattr(torch, device.type).set_rng_state(state, device)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


@contextmanager
def left_alone(model: nn.Module | ModelInfo) -> Iterator[State]:
    """Leave random state and buffers as they are, however the block ends; gives what to go back to on the way."""
    state = State(model)
    try:
        yield state
    finally:
        state.restore()


class _KeptBuffer(NamedTuple):
    """One buffer, what it held, and how often it had been written to."""

    module: nn.Module
    name: str
    buffer: Tensor
    saved: Tensor
    version: int

    def moved(self) -> bool:
        now = getattr(self.module, self.name)
        if now is None or now.shape != self.saved.shape or not (now.is_floating_point() or now.numel() == 1):
            return False  # a table, or a cache that grew
        if now.device.type != "cpu":
            return now is not self.buffer or now._version != self.version
        return not bool(((now == self.saved) | (now.isnan() & self.saved.isnan())).all())


def _held(model_info: ModelInfo) -> list[_KeptBuffer]:
    """The buffers as they are now: a module may have put others in the place of those that were looked up."""
    now = ((owned, owned.module._buffers.get(owned.name)) for owned in model_info.buffers)
    return [
        _KeptBuffer(owned.module, owned.name, buffer, buffer.detach().clone(), buffer._version)
        for owned, buffer in now
        if buffer is not None
    ]


def _accelerators(model_info: ModelInfo) -> list[torch.device]:
    return sorted((device for device in model_info.devices if device.type != "cpu"), key=str)


def _numpy_state() -> Any:
    """NumPy's global state; None while it is not loaded."""
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random.get_state()


def _generator_state(device: torch.device) -> Tensor:
    state: Tensor = getattr(torch, device.type).get_rng_state(device)
    return state
