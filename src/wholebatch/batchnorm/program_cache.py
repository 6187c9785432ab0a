"""The programs of a model: captured once for each form of call, kept as long as the model lives."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from wholebatch.batchnorm.capture import CaptureError, capture
from wholebatch.batchnorm.model_call import ModelCall, varying
from wholebatch.batchnorm.operations import OPERATIONS, Reader
from wholebatch.batchnorm.partition import Program, cut
from wholebatch.batchnorm.rematerialize import Value, least_bytes
from wholebatch.batchnorm.verify_program import compare

CAPACITY = 16
"""How many programs of a model are kept; a batch of more forms of calls is captured again."""

_KEPT: WeakKeyDictionary[nn.Module, OrderedDict[Hashable, Program | None]] = WeakKeyDictionary()
"""A memory of what is costly to find out again. Nothing depends on it but time."""

_CAPTURING = threading.RLock()
"""One thread at a time: capturing has the whole process's warnings, logs and modules for a while."""


def programs_for(
    model: nn.Module,
    calls: Sequence[ModelCall],
    operations: Mapping[Any, Reader] = OPERATIONS,
    take: Callable[[Any], Any] = lambda leaf: leaf,
) -> list[Program]:
    """Find or make a program for each call.

    Calls of the same sizes share one. Where sizes vary, one program for all sizes above 1 is tried first, because
    the next batch will bring others.

    Args:
        model: the module itself.
        calls: one for each micro-batch; of their leaves only those of examples are looked at.
        operations: those in which rows may meet.
        take: fetches a leaf of an example from where it waits.

    Raises:
        CaptureError: if the model cannot be captured, or its calls meet at different operations.
    """
    state = (state_of(model), tuple(operations))

    def make(call: ModelCall, free: dict[tuple[int, int], str]) -> Program:
        return _made(model, call.map(take), free, operations)

    with _CAPTURING:
        kept = _KEPT.setdefault(model, OrderedDict())
        found = [_program(kept, call, calls, state, make) for call in calls]
        while len(kept) > CAPACITY:
            kept.popitem(last=False)
    if len({program.signature for program in found}) > 1:
        counts = sorted({len(program.couplings) for program in found})
        raise CaptureError(
            f"The micro-batches take different ways through the model: rows meet {counts} times in them."
        )
    return found


def state_of(model: nn.Module) -> Hashable:
    """Everything about a model that its code may have read while it was captured, but no value of a tensor."""
    plain = (int, float, bool, str, type(None))
    return tuple(
        (
            name,
            type(module),
            *((key, value) for key, value in vars(module).items() if isinstance(value, plain)),
            *((key, p.requires_grad, p.dtype, p.device) for key, p in module._parameters.items() if p is not None),
        )
        for name, module in model.named_modules()
    )


Make = Callable[[ModelCall, "dict[tuple[int, int], str]"], Program]


def _program(
    kept: OrderedDict[Hashable, Program | None],
    call: ModelCall,
    calls: Sequence[ModelCall],
    state: Hashable,
    make: Make,
) -> Program:
    fixed = (state, call.form, call.sizes)
    if fixed not in kept:
        serves_all = _for_all_sizes(kept, call, calls, state, make)
        if serves_all is not None:
            return serves_all
    program = kept.get(fixed)
    if program is None:
        program = kept[fixed] = make(call, {})
    kept.move_to_end(fixed)
    return program


def _for_all_sizes(
    kept: OrderedDict[Hashable, Program | None],
    call: ModelCall,
    calls: Sequence[ModelCall],
    state: Hashable,
    make: Make,
) -> Program | None:
    """Find or make one program for every size above 1 of what varies; None where nothing does, or none can be made."""
    alike = [other for other in calls if other.form == call.form]
    free = varying(alike) if min((size for sizes in call.sizes for size in sizes or ()), default=1) > 1 else {}
    if not free:
        return None
    open_to_all = (state, call.form, tuple(sorted(free)))
    if open_to_all not in kept:
        kept[open_to_all] = _try(make, max(alike, key=lambda other: [sizes or () for sizes in other.sizes]), free)
    return kept[open_to_all]


def _try(make: Make, call: ModelCall, free: dict[tuple[int, int], str]) -> Program | None:
    try:
        return make(call, free)
    except CaptureError:
        return None


def _made(model: nn.Module, call: ModelCall, free: dict[tuple[int, int], str], operations: Any) -> Program:
    program = cut(capture(model, call, free), model, operations)
    sizes = compare(model, call, program)
    crossing = [Value(program.births[name], program.uses[name], size) for name, size in sizes.items()]
    made = [value for value in crossing if value.birth >= 0 and value.last > value.birth]
    return replace(program, few=least_bytes(made, len(program.couplings)))
