"""Which tensors a loss function can reach besides the model that it is given."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

DEPTH = 4
"""How many functions, objects and containers are looked through one inside the other."""


def named_leaves(function: Callable[..., Any]) -> list[Tensor]:
    """List the leaf tensors with gradient that a function names: a criterion's weights, a learned temperature.

    Looks at what the function closes over, its defaults, the arguments of a ``partial``, the object that it is bound
    to, and the globals that its code mentions; through containers, functions and plain objects. What it reaches in
    another way shows in the graph of a micro-batch that uses it.

    Example:
        >>> import torch
        >>> scale = torch.ones((), requires_grad=True)
        >>> [leaf is scale for leaf in named_leaves(lambda model, rows: model(rows) * scale)]
        [True]
    """
    found: dict[int, Tensor] = {}
    _look([function], found, set(), DEPTH)
    return list(found.values())


def _look(values: Iterable[Any], found: dict[int, Tensor], seen: set[int], depth: int) -> None:
    for value in values:
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            found.update((id(p), p) for p in value.parameters() if p.requires_grad)
        elif isinstance(value, Tensor):
            if value.is_leaf and value.requires_grad:
                found[id(value)] = value
        elif depth:
            _look(_inside(value), found, seen, depth - 1)


def _inside(value: Any) -> Iterator[Any]:
    """What a function, an object or a container holds."""
    if isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, types.FunctionType):
        yield from _named_by(value)
    elif isinstance(value, Mapping):
        yield from list(value.values())
    elif isinstance(value, (list, tuple, set)):
        yield from value
    elif not isinstance(value, (type, types.ModuleType)):
        yield from list(getattr(value, "__dict__", {}).values())


def _named_by(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not bound yet
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for name in _global_names(function.__code__):
        if name in function.__globals__:
            yield function.__globals__[name]


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)
