"""What holds other things by name, and how the same kind of object is made of other contents.

An object may know more than it was given: the number of its tokens, a cache, a property read before. All that was
computed from the rows of the whole batch, and would be wrong for some of them. So an object around other rows is made
by its own class, which computes these anew; what is not made that way carries nothing but what it was given. Where
neither is possible, it is refused. The object that was given is only read.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import types
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from wholebatch.batch.leaf_kinds import SCALARS, UNABLE, LeafKind, is_same, kind_of, slices_itself
from wholebatch.errors import SplitError

Fields: TypeAlias = "list[tuple[str, Any]]"

NO_RECORDS = (
    *SCALARS,
    Tensor,
    nn.Module,
    type,
    torch.Generator,
    torch.distributions.Distribution,
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    types.ModuleType,
)
CONSTANT = (str, bool, type(None), torch.device, torch.dtype)


def fields_of(value: Any, outermost: bool) -> Fields | None:
    """Return the contents of what gives them names; None for anything else.

    Mappings, named tuples, dataclasses, classes of attrs and pydantic, namespaces; as the outermost object also one of
    any class whose attributes are what its constructor takes. A dataclass that can be sliced is cut by its own slices.
    """
    if isinstance(value, Mapping):
        return [(str(key), item) for key, item in value.items()]
    if is_named_tuple(value):
        return list(zip(value._fields, value, strict=True))
    names = _declared(type(value))
    if names is not None and not isinstance(value, type):
        return None if slices_itself(value) else [(name, getattr(value, name, None)) for name in names]
    if isinstance(value, types.SimpleNamespace) or (outermost and _is_record(value)):
        taken = set(_takes(value).values())
        return [(name, item) for name, item in attributes_of(value).items() if name in taken]
    return None


def is_named_tuple(value: Any) -> bool:
    """Tell whether a value is a named tuple, whose fields are no rows."""
    return isinstance(value, tuple) and hasattr(value, "_fields")


def attributes_of(value: Any) -> dict[str, Any]:
    """Return what an object holds itself, in its ``__dict__`` or its slots."""
    slots = [name for each in type(value).__mro__ for name in _slots(each) if hasattr(value, name)]
    return {**{name: getattr(value, name) for name in slots}, **getattr(value, "__dict__", {})}


def remade(value: Any, parts: list[Any], names: Sequence[str], all_rows: bool) -> Any:
    """Return an object like ``value`` around other contents, in the order of `fields_of`.

    Args:
        value: what holds the old contents; left alone.
        parts: the new contents.
        names: theirs.
        all_rows: whether they stand for all rows, so that whatever else it knows stays true.

    Raises:
        SplitError: if its class does not let itself be made of fewer rows.
    """
    if type(value) is dict:
        return dict(zip(value, parts, strict=True))
    if is_named_tuple(value):
        return type(value)._make(parts)
    if isinstance(value, Mapping):
        return _remade_mapping(value, dict(zip(value, parts, strict=True)), all_rows)
    return _remade_record(value, dict(zip(names, parts, strict=True)), all_rows)


def _remade_mapping(value: Mapping[Any, Any], items: dict[Any, Any], all_rows: bool) -> Any:
    if not isinstance(value, MutableMapping) or attributes_of(value):
        kind: Any = type(value)
        by_name = [lambda: kind(**items)] if all(isinstance(key, str) for key in items) else []
        by_items = [lambda: kind(items)]
        for make in by_name + by_items if dataclasses.is_dataclass(kind) else by_items + by_name:
            new = _tried(make)
            if isinstance(new, kind) and is_same(dict(new), items):
                return _with_constants(new, value)
        if not all_rows or not isinstance(value, MutableMapping):
            _refuse(value, f"{kind.__name__}({{...}}) does not hold what it is given", "dict(batch)")
    bare: Any = copy.copy(value)  # it knows nothing of rows: a default factory, an order
    for key, item in items.items():
        bare[key] = item
    return bare


def _remade_record(value: Any, contents: dict[str, Any], all_rows: bool) -> Any:
    """Make a record by its constructor; else, if its fields are all it has, by setting them."""
    takes = _takes(value)
    new = _constructed(value, takes, contents)
    if new is None and all_rows:
        return _with_fields(copy.copy(value), contents)
    computed = {name: item for name, item in contents.items() if name not in takes.values()}
    if new is not None:
        # What has rows is cut, and not computed anew: advantages normalised over the whole batch stay so.
        rows = {name: item for name, item in computed.items() if item is not getattr(value, name, None)}
        return _with_constants(_with_fields(new, rows), value)
    unsure = [name for name, item in computed.items() if _is_number(item)]
    if _declared(type(value)) is None or unsure:
        more = f", so that {unsure[0]!r} cannot be computed anew" if unsure else ""
        _refuse(value, f"its constructor does not take {', '.join(contents)} and keep them as they are{more}", "a dict")
    bare = getattr(type(value), "model_construct", None)
    return _with_fields(object.__new__(type(value)), contents) if bare is None else bare(**contents)


def _constructed(value: Any, takes: Mapping[str, str], contents: Mapping[str, Any]) -> Any:
    """Call the constructor; None if it wants more than is kept, or does not keep what it is given."""
    if not takes or not all(name in contents for name in takes.values()):
        return None
    new = _tried(lambda: type(value)(**{argument: contents[name] for argument, name in takes.items()}))
    kept = new is not None and all(is_same(getattr(new, name, None), contents[name]) for name in takes.values())
    return new if kept else None


def _with_fields(new: Any, contents: Mapping[str, Any]) -> Any:
    for name, item in contents.items():
        object.__setattr__(new, name, item)  # works for frozen ones too
    return new


def _with_constants(new: Any, value: Any) -> Any:
    """Keep what was set later and cannot depend on rows: the name of a task, a switch."""
    for name, item in getattr(value, "__dict__", {}).items():
        if isinstance(item, CONSTANT) and not hasattr(new, name):
            object.__setattr__(new, name, item)
    return new


def _declared(kind: type) -> list[str] | None:
    """The names of the fields that a class declares; None if it declares none."""
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    if isinstance(attrs := getattr(kind, "__attrs_attrs__", None), tuple):
        return [attribute.name for attribute in attrs]
    fields = getattr(kind, "model_fields", None)
    return list(fields) if isinstance(fields, dict) and hasattr(kind, "model_validate") else None


def _takes(value: Any) -> dict[str, str]:
    """Which attribute each argument of the constructor is; an argument that is none stands for itself."""
    kind = type(value)
    aliases = {_argument_of(each): each.name for each in getattr(kind, "__attrs_attrs__", ()) if each.init}
    parameters = _tried(lambda: list(inspect.signature(kind).parameters.values()))
    if parameters is None or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        names = _declared(kind) or list(attributes_of(value))
        return {name: name for name in names}
    return {each.name: aliases.get(each.name, each.name) for each in parameters if each.kind is not each.VAR_POSITIONAL}


def _argument_of(attribute: Any) -> str:
    """The name of an argument, which attrs writes without the underscore of a private attribute."""
    return str(getattr(attribute, "alias", None) or attribute.name.lstrip("_"))


def _is_record(value: Any) -> bool:
    """Whether an object of any class holds tensors or arrays, and all that its constructor takes."""
    if isinstance(value, (*NO_RECORDS, list, tuple)) or type(kind_of(value)) is not LeafKind:
        return False
    held = attributes_of(value)
    takes = _takes(value).values() if held else ()
    return all(name in held for name in takes) and any(kind_of(held[name]).shape(held[name]) for name in takes)


def _is_number(item: Any) -> bool:
    number = isinstance(item, (int, float)) and not isinstance(item, bool)
    return number or (isinstance(item, Tensor) and item.dim() == 0)


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(name for name in slots if not name.startswith("__"))


def _tried(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except UNABLE:
        return None


def _refuse(value: Any, why: str, instead: str) -> None:
    name = type(value).__name__
    raise SplitError(
        f"A {name} of some of its rows cannot be made: {why}. What else it knows may be of all rows, so it is not "
        f"copied. Give {instead}, or samples with collate=, or cut it yourself: wb.Window([...]) of {name} objects."
    )
