"""What can hold values that a forward moves: attributes, containers, closures, globals; to be read and put back."""

from __future__ import annotations

import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

ENTRIES = 10_000
"""A container of more entries is data, not state."""

WRAPPERS = ("torch.distributed", "torch.nn.parallel", "torch._dynamo", "torch.utils", "torch.fx", "torch._inductor")
"""Where torch keeps what it knows of its own: to be put back by nobody."""

FOREIGN = sys.stdlib_module_names - {"types", "argparse", "collections", "__main__"} | {"torch", "numpy", "builtins"}
"""Whose objects are not looked into, unless they are asked for below."""

LOOKED_INTO = ("torch.nn", "torch.optim", "torch.amp")


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


def holders_of(name: str, value: Any) -> list[Holder]:
    """List the holders that a value is made of: none for a number, a text, a tensor, or what nothing is known of."""
    if issubclass(type(value), nn.Module):  # a weak proxy only says that it is one
        return _of_module(name, value)
    if isinstance(value, types.MethodType):
        return [_fixed(name, value, {"": value.__self__, "()": value.__func__})]
    if isinstance(value, types.FunctionType):
        return _of_function(value)
    if isinstance(value, functools.partial):
        return [_fixed(name, value, {"": value.func, "args": value.args, "keywords": value.keywords})]
    if isinstance(value, (dict, list, deque, set, tuple)):
        return [_of_container(name, value)] if len(value) <= ENTRIES else []
    if isinstance(value, type):
        return [_of_class(each) for each in value.__mro__ if _own(each)] if _own(value) else []
    return _of_object(name, value) if _own(type(value)) else []


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
    hooks = {**module._forward_hooks, **module._forward_pre_hooks}
    seen = {"forward": vars(module).get("forward"), **{f"hook {i}": hook for i, hook in enumerate(hooks.values())}}
    if not kind.__module__.startswith("torch."):
        seen |= {"forward()": kind.forward, "class": kind}
    return [*held, _attributes(name, module, skip=_INTERNAL), _fixed(name, module, seen)]


_INTERNAL = frozenset(vars(nn.Module()))
"""What every module has: its registries, its hooks, its mode."""


def _of_function(function: types.FunctionType) -> list[Holder]:
    """What a function closes over, its defaults, and the globals that its code mentions."""
    code, scope = function.__code__, function.__globals__
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    names = [name for name in dict.fromkeys(global_names(code)) if name in scope]
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return [
        Holder(function.__name__, function, lambda: _contents(cells), lambda saved: _fill(cells, saved)),
        Holder(
            function.__module__ or "",
            function,
            lambda: {name: scope[name] for name in names if name in scope},
            lambda saved: scope.update({str(name): value for name, value in saved.items()}),
        ),
        _fixed(function.__name__, function, dict(enumerate(defaults))),
    ]


def global_names(code: types.CodeType) -> Iterator[str]:
    """List the names that a function's code, and functions inside of it, look up outside of themselves."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from global_names(constant)


def _of_container(name: str, value: Any) -> Holder:
    if isinstance(value, dict):
        return Holder(name, value, lambda: dict(value), functools.partial(_refill, value))
    if isinstance(value, set):
        return Holder(name, value, lambda: dict.fromkeys(value), functools.partial(_refill, value))
    if isinstance(value, tuple):
        return _fixed(name, value, dict(enumerate(value)))

    def write(saved: dict[Hashable, Any]) -> None:
        value.clear()
        value.extend(saved.values())

    return Holder(name, value, lambda: dict(enumerate(value)), write)


def _of_object(name: str, value: Any) -> list[Holder]:
    slots = [
        slot
        for kind in type(value).__mro__
        for slot in _names(vars(kind).get("__slots__", ()))
        if isinstance(vars(kind).get(slot), types.MemberDescriptorType)
    ]
    held = [_attributes(name, value)] if hasattr(value, "__dict__") else []
    if slots:
        held.append(_of_slots(name, value, slots))
    if held and callable(value):
        held.append(_fixed(name, value, {"()": type(value).__call__, "class": type(value)}))
    return held


def _of_slots(name: str, value: Any, slots: list[str]) -> Holder:
    def write(saved: dict[Hashable, Any]) -> None:
        for slot, was in saved.items():
            object.__setattr__(value, str(slot), was)

    return Holder(name, value, lambda: {slot: getattr(value, slot) for slot in slots if hasattr(value, slot)}, write)


def _of_class(kind: type) -> Holder:
    def read() -> dict[Hashable, Any]:
        inside = vars(kind).items()
        return {name: value for name, value in inside if name[:2] != "__" and not isinstance(value, _DESCRIBES)}

    def write(saved: dict[Hashable, Any]) -> None:
        for name in read().keys() - saved.keys():
            delattr(kind, str(name))
        for name, value in saved.items():
            setattr(kind, str(name), value)

    return Holder(kind.__name__, kind, read, write)


_DESCRIBES = (types.FunctionType, classmethod, staticmethod, property, types.MemberDescriptorType)


def _attributes(name: str, owner: Any, skip: frozenset[str] = frozenset()) -> Holder:
    held = vars(owner)

    def read() -> dict[Hashable, Any]:
        return {key: value for key, value in dict(held).items() if key not in skip}

    def write(saved: dict[Hashable, Any]) -> None:
        for key in read().keys() - saved.keys():
            del held[str(key)]
        held.update(saved)

    return Holder(name, owner, read, write)


def _registered(registry: dict[str, Any]) -> dict[Hashable, Any]:
    return {Registered(name): value for name, value in dict(registry).items()}


def _fixed(name: str, owner: Any, values: dict[Any, Any]) -> Holder:
    """Hold what nothing can be put in the place of, but may itself hold something."""
    return Holder(name, owner, lambda: values, lambda saved: None)


def _contents(cells: dict[str, Any]) -> dict[Hashable, Any]:
    held: dict[Hashable, Any] = {}
    for name, cell in cells.items():
        try:
            held[name] = cell.cell_contents
        except ValueError:  # not bound yet
            continue
    return held


def _fill(cells: dict[str, Any], saved: dict[Hashable, Any]) -> None:
    for name, value in saved.items():
        cells[str(name)].cell_contents = value


def _refill(container: Any, saved: dict[Hashable, Any]) -> None:
    container.clear()
    container.update(saved)


def _own(kind: type) -> bool:
    """Tell whether objects of a class are looked into: not those of torch and the standard library, mostly."""
    modules = [each.__module__ for each in kind.__mro__]
    if any(module.startswith(WRAPPERS) for module in modules) or issubclass(kind, Tensor) or hasattr(kind, "__next__"):
        return False
    return modules[0].split(".")[0] not in FOREIGN or modules[0].startswith(LOOKED_INTO)


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)
