"""What makes two windows the same for the proof: model and loss function, options, and what the batch looks like."""

from __future__ import annotations

import functools
import types
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from wholebatch.options import Options
from wholebatch.window import Window

DEPTH = 3
"""How many functions one inside the other are told apart."""

LOOKED_AT = 1 << 20
"""Up to how many integers are looked through for negative ones, such as labels that are ignored."""


def identity_of(functions: Sequence[Any], options: Options, batch: Any) -> Hashable:
    """Return a key that is equal for windows of which one proves the other.

    A function made anew in each call is the same function: its code counts, with that of what it holds.

    Example:
        >>> make = lambda: lambda model, x: model(x)
        >>> identity_of([make()], {}, torch.zeros(2)) == identity_of([make()], {}, torch.zeros(3))
        True
    """
    chosen = tuple((name, _known(value, 1)) for name, value in options.items() if name != "verify")
    named = tuple(_known(function, DEPTH) for function in functions)
    return named, chosen, looks_of(batch, options.get("collate") is not None)


def looks_of(batch: Any, samples: bool = False) -> Any:
    """Describe a batch by the kinds of its tensors and whether their integers have negative ones among them."""
    if isinstance(batch, Window):
        return frozenset(looks_of(micro_batch, samples) for micro_batch in batch)
    if samples:
        return type(batch)
    if isinstance(batch, Tensor):
        return str(batch.dtype), batch.dim(), _has_negatives(batch)
    if isinstance(batch, Mapping):
        return tuple((str(key), looks_of(value)) for key, value in batch.items())
    if isinstance(batch, tuple):
        return tuple(looks_of(value) for value in batch)
    return type(batch)


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
        return type(value.__self__), value.__func__.__code__ if hasattr(value.__func__, "__code__") else None
    if isinstance(value, types.FunctionType):
        cells = value.__closure__ or ()
        held = [cell.cell_contents for cell in cells if depth and not _unbound(cell)]
        return (value.__code__, *(_known(each, depth - 1) for each in held))
    if isinstance(value, (str, bool, torch.dtype, type(None))):
        return value
    return type(value), getattr(value, "reduction", None) if isinstance(value, torch.nn.Module) else None


def _unbound(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is None
    except ValueError:
        return True
