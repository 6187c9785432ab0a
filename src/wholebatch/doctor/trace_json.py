"""Traces as JSON, so that they can travel between processes: reading one runs nothing, whoever wrote it."""

from __future__ import annotations

import base64
import ctypes
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wholebatch.doctor import trace
from wholebatch.doctor.trace import Event, Optimizer, Trace, TracedTerm
from wholebatch.verify.source_line import Site

CLASSES: dict[str, type[Any]] = {kind.__name__: kind for kind in (Trace, Optimizer, TracedTerm, Site, Event)}
CLASSES |= {name: kind for name, kind in vars(trace).items() if isinstance(kind, type) and issubclass(kind, Event)}
DTYPES = {"float32": torch.float32, "float64": torch.float64}


def written(told: Trace) -> str:
    """Return a trace as JSON."""
    return json.dumps(plain(told))


def read(text: str) -> Trace:
    """Return the trace that `written` wrote.

    Raises:
        ValueError: for anything else.
    """
    told = value_of(json.loads(text))
    if not isinstance(told, Trace):
        raise ValueError(f"This is {type(told).__name__}, no trace of the doctor.")
    return told


def plain(value: Any) -> Any:
    """Return a value in JSON's own kinds; what JSON does not know is an object with one key, its kind."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"class": [type(value).__name__, fields]}
    if isinstance(value, Tensor):
        held = value.detach().cpu().contiguous()
        content = ctypes.string_at(held.data_ptr(), held.numel() * held.element_size())
        return {"tensor": [str(held.dtype).removeprefix("torch."), base64.b64encode(content).decode()]}
    if isinstance(value, frozenset):
        return {"set": sorted(value)}
    if isinstance(value, tuple):
        return {"tuple": [plain(part) for part in value]}
    if isinstance(value, dict):
        return {"map": [[key, plain(part)] for key, part in value.items()]}
    return [plain(part) for part in value] if isinstance(value, list) else value


def value_of(written_value: Any) -> Any:
    """Return the value that `plain` wrote."""
    if isinstance(written_value, list):
        return [value_of(part) for part in written_value]
    if not isinstance(written_value, dict):
        return written_value
    ((kind, content),) = written_value.items()
    if kind not in READERS or (kind == "class" and content[0] not in CLASSES):
        raise ValueError(f"{kind!r} is no kind of value in a trace of the doctor.")
    return READERS[kind](content)


def _tensor(content: Any) -> Tensor:
    dtype, text = content
    raw = base64.b64decode(text)
    # A copy of its own: the buffer under `frombuffer` can't be written to.
    return torch.frombuffer(bytearray(raw), dtype=DTYPES[dtype]) if raw else torch.empty(0)


def _record(content: Any) -> Any:
    name, fields = content
    return CLASSES[name](**{key: value_of(part) for key, part in fields.items()})


READERS: dict[str, Callable[[Any], Any]] = {
    "class": _record,
    "tensor": _tensor,
    "set": frozenset,
    "tuple": lambda content: tuple(value_of(part) for part in content),
    "map": lambda content: {key: value_of(part) for key, part in content},
}
"""Makes a value of what stands under each kind; reading runs nothing else, whoever wrote the trace."""
