"""A model looked through once: what every window needs to know of its modules, parameters and buffers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn


class Owned(NamedTuple):
    """A buffer, and where it is registered."""

    module: nn.Module
    name: str
    buffer: Tensor


class Survey:
    """The modules, parameters and buffers of a model, each once, from a single walk.

    A walk through a large model takes as long as some of its layers, and a window asks several questions of it.

    Args:
        model: as the loss function is given it, wrapper and all.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules = list(model.modules())
        parameters: dict[int, nn.Parameter] = {}
        self.buffers: list[Owned] = []
        for module in self.modules:  # the dicts behind named_parameters and named_buffers, at a third of the time
            for parameter in module._parameters.values():
                if parameter is not None:
                    parameters[id(parameter)] = parameter
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta:
                    self.buffers.append(Owned(module, name, buffer))
        self.parameters = list(parameters.values())

    @property
    def devices(self) -> set[torch.device]:
        """Where its tensors are."""
        found = {parameter.device for parameter in self.parameters if not parameter.is_meta}
        return found | {owned.buffer.device for owned in self.buffers}

    @property
    def device(self) -> torch.device | None:
        """The one device of all its tensors; None if there are several or none."""
        devices = self.devices
        return devices.pop() if len(devices) == 1 else None

    def path(self, module: nn.Module, name: str) -> str:
        """Name something that a module owns as ``named_parameters`` would."""
        paths = {id(each): path for path, each in self.model.named_modules()}
        return ".".join(filter(None, (paths[id(module)], name)))
