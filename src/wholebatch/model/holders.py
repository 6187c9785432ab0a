"""What can hold values that a forward moves: attributes, containers, closures, globals; to be read and put back."""

from __future__ import annotations

import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, cast

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from wholebatch.model.origin import (
    carries,
    cells_of,
    container_of,
    entries_of,
    names_in,
    of_library,
    places_of,
    size_of,
)

ENTRIES = 10_000
"""A container of more entries is data, not state."""

WRAPPERS = ("torch.distributed", "torch.nn.parallel", "torch._dynamo", "torch.utils", "torch.fx", "torch._inductor")
"""Where torch keeps what it knows of its own: to be put back by nobody."""

FOREIGN = sys.stdlib_module_names - {"types", "argparse", "collections", "__main__"} | {"torch", "numpy", "builtins"}
"""Whose objects are not looked into, unless they are asked for below."""

LOOKED_INTO = ("torch.nn", "torch.optim", "torch.amp")

BASIC = sys.stdlib_module_names | {"torch", "numpy", "builtins", "wholebatch"}
"""Libraries whose objects are small, or looked into by name."""

TRANSPARENT = (nn.Module, Tensor, type, types.FunctionType, types.MethodType, types.ModuleType, functools.partial)
"""What is the user's, or leads to it, wherever its class comes from."""


class Holder(NamedTuple):
    """Something with named places for values.

    Attributes:
        name: what to call it.
        owner: the object itself, which keeps its identity.
        read: lists what it holds by name.
        write: puts back what ``read`` has listed.
    """

    name: str
    owner: Any
    read: Callable[[], dict[Hashable, Any]]
    write: Callable[[dict[Hashable, Any]], None]

    def place(self, key: Hashable) -> str:
        """Name one of its places."""
        inside = isinstance(self.owner, (dict, list, tuple, deque, set)) and not isinstance(key, Registered)
        return f"{self.name}[{key!r:.40}]" if inside else ".".join(filter(None, (self.name, str(key))))


class Registered(str):
    """The name of a parameter, a buffer or a module where torch keeps them."""


class Hook(NamedTuple):
    """The place of a hook of a module: its registry, and its number there."""

    registry: str
    number: int

    def __str__(self) -> str:
        return f"{self.registry}[{self.number}]"


def holders_of(name: str, value: Any) -> list[Holder]:
    """List the holders that a value is made of: none for a number, a text, a tensor, or what nothing is known of.

    Only what stands in a value is read; no code of its class runs, which may well load half a library.
    """
    kind = type(value)
    if issubclass(kind, nn.Module):
        return _of_module(name, value)
    if kind is types.MethodType:
        return [_fixed(name, value, {"": value.__self__, "()": value.__func__})]
    if kind is types.FunctionType:
        return _of_function(value)
    if issubclass(kind, functools.partial):
        return [_fixed(name, value, {"": value.func, "args": value.args, "keywords": value.keywords})]
    if container_of(kind) is not None:
        return _of_container(name, value) if size_of(value) <= ENTRIES else []
    if issubclass(kind, type):
        return [_of_class(each) for each in value.__mro__ if _own(each)] if _own(value) else []
    return _of_object(name, value) if _own(kind) else []


def is_framework(value: Any) -> bool:
    """Tell whether an object is of a library's class: a trainer, a dataset, a tokenizer, each of which holds others."""
    kind = type(value)
    if issubclass(kind, TRANSPARENT) or container_of(kind) is not None or kind.__module__.split(".")[0] in BASIC:
        return False
    return of_library(kind)


def _of_module(name: str, module: nn.Module) -> list[Holder]:
    if any(parameter is not None and is_lazy(parameter) for parameter in module._parameters.values()):
        return []  # its first forward makes something else of it
    held = [
        Holder(name, module, functools.partial(_registered, registry), functools.partial(_refill, registry))
        for registry in (module._parameters, module._buffers, module._modules)
    ]
    kind = type(module)
    if kind.__module__.startswith(WRAPPERS):
        return held
    seen: dict[str, Any] = {"forward": vars(module).get("forward")}
    if not kind.__module__.startswith("torch."):
        seen |= {"forward()": kind.forward, "class": kind}
    return [*held, _attributes(name, module, skip=_INTERNAL), _hooks(name, module), _fixed(name, module, seen)]


_INTERNAL = frozenset(vars(nn.Module())) - {"training"}
"""What every module has: its registries and its hooks."""


_HOOKS = tuple(name for name in vars(nn.Module()) if name.startswith(("_forward_", "_backward_")) and "hooks" in name)


def _hooks(name: str, module: nn.Module) -> Holder:
    """The hooks of a module: a model that sets hooks and notes that it has would set them twice if only the note went.

    What a registry says of a hook goes with it; the registries themselves stay, as handles know them.
    """

    def read() -> dict[Hashable, Any]:
        inside = vars(module)
        return {Hook(kind, key): hook for kind in _HOOKS for key, hook in (inside.get(kind) or {}).items()}

    def write(saved: dict[Hashable, Any]) -> None:
        for kind in _HOOKS:
            registry = vars(module).get(kind)
            if registry is not None:
                mine: dict[Hashable, Any] = {
                    cast("Hook", key).number: hook for key, hook in saved.items() if cast("Hook", key).registry == kind
                }
                _refill(registry, mine)

    return Holder(name, module, read, write)


def _of_function(function: types.FunctionType) -> list[Holder]:
    """What a function closes over, its defaults, and the globals that its code mentions."""
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    scopes: dict[int, tuple[dict[str, Any], list[str]]] = {}
    for scope, name in places_of(function):
        scopes.setdefault(id(scope), (scope, []))[1].append(name)
    return [
        Holder(function.__name__, function, lambda: cells_of(function), functools.partial(_fill, function)),
        *(_of_scope(function, scope, names) for scope, names in scopes.values()),
        _fixed(function.__name__, function, dict(enumerate(defaults))),
    ]


def _of_scope(function: types.FunctionType, scope: dict[str, Any], names: list[str]) -> Holder:
    return Holder(
        str(scope.get("__name__", "")),
        function,
        lambda: {name: scope[name] for name in names if name in scope},
        lambda saved: scope.update({str(name): value for name, value in saved.items()}),
    )


def _of_container(name: str, value: Any) -> list[Holder]:
    """The entries of a container, and what its class keeps beside them."""
    base = container_of(type(value))
    beside = [_attributes(name, value)] if type(value).__dictoffset__ else []
    if base is tuple:
        return [_fixed(name, value, entries_of(value)), *beside]
    return [Holder(name, value, functools.partial(entries_of, value), functools.partial(_refill, value)), *beside]


def _of_object(name: str, value: Any) -> list[Holder]:
    slots = [
        slot
        for kind in type(value).__mro__
        for slot in _names(vars(kind).get("__slots__", ()))
        if type(vars(kind).get(slot)) is types.MemberDescriptorType
    ]
    held = [_attributes(name, value)] if type(value).__dictoffset__ else []
    if slots:
        held.append(_of_slots(name, value, slots))
    if held and callable(value):
        held.append(_fixed(name, value, {"()": type(value).__call__, "class": type(value)}))
    return held


def _of_slots(name: str, value: Any, slots: list[str]) -> Holder:
    def read() -> dict[Hashable, Any]:
        held: dict[Hashable, Any] = {}
        for slot in slots:
            try:
                held[slot] = object.__getattribute__(value, slot)
            except AttributeError:  # not set yet
                continue
        return held

    def write(saved: dict[Hashable, Any]) -> None:
        for slot, was in saved.items():
            object.__setattr__(value, str(slot), was)

    return Holder(name, value, read, write)


def _of_class(kind: type) -> Holder:
    foreign = of_library(kind)

    def read() -> dict[Hashable, Any]:
        inside = {name: value for name, value in vars(kind).items() if name[:2] != "__"}
        if foreign:  # behind its other attributes lies the rest of the library
            return {name: value for name, value in inside.items() if carries(value)}
        return {name: value for name, value in inside.items() if not issubclass(type(value), _DESCRIBES)}

    def write(saved: dict[Hashable, Any]) -> None:
        for name in read().keys() - saved.keys():
            delattr(kind, str(name))
        for name, value in saved.items():
            setattr(kind, str(name), value)

    return Holder(kind.__name__, kind, read, write)


_DESCRIBES = (types.FunctionType, classmethod, staticmethod, property, types.MemberDescriptorType)


def _attributes(name: str, owner: Any, skip: frozenset[str] = frozenset()) -> Holder:
    held = names_in(owner)

    def read() -> dict[Hashable, Any]:
        return {key: value for key, value in entries_of(held).items() if key not in skip}

    def write(saved: dict[Hashable, Any]) -> None:
        for key in read().keys() - saved.keys():
            del held[str(key)]
        held.update({str(key): value for key, value in saved.items()})

    return Holder(name, owner, read, write)


def _registered(registry: dict[str, Any]) -> dict[Hashable, Any]:
    return {Registered(name): value for name, value in dict(registry).items()}


def _fixed(name: str, owner: Any, values: dict[Any, Any]) -> Holder:
    """Hold what nothing can be put in the place of, but may itself hold something."""
    return Holder(name, owner, lambda: values, lambda saved: None)


def _fill(function: types.FunctionType, saved: dict[Hashable, Any]) -> None:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if name in saved:
            cell.cell_contents = saved[name]


def _refill(container: Any, saved: dict[Hashable, Any]) -> None:
    """Put back what stood in a container, past what its class makes of being written to."""
    base: Any = container_of(type(container))
    base.clear(container)
    if base is set:
        base.update(container, saved)
    elif base in (list, deque):
        base.extend(container, saved.values())
    else:
        for key, value in saved.items():
            base.__setitem__(container, key, value)


def _own(kind: type) -> bool:
    """Tell whether objects of a class are looked into: not those of torch and the standard library, mostly."""
    modules = [each.__module__ for each in kind.__mro__]
    if issubclass(kind, types.ModuleType):  # of modules only the names count that code mentions
        return False
    if any(module.startswith(WRAPPERS) for module in modules) or issubclass(kind, Tensor) or hasattr(kind, "__next__"):
        return False
    return modules[0].split(".")[0] not in FOREIGN or modules[0].startswith(LOOKED_INTO)


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)
