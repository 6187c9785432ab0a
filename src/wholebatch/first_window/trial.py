"""One trial: rows run whole, then in parts that are taken away again; what remains is what does not add up."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from wholebatch.batch.tree import BatchTree, move, rows_of
from wholebatch.errors import SplitError, own_faults_apart
from wholebatch.first_window.conduct import WatchedLoss
from wholebatch.first_window.draws import FixedDraws, uncompiled
from wholebatch.first_window.kinks import Kink, KinkWatch
from wholebatch.first_window.levels import HeldStill, RowNumbers, those_that_matter
from wholebatch.first_window.norms import NormWatch
from wholebatch.first_window.off_graph import OffGraph
from wholebatch.first_window.sample import Portion, TriedRows
from wholebatch.loss.denominators import Known, counted_divisors
from wholebatch.loss.seeds import BackwardSeeds, weighted
from wholebatch.loss.shapes import Shapes
from wholebatch.loss.terms import ParsedLoss, read
from wholebatch.loss.totals import KNOWN, LossAccumulator, LossTotals
from wholebatch.model.comparison import ON_DEVICES, rounding_of
from wholebatch.model.gradient_hooks import hooks_that_read
from wholebatch.model.gradients import GradientAccumulator, all_or_nothing, total_norm
from wholebatch.model.inspection import ModelInfo
from wholebatch.model.memory import offloaded
from wholebatch.model.reached import external_parameters
from wholebatch.model.snapshot import Moved, Snapshot
from wholebatch.model.state import State
from wholebatch.options import Options
from wholebatch.ranks.agreement import Ranks


@dataclass
class TrialOutcome:
    """What lies between rows run whole and the same rows in parts.

    Attributes:
        gradient: norm of the difference of gradients over the norm of the whole's.
        loss: difference of losses over the size of what was added up.
        whole, parts: the sums of both.
        scale: norm of the whole's gradient.
        tolerance: what rounding explains.
        seen: which operators drew random numbers.
        own: where the user's own code drew them, in words.
        numbers: what they were replaced by.
        redrawn: which of them a checkpoint drew anew in the backward.
        batch_norms: where BatchNorm was called that would have used the rows' statistics.
        elsewhere: whether draws were made that nobody holds still: NumPy's, or Python's own.
        moved: what the whole has moved besides gradients.
        shapes: of what the loss function returned for the whole and for the parts.
        stated: the terms whose items the loss function states beside a number, so that nobody can count them again.
        unseen: the terms that some micro-batch states no items of, so that its share counts for nothing.
        provisional: whether the window will divide by a provisional number, as the terms share one that is not known.
        kinks: what was clipped, bent or compared in the loss and the backward of each micro-batch, the whole first.
    """

    gradient: float = 0.0
    loss: float = 0.0
    whole: LossTotals = field(default_factory=LossTotals)
    parts: LossTotals = field(default_factory=LossTotals)
    scale: float = 0.0
    tolerance: float = 0.0
    seen: set[str] = field(default_factory=set)
    own: set[str] = field(default_factory=set)
    numbers: RowNumbers | HeldStill = field(default_factory=RowNumbers)
    redrawn: set[str] = field(default_factory=set)
    batch_norms: list[str] = field(default_factory=list)
    elsewhere: bool = False
    moved: list[Moved] = field(default_factory=list)
    shapes: Shapes = field(default_factory=Shapes)
    stated: set[Any] = field(default_factory=set)
    unseen: set[Any] = field(default_factory=set)
    provisional: bool = False
    kinks: list[list[Kink]] = field(default_factory=list)

    @property
    def empty(self) -> str:
        """Why the whole shows nothing; nothing if it does."""
        if not self.whole.schema.terms:
            return "the loss function returned None for the rows that were tried"
        if not self.scale or not float(self.whole.alive):
            return "the gradient of the rows that were tried is zero"
        return "" if math.isfinite(self.scale) else "the gradient of the rows that were tried is not finite"

    @property
    def is_finite(self) -> bool:
        """Whether the parts can be held against the whole at all."""
        return math.isfinite(self.gradient) and math.isfinite(self.loss)

    @property
    def adds_up(self) -> bool:
        """Whether gradient, loss and items of the parts are those of the whole."""
        return self.gradient <= self.tolerance and self.loss <= self.tolerance and self.miscounted is None

    @property
    def miscounted(self) -> tuple[Any, float, float] | None:
        """The first term whose items do not add up, with those of the whole and of the parts together."""
        for key, _ in self.whole.schema.terms:
            whole, parts = float(self.whole.counts[key]), float(self.parts.counts.get(key, 0.0))
            if key not in self.once and abs(whole - parts) > 1e-5 * max(abs(whole), abs(parts)):
                return key[0], whole, parts
        return None

    @property
    def drawn_by_rows(self) -> bool:
        """Whether each row had random numbers of its own."""
        return isinstance(self.numbers, RowNumbers) and self.numbers.by_rows

    @property
    def held(self) -> list[str]:
        """Where the user's own code draws numbers that were the same for each row, as nothing says whose they are."""
        if isinstance(self.numbers, HeldStill):
            return sorted(self.own)
        return self.numbers.held_by_hand()

    @property
    def once(self) -> set[Any]:
        """The terms that exist once a batch, or have no items."""
        return {key for key, kind in self.whole.schema.terms if kind in ("one", "once")}


class Trial:
    """Runs rows of a window without leaving a trace.

    What the whole adds to the gradients, the parts take away again: no second set of gradients is needed. Gradients
    are about as large as in the window, and where that will divide by a provisional number, those of the parts half as
    large as those of the whole, to which powers of two make no difference unless something acts on their size.

    Args:
        model_info: of the model.
        loss_fn: called as in the window.
        ranks: whose forwards stay local.
        scaler: whose scale gradients have.
        options: of the window.
        learning: the tensors that may receive gradients.
        functions: the user's own functions, where ``loss_fn`` only calls these.
        micro_batches: how many the window has.
    """

    def __init__(
        self,
        model_info: ModelInfo,
        loss_fn: Callable[[Any, Any], Any],
        ranks: Ranks,
        scaler: GradScaler | None,
        options: Options,
        learning: Sequence[Tensor],
        functions: Sequence[Callable[..., Any]] = (),
        micro_batches: int = 1,
    ) -> None:
        self.model_info, self.loss_fn, self.ranks, self.scaler, self.options = (
            model_info,
            loss_fn,
            ranks,
            scaler,
            options,
        )
        self.functions = tuple(functions) or (loss_fn,)
        self._portion = 2.0 ** (1 - max(micro_batches, 1).bit_length())
        self._learning = learning
        self._gradients = GradientAccumulator()
        self._watched, self._outcome, self._kinks = WatchedLoss(loss_fn, {}), TrialOutcome(), KinkWatch()
        self._aside = OffGraph()
        self._disturbed: tuple[str, bool] | None = None

    @functools.cached_property
    def _start(self) -> Snapshot:
        """What everything was before the first run."""
        return Snapshot(self.model_info, *self.functions, *hooks_that_read(self.model_info, self._learning))

    @property
    def hooked(self) -> bool:
        """Whether hooks of modules or parameters see gradients while they flow."""
        return bool(hooks_that_read(self.model_info, self._learning))

    def run(self, sample: TriedRows, flipped: bool = False, even: bool = False) -> TrialOutcome:
        """Run rows whole and take their parts away, each row with random numbers of its own.

        Where nothing tells which row a number belongs to, other ways are tried, the last to hold all draws still.

        Args:
            sample: the rows.
            flipped: whether rows that mostly draw small numbers draw large ones instead.
            even: whether gradients of the parts are as large as those of the whole in any case.
        """
        first = self._with(sample, RowNumbers(flipped), even)
        if not first.seen or (first.adds_up and not first.empty):
            return first
        for numbers in _further(first):
            again = self._with(sample, numbers, even)
            if again.adds_up and not again.empty:
                return again
        return first

    def held_still(self, sample: TriedRows) -> TrialOutcome:
        """Run rows whole and take their parts away, with random numbers that are the same for each row."""
        return self._with(sample, HeldStill(), even=False)

    def _with(self, sample: TriedRows, numbers: RowNumbers | HeldStill, even: bool) -> TrialOutcome:
        whole, parts = sample.portion(sample.whole), [sample.portion(part) for part in sample.parts]
        return self.compare(whole, parts, numbers, even=even)

    def repeat(self, sample: TriedRows, carry: bool = False) -> TrialOutcome:
        """Run rows whole and take the same away again: what then remains is not due to a cut.

        Args:
            sample: the rows.
            carry: whether the second run finds what the first has left.
        """
        whole = sample.portion(sample.whole)
        return self.compare(whole, [whole], carry=carry)

    def shared(self, sample: TriedRows, outcome: TrialOutcome) -> list[str]:
        """Name where numbers are drawn once for all rows, if the loss follows them."""
        numbers = outcome.numbers
        if not isinstance(numbers, RowNumbers):
            return []
        return those_that_matter(numbers, functools.partial(self._follows, sample.portion(sample.whole)))

    def _follows(self, whole: Portion, numbers: RowNumbers) -> bool:
        """Tell whether loss or gradient of the same rows are others with other numbers."""
        try:
            return not self.compare(whole, [whole], numbers).adds_up
        except (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError):
            return True

    def feels(self, sample: TriedRows, kink: Kink) -> bool:
        """Tell whether loss or gradient follow if a call returns something else, a comparison its other side."""
        whole = sample.portion(sample.whole)
        for up in (True, False):
            self._disturbed = kink.place, up
            try:
                if not self.compare(whole, [whole]).adds_up:
                    return True
            except ArithmeticError:
                pass  # the exponential of a number that is logged
            except (RuntimeError, ValueError, TypeError, LookupError, AssertionError):
                return True  # as a check of the user's own says
            finally:
                self._disturbed = None
        return False

    def compare(
        self,
        whole: Portion,
        parts: Sequence[Portion],
        numbers: RowNumbers | HeldStill | None = None,
        carry: bool = False,
        even: bool = True,
    ) -> TrialOutcome:
        """Hold the gradient, loss and items of one micro-batch against those of others."""
        drawn = RowNumbers() if numbers is None else numbers
        return all_or_nothing(lambda gradients: self._compare(gradients, whole, parts, drawn, carry, even))

    def _compare(
        self,
        gradients: GradientAccumulator,
        whole: Portion,
        parts: Sequence[Portion],
        numbers: RowNumbers | HeldStill,
        carry: bool,
        even: bool,
    ) -> TrialOutcome:
        outcome, start, self._gradients = TrialOutcome(numbers=numbers), self._start, gradients
        self._outcome = outcome
        try:
            with own_faults_apart(), self._watched_by(numbers, outcome) as draws:
                outcome.whole = self._side(draws, [whole], self._portion, None)
                outcome.scale = self._norm()
                outcome.moved, outcome.elsewhere = start.moved(), start.drew_elsewhere()
                if not carry:
                    start.restore()
                if outcome.empty:
                    return outcome
                smaller = 1.0 if even or not outcome.provisional else 0.5
                if smaller != 1.0:
                    gradients.scale(smaller)
                self._aside.disturbed = self._disturbed
                outcome.parts = self._side(draws, parts, -self._portion * smaller, outcome.whole)
                outcome.gradient = self._norm() / (outcome.scale * smaller)
                outcome.tolerance = self._tolerance(draws)
            outcome.loss = _apart(outcome.whole, outcome.parts)
        finally:
            self._aside.disturbed = None
            start.restore()
        return outcome

    @contextmanager
    def _watched_by(self, numbers: RowNumbers | HeldStill, outcome: TrialOutcome) -> Iterator[FixedDraws]:
        """Set gradients aside, replace the draws, and let BatchNorm use its running statistics."""
        draws, watch = FixedDraws(numbers), NormWatch(hold=True)
        with ExitStack() as stack:
            if "torch._dynamo" in sys.modules:  # else nothing is compiled, and importing it takes seconds
                stack.enter_context(uncompiled())
            self._watched = WatchedLoss(self.loss_fn, self._gradients.parameters)
            stack.callback(self._gradients.take_back)
            self._gradients.begin(self._learning, views=self.ranks.views)
            stack.enter_context(watch)
            stack.enter_context(draws)
            stack.enter_context(self._aside)
            yield draws
        numbers.settle()
        outcome.seen, outcome.own, outcome.redrawn = draws.seen, draws.own, draws.redrawn
        outcome.batch_norms = [place for place, _ in watch.seen]

    def _side(
        self, draws: FixedDraws, portions: Sequence[Portion], factor: float, whole: LossTotals | None
    ) -> LossTotals:
        """Add a multiple of the gradient of some micro-batches, divided by the items of the whole."""
        tally, shares = LossAccumulator(holds_counts=False), BackwardSeeds(self.scaler, 1, drops_empty=False)
        # Whoever has chosen a batch_norm= has buffers moved once a batch, or follow each micro-batch on purpose.
        buffers = None if self.options.get("batch_norm") is None else State(self.model_info)
        for portion in portions:
            if buffers is not None:
                buffers.restore_buffers()
            draws.begin(portion.rows)
            micro_batch = portion.make()
            said = read(self._returned(micro_batch))
            self._outcome.shapes.note(said, _rows(micro_batch, self.options), self._watched.micro_batch)
            answer = tally.add(said)
            sums = [] if answer is None else [output for output, _ in weighted(answer).values()]
            self._outcome.kinks.append(self._kinks.take(sums))
            if answer is None:
                continue
            stated = {key: term for key, term in answer.terms.items() if term.kind == "count"}
            self._outcome.stated |= stated.keys()
            self._outcome.unseen |= {key for key, term in stated.items() if not float(term.count)}
            self._outcome.provisional = self._counts_late(answer)
            of = functools.partial(counted_divisors, tally.sums() if whole is None else whole)
            outputs, seeds = shares.of(answer, Known(of, of, "The proof"))
            self._gradients.include(external_parameters(outputs, self.model_info))
            if outputs:
                torch.autograd.backward(outputs, [None if seed is None else seed * factor for seed in seeds])
            self._outcome.kinks[-1] += self._aside.take()
        tally.flags.settle()
        return tally.sums()

    def _counts_late(self, answer: ParsedLoss) -> bool:
        """Tell whether the window will know what it divides by only at its end."""
        if self.options.get("items") is not None or self.hooked:
            return False
        terms = answer.terms.values()
        return len({term.group for term in terms}) == 1 and any(term.kind not in KNOWN for term in terms)

    def _returned(self, micro_batch: Any) -> Any:
        """Call the loss function with a micro-batch of its own, which it may change."""
        copied = BatchTree(micro_batch).map(lambda leaf: _copied(leaf.value))
        self._kinks.take([])  # of a call that has failed
        self._aside.take()
        with self.ranks.local(), offloaded(self.model_info.model, self.options.get("offload", False)), self._kinks:
            return self._watched(self.model_info.model, move(copied, self.model_info.device))

    def _norm(self) -> float:
        """Measure the gradients of all that lasts; what a loss function has made for itself is another each time."""
        own = {id(tensor) for tensor in self._learning}
        lasting = [t for key, t in self._gradients.parameters.items() if key in own or isinstance(t, nn.Parameter)]
        held = self._gradients.held(lasting)
        return float(total_norm(held, held[0].device)) if held else 0.0

    def _tolerance(self, draws: FixedDraws) -> float:
        floats = {p.dtype for p in self._learning if p.is_floating_point()}
        if draws.half or any(dtype.itemsize < 4 for dtype in floats):
            return rounding_of(torch.bfloat16).parts
        if any(p.device.type != "cpu" for p in self._learning):
            return ON_DEVICES
        return rounding_of(torch.float64 if floats == {torch.float64} else torch.float32).parts


def _further(first: TrialOutcome) -> Iterator[RowNumbers | HeldStill]:
    """Yield what else random numbers may be replaced by where the first did not show that rows add up."""
    numbers = first.numbers
    if not isinstance(numbers, RowNumbers):
        return
    nothing = bool(first.empty) or not first.is_finite  # such as a mask that leaves nothing
    if nothing:
        yield RowNumbers(not numbers.flipped)
    yield from numbers.further()
    if nothing or numbers.astray or numbers.doubtful:
        yield HeldStill()
        yield HeldStill(alike=True)


def _apart(whole: LossTotals, parts: LossTotals) -> float:
    """How far the losses lie apart, over the size of their terms."""
    size, apart = 0.0, 0.0
    for key, kind in whole.schema.terms:
        divisor = float(whole.denominator(key, kind)) or 1.0
        one, two = (float(sums.weighted.get(key, 0.0)) / divisor for sums in (whole, parts))
        size, apart = size + abs(one), apart + abs(one - two)
    return apart / size if size else apart


def _rows(micro_batch: Any, options: Options) -> int:
    try:
        return rows_of(micro_batch, options.get("whole", ()))
    except SplitError:
        return 1


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
