"""How noisy a gradient is: the simple noise scale, estimated from micro-batches that run anyway.

The micro-batches of a window are samples of the gradient's noise. With G the true gradient and V the variance that one
row adds, summed over parameters, a batch of R rows gives a gradient whose squared length is ``|G|^2 + V / R`` on
average; the simple noise scale is ``V / |G|^2``, the rows at which noise and gradient are equally long.

Of a window of k micro-batches, where micro-batch i holds r_i of R rows and the fraction p_i of what the loss averages
over, h_i is its share of the gradient and g = sum of h_i. If rows fall into micro-batches at random,

    sum of R / r_i * |h_i|^2   is on average   a * |G|^2 + k * V / R,   with a = sum of R / r_i * p_i^2
    |g|^2                      is on average       |G|^2 +     V / R

which are two equations for two numbers. With equal micro-batches a is 1, and they are those of the paper.

Source:
    McCandlish et al. 2018, arXiv 1812.06162, section 2.2 and appendix A.1.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from wholebatch.amounts import whole_number

VERSION = 1
"""Of the state dict's layout."""

LEAST_FREEDOM = 1e-3
"""Below this many degrees of freedom a window's micro-batches are no samples that could be told apart."""


class Measured(NamedTuple):
    """What one window has shown.

    Attributes:
        shares: sum of R / r_i * |h_i|^2 over all micro-batches of all ranks.
        fractions: sum of R / r_i * p_i^2.
        micro_batches: how many there were.
        rows: R.
        items: what the loss averaged over; not a number for a loss of several denominators.
        square: |g|^2.
        complete: 1 if all ranks measured, and every gradient came in one part.
    """

    shares: float
    fractions: float
    micro_batches: float
    rows: float
    items: float
    square: float
    complete: float = 1.0

    @property
    def freedom(self) -> float:
        """The degrees of freedom of its estimate: one less than there are micro-batches, if these are equal."""
        return self.micro_batches - self.fractions

    @property
    def scatter(self) -> float:
        """The variance that the window's gradient has, times the degrees of freedom."""
        return self.shares - self.fractions * self.square

    @property
    def usable(self) -> bool:
        """Whether it says anything."""
        finite = math.isfinite(self.shares) and math.isfinite(self.square)
        return finite and self.complete == 1.0 and self.micro_batches >= 2 and self.freedom > LEAST_FREEDOM


@dataclass(frozen=True)
class NoiseEstimate:
    """What the windows measured so far say of the noise.

    Attributes:
        rows: the simple noise scale in rows; infinite if no gradient shows above the noise, NaN before a measurement.
        rows_error: its standard error, from leaving out one window at a time; NaN for fewer than two windows.
        items: the same in what the loss averages over (tokens, boxes); NaN for a loss of several denominators.
        items_error: its standard error.
        variance: V, what one row adds to the squared length of the noise.
        square: the squared length of the true gradient G.
        windows: how many windows it rests on.
        reason: why the last window that was to be measured could not be, or None.
    """

    rows: float
    rows_error: float
    items: float
    items_error: float
    variance: float
    square: float
    windows: int
    reason: str | None

    def __str__(self) -> str:
        if not self.windows:
            return f"noise scale not measured: {self.reason or 'no window was due yet'}"
        counted = f"{self.windows} window{'s' if self.windows > 1 else ''}"
        return f"noise scale {self.rows:.4g} +- {self.rows_error:.2g} rows, from {counted}"


class NoiseScale:
    """Estimate the simple noise scale of the gradient while training, for nearly nothing.

    Given to :class:`wholebatch.Step` or ``backward`` as ``noise_scale=``, it measures every n-th window: the squared
    length of each micro-batch's share, as it arrives, with no copy of a gradient. In a batch much smaller than the
    noise scale every further row is worth nearly as much as the one before; in a batch much larger most are wasted. It
    needs windows of two micro-batches or more over all ranks, and rows in random order, as a shuffling loader gives
    them. Under ``Tokens``, which sorts rows by length, a window that is measured is cut at random instead: sorted ones
    would be several times off. Losses in which rows meet, and terms that exist once a batch, are not measured;
    ``reason`` says so.

    Args:
        every: windows from one measurement to the next.
        windows: how many measurements the estimate rests on, the last ones.

    Raises:
        TypeError: for a number that is not whole.
        ValueError: for one below 1.

    Example:
        >>> import torch, wholebatch as wb
        >>> noise = wb.NoiseScale(every=1)
        >>> model, rows = torch.nn.Linear(3, 1), torch.randn(64, 3)
        >>> loss_fn = lambda model, x: model(x).square()
        >>> result = wb.backward(model, loss_fn, rows, micro_batch_size=8, noise_scale=noise)
        >>> noise.estimate().windows
        1

    Source:
        McCandlish et al. 2018, arXiv 1812.06162.
    """

    def __init__(self, every: int = 16, windows: int = 128) -> None:
        self.every = whole_number(every, "every", "wb.NoiseScale(every=16)")
        self._found: deque[Measured] = deque(maxlen=whole_number(windows, "windows", "wb.NoiseScale(windows=128)"))
        self._unread: list[Tensor] = []
        self._seen = 0
        self.reason: str | None = None

    def __repr__(self) -> str:
        return f"NoiseScale(every={self.every}, windows={self._found.maxlen}, measured={self.measured})"

    @property
    def measured(self) -> int:
        """How many measurements the estimate rests on."""
        self._read()
        return len(self._found)

    @property
    def due(self) -> bool:
        """Whether the coming window is to be measured: the last of every n, so that the first is left to its proof."""
        return (self._seen + 1) % self.every == 0

    @property
    def seen(self) -> int:
        """How many windows have passed."""
        return self._seen

    def passed(self, measured: Tensor | None = None, reason: str | None = None) -> None:
        """Take note of a window that has come to its end.

        Args:
            measured: the numbers of :class:`Measured`, on any device; not read yet.
            reason: why a window that was due was not measured.
        """
        due = self.due
        self._seen += 1
        if due:
            self.reason = reason
        if measured is not None:
            self._read()  # of the measurement before: the device has long made it
            self._unread.append(measured)

    def estimate(self) -> NoiseEstimate:
        """Say what the last measurements come to; waits for the device if one has not been read yet."""
        self._read()
        found = list(self._found)
        in_rows, in_items = (_parts(found, [getattr(each, unit) for each in found]) for unit in ("rows", "items"))
        return NoiseEstimate(
            *_with_error(in_rows), *_with_error(in_items), *_whole(in_rows).solved(), len(found), self.reason
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what was measured; plain values that any format can hold."""
        self._read()
        return {"version": VERSION, "seen": self._seen, "found": [list(each) for each in self._found]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that :meth:`state_dict` returned.

        Raises:
            ValueError: if it is none, or was written by a newer version; nothing has changed then.
        """
        found = _measurements(state)
        self._unread.clear()
        self._found.clear()
        self._found.extend(found)
        self._seen, self.reason = int(state["seen"]), None

    def _read(self) -> None:
        for numbers in self._unread:
            measured = Measured(*numbers.tolist())
            if measured.usable:
                self._found.append(measured)
            else:
                self.reason = _unusable(measured)
        self._unread.clear()


class _Sums(NamedTuple):
    """What a set of windows adds up to.

    Attributes:
        scatter: of units (rows or items) times scatter.
        freedom: of degrees of freedom.
        square: of squared lengths.
        inverse: of 1 / units.
        windows: how many there are.
    """

    scatter: float
    freedom: float
    square: float
    inverse: float
    windows: float

    def without(self, other: _Sums) -> _Sums:
        """Leave one window out."""
        return _Sums(*(whole - part for whole, part in zip(self, other, strict=True)))

    def solved(self) -> tuple[float, float]:
        """Return the variance of one unit and the squared length of the true gradient."""
        if not self.windows:
            return math.nan, math.nan
        variance = self.scatter / self.freedom
        return variance, (self.square - variance * self.inverse) / self.windows


def _parts(found: Sequence[Measured], units: Sequence[float]) -> list[_Sums]:
    return [
        _Sums(unit * each.scatter, each.freedom, each.square, 1.0 / unit, 1.0)
        for unit, each in zip(units, found, strict=True)
    ]


def _with_error(parts: Sequence[_Sums]) -> tuple[float, float]:
    """Return the noise scale, and the standard error of it by leaving out one window at a time."""
    whole = _whole(parts)
    if len(parts) < 2:
        return _ratio(*whole.solved()), math.nan
    others = [_ratio(*whole.without(part).solved()) for part in parts]
    centre = sum(others) / len(others)
    spread = sum((other - centre) ** 2 for other in others)
    error = math.sqrt(spread * (len(others) - 1) / len(others)) if math.isfinite(spread) else math.nan
    return _ratio(*whole.solved()), error


def _whole(parts: Sequence[_Sums]) -> _Sums:
    return _Sums(*map(sum, zip(*parts, strict=True))) if parts else _Sums(0.0, 0.0, 0.0, 0.0, 0.0)


def _ratio(variance: float, square: float) -> float:
    if math.isnan(variance) or math.isnan(square):
        return math.nan
    return max(variance, 0.0) / square if square > 0 else math.inf


def _unusable(measured: Measured) -> str:
    if measured.complete != 1.0:
        return (
            "a parameter got the gradient of a micro-batch in several parts (a checkpoint with use_reentrant=True), or "
            "another rank measures no noise"
        )
    if measured.micro_batches < 2:
        return "the window was one micro-batch, which has nothing beside it: choose a smaller micro_batch_size"
    if not (math.isfinite(measured.shares) and math.isfinite(measured.square)):
        return "the gradient of the window was not finite"
    return f"of the {measured.micro_batches:g} micro-batches of the window only one had items"


def _measurements(state: Mapping[str, Any]) -> list[Measured]:
    """Read the measurements out of a state that has all its parts."""
    if not {"version", "seen", "found"} <= set(state):
        raise ValueError(f"{state!r:.80} is no state of NoiseScale. Load what its state_dict() returned.")
    if state["version"] != VERSION:
        raise ValueError(
            f"The state is of version {state['version']!r}, and this wholebatch reads {VERSION}. Update wholebatch, or "
            "begin a new wb.NoiseScale()."
        )
    try:
        return [Measured(*map(float, numbers)) for numbers in state["found"]]
    except (TypeError, ValueError) as error:
        raise ValueError(f"The state's measurements are damaged: {error}. Begin a new wb.NoiseScale().") from None
