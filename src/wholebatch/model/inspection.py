"""A model looked through once: what every window needs to know of its modules, parameters and buffers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from wholebatch.model.references import unlisted


class Owned(NamedTuple):
    """A buffer, and where it is registered."""

    module: nn.Module
    name: str
    buffer: Tensor


def uses_batch_statistics(module: nn.Module) -> bool:
    """Tell whether a layer is a BatchNorm that normalises by the statistics of the rows it is given."""
    kind = nn.modules.batchnorm._BatchNorm
    return isinstance(module, kind) and (module.training or module.running_mean is None)


class ModelInfo:
    """The modules, parameters and buffers of a model, each once, from a single walk.

    A walk through a large model takes as long as some of its layers, and a window asks several questions of it.

    Attributes:
        modules: those of the model, the model first.
        outside: modules that run with the model without being part of it: a head that the loss function names, a
            layer in a plain list.
        parameters: of the model alone.
        own: their identities.
        buffers: of all modules.
        leaves: leaf tensors that the loss function names besides the model's parameters.

    Args:
        model: as the loss function is given it, wrapper and all.
        named: modules that the loss function names.
        leaves: leaf tensors that it names.
    """

    def __init__(self, model: nn.Module, named: Iterable[nn.Module] = (), leaves: Iterable[Tensor] = ()) -> None:
        self.model, self.leaves = model, list(leaves)
        self.modules = list(model.modules())
        inside = {id(module) for module in self.modules}
        hidden = [part for module in self.modules for each in unlisted(module) for part in each.modules()]
        found = {id(module): module for module in (*hidden, *named) if id(module) not in inside}
        self.outside = list(found.values())
        parameters: dict[int, nn.Parameter] = {}
        self.buffers: list[Owned] = []
        for module in self.modules:  # the dicts behind named_parameters and named_buffers, at a third of the time
            for parameter in module._parameters.values():
                if parameter is not None:
                    parameters[id(parameter)] = parameter
        for module in (*self.modules, *self.outside):
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta:
                    self.buffers.append(Owned(module, name, buffer))
        self.parameters, self.own = list(parameters.values()), parameters.keys()

    @property
    def devices(self) -> set[torch.device]:
        """Where the model's tensors are."""
        inside = {id(module) for module in self.modules} if self.outside else ()
        found = {parameter.device for parameter in self.parameters if not parameter.is_meta}
        return found | {o.buffer.device for o in self.buffers if not self.outside or id(o.module) in inside}

    @property
    def device(self) -> torch.device | None:
        """The one device of all its tensors; None if there are several or none."""
        devices = self.devices
        return devices.pop() if len(devices) == 1 else None

    def path(self, module: nn.Module, name: str = "") -> str:
        """Name a module, or something that it owns, as ``named_parameters`` would."""
        paths = {id(each): path for path, each in self.model.named_modules()}
        place = paths.get(id(module), f"{type(module).__name__} outside of the model")
        return ".".join(filter(None, (place, name)))


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the user's own module out of ``DistributedDataParallel`` and ``torch.compile``."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
            continue
        inside = vars(model).get("_modules")
        own = inside.get("_orig_mod") if isinstance(inside, dict) else None  # a scripted model has no such dict
        if not isinstance(own, nn.Module):
            return model
        model = own
