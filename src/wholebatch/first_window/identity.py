"""What makes two windows the same for the proof: model and loss function, options, and what the batch looks like.

Switches count with what holds them, as a warm-up or a phase of training turns them; numbers do not, which may be others
in each step.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from wholebatch.batch.window import Window
from wholebatch.model.inspection import ModelInfo
from wholebatch.options import Options

DEPTH = 3
"""How many functions one inside the other are told apart."""

LOOKED_AT = 1 << 20
"""Up to how many integers are looked through for negative ones, such as labels that are ignored."""

MASKS = 1 << 16
"""Up to how many numbers are looked through for whether they are a mask that leaves something out."""

SWITCHES = 256
"""Up to how many values of a dict or an object are looked through for switches."""

MEANWHILE = ("verify", "noise_scale")
"""Options that change nothing of what runs."""

WRAPPERS = ("torch.nn.parallel", "torch.distributed", "torch._dynamo")
"""Whose modules turn switches of their own from window to window."""


def identity_of(functions: Sequence[Any], options: Options, batch: Any) -> Hashable:
    """Return a key that is equal for windows of which one proves the other.

    A function made anew in each call is the same function: its code counts, with that of what it holds.

    Example:
        >>> make = lambda: lambda model, x: model(x)
        >>> identity_of([make()], {}, torch.zeros(2)) == identity_of([make()], {}, torch.zeros(3))
        True
    """
    chosen = tuple((name, _known(value, 1)) for name, value in options.items() if name not in MEANWHILE)
    named = tuple(_known(function, DEPTH) for function in functions)
    return named, chosen, looks_of(batch, options.get("collate") is not None)


def looks_of(batch: Any, samples: bool = False) -> Any:
    """Describe a batch by the kinds of its tensors, and by whether labels are ignored or masks leave something out."""
    if isinstance(batch, Window):
        return frozenset(looks_of(micro_batch, samples) for micro_batch in batch)
    if samples:
        return type(batch)
    if isinstance(batch, Tensor):
        return str(batch.dtype), batch.dim(), _has_negatives(batch), leaves_out(batch)
    if isinstance(batch, Mapping):
        return tuple((str(key), looks_of(value)) for key, value in batch.items())
    if isinstance(batch, tuple):
        return tuple(looks_of(value) for value in batch)
    return type(batch)


def state_of(model_info: ModelInfo) -> Hashable:
    """Describe a model by its switches, those of its layers, and how many of its parameters learn."""
    modules = (*model_info.modules, *model_info.outside)
    wrappers = {kind for kind in set(map(type, modules)) if kind.__module__.startswith(WRAPPERS)}
    own = [module for module in modules if type(module) not in wrappers]
    switches = tuple(value for module in own for value in vars(module).values() if value is True or value is False)
    return switches, sum(parameter.requires_grad for parameter in model_info.parameters)


def leaves_out(tensor: Tensor) -> bool:
    """Tell whether a tensor on the host is a mask, zeros and ones, that leaves something out: then means differ."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_nested or tensor.is_complex():
        return False
    if not 0 < tensor.numel() <= MASKS or tensor.dim() > 3:
        return False
    if tensor.dtype is torch.bool:
        return not bool(tensor.all())
    if tensor[(0,) * tensor.dim()].item() not in (0, 1):  # most others are known by their first
        return False
    least, most = torch.aminmax(tensor.detach())
    return least.item() == 0 and most.item() <= 1 and bool(((tensor == 0) | (tensor == 1)).all())


def _has_negatives(tensor: Tensor) -> bool:
    """Tell whether integers on the host have negative ones among them: labels to ignore change what counts."""
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool or tensor.device.type != "cpu":
        return False
    plain = tensor.layout is torch.strided and not tensor.is_nested and 0 < tensor.numel() <= LOOKED_AT
    return plain and bool(tensor.min() < 0)


def _known(value: Any, depth: int) -> Hashable:
    """Tell functions apart by their code and what they hold, other values by their type."""
    if isinstance(value, functools.partial) and depth:
        inside = [value.func, *value.args, *value.keywords.values()]
        return ("partial", *(_known(each, depth - 1) for each in inside))
    if isinstance(value, types.MethodType):
        code = value.__func__.__code__ if hasattr(value.__func__, "__code__") else None
        return type(value.__self__), code, _switches(value.__self__)
    if isinstance(value, types.FunctionType):
        cells = value.__closure__ or ()
        held = [cell.cell_contents for cell in cells if depth and not _unbound(cell)]
        return (value.__code__, *(_known(each, depth - 1) for each in held), _switches_named_by(value))
    if isinstance(value, (str, bool, torch.dtype, type(None))):
        return value
    return type(value), getattr(value, "reduction", None) if isinstance(value, torch.nn.Module) else _switches(value)


def _switches(value: Any) -> Hashable:
    """List the switches that an object or a dict holds by name."""
    held = value if isinstance(value, dict) else getattr(value, "__dict__", None)
    if not isinstance(held, dict) or isinstance(value, (type, types.ModuleType)) or len(held) > SWITCHES:
        return ()
    return tuple((str(name), inside) for name, inside in list(held.items()) if inside is True or inside is False)


def _switches_named_by(function: types.FunctionType) -> Hashable:
    """List the switches among the globals that a function names, and in dicts and objects among them."""
    found = [(name, function.__globals__[name]) for name in function.__code__.co_names if name in function.__globals__]
    plain = [(name, value) for name, value in found if not callable(value)]
    return tuple((name, value if isinstance(value, bool) else _switches(value)) for name, value in plain)


def _unbound(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is None
    except ValueError:
        return True
