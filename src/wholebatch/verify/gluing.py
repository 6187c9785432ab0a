"""Micro-batches of one structure put side by side, by the plainest rules: the other voice beside `batch.join`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

PLAIN = (str, int, float, bool, type(None))
"""Classes whose values are kept where all micro-batches have the same."""


class Unlike(Exception):
    """Micro-batches that are not parts of one batch by any plain rule."""


def glued(parts: Sequence[Any], whole: Sequence[str] = ()) -> Any:
    """Return one batch of several: tensors concatenated, lists of rows chained, what is the same in all kept.

    What has another number of entries than the rest may point into its own micro-batch, as offsets and edges do, so it
    is only kept.

    Raises:
        Unlike: where that is not plainly possible.
    """
    return _glued(parts, _Rule(tuple(whole), tuple(rows_in(part, whole) for part in parts)), "")


@dataclasses.dataclass(frozen=True)
class _Rule:
    """What is known of the parts: names of what has no rows, and how many rows each has."""

    whole: tuple[str, ...]
    rows: tuple[int | None, ...]


def _glued(parts: Sequence[Any], rule: _Rule, path: str) -> Any:
    first = parts[0]
    if any(f"{path}.".startswith(f"{name}.") for name in rule.whole):
        return first
    if any(type(part) is not type(first) for part in parts):
        raise Unlike(f"{path!r} is of several classes")
    if isinstance(first, Tensor):
        return _concatenated(parts, rule, path)
    if isinstance(first, Mapping):
        return _mapped(parts, rule, path)
    if isinstance(first, (list, tuple)):
        return _entries(parts, rule, path)
    return _fields(parts, rule, path) if _is_record(first) else _kept(parts, path)


def _concatenated(parts: Sequence[Tensor], rule: _Rule, path: str) -> Tensor:
    first = parts[0]
    alike = all(part.shape[1:] == first.shape[1:] and part.dtype == first.dtype for part in parts)
    if first.is_nested or first.layout is not torch.strided or not alike:
        raise Unlike(f"{path!r} has several shapes or kinds of numbers, or no plain layout")
    if first.dim() and all(len(part) == rows for part, rows in zip(parts, rule.rows, strict=True)):
        return torch.cat([part.to(first.device) for part in parts])
    if all(part.shape == first.shape and bool((part == first).all()) for part in parts):
        return first
    raise Unlike(f"{path!r} has another number of entries than there are rows, and not the same values")


def _mapped(parts: Sequence[Any], rule: _Rule, path: str) -> Any:
    first = parts[0]
    if any(list(part) != list(first) for part in parts):
        raise Unlike(f"{path!r} has other keys in some micro-batches")
    joined = {name: _glued([part[name] for part in parts], rule, _below(path, name)) for name in first}
    if type(first) is dict:
        return joined
    try:
        return type(first)(joined)
    except (TypeError, ValueError, KeyError, AttributeError) as error:  # a class that is not made of what it holds
        raise Unlike(f"{path!r} is of {type(first).__name__}, which can't be made of a dict") from error


def _entries(parts: Sequence[Any], rule: _Rule, path: str) -> Any:
    first = parts[0]
    if isinstance(first, list) and _is_per_row(parts):
        return [entry for part in parts for entry in part]
    if any(len(part) != len(first) for part in parts):
        raise Unlike(f"{path!r} has other lengths in some micro-batches")
    joined = [_glued([part[place] for part in parts], rule, _below(path, place)) for place in range(len(first))]
    return joined if type(first) is list else _remade(first, joined)


def _fields(parts: Sequence[Any], rule: _Rule, path: str) -> Any:
    first = parts[0]
    names = [field.name for field in dataclasses.fields(first) if field.init]
    joined = {name: _glued([getattr(part, name) for part in parts], rule, _below(path, name)) for name in names}
    return type(first)(**joined)  # what it works out for itself, it works out anew


def _kept(parts: Sequence[Any], path: str) -> Any:
    first = parts[0]
    if isinstance(first, PLAIN) and all(part == first for part in parts):
        return first
    raise Unlike(f"{path!r} is of {type(first).__name__}, and not known to be the same in all micro-batches")


def taken(batch: Any, index: Sequence[int], rows: int, outermost: bool = True) -> Any:
    """Return rows of a batch by the plainest rule: what is as long as the batch is cut, a list by its entries.

    Raises:
        Unlike: for a class that is not known.
    """
    if isinstance(batch, Tensor):
        return batch[list(index)] if batch.dim() and batch.shape[0] == rows else batch
    if isinstance(batch, Mapping):
        return {name: taken(value, index, rows, False) for name, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        structure = isinstance(batch, tuple) and (outermost or hasattr(batch, "_fields"))
        if len(batch) == rows and not structure:
            return [batch[place] for place in index]
        return _remade(batch, [taken(value, index, rows, False) for value in batch])
    if isinstance(batch, PLAIN):
        return batch
    raise Unlike(f"a {type(batch).__name__} can't be cut by a plain rule")


def rows_in(batch: Any, whole: Sequence[str] = ()) -> int | None:
    """Return the first dimension of the first tensor of a batch that has one; the length of a list without tensors."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.dim() else None
    counts = [rows_in(value) for name, value in _named(batch) if name not in whole]
    found = next((count for count in counts if count is not None), None)
    return len(batch) if found is None and isinstance(batch, list) else found


def _named(batch: Any) -> list[tuple[Any, Any]]:
    """List what one level of a nest holds, by the names that `whole` knows it by."""
    if isinstance(batch, Mapping):
        return list(batch.items())
    if _is_record(batch):
        return [(field.name, getattr(batch, field.name, None)) for field in dataclasses.fields(batch)]
    if isinstance(batch, (list, tuple)):
        return [(str(place), value) for place, value in enumerate(batch)]
    return []


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _remade(like: Any, entries: list[Any]) -> Any:
    """Make a sequence of the class of another, a NamedTuple too."""
    return type(like)(*entries) if hasattr(like, "_fields") else type(like)(entries)


def _is_per_row(parts: Sequence[list[Any]]) -> bool:
    """Tell whether lists hold no tensor: one entry a row, such as names."""
    return not any(isinstance(entry, (Tensor, Mapping, list, tuple)) for part in parts for entry in part)


def _below(path: str, name: Any) -> str:
    return f"{path}.{name}" if path else str(name)
