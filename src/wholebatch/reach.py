"""Which tensors and modules a loss function can reach besides the model that it is given."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

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
        if isinstance(value, nn.Module):
            for part in value.modules():
                modules[id(part)] = part
                _look(unlisted(part), leaves, modules, seen, depth)
            leaves.update((id(p), p) for p in value.parameters() if p.requires_grad)
        elif isinstance(value, Tensor):
            if value.is_leaf and value.requires_grad:
                leaves[id(value)] = value
        elif depth:
            _look(_inside(value), leaves, modules, seen, depth - 1)


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
    names = set(_global_names(function.__code__))
    for name in names & function.__globals__.keys():
        value = function.__globals__[name]
        if isinstance(value, types.ModuleType):  # what is written as settings.scale
            yield from (vars(value)[inner] for inner in names & vars(value).keys() if _learns(vars(value)[inner]))
        else:
            yield value


def _learns(value: Any) -> bool:
    return isinstance(value, (nn.Module, Tensor))


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)
