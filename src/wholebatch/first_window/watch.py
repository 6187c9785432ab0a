"""What the first window of a model and a loss function shows while it runs, wherever layers, state and hooks are kept.

Reading a model finds what is registered; what runs shows itself. In the first window of a model and a loss function:

1. The first forward: does anything normalise by the rows of a micro-batch that no survey has found?
2. The first backward: does it leave the parameters alone?
3. After the last forward: does what the forwards have moved change what a micro-batch says?

Later windows are not looked at.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import CodeType
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from wholebatch.batch.window import MicroBatch
from wholebatch.errors import InexactError
from wholebatch.first_window.draws import uncompiled
from wholebatch.first_window.norms import NormWatch
from wholebatch.first_window.quiet import quietly
from wholebatch.loss.terms import ParsedLoss
from wholebatch.model.inspection import ModelInfo
from wholebatch.model.memory import is_out_of_memory, release
from wholebatch.model.references import code_of
from wholebatch.model.snapshot import Moved, Snapshot
from wholebatch.options import Options
from wholebatch.ranks.agreement import Ranks

KEPT = 2**26
"""How many bytes are copied for a window that is watched."""

LISTED = 3
"""How many names an error lists."""

NOISE = 8
"""How many times the difference between two runs from one state still counts as none."""

NOT_TWICE = (RuntimeError, ValueError, TypeError, LookupError, AttributeError)
"""What code raises that cannot be run on the same micro-batch again."""

Key = tuple["CodeType | type", bool, "str | None"]

WATCHED: weakref.WeakKeyDictionary[nn.Module, set[Key]] = weakref.WeakKeyDictionary()
"""What has been watched of each model, for as long as it lives."""


class Unwatched:
    """A window like one that has been watched already: nothing is looked at.

    Attributes:
        said: what could not be shown of the window, in words.
    """

    said = ""

    def forward(self) -> AbstractContextManager[None]:
        """Run a forward."""
        return nullcontext()

    def backward(self) -> AbstractContextManager[None]:
        """Run a backward."""
        return nullcontext()

    def finish(self, say: Callable[[MicroBatch], ParsedLoss | None], micro_batches: Sequence[MicroBatch]) -> None:
        """Do what there is to do after the last forward."""


class Watch(Unwatched):
    """Watches one window; :func:`watch_for` says whether there is anything to watch.

    With ``verify="never"`` nothing is copied, compared or run again, and no number is read from the device: what
    normalises is looked at, and how often parameters have been written to.

    Args:
        model_info: of the model and of what the loss function names.
        loss_fn: the user's own.
        micro_batches: how many micro-batches there are.
        options: of the window.
        steady: whether everything may be looked at and put back: not where torch gathers parameters meanwhile.
    """

    def __init__(
        self,
        model_info: ModelInfo,
        loss_fn: Callable[..., Any],
        micro_batches: int,
        options: Options,
        steady: bool = True,
    ) -> None:
        self._model_info, self._loss_fn, self._micro_batches = model_info, loss_fn, micro_batches
        self._chosen, self._key = options.get("batch_norm"), _key_of(model_info, loss_fn, options)
        self._steady, looks = steady, steady and options.get("verify") != "never"
        self._start = Snapshot(model_info, loss_fn, keep=KEPT) if looks else None
        self._forwards = self._backwards = 0

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Watch what normalises in the first forward.

        Raises:
            InexactError: naming the layer, or the place of the call.
        """
        self._forwards += 1
        if self._forwards > 1 or self._chosen is not None:
            yield
            return
        with NormWatch() as norms, _uncompiled():
            yield
        if norms.seen:
            self._put_back()
            raise InexactError(alone(norms.seen[0][0], self._micro_batches))

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Watch whether the first backward leaves the parameters alone.

        Raises:
            InexactError: if something steps in it, naming a parameter; what was copied is put back.
        """
        self._backwards += 1
        if self._backwards > 1:
            yield
            return
        before = self._written()
        yield
        stepped = [name for name, times in self._written().items() if before.get(name) != times]
        if stepped:
            lost = self._put_back()
            stay = (
                f"{len(lost)} of them were too large to be copied: load them again." if lost else "They are put back."
            )
            raise InexactError(
                f"The first backward moves {len(stepped)} parameters (first: {stepped[0]!r}): something steps "
                "inside of it, as optimizers in the backward pass do, by hooks on parameters, tensors or their "
                f"AccumulateGrad nodes. Each of {self._micro_batches} micro-batches would be a step of its own. "
                f"{stay} Remove "
                "the hook and step after wb.backward, or use wb.Step."
            )

    def finish(self, say: Callable[[MicroBatch], ParsedLoss | None], micro_batches: Sequence[MicroBatch]) -> None:
        """Ask, once all forwards have run, whether what they have moved changes what a micro-batch says.

        Raises:
            InexactError: naming what has moved; it is put back.
        """
        WATCHED.setdefault(self._model_info.model, set()).add(self._key)
        if self._start is None:
            return
        passed = {"generator"} if self._chosen is None else {"generator", "buffer"}
        moved = [each for each in self._start.moved() if each.kind not in passed]
        if moved and self._matters(lambda: say(micro_batches[-1])):
            carried = handed_on(moved, micro_batches)
            if carried:
                self.said = f"not verified: each micro-batch hands {', '.join(carried[:LISTED])} on to the next one"
                return
            WATCHED[self._model_info.model].remove(self._key)
            self._put_back()
            raise InexactError(
                f"What a micro-batch says depends on {listed(moved)}, which the forwards move: it follows each of "
                f"{len(micro_batches)} micro-batches instead of the batch. Move it once, after the step "
                "(wb.Step(..., after_step=[...])) or after wb.backward, and only read it in the forward. What the "
                "first forward makes for good, such as a layer, is there after one forward before the window. Where "
                "micro-batches are meant to follow one another, as chunks of time that carry a state, pass "
                'verify="never".'
            )

    def _matters(self, say: Callable[[], ParsedLoss | None]) -> bool:
        if self._start is None:
            return False
        with quietly():
            return matters(self._start, Snapshot(self._model_info, self._loss_fn, keep=KEPT), say)

    def _put_back(self) -> list[Moved]:
        return [] if self._start is None else self._start.restore()

    def _written(self) -> dict[str, int]:
        """Name the parameters that have changed since the window began, or say how often each was written to."""
        if self._start is not None:
            return {each.name: 1 for each in self._start.changed() if "parameter" in each.kind}
        if not self._steady:
            return {}
        outside = (
            (f"{type(module).__name__}.{name}", parameter)
            for module in self._model_info.outside
            for name, parameter in module.named_parameters(recurse=False)
        )
        return {name: parameter._version for name, parameter in (*self._model_info.model.named_parameters(), *outside)}


def alone(place: str, micro_batches: int) -> str:
    """Say that a call normalises each micro-batch alone."""
    return (
        f"{place} normalises by the statistics of the rows it is given, and no module of the model holds it: each of "
        f"{micro_batches} micro-batches would be normalised alone. Make it part of the model (an attribute of a "
        f"module, "
        'nn.ModuleList) and choose batch_norm="exact", put it into eval mode, or choose batch_norm="micro" (as usual).'
    )


def watch_for(
    model_info: ModelInfo,
    loss_fn: Callable[..., Any],
    micro_batches: int,
    options: Options,
    ranks: Ranks,
    splits: bool = False,
) -> Unwatched:
    """Watch a window unless one like it has been watched, or there is nothing to watch: all rows in one micro-batch."""
    if micro_batches < 2 and not splits:
        return Unwatched()
    if options.get("verify") != "always" and _key_of(model_info, loss_fn, options) in WATCHED.get(model_info.model, ()):
        return Unwatched()
    return Watch(model_info, loss_fn, micro_batches, options, steady=not (ranks.per_micro_batch or ranks.meets))


def _key_of(model_info: ModelInfo, loss_fn: Callable[..., Any], options: Options) -> Key:
    return code_of(loss_fn), model_info.model.training, options.get("batch_norm")


def matters(start: Snapshot, here: Snapshot, say: Callable[[], ParsedLoss | None]) -> bool:
    """Tell whether a loss function says something else from another state, with the same draws; stays in the state.

    Args:
        start: the state to be compared with.
        here: the state as it is.
        say: what the loss function says about a micro-batch.
    """
    try:
        now = _numbers(say())
        here.restore()
        start.restore(draws=False)
        then = _numbers(say())
        if _apart(now, then) == 0.0:
            return False
        here.restore()
        start.restore(draws=False)
        return _apart(now, then) > NOISE * _apart(then, _numbers(say()))
    except (*NOT_TWICE, MemoryError) as error:
        if is_out_of_memory(error):
            release()
        return False
    finally:
        here.restore()


def handed_on(moved: Sequence[Moved], micro_batches: Sequence[MicroBatch]) -> list[str]:
    """Name the states of single rows that ready-made micro-batches hand on, as chunks of time do: nothing else is.

    Such a state is a tensor as wide as the micro-batch: it belongs to these rows. Averages, centres and counters are
    not. In a batch that is cut here, no micro-batch comes after another one.
    """
    if any(micro_batch.is_cut for micro_batch in micro_batches):
        return []
    given = pytree.tree_leaves(micro_batches[0].cut(micro_batches[0].index))
    widths = {size for leaf in given if isinstance(leaf, Tensor) for size in leaf.shape[:2]} - {1}
    return [each.name for each in moved if each.kind == "tensor" and widths & set(each.shape)]


def listed(moved: Sequence[Moved]) -> str:
    """Name what has moved: a few, and how many more."""
    names = ", ".join(f"{each.name!r} ({each.kind})" for each in moved[:LISTED])
    return f"{names} and {len(moved) - LISTED} more" if len(moved) > LISTED else names


def _uncompiled() -> AbstractContextManager[None]:
    """Run compiled functions as they were written; where nothing is compiled, importing the compiler takes seconds."""
    return uncompiled() if "torch._dynamo" in sys.modules else nullcontext()


def _numbers(answer: ParsedLoss | None) -> list[float]:
    """What the loss function said about each term, in numbers."""
    terms = [] if answer is None else answer.terms.values()
    numbers = (number for term in terms for number in (term.total, term.count, term.weight))
    return [float(number.detach()) if isinstance(number, Tensor) else float(number) for number in numbers]


def _apart(one: Sequence[float], two: Sequence[float]) -> float:
    """The largest relative difference; infinite if other terms are there or one is no number."""
    if len(one) != len(two):
        return math.inf
    pairs = [(a, b) for a, b in zip(one, two, strict=True) if not (a == b or (a != a and b != b))]
    apart = [abs(a - b) / max(abs(a), abs(b)) for a, b in pairs]
    return max((each if math.isfinite(each) else math.inf for each in apart), default=0.0)
