"""Which number between 0 and 1 stands in the place of a random one: a row's own, or one that is the same for each row.

In a batch each row draws its own numbers; in micro-batches it does, too, but others, since draws follow one another.
To compare both, a row has to keep its numbers: in the whole, row ``i`` gets those of its index, and a part that runs
rows ``a`` to ``b`` gets those of ``a`` to ``b``. Which dimension is that of the rows shows itself: in a part it is as
much shorter as the part has fewer rows. What is as long in a part as in the whole is drawn once for all rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

STEP = 0.6180339887498949
"""Multiples of the golden ratio's fraction fill the unit interval evenly, however many are taken."""

STEPS = (STEP, math.sqrt(2) - 1, math.sqrt(3) - 1, math.sqrt(5) - 2, math.sqrt(7) - 2, math.sqrt(11) - 3)
"""The same for each dimension, so that numbers do not repeat along a diagonal."""

LARGE = 1 << 20
"""From so many numbers on, single precision does."""

BEND = 1.6
"""The exponent of the numbers of one row, and of another their root: more small ones there, more large ones here."""

NEAR = 1e-3
"""How near to 0 and 1 numbers come; at these, what is made of them may be infinite."""

EXTREMES = (0.02, 0.98)
"""What a draw that all rows share is replaced by, in order to see whether anything follows it."""

Key = tuple[Any, str, int]


class Draw(NamedTuple):
    """One call of an operator that draws.

    Attributes:
        state: marks the random state that it draws from; None where that can't be read.
        name: of the operator.
        place: the user's own line that it was called in, in words.
        layer: whether one of torch's layers or functions for them drew, such as dropout, which acts on each number.
    """

    state: Any = None
    name: str = ""
    place: str = ""
    layer: bool = False

    def __str__(self) -> str:
        return f"{self.name} ({self.place})" if self.place else self.name


class Levels(Protocol):
    """Gives numbers for draws."""

    def begin(self, rows: Sequence[int]) -> None:
        """Run these rows next; the first ones are the whole."""

    def of(self, draw: Draw, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Return numbers between 0 and 1 that can be expanded to a shape."""


class HeldStill:
    """Numbers that depend on the last index alone, if there are two dimensions or more: the same for each row.

    Args:
        alike: use one and the same number everywhere, for draws whose last dimension is that of the rows.
    """

    def __init__(self, alike: bool = False) -> None:
        self._alike = alike

    def begin(self, rows: Sequence[int]) -> None:
        """Run these rows next."""

    def settle(self) -> None:
        """Come to an end."""

    def of(self, draw: Draw, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Return numbers between 0 and 1 that can be expanded to a shape."""
        if not shape or self._alike:
            return torch.full((), 0.37, dtype=torch.float64)
        place = torch.arange(shape[-1] if len(shape) > 1 else 1, dtype=torch.float64)
        return ((0.37 + STEP * place) % 1.0).to(device)


class _Known(NamedTuple):
    """A draw of the whole: its turn, and the shape of what it gave."""

    draw: Draw
    turn: int
    shape: tuple[int, ...]


class RowNumbers:
    """Numbers that a row keeps in any part of a batch, and that differ from row to row as far as they can.

    Some rows get small numbers and others large ones, so that what is counted by them (the places of a random mask)
    differs, too; where a row draws one number alone, their order is never that of the rows.

    Attributes:
        astray: whether parts draw more often than the whole, or less: then nothing says which draw is which.
        by_rows: whether any draw goes with the rows.
        shared: the draws that are made once for all rows.
        doubtful: those whose rows are guessed, as their shapes do not tell.
        multiples: whether some hold several entries for each row on one dimension.

    Args:
        flipped: give large numbers to the rows that had small ones.
        tiled: where a dimension holds several entries for each row, rows repeat, as in ``cat([x, x])``.
        held: draws whose numbers are to be the same for each row, as their shapes leave a doubt.
        moved: draws that get another number beyond the whole, and that number.

    Example:
        >>> numbers, draw = RowNumbers(), Draw(0, "rand")
        >>> numbers.begin([7, 4, 9])
        >>> whole = numbers.of(draw, (3, 2), torch.device("cpu"))
        >>> numbers.begin([4, 9])
        >>> torch.equal(numbers.of(draw, (2, 2), torch.device("cpu")), whole[1:])
        True
    """

    def __init__(
        self,
        flipped: bool = False,
        tiled: bool = False,
        held: Mapping[Key, Draw] | None = None,
        moved: tuple[Collection[Key], float] = ((), 0.0),
    ) -> None:
        self.astray = self.multiples = self.by_rows = False
        self.shared: dict[Key, Draw] = {}
        self.doubtful: dict[Key, Draw] = {}
        self.flipped, self._tiled, self.held = flipped, tiled, dict(held or {})
        self._moved, self._level = moved
        self._still = HeldStill()
        self._places: dict[int, int] = {}
        self._rows: list[int] = []
        self._begun = 0
        self._known: dict[Key, _Known] = {}
        self._met: set[Key] = set()

    def begin(self, rows: Sequence[int]) -> None:
        """Run these rows next; the first ones are the whole."""
        self.settle()
        self._begun += 1
        if self._begun == 1:
            self._places = {row: place for place, row in enumerate(rows)}
        self._rows, self._met = [self._places[row] for row in rows], set()

    def settle(self) -> None:
        """Look whether the last part has drawn as often as the whole."""
        if self._begun > 1 and self._met != self._known.keys():
            self.astray = True

    def further(self) -> Iterator[RowNumbers]:
        """Yield what else may be tried if a whole and its parts do not add up, as shapes have left a doubt."""
        if self.multiples:
            yield RowNumbers(self.flipped, tiled=True)
        if self.doubtful:
            yield RowNumbers(self.flipped, held=self.doubtful)

    def held_by_hand(self) -> list[str]:
        """Where the user's own code draws numbers that were the same for each row."""
        return sorted({str(draw) for draw in self.held.values() if not draw.layer})

    def of(self, draw: Draw, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Return numbers between 0 and 1 that can be expanded to a shape."""
        key = draw.state, draw.name, len(shape)
        if draw.state is not None and self._begun == 1:
            self._known.setdefault(key, _Known(draw, len(self._known), shape))
        known = self._known.get(key)
        self._met.add(key)
        if key in self._moved and self._begun > 1:
            return torch.full((), self._level, dtype=torch.float64)
        places = None if known is None or key in self.held else self._places_of(key, known, shape)
        if known is None or places is None:
            return self._still.of(draw, shape, device)
        return self._numbers(known, places, device)

    def _places_of(self, key: Key, known: _Known, shape: tuple[int, ...]) -> list[Tensor] | None:
        """Say where in the whole what is drawn for these rows lies, on each dimension; None if that can't be."""
        rows, part = len(self._places), len(self._rows)
        found, by_rows, narrowed = [], False, False
        for whole, size in zip(known.shape, shape, strict=True):
            if size == whole:
                found.append(torch.arange(size))
            elif whole * part == size * rows and whole % rows == 0:
                found.append(self._entries(whole // rows))
                by_rows, narrowed = True, narrowed or whole > rows
                self.multiples |= whole > rows
            else:
                found.append(torch.arange(size))
                narrowed = True
            if size > whole:
                self.doubtful[key] = known.draw
                return None
        if narrowed:
            self.doubtful[key] = known.draw
        self.by_rows |= by_rows
        if not narrowed and not by_rows and part < rows:
            self.shared[key] = known.draw
        return found

    def _entries(self, each: int) -> Tensor:
        """The entries of the rows that run, where the whole has several for each."""
        rows = torch.tensor(self._rows)
        if self._tiled:
            return (torch.arange(each)[:, None] * len(self._places) + rows).flatten()
        return (rows[:, None] * each + torch.arange(each)).flatten()

    def _numbers(self, known: _Known, places: Sequence[Tensor], device: torch.device) -> Tensor:
        """Fill a tensor: a sum of what belongs to its indices, as it wraps around, bent towards 0 or 1 for each row."""
        rows = len(self._places)
        along = next((d for d, size in enumerate(known.shape) if rows > 1 and size % rows == 0 and size), None)
        alone = along is not None and math.prod(known.shape) == rows
        start = (0.37 + STEP * known.turn) % 1.0
        dtype = torch.float64 if math.prod(known.shape) <= LARGE else torch.float32
        levels = torch.full([len(each) for each in places], 0.0 if alone else start, dtype=dtype, device=device)
        bend = None
        for d, place in enumerate(places):
            if d == along:
                row, entry = self._row_and_entry(place, known.shape[d] // rows)
                rank = (row + 1 + known.turn % max(rows - 1, 1)) % rows
                first = (rank + (start if alone else 0.0)) / rows
                term = first + entry * STEPS[d % len(STEPS)]
                bend = BEND ** (1 - 2 * row.double() / (rows - 1)).mul(-1.0 if self.flipped else 1.0)
            else:
                term = place * STEPS[d % len(STEPS)]
            levels += _on(term % 1.0, d, len(places)).to(device, dtype)
        levels.remainder_(1.0)
        if alone and self.flipped:
            levels = 1.0 - levels
        if bend is not None and not alone and along is not None:
            levels.pow_(_on(bend, along, len(places)).to(device, dtype))
        return levels.clamp_(NEAR, 1.0 - NEAR)

    def _row_and_entry(self, place: Tensor, each: int) -> tuple[Tensor, Tensor]:
        rows = len(self._places)
        return (place % rows, place // rows) if self._tiled else (place // each, place % each)


def those_that_matter(numbers: RowNumbers, follows: Callable[[RowNumbers], bool]) -> list[str]:
    """Name where numbers are drawn once for all rows, if what is to be learned follows them.

    Args:
        numbers: what has run.
        follows: whether it is another with these numbers, of which some are moved beyond the whole.
    """
    places: dict[str, list[Key]] = {}
    for key, draw in numbers.shared.items():
        places.setdefault(str(draw), []).append(key)

    def matters(keys: Collection[Key]) -> bool:
        return any(follows(RowNumbers(numbers.flipped, moved=(keys, level))) for level in EXTREMES)

    if not places or not matters(list(numbers.shared)):
        return []
    return [place for place, keys in places.items() if matters(keys)] or sorted(places)


def _on(values: Tensor, dimension: int, dimensions: int) -> Tensor:
    """Lay a vector along one dimension."""
    return values.double().view([-1 if d == dimension else 1 for d in range(dimensions)])
