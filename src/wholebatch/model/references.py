"""Which tensors and modules a loss function can reach besides the model that it is given."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from wholebatch.model.origin import cells_of, container_of, entries_of, names_in, places_of

DEPTH = 4
"""How many functions, objects and containers are looked through one inside the other."""

PLAIN = frozenset({list, tuple, dict})
"""Containers that hold modules without torch's knowing."""


class Reach(NamedTuple):
    """The leaf tensors with gradient, and the modules, that a function names."""

    leaves: list[Tensor]
    modules: list[nn.Module]


def reach_of(function: Callable[..., Any]) -> Reach:
    """List what a loss function names besides its arguments: a criterion's weights, a learned temperature, a head.

    Looks at what the function closes over, its defaults, the arguments of a ``partial``, the object that it is bound
    to, and the globals that its code mentions; through containers, functions, plain objects, and the plain lists of
    modules. What it reaches in another way shows in the graph of a micro-batch that uses it.

    Example:
        >>> import torch
        >>> scale = torch.ones((), requires_grad=True)
        >>> [leaf is scale for leaf in reach_of(lambda model, rows: model(rows) * scale).leaves]
        [True]
    """
    leaves: dict[int, Tensor] = {}
    modules: dict[int, nn.Module] = {}
    _look([function], leaves, modules, set(), DEPTH)
    return Reach(list(leaves.values()), list(modules.values()))


def unlisted(module: nn.Module) -> list[nn.Module]:
    """List the modules that a module keeps in plain lists or dicts, where torch does not see them."""
    held = [value for name, value in vars(module).items() if type(value) in PLAIN and value and name[0] != "_"]
    found: list[nn.Module] = []
    for value in held:  # mostly none
        inside = value.values() if isinstance(value, dict) else value
        found += [each for each in inside if isinstance(each, nn.Module)]
    return found


def code_of(function: Any) -> types.CodeType | type:
    """Return the code that runs when something is called, else its type: what tells functions made anew as the same."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return code if isinstance(code, types.CodeType) else type(function)


def _look(
    values: Iterable[Any], leaves: dict[int, Tensor], modules: dict[int, nn.Module], seen: set[int], depth: int
) -> None:
    for value in values:
        if id(value) in seen:
            continue
        seen.add(id(value))
        if issubclass(type(value), nn.Module):
            for part in value.modules():
                modules[id(part)] = part
                _look(unlisted(part), leaves, modules, seen, depth)
            leaves.update((id(p), p) for p in value.parameters() if p.requires_grad)
        elif issubclass(type(value), Tensor):
            if value.is_leaf and value.requires_grad:
                leaves[id(value)] = value
        elif depth:
            _look(_inside(value), leaves, modules, seen, depth - 1)


def _inside(value: Any) -> Iterator[Any]:
    """What a function, an object or a container holds; nothing of it is run, and a library's depths are left out."""
    kind = type(value)
    if issubclass(kind, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif kind is types.MethodType:
        yield from (value.__self__, value.__func__)
    elif kind is types.FunctionType:
        yield from _named_by(value)
    elif container_of(kind) is not None:
        entries = entries_of(value)
        yield from entries if issubclass(kind, set) else entries.values()
    elif not issubclass(kind, (type, types.ModuleType)):
        yield from list(names_in(value).values())


def _named_by(function: types.FunctionType) -> Iterator[Any]:
    yield from cells_of(function).values()
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from (place.scope[place.name] for place in places_of(function))
