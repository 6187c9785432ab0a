"""All that a forward, a loss function or a backward can move besides gradients: remembered, compared and put back."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from wholebatch.model.holders import Holder, Registered, holders_of, is_framework
from wholebatch.model.inspection import ModelInfo
from wholebatch.model.origin import container_of, is_array, is_generator
from wholebatch.model.state import State

KEPT = 2**28
"""How many bytes of tensors are copied; of what is beyond, only a mark is kept that tells whether it has changed."""

LOOKED_AT = 100_000
"""How many places for values are looked through: enough for a large model and what its user keeps around it.

A number of places and not of seconds, so that every rank and every run looks at the same.
"""

WITHIN = 5_000
"""How many of them may lie within objects of libraries (trainers, datasets, tokenizers), the nearest first."""

PLAIN = (int, float, complex, str, bytes, bool, type(None))


class Moved(NamedTuple):
    """Something that is no longer what it was.

    Attributes:
        name: where it is, such as ``head.normaliser`` or ``Criterion.center``.
        kind: "buffer", "parameter", "frozen parameter", "tensor", "array", "value" or "generator".
        shape: of the tensor that is there now.
    """

    name: str
    kind: str
    shape: tuple[int, ...] = ()


class Snapshot:
    """What a model and a loss function hold at one moment, to be compared with and gone back to.

    Where :class:`wholebatch.model.state.State` holds random state and buffers at the cost of a look, this one goes
    through everything that can be reached: parameters, buffers, attributes, containers in them, objects, closures,
        globals
    that the code mentions, attributes of classes, optimizers, generators. It is for the first window and for
    experiments, not for every window. Gradients are left alone.

    Args:
        model_info: of the model and of the modules that run with it.
        functions: the loss function, and others that are called on the way.
        keep: how many bytes of tensors may be copied, small ones first; larger ones are only compared.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> model.calls = 0
        >>> before = Snapshot(ModelInfo(model))
        >>> model.calls += 1
        >>> before.moved()
        [Moved(name='calls', kind='value', shape=())]
        >>> before.restore()
        []
        >>> model.calls
        0
    """

    def __init__(self, model_info: ModelInfo, *functions: Callable[..., Any], keep: int = KEPT) -> None:
        self._random = State(model_info, buffers=False)
        self._held: list[tuple[Holder, dict[Hashable, Any]]] = []
        self._contents: dict[int, _Content] = {}
        roots: list[tuple[str, Any]] = [
            *model_info.model.named_modules(),
            *((type(m).__name__, m) for m in model_info.outside),
        ]
        roots += [(getattr(function, "__name__", type(function).__name__), function) for function in functions]
        self._look(roots)
        self._keep(keep)

    def moved(self) -> list[Moved]:
        """Name everything that is no longer what it was, random state aside."""
        return list(dict.fromkeys((*self._replaced(), *self.changed())))

    def changed(self) -> list[Moved]:
        """Name the tensors, arrays and generators that are what they were but hold something else."""
        return [Moved(each.name, each.kind) for each in self._contents.values() if each.moved()]

    def drew_elsewhere(self) -> bool:
        """Tell whether global draws were made since that are not torch's: NumPy's, or Python's own."""
        return self._random.drew_elsewhere()

    @torch.no_grad()
    def restore(self, draws: bool = True) -> list[Moved]:
        """Go back to the moment of the snapshot; all objects keep their identity.

        Args:
            draws: whether generators of random numbers go back, too, those in the user's hands and the global ones.

        Returns:
            What has moved and was too large to be copied: it stays as it is now.
        """
        if draws:
            self._random.restore_random()  # first, since it needs no memory: what follows compares, and may lack some
        for holder, saved in self._held:
            now = holder.read()
            if now.keys() != saved.keys() or any(now[key] is not value for key, value in saved.items()):
                holder.write(saved)
        contents = [each for each in self._contents.values() if draws or each.kind != "generator"]
        return [Moved(each.name, each.kind) for each in contents if not each.restore()]

    def _look(self, roots: list[tuple[str, Any]]) -> None:
        """Go through all that can be reached, breadth first."""
        found, seen = deque((name, value, False) for name, value in roots), set[int]()
        rooms = {False: LOOKED_AT, True: WITHIN}
        while found:
            name, value, within = found.popleft()
            if id(value) in seen or rooms[within] <= 0:
                continue
            seen.add(id(value))
            inner = is_framework(value) or (within and container_of(type(value)) is not None)
            for holder in holders_of(name, value):
                saved = holder.read()
                self._held.append((holder, saved))
                rooms[within] -= 1 + len(saved)
                deeper = [(key, held) for key, held in saved.items() if not issubclass(type(held), PLAIN)]
                found += [(holder.place(key), held, inner) for key, held in deeper]
                for key, held in deeper:
                    self._note(holder, key, held)

    def _note(self, holder: Holder, key: Hashable, value: Any) -> None:
        if id(value) not in self._contents:
            content = _content_of(holder.place(key), kind_of(holder, key, value), value)
            if content is not None:
                self._contents[id(value)] = content

    @torch.no_grad()
    def _keep(self, room: int) -> None:
        """Copy the tensors that fit: those that belong to the model last, which are the ones seldom moved."""
        for content in sorted(self._contents.values(), key=lambda each: ("parameter" in each.kind, each.size)):
            room -= content.size
            content.save(room >= 0)

    def _replaced(self) -> Iterator[Moved]:
        for holder, saved in self._held:
            now = holder.read()
            for key in dict.fromkeys((*saved, *now)):
                if key not in saved or key not in now or not self._same(saved[key], now[key]):
                    value = now.get(key, saved.get(key))
                    yield Moved(holder.place(key), kind_of(holder, key, value), _shape_of(value))

    def _same(self, was: Any, now: Any) -> bool:
        """Compare what a place held with what it holds; what an object holds itself is compared elsewhere."""
        if was is now or hasattr(type(was), "to_local"):  # in the place of a shard lies, for a while, what was gathered
            return True
        if type(was) is not type(now):
            return False
        if isinstance(was, Tensor):
            content = self._contents.get(id(was))
            return content is not None and content.equals(now)
        if isinstance(was, PLAIN):
            return bool(was == now or (was != was and now != now))
        if isinstance(was, (list, tuple, deque)):
            return len(was) == len(now) and all(map(self._same, was, now))
        if isinstance(was, dict):
            return was.keys() == now.keys() and all(self._same(was[key], now[key]) for key in was)
        return False


def _shape_of(value: Any) -> tuple[int, ...]:
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def kind_of(holder: Holder, key: Hashable, value: Any) -> str:
    """Say in words what lies in a place."""
    if isinstance(value, nn.Parameter):
        return "parameter" if value.requires_grad else "frozen parameter"
    if isinstance(value, Tensor):
        return "buffer" if isinstance(key, Registered) else "tensor"
    return "generator" if is_generator(value) else "array" if is_array(value) else "value"


class _Content(Protocol):
    """What a place holds that changes in itself."""

    name: str
    kind: str
    size: int

    def save(self, whole: bool) -> None: ...

    def moved(self) -> bool: ...

    def equals(self, now: Any) -> bool: ...

    def restore(self) -> bool:
        """Put the content back; False if it has moved and there is no copy of it."""


def _content_of(name: str, kind: str, value: Any) -> _Content | None:
    if isinstance(value, Tensor):
        return None if value.is_meta or value.is_inference() else _Numbers(name, kind, value)
    if is_generator(value):
        return _Draws(name, kind, value)
    return _Array(name, kind, value) if is_array(value) else None


class _Numbers:
    """A tensor: a copy of it, or its version and a mark."""

    def __init__(self, name: str, kind: str, tensor: Tensor) -> None:
        self.name, self.kind, self.tensor = name, kind, tensor
        part = _local(tensor)
        self.size, self._version = part.numel() * part.element_size(), tensor._version
        self._copy: Tensor | None = None
        self._mark: Tensor | None = None

    def save(self, whole: bool) -> None:
        if whole:
            self._copy = _local(self.tensor).clone()
        elif not self._beyond():
            self._mark = mark_of(self.tensor)

    def moved(self) -> bool:
        if self._copy is not None:
            return not _equal(self._copy, _local(self.tensor))
        if self._mark is not None:  # what is written by way of .data leaves the version as it is
            return not torch.equal(self._mark, mark_of(self.tensor))
        return self.tensor._version != self._version

    def equals(self, now: Tensor) -> bool:
        return _equal(_local(self.tensor) if self._copy is None else self._copy, _local(now))

    def restore(self) -> bool:
        if not self.moved():
            return True
        if self._copy is None:
            return False
        if self._copy.shape == _local(self.tensor).shape:
            _local(self.tensor.data).copy_(self._copy)
        else:
            self.tensor.data = self._copy.clone()
        return True

    def _beyond(self) -> bool:
        """Tell whether it is data that lies somewhere rather than state, and too much to be read through."""
        return self.size > KEPT and self.kind == "tensor"


class _Draws:
    """A generator of random numbers in the user's hands."""

    size = 0

    def __init__(self, name: str, kind: str, generator: Any) -> None:
        self.name, self.kind, self._generator = name, kind, generator

    def save(self, whole: bool) -> None:
        self._state = self._read()

    def moved(self) -> bool:
        now = self._read()
        return not torch.equal(self._state, now) if isinstance(now, Tensor) else repr(now) != repr(self._state)

    def equals(self, now: Any) -> bool:
        return now is self._generator

    def restore(self) -> bool:
        generator = self._generator
        if isinstance(generator, torch.Generator):
            generator.set_state(self._state)
        elif isinstance(generator, random.Random):
            generator.setstate(self._state)
        elif hasattr(generator, "bit_generator"):
            generator.bit_generator.state = self._state
        else:
            generator.set_state(self._state)
        return True

    def _read(self) -> Any:
        generator = self._generator
        if isinstance(generator, torch.Generator):
            return generator.get_state()
        if isinstance(generator, random.Random):
            return generator.getstate()
        return generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.get_state()


class _Array:
    """A NumPy array."""

    def __init__(self, name: str, kind: str, array: Any) -> None:
        self.name, self.kind, self._array, self.size = name, kind, array, array.nbytes

    def save(self, whole: bool) -> None:
        self._copy = self._array.copy() if whole else None

    def moved(self) -> bool:
        return self._copy is not None and self._copy.tobytes() != self._array.tobytes()

    def equals(self, now: Any) -> bool:
        return now is self._array

    def restore(self) -> bool:
        if self.moved():
            self._array[...] = self._copy
        return True


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def mark_of(tensor: Tensor) -> Tensor:
    """Sum up the bits of a tensor: another sum for other values, at the cost of reading it once."""
    part = _local(tensor)
    if part.layout is not torch.strided or part.is_quantized or part.is_nested:
        return torch.tensor(tensor._version)
    part = torch.view_as_real(part.resolve_conj()) if part.is_complex() else part
    return part.view(_INTEGERS[part.element_size()]).sum()


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, without its history."""
    part: Tensor = tensor.detach()
    return part.to_local() if hasattr(part, "to_local") else part


def _equal(was: Tensor, now: Tensor) -> bool:
    if was.shape != now.shape or was.dtype != now.dtype or was.device != now.device:
        return False
    if was.is_nested:
        rows = was.unbind(), now.unbind()
        return len(rows[0]) == len(rows[1]) and all(_equal(one, two) for one, two in zip(*rows, strict=True))
    if was.layout is not torch.strided:
        return bool(mark_of(was.to_dense()) == mark_of(now.to_dense()))
    return torch.equal(was, now) or bool(((was == now) | (was.isnan() & now.isnan())).all())
