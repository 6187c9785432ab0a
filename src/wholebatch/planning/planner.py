"""Measure a few micro-batches of a real batch, then say how it runs best in a given memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from wholebatch.amounts import bytes_in, in_bytes
from wholebatch.batch.sizes import Tokens
from wholebatch.batch.tree import BatchTree, move
from wholebatch.batch.window import MicroBatch, Window, micro_batches_of
from wholebatch.errors import OutOfMemoryError, SplitError
from wholebatch.gradient.separable import accumulate
from wholebatch.loss.terms import LossFunction
from wholebatch.model.checkpointing import checkpointed, find_blocks
from wholebatch.model.gradients import GradientAccumulator, all_or_nothing, device_of
from wholebatch.model.memory import SavedBytes, is_out_of_memory, offloaded
from wholebatch.model.state import left_alone
from wholebatch.options import BACKWARD, Options, checked
from wholebatch.ranks.reduction import by_itself

Way: TypeAlias = Literal["smaller micro-batches", "checkpointing", "offload"]
Running: TypeAlias = "Callable[[], AbstractContextManager[Any]]"
"""Makes the context in which a micro-batch runs one way."""
REPEATS = 3
LONG_SECONDS = 1.0
"""A micro-batch that takes so long needs no repetition, and no larger one is tried."""
FACTORS = [2.0**power for power in range(-2, 14)]
WORTHWHILE = 0.98
"""A way that keeps more than this share of the bytes is not worth its time."""
FEWEST = 1e9
"""What a micro-batch costs, in tokens, where as few as can be are wanted."""
POINTS = 24
"""Of each curve."""
PLAN = (*BACKWARD[:3], "memory", "tokens", "optimizer", "blocks")
"""What ``plan`` takes besides options, by name."""


@dataclass(frozen=True)
class Measured:
    """Bytes and seconds of micro-batches run one way, as a line over what they hold: rows, or padded tokens.

    Attributes:
        way: how the micro-batches ran.
        held: rows or padded tokens of each measured micro-batch.
        bytes: what each kept for its backward, at its peak.
        seconds: the forward and backward of each.
        fixed_bytes, unit_bytes: the line through the bytes.
        fixed_seconds, unit_seconds: the line through the seconds.
    """

    way: Way
    held: list[int]
    bytes: list[float]
    seconds: list[float]
    fixed_bytes: float
    unit_bytes: float
    fixed_seconds: float
    unit_seconds: float

    def micro_batch_bytes(self, held: int) -> float:
        """What a micro-batch keeps for its backward."""
        return self.fixed_bytes + self.unit_bytes * held

    def largest(self, free: float, most: int) -> int:
        """What the largest micro-batch holds that fits into so many bytes; 0 if nothing does."""
        if self.unit_bytes <= 0:
            return most if self.fixed_bytes <= free else 0
        return int(max(0.0, min(float(most), (free - self.fixed_bytes) / self.unit_bytes)))

    def step_seconds(self, micro_batches: Sequence[MicroBatch]) -> float:
        """The time of a step in these micro-batches."""
        return (
            len(micro_batches) * self.fixed_seconds
            + sum(micro_batch.held for micro_batch in micro_batches) * self.unit_seconds
        )


@dataclass(frozen=True)
class Choice:
    """One way to run the batch, in micro-batches of one size.

    Attributes:
        way: smaller micro-batches alone, with checkpointing, or with saved tensors on the host.
        micro_batch_size: rows, or the budget of padded tokens, of a micro-batch at most.
        micro_batches: how many those make.
        seconds: the modelled time of a step.
        activations: bytes that the largest micro-batch keeps for its backward.
    """

    way: Way
    micro_batch_size: int
    micro_batches: int
    seconds: float
    activations: float

    @property
    def pieces(self) -> int:
        """The former name of `micro_batches`."""
        return self.micro_batches

    def said(self, unit: str) -> str:
        """Say it in one line."""
        return (
            f"{self.way}, {self.micro_batches:,} x {self.micro_batch_size:,} {unit} at most, {self.seconds:.3g} s "
            f"a step, "
            f"{in_bytes(self.activations)} of activations"
        )


@dataclass(frozen=True, repr=False)
class Plan:
    """What running a batch will take, and which way is fastest.

    Attributes:
        rows: of the batch.
        unit: what ``micro_batch_size`` counts: "rows" or "tokens".
        memory: the cap in bytes, or None for no cap.
        parts: bytes of weights, gradients, optimizer and inputs.
        measured: what was measured, a way each.
        choices: the ways that fit, each with its largest micro-batch, fastest first.
        reason: why the first wins, in one sentence.
        curves: each way in micro-batches from the smallest to the largest, whether they fit or not.
    """

    rows: int
    unit: Literal["rows", "tokens"]
    memory: int | None
    parts: dict[str, int]
    measured: list[Measured]
    choices: list[Choice]
    reason: str
    curves: list[Choice]

    def __repr__(self) -> str:
        limit = "" if self.memory is None else f" in {in_bytes(self.memory)}"
        held = ", ".join(f"{name} {in_bytes(size)}" for name, size in self.parts.items())
        ways = "; ".join(choice.said(self.unit) for choice in self.choices)
        return f"Plan of {self.rows:,} rows{limit}: {ways}. Besides: {held}."

    @property
    def best(self) -> Choice:
        """The fastest way that fits."""
        return self.choices[0]

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        return asdict(self)


def plan(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    memory: int | str | None = None,
    *,
    tokens: Tokens | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    blocks: str | type[nn.Module] | Sequence[str] | None = None,
    **options: Unpack[Options],
) -> Plan:
    """Measure a few micro-batches of a batch and say which size and which way run it fastest in a given memory.

    Runs forwards and backwards of a few micro-batches, as they are, with activation checkpointing where blocks are
    found, and with saved tensors on the host where the model is on a device; fits bytes and seconds as lines over what
    the micro-batches hold. Parameters, gradients, buffers and random state are as before. On a CUDA device the peak of
    a micro-batch holds new gradients too, so that the answer errs on the safe side.

    Args:
        model: plain, one process.
        loss_fn: as for :func:`wholebatch.backward`.
        batch: a real one, micro-batches of which are measured.
        memory: bytes that may be used in all, a number or "2GiB"; None asks for the fastest way without a cap.
        tokens: how rows are counted in tokens, if the batch is to be cut by tokens; its budget is the most tried.
        optimizer: whose state is counted; without one, two float32 numbers a parameter as in AdamW.
        blocks: what to checkpoint, as for :func:`wholebatch.checkpointed`.
        **options: as for :func:`wholebatch.backward`.

    Returns:
        Sizes, times and bytes, and the choice.

    Raises:
        OutOfMemoryError: if no way fits even one row.
        SplitError: for a batch without rows, or one that cannot be cut.
        TypeError, ValueError: for a memory that is no number of bytes.

    Example:
        >>> model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(4)])
        >>> found = plan(model, lambda model, x: model(x).square(), torch.randn(64, 16), memory=1_000_000)
        >>> found.best.micro_batches * found.best.micro_batch_size >= 64
        True
    """
    chosen = checked(options, PLAN)
    memory = None if memory is None else bytes_in(memory)
    cut = _Cut(batch, tokens, chosen)
    parts = parts_of(model, optimizer, batch)
    free = float("inf") if memory is None else float(memory - sum(parts.values()))
    trial = _Trial(model, loss_fn, chosen, free)
    first, *others = trial.measure(_ways(model, blocks), cut.growing())
    measured = [first, *(way for way in others if way.unit_bytes < WORTHWHILE * first.unit_bytes)]
    choices = sorted(_choices(measured, free, cut), key=lambda choice: choice.seconds)
    if not choices:
        raise OutOfMemoryError(_nothing_fits(measured, parts, memory or 0, cut.least))
    unit: Literal["rows", "tokens"] = "rows" if tokens is None else "tokens"
    curves = [_choice(way, size, cut) for way in measured for size in cut.sizes()]
    return Plan(cut.rows, unit, memory, parts, measured, choices, _reason(choices, measured, unit), curves)


def parts_of(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, batch: Any = None) -> dict[str, int]:
    """Return the bytes that a step takes besides activations: weights, gradients, optimizer, inputs.

    Args:
        model: its buffers count as weights.
        optimizer: whose state is counted; without one, or before its first step, two float32 numbers a parameter.
        batch: whose tensors are counted where they lie on the model's device.
    """
    parameters = [p for p in model.parameters() if not p.is_meta]
    buffers = [b for b in model.buffers() if not b.is_meta]
    learning = [p for p in parameters if p.requires_grad]
    states = optimizer.state.values() if optimizer is not None else ()
    optimized = sum(t.nbytes for held in states for t in held.values() if isinstance(t, Tensor))
    inputs = [leaf.value for leaf in BatchTree(batch).leaves if isinstance(leaf.value, Tensor)]
    return {
        "weights": sum(t.nbytes for t in (*parameters, *buffers)),
        "gradients": sum(p.nbytes for p in learning),
        "optimizer": optimized or sum(2 * 4 * p.numel() for p in learning),
        "inputs": sum(t.nbytes for t in inputs if t.device == device_of(model)),
    }


class _Cut:
    """A batch that can be cut into micro-batches that hold at most so many rows or tokens."""

    def __init__(self, batch: Any, tokens: Tokens | None, options: Options) -> None:
        self._batch, self._tokens, self._options = batch, tokens, options
        self.rows = sum(micro_batch.rows for micro_batch in self._cut(None))
        if not self.rows:
            raise SplitError(
                "The batch has no rows, of which nothing can be measured. Give a real one, as large as it shall be "
                "trained on: wb.plan(model, loss_fn, next(iter(loader)))."
            )
        self.least = 1 if tokens is None else max(micro_batch.longest for micro_batch in self.micro_batches(1))
        held = (
            self.rows if tokens is None else sum(micro_batch.held for micro_batch in self.micro_batches(tokens.budget))
        )
        self.most = max(self.least, held if tokens is None else min(tokens.budget, held))

    def micro_batches(self, held: int) -> list[MicroBatch]:
        """Cut the batch; by rows, as evenly as the number of micro-batches allows."""
        return self._cut(held if self._tokens is None else replace(self._tokens, budget=held))

    def _cut(self, size: int | Tokens | None) -> list[MicroBatch]:
        return micro_batches_of(
            self._batch, size, whole=self._options.get("whole", ()), collate=self._options.get("collate")
        )

    def even(self, held: int) -> int:
        """The smallest size that makes no more micro-batches."""
        return held if self._tokens is not None else -(-self.rows // -(-self.rows // held))

    def growing(self) -> list[MicroBatch]:
        """Micro-batches to be measured, the smallest first, each about twice the one before."""
        wanted = {int(factor * self.least) for factor in FACTORS if 1 <= factor * self.least <= self.most}
        found = [self._near(size) for size in sorted(wanted | {self.least})]
        return sorted(
            {micro_batch.held: micro_batch for micro_batch in found}.values(), key=lambda micro_batch: micro_batch.held
        )

    def sizes(self) -> list[int]:
        """Sizes from the smallest to the largest, evenly on a logarithmic scale."""
        steps = [(self.most / self.least) ** (i / (POINTS - 1)) for i in range(POINTS)]
        return sorted({round(self.least * step) for step in steps})

    def _near(self, held: int) -> MicroBatch:
        """A micro-batch that holds about so much: of as few micro-batches as can be, which are then nearly full."""
        if self._tokens is None:
            return max(self.micro_batches(held), key=lambda micro_batch: micro_batch.held)
        full = replace(self._tokens, budget=max(held, self.least), overhead=FEWEST, cost=None)
        return min(self._cut(full), key=lambda micro_batch: abs(micro_batch.held - held))


def _ways(model: nn.Module, blocks: str | type[nn.Module] | Sequence[str] | None) -> dict[Way, Running]:
    device = device_of(model)
    ways: dict[Way, Running] = {"smaller micro-batches": nullcontext}
    if blocks is not None or find_blocks(model):
        ways["checkpointing"] = lambda: checkpointed(model, blocks)
    if device is not None and device.type != "cpu":
        ways["offload"] = lambda: offloaded(model, True)
    return ways


class _Notes:
    """What was seen of one way so far."""

    def __init__(self, way: Way) -> None:
        self.way, self.full = way, False
        self.held: list[int] = []
        self.peaks: list[float] = []
        self.times: list[float] = []  # of this process, which others on the machine disturb less than the clock

    def wanted(self, micro_batch: MicroBatch) -> bool:
        """Whether a micro-batch may still fit, and has not been run for long enough."""
        again = bool(self.held) and self.held[-1] == micro_batch.held
        return not self.full and not (again and self.times[-1] > LONG_SECONDS)

    def add(self, micro_batch: MicroBatch, seen: tuple[float, float] | None) -> None:
        if seen is None:
            self.full = True
        elif self.held and self.held[-1] == micro_batch.held:
            self.peaks[-1], self.times[-1] = max(self.peaks[-1], seen[0]), min(self.times[-1], seen[1])
        else:
            self.held.append(micro_batch.held)
            self.peaks.append(seen[0])
            self.times.append(seen[1])

    def measured(self, pace: float, plain: _Notes) -> Measured:
        """Draw the lines; ``pace`` is how long a second of this process takes.

        The other ways do what the plain one does, and more: their times follow its line, at a ratio that all sizes
        which both have run tell together, and that is below 1 by chance alone.
        """
        times = [pace * seconds for seconds in self.times]
        common = min(len(self.times), len(plain.times))
        ratio = max(1.0, sum(self.times[:common]) / sum(plain.times[:common]))
        fixed, unit = (pace * ratio * number for number in _line(plain.held, plain.times))
        return Measured(self.way, self.held, self.peaks, times, *_line(self.held, self.peaks), fixed, unit)


class _Trial:
    """Runs micro-batches to see what they take, and leaves no trace.

    Args:
        model, loss_fn, options: as for :func:`plan`.
        free: bytes beyond which no larger micro-batch is tried.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFunction, options: Options, free: float) -> None:
        self._model, self._loss_fn, self._free = model, loss_fn, free
        self._options: Options = {**by_itself(model, options), "collate": None, "whole": ()}
        self._device = device_of(model)
        self._pace = float("inf")

    def measure(self, ways: Mapping[Way, Running], samples: Sequence[MicroBatch]) -> list[Measured]:
        """Run micro-batches of growing size, all ways in turn, until one does not fit; keep least times and highest
        peaks.
        """
        notes = {way: _Notes(way) for way in ways}
        for micro_batch in samples:
            for way, context in [*ways.items()] * REPEATS:
                if notes[way].wanted(micro_batch):
                    notes[way].add(micro_batch, self._attempt(context, micro_batch, first=not notes[way].held))
            for each in notes.values():
                each.full |= bool(each.held) and (each.peaks[-1] > self._free or each.times[-1] > LONG_SECONDS)
        plain = next(iter(notes.values()))
        return [each.measured(self._pace, plain) for each in notes.values()]

    def _attempt(self, context: Running, micro_batch: MicroBatch, first: bool) -> tuple[float, float] | None:
        """Run one micro-batch; None if it does not fit, which the first of all must."""
        try:
            return self._run(context, micro_batch)
        except (RuntimeError, MemoryError, OSError) as error:
            if first or not is_out_of_memory(error):
                raise
        return None

    def _run(self, context: Running, micro_batch: MicroBatch) -> tuple[float, float]:
        """Run one micro-batch; return the bytes kept for its backward, and the seconds of this process."""
        model, device = self._model, self._device
        window = Window([move(micro_batch.load(), device)])
        cuda = device is not None and device.type == "cuda"
        if cuda:
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device) if cuda else 0
        now = time.perf_counter if cuda else time.process_time
        start, clock = now(), time.perf_counter()
        counted = nullcontext() if cuda else SavedBytes(ignored=[*model.parameters(), *model.buffers()])
        with left_alone(model), context(), counted as saved:
            all_or_nothing(lambda gradients: self._without_trace(gradients, window))
        if cuda:
            torch.cuda.synchronize(device)
        seconds = now() - start
        self._pace = min(self._pace, (time.perf_counter() - clock) / max(seconds, 1e-9))
        peak = torch.cuda.max_memory_allocated(device) - before if saved is None else saved.peak
        return float(peak), seconds

    def _without_trace(self, gradients: GradientAccumulator, micro_batch: Window[Any]) -> None:
        accumulate(self._model, self._loss_fn, micro_batch, None, gradients, **self._options)
        gradients.take_back()


def _line(held: Sequence[int], values: Sequence[float]) -> tuple[float, float]:
    """Fit value = fixed + unit * held, neither negative, by relative least squares."""
    if len(held) == 1:
        return 0.0, values[0] / held[0]
    columns = torch.tensor([[1.0, float(n)] for n in held], dtype=torch.float64)
    target = torch.tensor(values, dtype=torch.float64)
    weights = target.clamp(min=1e-12)[:, None]
    fixed, slope = torch.linalg.lstsq(columns / weights, target[:, None] / weights).solution.flatten().tolist()
    if fixed < 0:
        return 0.0, float((target / columns[:, 1]).mean())
    return (fixed, slope) if slope >= 0 else (float(target.mean()), 0.0)


def _choices(measured: Sequence[Measured], free: float, cut: _Cut) -> Iterator[Choice]:
    for way in measured:
        most = way.largest(free, cut.most)
        if most >= cut.least:
            yield _choice(way, cut.even(most), cut)


def _choice(way: Measured, size: int, cut: _Cut) -> Choice:
    micro_batches = cut.micro_batches(size)
    largest = max(micro_batch.held for micro_batch in micro_batches)
    return Choice(way.way, size, len(micro_batches), way.step_seconds(micro_batches), way.micro_batch_bytes(largest))


def _reason(choices: Sequence[Choice], measured: Sequence[Measured], unit: str) -> str:
    best, others = choices[0], choices[1:]
    takes = "take" if best.way == "smaller micro-batches" else "takes"
    said = [
        f"{best.way} {takes} {best.seconds:.3g} s a step in micro-batches of {best.micro_batch_size:,} {unit} at most"
    ]
    said += [
        f"{c.way} would take {c.seconds / best.seconds:.2f} x that in micro-batches of {c.micro_batch_size:,}"
        for c in others
    ]
    fitting = {choice.way for choice in choices}
    said += [f"{way.way} would not fit one row" for way in measured if way.way not in fitting]
    said += [
        f"{way.way} keeps {_ratio(way.unit_bytes, measured[0].unit_bytes)} the bytes of a {unit[:-1]} and takes "
        f"{_ratio(way.unit_seconds, measured[0].unit_seconds)} its time"
        for way in measured[1:]
    ]
    joined = "; ".join(said)
    return f"{joined[0].upper()}{joined[1:]}."


def _ratio(value: float, of: float) -> str:
    return f"{value / of:.2f} x" if of else "all of"


def _nothing_fits(measured: Sequence[Measured], parts: dict[str, int], memory: int, least: int) -> str:
    needs = ", ".join(f"{way.way} {way.micro_batch_bytes(least) / 2**20:.2f} MiB" for way in measured)
    held = ", ".join(f"{name} {size / 2**20:.2f} MiB" for name, size in parts.items())
    return (
        f"Not even one row fits into {memory / 2**20:.2f} MiB: {held}; activations of the smallest micro-batch: "
        f"{needs}. "
        "Allow more memory, checkpoint smaller blocks (blocks=...), or shorten the rows."
    )
