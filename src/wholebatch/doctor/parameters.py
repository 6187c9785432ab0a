"""The parameters of a watched loop: their names, and what happens to their gradients between two looks."""

from __future__ import annotations

import dataclasses
import weakref

import torch
from torch import Tensor, nn

SAMPLE_NUMEL = 1 << 16
SAMPLE_BYTES = 512 << 20


@dataclasses.dataclass(frozen=True)
class Look:
    """Which parameters hold a gradient, and which gradients differ from the look before."""

    pending: frozenset[int]
    changed: frozenset[int]


class Parameters:
    """Every parameter met so far, numbered in the order of meeting.

    A look costs less than a microsecond a parameter: a gradient has changed when it is another tensor or its
    version is another. Up to `SAMPLE_NUMEL` entries of the gradients can be copied out for measuring.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.names: list[str] = []
        self.numbers: dict[int, int] = {}
        self.modules: dict[int, str] = {}
        self.roots: dict[int, tuple[weakref.ref[nn.Module], int]] = {}
        self.members: list[frozenset[int]] = []
        self.zeroed: set[int] = set()
        self.marks: dict[int, tuple[int, int]] = {}
        self.storages: dict[int, int] = {}
        self.sampled: dict[int, tuple[int, int]] = {}
        self.spent = 0
        self.size = 0

    def add(self, parameter: Tensor, name: str) -> int:
        """Return the number of a parameter, a new one under `name` if it was not met before."""
        number = self.numbers.get(id(parameter))
        if number is None:
            number = self.numbers[id(parameter)] = len(self.tensors)
            self.tensors.append(parameter)
            self.names.append(name)
            self.storages[parameter.data_ptr()] = number
        return number

    def add_module(self, module: nn.Module) -> int:
        """Meet a module: its parameters under their own names, its parts for naming BatchNorm layers.

        Returns the module's number. Names of a further module begin with its class: the first one's stand alone.
        """
        known = self.roots.get(id(module))
        if known is not None and known[0]() is module:
            return known[1]
        prefix = f"{type(module).__name__} {len(self.members) + 1}." if self.members else ""
        for name, part in module.named_modules():
            self.modules.setdefault(id(part), name.removeprefix("module."))
        numbers = [self.add(held, prefix + name.removeprefix("module.")) for name, held in module.named_parameters()]
        self.roots[id(module)] = (weakref.ref(module), len(self.members))
        self.members.append(frozenset(numbers))
        return len(self.members) - 1

    def look(self, written: bool = False) -> Look:
        """Compare every gradient with the look before, and remember this one.

        A gradient that was changed into zeros counts as absent until it is written again: it was cleared in place.
        Where a backward has just `written` them, nothing is looked for.
        """
        pending, changed = [], []
        for number, parameter in enumerate(self.tensors):
            gradient = parameter.grad
            held = getattr(gradient, "_local_tensor", gradient)  # only the local part of a shard counts its versions
            mark = (0, 0) if held is None else (id(held), held._version)
            if mark != self.marks.get(number, (0, 0)):
                changed.append(number)
                self.marks[number] = mark
            if gradient is not None:
                pending.append(number)
        self.zeroed.difference_update(changed)
        if not written:
            waiting = set(changed) & set(pending)
            self.zeroed |= {number for number in waiting if not bool(self.gradient(number).any())}
        return Look(frozenset(pending) - self.zeroed, frozenset(changed))

    def gradient(self, number: int) -> Tensor:
        """Return a parameter's gradient as a plain dense tensor: the local part where it is spread over ranks."""
        gradient = self.tensors[number].grad
        if gradient is None:
            return torch.zeros(())
        gradient = getattr(gradient, "_local_tensor", gradient)
        return gradient.coalesce().values() if gradient.is_sparse else gradient

    def weights(self) -> int:
        """Return a number that differs whenever a parameter was written to."""
        return sum(parameter._version for parameter in self.tensors)

    def choose(self, touched: frozenset[int]) -> None:
        """Take newly touched parameters into the sample, as long as they fit."""
        for number in sorted(touched - self.sampled.keys()):
            numel = self.tensors[number].numel()
            dense = self.tensors[number].grad
            if dense is not None and not dense.is_sparse and self.size + numel <= SAMPLE_NUMEL:
                self.sampled[number] = (self.size, numel)
                self.size += numel

    def sample(self) -> Tensor | None:
        """Copy the sampled gradients into one vector; zeros where there is none. None once too much was kept."""
        if not self.sampled or self.spent > SAMPLE_BYTES:
            return None
        micro_batches = []
        for number, (_, numel) in self.sampled.items():
            gradient = self.tensors[number].grad
            held = None if gradient is None else self.gradient(number).detach().reshape(-1)
            fits = held is not None and held.numel() == numel
            micro_batches.append(
                held.to("cpu", widened(held.dtype)) if held is not None and fits else torch.zeros(numel)
            )
        vector = torch.cat(micro_batches) if len(micro_batches) > 1 else micro_batches[0].clone()
        self.spent += vector.numel() * vector.element_size()
        return vector

    def norm(self, numbers: frozenset[int]) -> float:
        """Return the norm of the gradients of these parameters, as this process holds them."""
        norms = [
            self.gradient(number).detach().norm().float() for number in numbers if self.tensors[number].grad is not None
        ]
        return float(torch.stack([norm.cpu() for norm in norms]).norm()) if norms else 0.0


def widened(dtype: torch.dtype) -> torch.dtype:
    """Return float64 for float64, float32 for every shorter format."""
    return torch.float64 if dtype == torch.float64 else torch.float32
