"""What modules answer while a loss is computed: kept row by row, and given back for the rows of all micro-batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from wholebatch.errors import LossError

KEPT = (bool, int, str, type(None))
"""What stands in an answer for all micro-batches; a number with a fraction may be a mean of the rows at hand."""


@dataclass(frozen=True)
class Layout:
    """How rows lie in a tensor of a micro-batch: one behind the other, or the second of all pairs behind the first.

    A tensor may have several entries a row (tokens without padding dimension); whatever has one entry in all is the
    same for every row.
    """

    paired: bool = False

    def by_row(self, tensor: Tensor, rows: int) -> Tensor:
        """Return (rows, ...) of a tensor with one entry or more for each row."""
        entries = len(tensor)
        if entries == rows:
            return tensor
        if entries == 1:
            return tensor.expand(rows, *tensor.shape[1:])
        each, left = divmod(entries, rows)
        if left or (self.paired and each % 2):
            raise LossError(f"A tensor of shape {tuple(tensor.shape)} has no {rows} rows, so it cannot be kept by row.")
        if self.paired:
            return tensor.reshape(2, rows, each // 2, *tensor.shape[1:]).transpose(0, 1)
        return tensor.reshape(rows, each, *tensor.shape[1:])

    def together(self, rows: Tensor, dimensions: int) -> Tensor:
        """Return the tensor, of so many dimensions, whose rows these are."""
        if rows.dim() == dimensions:
            return rows
        rows = rows.transpose(0, 1) if self.paired else rows
        return rows.reshape(-1, *rows.shape[rows.dim() - dimensions + 1 :])

    def listed(self, lists: Sequence[Sequence[Any]], rows: Sequence[int]) -> list[Any]:
        """Put lists with an entry a row together, as `together` does tensors."""
        if not self.paired or all(len(each) == count for each, count in zip(lists, rows, strict=True)):
            return [entry for each in lists for entry in each]
        halves = [(each[:count], each[count:]) for each, count in zip(lists, rows, strict=True)]
        return [entry for half in zip(*halves, strict=True) for each in half for entry in each]


@dataclass
class Answers:
    """What modules answered in a micro-batch, call by call.

    Attributes:
        layout: how rows lie in it.
        forms: of each call the module, its answer without tensors, and the dimensions of every tensor with rows.
    """

    layout: Layout
    forms: list[tuple[nn.Module, pytree.TreeSpec, list[Any]]] = field(default_factory=list)

    @contextlib.contextmanager
    def kept(self, modules: Iterable[nn.Module], rows: int) -> Iterator[list[Tensor]]:
        """Let modules run, and fill a list with what they say, row by row."""
        said: list[Tensor] = []
        self.forms = []

        def run(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            answer = forward(*args, **kwargs)
            leaves, form = pytree.tree_flatten(answer)
            said.extend(self.layout.by_row(leaf, rows) for leaf in leaves if may_have_rows(leaf))
            self.forms.append(
                (module, form, [KeptRows(leaf.dim()) if may_have_rows(leaf) else _rest(leaf) for leaf in leaves])
            )
            return answer

        with _in_place_of(modules, run):
            yield said

    @contextlib.contextmanager
    def given(self, modules: Iterable[nn.Module], said: Iterable[Tensor]) -> Iterator[None]:
        """Let modules answer, in the same order, from what was kept for all rows."""
        calls, tensors = iter(self.forms), iter(said)

        def answer(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            known, form, leaves = next(calls, (None, None, []))
            if known is not module or form is None:
                raise LossError(f"{type(module).__name__} is called in another order for all rows than for some.")
            whole = [
                self.layout.together(next(tensors), leaf.dimensions) if isinstance(leaf, KeptRows) else leaf
                for leaf in leaves
            ]
            return pytree.tree_unflatten(whole, form)

        with _in_place_of(modules, answer):
            yield


@dataclass(frozen=True)
class KeptRows:
    """Stands for a tensor of so many dimensions that was kept by row."""

    dimensions: int


def may_have_rows(value: Any) -> TypeGuard[Tensor]:
    """Say whether something is a tensor that may have rows."""
    return isinstance(value, Tensor) and value.dim() > 0


def parts(module: nn.Module) -> list[nn.Module]:
    """Return the modules that a module's forward may call: its children, and those of lists and dicts among them."""
    found: list[nn.Module] = []
    for child in module.children():
        found += parts(child) if isinstance(child, (nn.ModuleList, nn.ModuleDict)) else [child]
    return found


def _rest(leaf: Any) -> Any:
    """Return what an answer holds besides rows, for all micro-batches: NaN for a number, maybe a mean of some."""
    if isinstance(leaf, KEPT):
        return leaf
    return torch.tensor(torch.nan) if isinstance(leaf, (Tensor, float)) else None


@contextlib.contextmanager
def _in_place_of(modules: Iterable[nn.Module], run: Callable[..., Any]) -> Iterator[None]:
    """Let a function answer in the place of modules' forwards, which it is given."""
    modules = list(modules)
    before = [vars(module).get("forward") for module in modules]
    for module in modules:
        vars(module)["forward"] = partial(run, module, module.forward)
    try:
        yield
    finally:
        for module, forward in zip(modules, before, strict=True):
            if forward is None:
                del vars(module)["forward"]
            else:
                vars(module)["forward"] = forward
