"""Whose code something is, the user's or a library's, and what can be seen of it without running any of it."""

from __future__ import annotations

import functools
import random
import sys
import sysconfig
import types
from collections import OrderedDict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

OWN = str(Path(__file__).resolve().parents[1])

STANDARD = sys.stdlib_module_names - {"__main__"}


@functools.lru_cache(maxsize=1)
def libraries() -> tuple[str, ...]:
    """Return the folders whose files are not the user's: installed packages and the standard library."""
    paths = sysconfig.get_paths()
    return tuple(dict.fromkeys(paths[name] for name in ("purelib", "platlib", "stdlib", "platstdlib")))


@functools.lru_cache(maxsize=4096)
def library(file: str) -> str | None:
    """Return the package that `file` belongs to, "" for the standard library, None for the user's own code."""
    if file.startswith("<"):
        return ""
    if file.startswith(OWN):
        return "wholebatch"
    for folder in libraries():
        if file.startswith(folder):
            parts = Path(file).relative_to(folder).parts
            parts = parts[1:] if parts[0] in ("site-packages", "dist-packages") else parts
            return parts[0].removesuffix(".py") if parts else ""
    return None


def from_library(scope: dict[str, Any]) -> bool:
    """Tell whether a module, given by its names, is a library's: one without a file is the user's, unless built in."""
    file = scope.get("__file__")
    if isinstance(file, str):
        return library(file) is not None
    return str(scope.get("__name__")).split(".")[0] in STANDARD


def of_library(kind: type) -> bool:
    """Tell whether a class is a library's."""
    module = sys.modules.get(kind.__module__)
    return kind.__module__ == "builtins" or (module is not None and from_library(names_in(module)))


def names_in(value: Any) -> dict[str, Any]:
    """Return the attributes that stand in an object or a module, without asking it: some answer by importing."""
    if not type(value).__dictoffset__:
        return {}
    inside = object.__getattribute__(value, "__dict__")
    return inside if isinstance(inside, dict) else {}


class Place(NamedTuple):
    """A global name, and the module that it stands in."""

    scope: dict[str, Any]
    name: str


def places_of(function: types.FunctionType) -> list[Place]:
    """List the globals that a function's code mentions, those written as ``settings.scale`` too.

    Of a library's globals only what moves and learns is listed, see :func:`carries`: behind its other names lies the
    rest of the library.
    """
    names = dict.fromkeys(global_names(function.__code__))
    closed = [module for module in cells_of(function).values() if issubclass(type(module), types.ModuleType)]
    scopes, seen = [function.__globals__, *map(names_in, closed)], set[int]()
    return [place for scope in scopes for place in _standing(scope, names, False, seen)]


def cells_of(function: types.FunctionType) -> dict[Any, Any]:
    """Return what a function closes over, as far as it is bound yet."""
    held: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            held[name] = cell.cell_contents
        except ValueError:
            continue
    return held


def _standing(scope: dict[str, Any], names: dict[str, None], foreign: bool, seen: set[int]) -> Iterator[Place]:
    foreign = foreign or from_library(scope)
    for name in names:
        value = scope.get(name)
        if issubclass(type(value), types.ModuleType):
            if id(value) not in seen:
                seen.add(id(value))
                yield from _standing(names_in(value), names, foreign, seen)
        elif name in scope and (not foreign or carries(value)):
            yield Place(scope, name)


def global_names(code: types.CodeType) -> Iterator[str]:
    """List the names that a function's code, and functions inside of it, look up outside of themselves."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from global_names(constant)


def carries(value: Any) -> bool:
    """Tell whether a value is a tensor, a module of layers, a generator of random numbers, or an array."""
    return issubclass(type(value), (Tensor, nn.Module)) or is_generator(value) or is_array(value)


def is_generator(value: Any) -> bool:
    """Tell whether a value draws random numbers from a state that can be read and put back."""
    kind, numpy = type(value), sys.modules.get("numpy")
    if issubclass(kind, (torch.Generator, random.Random)):
        return not issubclass(kind, random.SystemRandom)
    return numpy is not None and issubclass(kind, (numpy.random.Generator, numpy.random.RandomState))


def is_array(value: Any) -> bool:
    """Tell whether a value is a NumPy array of numbers."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(type(value), numpy.ndarray) and value.dtype != object


CONTAINERS: tuple[type[Any], ...] = (OrderedDict, dict, list, deque, set, tuple)


def container_of(kind: type) -> type[Any] | None:
    """Return the container of Python's own that a class is, or is built on."""
    return next((base for base in CONTAINERS if issubclass(kind, base)), None)


def entries_of(container: Any) -> dict[Any, Any]:
    """Return what stands in a container, by key or place, whatever its class makes of being asked."""
    base = container_of(type(container))
    if base is dict or base is OrderedDict:
        return dict(base.items(container))
    inside = list(base.__iter__(container)) if base is not None else []
    return dict.fromkeys(inside) if base is set else dict(enumerate(inside))


def size_of(container: Any) -> int:
    """Return how many entries stand in a container."""
    base = container_of(type(container))
    return int(base.__len__(container)) if base is not None else 0
