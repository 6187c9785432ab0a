"""Micro-batches of one structure put side by side, by the plainest rules: the other voice beside `batch.join`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


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
    first, whole = parts[0], rule.whole
    if path in whole or any(path.startswith(f"{name}.") for name in whole):
        return first
    if any(type(part) is not type(first) for part in parts):
        raise Unlike(path)
    if isinstance(first, Tensor):
        return _concatenated(parts, rule, path)
    if isinstance(first, Mapping):
        return _mapped(parts, rule, path)
    if isinstance(first, tuple) or (isinstance(first, list) and not _is_per_row(parts)):
        return _entries(parts, rule, path)
    if isinstance(first, list):
        return [entry for part in parts for entry in part]
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        return _fields(parts, rule, path)
    if (first is None or isinstance(first, (str, int, float, bool))) and all(part == first for part in parts):
        return first
    raise Unlike(path)


def taken(batch: Any, index: Sequence[int], rows: int, outermost: bool = True) -> Any:
    """Return rows of a batch by the plainest rule: what is as long as the batch is cut, a list by its entries.

    Raises:
        Unlike: for a class that is not known.
    """
    if isinstance(batch, Tensor):
        return batch[list(index)] if batch.dim() and batch.shape[0] == rows else batch
    if isinstance(batch, Mapping):
        return dict(zip(batch, (taken(value, index, rows, False) for value in batch.values()), strict=True))
    if isinstance(batch, (list, tuple)):
        structure = isinstance(batch, tuple) and (outermost or hasattr(batch, "_fields"))
        if len(batch) == rows and not structure:
            return [batch[place] for place in index]
        parts = [taken(value, index, rows, False) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    if batch is None or isinstance(batch, (str, int, float, bool)):
        return batch
    raise Unlike(type(batch).__name__)


def rows_in(batch: Any, whole: Sequence[str] = ()) -> int | None:
    """Return the first dimension of the first tensor of a batch that has one; the length of a list without tensors."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.dim() else None
    if isinstance(batch, Mapping):
        inside: Any = [value for name, value in batch.items() if name not in whole]
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        inside = [getattr(batch, field.name, None) for field in dataclasses.fields(batch) if field.name not in whole]
    elif isinstance(batch, (list, tuple)):
        inside = [value for place, value in enumerate(batch) if str(place) not in whole]
    else:
        return None
    counts = [rows_in(value) for value in inside]
    found = next((count for count in counts if count is not None), None)
    return len(batch) if found is None and isinstance(batch, list) else found


def _concatenated(parts: Sequence[Tensor], rule: _Rule, path: str) -> Tensor:
    first = parts[0]
    alike = all(part.shape[1:] == first.shape[1:] and part.dtype == first.dtype for part in parts)
    if first.is_nested or first.layout is not torch.strided or not alike:
        raise Unlike(path)
    if not first.dim() or any(len(part) != rows for part, rows in zip(parts, rule.rows, strict=True)):
        if all(part.shape == first.shape and bool((part == first).all()) for part in parts):
            return first
        raise Unlike(path)
    return torch.cat([part.to(first.device) for part in parts])


def _mapped(parts: Sequence[Any], rule: _Rule, path: str) -> Any:
    first = parts[0]
    if any(list(part) != list(first) for part in parts):
        raise Unlike(path)
    joined = {name: _glued([part[name] for part in parts], rule, _below(path, name)) for name in first}
    if type(first) is dict:
        return joined
    try:
        return type(first)(joined)
    except (TypeError, ValueError, KeyError, AttributeError) as error:  # a class that is not made of what it holds
        raise Unlike(path) from error


def _entries(parts: Sequence[Any], rule: _Rule, path: str) -> Any:
    first = parts[0]
    if any(len(part) != len(first) for part in parts):
        raise Unlike(path)
    joined = [_glued([part[place] for part in parts], rule, _below(path, place)) for place in range(len(first))]
    if hasattr(first, "_fields"):
        return type(first)(*joined)
    return joined if type(first) is list else type(first)(joined)


def _fields(parts: Sequence[Any], rule: _Rule, path: str) -> Any:
    first = parts[0]
    names = [field.name for field in dataclasses.fields(first) if field.init]
    joined = {name: _glued([getattr(part, name) for part in parts], rule, _below(path, name)) for name in names}
    return type(first)(**joined)  # what it works out for itself, it works out anew


def _is_per_row(parts: Sequence[list[Any]]) -> bool:
    """Tell whether lists hold no tensor: one entry a row, such as names."""
    return not any(isinstance(entry, (Tensor, Mapping, list, tuple)) for part in parts for entry in part)


def _below(path: str, name: Any) -> str:
    return f"{path}.{name}" if path else str(name)
