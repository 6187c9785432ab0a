"""Whether rows meet, found by experiment: other rows are exchanged, and nothing about a row may change.

For the halves A and B of a batch, and C and D of the same sizes, with the same random draws at the same places:

* a module without parts couples if, called again on the inputs that it was given for AB, and on those with the second
  half exchanged, it says something else about A;
* a module with parts couples if that is so of its outputs in the batches AB and AD, and of none of its parts;
* the loss couples if a sum S that it states (a total or a count) is no sum over rows:
  S(AB) - S(AD) - S(CB) + S(CD) is zero for every sum over rows, whatever the halves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from wholebatch.batch.tree import BatchTree, move
from wholebatch.errors import LossError, SplitError
from wholebatch.first_window.draws import FixedDraws, uncompiled
from wholebatch.first_window.levels import RowNumbers
from wholebatch.loss.terms import LossSum, read
from wholebatch.model.gradients import device_of
from wholebatch.model.state import State, left_alone


@dataclass(frozen=True)
class CouplingReport:
    """Where the rows of a batch meet.

    Attributes:
        modules: the innermost modules in which they do, by name, with the relative change that other rows made to a
            row's output.
        loss: the relative size of what the loss of one half owes to the other; 0 if it is a sum over rows.
        sums: whether the loss function stated sums that could be tried at all; a bare number is none.
    """

    modules: dict[str, float]
    loss: float
    sums: bool = True

    def __bool__(self) -> bool:
        return bool(self.modules) or self.loss > 0

    def __str__(self) -> str:
        if not self:
            return "No rows meet: the loss of a row depends on that row alone."
        places = [f"in module {name!r} (a row changes by {change:.2g})" for name, change in self.modules.items()]
        if self.loss and not places:
            places = [f"in the loss function itself (halves of the batch depend on each other by {self.loss:.2g})"]
        return "Rows meet " + ", ".join(places) + "."


def find_coupling(
    model: nn.Module, loss_fn: Callable[[Any, Any], Any], batch: Any, whole: Sequence[str] = ()
) -> CouplingReport:
    """Find out by experiment whether the loss of a row depends on other rows, and which modules cause it.

    Exchanges rows and compares, with random draws held still, and then with others for each row, as a permutation may
    bring rows together; no layer names are known. Costs four forward passes over the batch, eight where something
    draws, so give it a small one; buffers and random state are set back. What depends on other rows too little to
    show on this batch, or only in the gradient, is not found.

    Args:
        model: as it is trained, in training mode if that is meant.
        loss_fn: ``loss_fn(model, batch)``; if it returns one bare number, that number is taken for a mean.
        batch: at least two different rows.
        whole: as in ``backward``.

    Returns:
        What was found; true if rows meet anywhere.

    Raises:
        SplitError: for a batch of fewer than two rows.
        TypeError: for a ``whole`` that names nothing.

    Example:
        >>> rows = torch.randn(6, 3)
        >>> str(wb.find_coupling(torch.nn.Linear(3, 1), lambda model, x: model(x).square(), rows))
        'No rows meet: the loss of a row depends on that row alone.'
        >>> list(wb.find_coupling(torch.nn.BatchNorm1d(3), lambda model, x: model(x).square(), rows).modules)
        ['']
    """
    if isinstance(whole, (str, int)):
        raise TypeError(
            f"whole is {whole!r}; it names what goes whole: whole=('mask',). Rows are exchanged in halves, whatever a "
            "micro-batch holds, so there is no size to give."
        )
    tree = BatchTree(batch, whole)
    rows = tree.count_rows()
    if rows < 2:
        raise SplitError(f"The batch has {rows} row; to see whether rows meet takes two. Give a larger batch.")
    with uncompiled():
        with FixedDraws() as draws:
            found = _found(model, loss_fn, tree, rows)
        if found or not draws.seen:
            return found
        numbers = RowNumbers()
        with FixedDraws(numbers) as draws:
            draws.begin(range(rows))
            by_draws = _found(model, loss_fn, tree, rows)
    # numbers of a data-dependent shape would go to other rows in an exchanged batch
    return found if numbers.doubtful else by_draws


def _found(model: nn.Module, loss_fn: Callable[[Any, Any], Any], tree: BatchTree, rows: int) -> CouplingReport:
    everything, half = list(range(rows)), rows // 2
    kept, other = everything[:half], everything[half:]
    exchanged = everything[: len(other)]
    runs = []
    with left_alone(model) as state:
        for index in (kept + other, kept + exchanged, other[:half] + other, other[:half] + exchanged):
            state.restore()
            runs.append(_run(model, loss_fn, move(tree.take(index), device_of(model)), rows))
        state.restore()
        found = _alone(runs[0].seen, state, kept + exchanged, half)
        found |= _together(runs[0].seen, runs[1].seen, found, half, rows)
    return CouplingReport(found, *_interaction([run.sums for run in runs]))


@dataclass(frozen=True)
class _Seen:
    """One call of a module: what went in and what came out."""

    name: str
    module: nn.Module
    args: Any
    kwargs: Any
    said: list[Tensor]


@dataclass(frozen=True)
class _ForwardTrace:
    """What one forward pass showed: inputs and outputs of module calls in order, and the sums that the loss stated."""

    seen: list[_Seen]
    sums: list[float] | None


def _run(model: nn.Module, loss_fn: Callable[[Any, Any], Any], batch: Any, rows: int) -> _ForwardTrace:
    seen: list[_Seen] = []
    with _watching(model, seen):  # with gradients: a loss may differentiate inside
        returned = loss_fn(model, batch)
    if isinstance(returned, Tensor) and returned.dim() == 0:
        return _ForwardTrace(seen, [_float(returned) * rows, float(rows)])
    try:
        answer = read(returned, rows)
    except LossError:
        return _ForwardTrace(seen, None)
    terms = [] if answer is None else list(answer.terms.values())
    return _ForwardTrace(seen, [_float(number) for term in terms for number in _numbers(term)])


def _float(number: Any) -> float:
    return float(number.detach() if isinstance(number, Tensor) else number)


def _numbers(term: LossSum) -> list[Any]:
    return [0.0, 0.0] if term.kind == "once" else [term.total * term.weight, term.count]


@contextmanager
def _watching(model: nn.Module, seen: list[_Seen]) -> Iterator[None]:
    """Note copies of what goes into and comes out of every module: code may write into them afterwards."""
    names = {module: name for name, module in model.named_modules()}
    waiting: dict[nn.Module, list[Any]] = {}

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        waiting.setdefault(module, []).append(pytree.tree_map(_copy, (args, kwargs)))

    def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        given, named = waiting[module].pop()
        seen.append(_Seen(names[module], module, given, named, _tensors(pytree.tree_map(_copy, output))))

    hooks = [module.register_forward_pre_hook(before, with_kwargs=True) for module in names]
    hooks += [module.register_forward_hook(after, with_kwargs=True) for module in names]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _copy(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _alone(seen: Sequence[_Seen], state: State, index: Sequence[int], kept: int) -> dict[str, float]:
    """Try every module without parts by itself."""
    rows = len(index)

    def exchange(leaf: Any) -> Any:
        return leaf[list(index)] if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == rows else leaf

    found: dict[str, float] = {}
    for call in seen:
        if any(True for _ in call.module.children()):
            continue
        said = []
        for args, kwargs in ((call.args, call.kwargs), pytree.tree_map(exchange, (call.args, call.kwargs))):
            state.restore()
            args, kwargs = pytree.tree_map(_copy, (args, kwargs))
            said.append([tensor.detach() for tensor in _tensors(call.module(*args, **kwargs))])
        change = _change(said[0], said[1], kept, rows)
        if change:
            found[call.name] = max(change, found.get(call.name, 0.0))
    return found


def _together(
    one: Sequence[_Seen], two: Sequence[_Seen], parts: dict[str, float], kept: int, rows: int
) -> dict[str, float]:
    """Name the modules whose rows changed though the same rows went in, and none of their parts is to blame."""
    found: dict[str, float] = {}
    for first, second in zip(one, two, strict=False):
        inside = [n for n in (*parts, *found) if f"{n}.".startswith(f"{first.name}." if first.name else "")]
        given, other = (_tensors((call.args, call.kwargs)) for call in (first, second))
        if not inside and not _change(given, other, kept, rows):
            change = _change(first.said, second.said, kept, rows)
            if change:
                found[first.name] = change
    return found


def _change(one: Sequence[Tensor], two: Sequence[Tensor], kept: int, rows: int) -> float:
    """Measure how far the kept rows moved, relatively; what has no rows is left out."""
    changes = [0.0]
    for a, b in zip(one, two, strict=False):
        if a.dim() and a.shape == b.shape and a.shape[0] >= rows and a.shape[0] % rows == 0:
            span = kept * (a.shape[0] // rows)  # images cut into patches, rows repeated for several heads
            a, b = (t[:span].to(torch.complex128 if t.is_complex() else torch.float64) for t in (a, b))
            size, apart = torch.linalg.vector_norm(a), torch.linalg.vector_norm(a - b)
            change = float(apart / size) if size else float(apart)
            changes.append(change if change > _noise(one) else 0.0)
    return max(changes)


def _noise(tensors: Sequence[Tensor]) -> float:
    """How far equal rows may lie apart by the order of additions alone."""
    return 64 * max((torch.finfo(t.dtype).eps for t in tensors if t.is_floating_point()), default=1e-9)


def _interaction(runs: Sequence[list[float] | None]) -> tuple[float, bool]:
    """Measure the part of the loss's sums that belongs to both halves at once."""
    sums = [run for run in runs if run is not None]
    if len(sums) < len(runs) or len({len(run) for run in sums}) > 1:
        return 0.0, False
    largest = 0.0
    for ab, ad, cb, cd in zip(*sums, strict=True):
        size = max(abs(ab), abs(ad), abs(cb), abs(cd))
        mixed = abs(ab - ad - cb + cd)
        if size and mixed > 1e-5 * size:
            largest = max(largest, mixed / size)
    return largest, True
