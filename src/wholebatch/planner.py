"""Measure a few pieces of a real batch, then say how it runs best in a given memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from wholebatch.batch import Nest, move
from wholebatch.checkpointing import checkpointed, find_blocks
from wholebatch.errors import OutOfMemoryError
from wholebatch.gradient import LossFunction, accumulate
from wholebatch.memory import SavedBytes, is_out_of_memory, offloaded
from wholebatch.options import Options, checked
from wholebatch.precision import device_of
from wholebatch.sizes import Tokens
from wholebatch.state import State
from wholebatch.window import Piece, Window, pieces_of

Way: TypeAlias = Literal["smaller pieces", "checkpointing", "offload"]
REPEATS = 3
FACTORS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Measured:
    """Bytes and seconds of pieces run one way, as a line over what they hold: rows, or padded tokens.

    Attributes:
        way: how the pieces ran.
        held: rows or padded tokens of each measured piece.
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

    def piece_bytes(self, held: int) -> float:
        """What a piece keeps for its backward."""
        return self.fixed_bytes + self.unit_bytes * held

    def largest(self, free: float, most: int) -> int:
        """What the largest piece holds that fits into so many bytes; 0 if nothing does."""
        if self.unit_bytes <= 0:
            return most if self.fixed_bytes <= free else 0
        return int(max(0.0, min(float(most), (free - self.fixed_bytes) / self.unit_bytes)))

    def step_seconds(self, pieces: Sequence[Piece]) -> float:
        """The time of a step in these pieces."""
        return len(pieces) * self.fixed_seconds + sum(piece.held for piece in pieces) * self.unit_seconds


@dataclass(frozen=True)
class Choice:
    """One way to run the batch within the memory.

    Attributes:
        way: smaller pieces alone, with checkpointing, or with saved tensors on the host.
        micro_batch_size: rows, or the budget of padded tokens, of the largest piece that fits.
        pieces: how many those make.
        seconds: the modelled time of a step.
        activations: bytes that the largest piece keeps for its backward.
    """

    way: Way
    micro_batch_size: int
    pieces: int
    seconds: float
    activations: float


@dataclass(frozen=True)
class Plan:
    """What running a batch will take, and which way is fastest.

    Attributes:
        rows: of the batch.
        unit: what ``micro_batch_size`` counts: "rows" or "tokens".
        memory: the cap in bytes, or None for no cap.
        parts: bytes of weights, gradients, optimizer and inputs.
        measured: what was measured, a way each.
        choices: the ways that fit, fastest first.
        reason: why the first wins, in one sentence.
    """

    rows: int
    unit: Literal["rows", "tokens"]
    memory: int | None
    parts: dict[str, int]
    measured: list[Measured]
    choices: list[Choice]
    reason: str

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
    memory: int | None = None,
    *,
    tokens: Tokens | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    blocks: str | type[nn.Module] | Sequence[str] | None = None,
    **options: Unpack[Options],
) -> Plan:
    """Measure a few pieces of a batch and say which size and which way run it fastest in a given memory.

    Runs forwards and backwards of a few pieces, as they are, with activation checkpointing where blocks are found,
    and with saved tensors on the host where the model is on a device; fits bytes and seconds as lines over what the
    pieces hold. Parameters, gradients, buffers and random state are as before.

    Args:
        model: plain, one process.
        loss_fn: as for :func:`wholebatch.backward`.
        batch: a real one, pieces of which are measured.
        memory: bytes that may be used in all; None asks for the fastest way without a cap.
        tokens: how rows are counted in tokens, if the batch is to be cut by tokens; its budget is the most tried.
        optimizer: whose state is counted; without one, two float32 numbers a parameter as in AdamW.
        blocks: what to checkpoint, as for :func:`wholebatch.checkpointed`.
        **options: as for :func:`wholebatch.backward`.

    Returns:
        Sizes, times and bytes, and the choice.

    Raises:
        OutOfMemoryError: if no way fits even one row.

    Example:
        >>> model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(4)])
        >>> found = plan(model, lambda model, x: model(x).square(), torch.randn(64, 16), memory=1_000_000)
        >>> found.best.pieces * found.best.micro_batch_size >= 64
        True
    """
    chosen = checked(options)
    cut = _Cut(batch, tokens, chosen)
    samples = cut.growing()
    ways = _ways(model, blocks)
    measured = [_measure(way, context, model, loss_fn, samples, chosen) for way, context in ways.items()]
    parts = parts_of(model, optimizer, batch)
    free = float("inf") if memory is None else float(memory - sum(parts.values()))
    choices = sorted(_choices(measured, free, cut), key=lambda choice: choice.seconds)
    if not choices:
        raise OutOfMemoryError(_nothing_fits(measured, parts, memory or 0, samples[0]))
    unit: Literal["rows", "tokens"] = "rows" if tokens is None else "tokens"
    return Plan(cut.rows, unit, memory, parts, measured, choices, _reason(choices, measured, unit))


class _Cut:
    """A batch that can be cut into pieces that hold at most so many rows or tokens."""

    def __init__(self, batch: Any, tokens: Tokens | None, options: Options) -> None:
        self._batch, self._tokens, self._options = batch, tokens, options
        whole = pieces_of(batch, None, whole=options.get("whole", ()), collate=options.get("collate"))
        self.rows = sum(piece.rows for piece in whole)
        self.most = self.rows if tokens is None else min(tokens.budget, sum(p.held for p in self.pieces(tokens.budget)))
        self.least = 1 if tokens is None else max(piece.longest for piece in self.pieces(1))

    def pieces(self, held: int) -> list[Piece]:
        """Cut the batch; by rows, as evenly as the number of pieces allows."""
        size: int | Tokens = held if self._tokens is None else replace(self._tokens, budget=held)
        return pieces_of(
            self._batch, size, whole=self._options.get("whole", ()), collate=self._options.get("collate")
        )

    def even(self, held: int) -> int:
        """The smallest size that makes no more pieces."""
        return held if self._tokens is not None else -(-self.rows // -(-self.rows // held))

    def growing(self) -> list[Piece]:
        """Pieces to be measured, the smallest first, each about twice the one before."""
        sizes = [self.least * factor for factor in FACTORS if self.least * factor <= max(self.most, self.least)]
        return [max(self.pieces(size), key=lambda piece: piece.held) for size in sizes]


def _ways(
    model: nn.Module, blocks: str | type[nn.Module] | Sequence[str] | None
) -> dict[Way, Callable[[], AbstractContextManager[Any]]]:
    device = device_of(model)
    ways: dict[Way, Callable[[], AbstractContextManager[Any]]] = {"smaller pieces": nullcontext}
    if blocks is not None or find_blocks(model):
        ways["checkpointing"] = lambda: checkpointed(model, blocks)
    if device is not None and device.type != "cpu":
        ways["offload"] = lambda: offloaded(model, True)
    return ways


def _measure(
    way: Way,
    context: Callable[[], AbstractContextManager[Any]],
    model: nn.Module,
    loss_fn: LossFunction,
    samples: Sequence[Piece],
    options: Options,
) -> Measured:
    """Run pieces of growing size until one does not fit; keep the least time and the peak of each."""
    held: list[int] = []
    peaks: list[float] = []
    times: list[float] = []
    for piece in samples:
        try:
            runs = [_run(context, model, loss_fn, piece, options) for _ in range(REPEATS)]
        except RuntimeError as error:
            if not is_out_of_memory(error) or not held:
                raise
            break
        held.append(piece.held)
        peaks.append(max(peak for peak, _ in runs))
        times.append(min(seconds for _, seconds in runs))
    return Measured(way, held, peaks, times, *_line(held, peaks), *_line(held, times))


def _run(
    context: Callable[[], AbstractContextManager[Any]],
    model: nn.Module,
    loss_fn: LossFunction,
    piece: Piece,
    options: Options,
) -> tuple[float, float]:
    """Run one piece and leave no trace; return the bytes kept for its backward, and the seconds."""
    device = device_of(model)
    state, micro_batch = State(model), Window([move(piece.load(), device)])
    plain: Options = {**options, "collate": None, "whole": ()}
    cuda = device is not None and device.type == "cuda"
    if cuda:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device) if cuda else 0
    start = time.perf_counter()
    with context(), nullcontext() if cuda else SavedBytes(ignored=[*model.parameters(), *model.buffers()]) as saved:
        pending = accumulate(model, loss_fn, micro_batch, **plain)
    if cuda:
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated(device) - before if saved is None else saved.peak
    pending.gradients.drop()
    state.restore()
    return float(peak), seconds


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
    inputs = [leaf.value for leaf in Nest(batch).leaves if isinstance(leaf.value, Tensor)]
    return {
        "weights": sum(t.nbytes for t in (*parameters, *buffers)),
        "gradients": sum(p.nbytes for p in learning),
        "optimizer": optimized or sum(2 * 4 * p.numel() for p in learning),
        "inputs": sum(t.nbytes for t in inputs if t.device == device_of(model)),
    }


def _choices(measured: Sequence[Measured], free: float, cut: _Cut) -> Iterator[Choice]:
    for way in measured:
        most = way.largest(free, max(cut.most, cut.least))
        if most >= cut.least:
            size = cut.even(most)
            pieces = cut.pieces(size)
            largest = max(piece.held for piece in pieces)
            yield Choice(way.way, size, len(pieces), way.step_seconds(pieces), way.piece_bytes(largest))


def _reason(choices: Sequence[Choice], measured: Sequence[Measured], unit: str) -> str:
    best, others = choices[0], choices[1:]
    said = f"{best.way.capitalize()} of {best.micro_batch_size} {unit} take {best.seconds:.3g} s a step"
    rivals = [
        f"{c.way} would take {c.seconds / best.seconds:.2f} x that in pieces of {c.micro_batch_size}" for c in others
    ]
    fitting = {choice.way for choice in choices}
    rivals += [f"{way.way} would not fit one row" for way in measured if way.way not in fitting]
    return f"{'; '.join([said, *rivals])}."


def _nothing_fits(measured: Sequence[Measured], parts: dict[str, int], memory: int, smallest: Piece) -> str:
    needs = ", ".join(f"{way.way} {way.piece_bytes(smallest.held) / 2**20:.2f} MiB" for way in measured)
    held = ", ".join(f"{name} {size / 2**20:.2f} MiB" for name, size in parts.items())
    return (
        f"Not even one row fits into {memory / 2**20:.2f} MiB: {held}; activations of the smallest piece: {needs}. "
        "Allow more memory, checkpoint smaller blocks (blocks=...), or shorten the rows."
    )
