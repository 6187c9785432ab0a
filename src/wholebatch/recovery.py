"""Out of memory is not an error: split the micro-batch that failed, undo what it left, and go on.

Where no gradient had arrived yet, the failed micro-batch alone runs again, in halves. A backward that stops half-way
has already added to some parameters, and nobody can tell what: its halves may draw other random numbers, from
generators that nobody knows of, or be normalised by other statistics. The window is then run from its start, in
micro-batches that are expected to fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch

from wholebatch.batch import Nest
from wholebatch.errors import OutOfMemoryError
from wholebatch.memory import is_out_of_memory, peak_bytes, release, too_few_rows, words_of
from wholebatch.precision import Gradients
from wholebatch.sizes import Auto, Tokens
from wholebatch.state import State
from wholebatch.survey import Survey
from wholebatch.window import Piece


class Redo(Exception):
    """What a failed piece has added cannot be told apart: run the window from its start, in smaller pieces.

    Args:
        fitting: splits a piece into those that are expected to fit.
    """

    def __init__(self, fitting: Callable[[Piece], Iterable[Piece]]) -> None:
        super().__init__("run the window again in smaller pieces")
        self.fitting = fitting


class Record(Protocol):
    """What is written down of every piece, and taken back of one that failed."""

    def mark(self) -> Any:
        """Return how much there is, to rewind to."""

    def rewind(self, mark: Any) -> None:
        """Forget what has come since a mark."""


class Recovery:
    """Runs pieces of an `Auto` size.

    Args:
        auto: remembers the size that fits.
        survey: of the model, whose buffers and random state are rolled back with a failed piece.
        gradients: the window's sums.
    """

    def __init__(self, auto: Auto, survey: Survey, gradients: Gradients) -> None:
        self._auto, self._survey, self._gradients = auto, survey, gradients
        self._failed = self._redone = False
        self._passed: set[Piece] = set()

    def run(self, piece: Piece, records: Sequence[Record], work: Callable[[Piece], None]) -> int:
        """Run the work on a piece, in as many parts as memory wants; return how many those were.

        Raises:
            OutOfMemoryError: if one row alone does not fit, or is too few for BatchNorm.
            Redo: if the backward failed after it had added to some parameter.
        """
        return sum(self._attempt(part, records, work) for part in self.fitting(piece))

    def fitting(self, piece: Piece) -> Iterator[Piece]:
        """Split a piece beforehand that is larger than what has failed in this window, unless it has come through."""
        too_large = self._failed and piece.held > self._limit and piece not in self._passed
        halves = piece.halves() if too_large else None
        if halves is None:
            yield piece
        else:
            for half in halves:
                yield from self.fitting(half)

    def rest(self) -> None:
        """Take note of the window's end: after quiet ones a larger size is tried again."""
        if not self._failed:
            self._auto.rest()

    def _attempt(self, piece: Piece, records: Sequence[Record], work: Callable[[Piece], None]) -> int:
        state, sums = State(self._survey), self._gradients.mark()
        marks = [(record, record.mark()) for record in records]
        said = self._try(piece, work)
        if said is None:
            self._passed.add(piece)
            return 1
        release()
        state.restore()
        for record, mark in marks:
            record.rewind(mark)
        self._failed = True
        self._auto.shrink(piece.held)
        halves = piece.halves()
        if halves is None:
            raise OutOfMemoryError(self._final(piece, said))
        if self._gradients.moved(sums):
            if self._redone:  # what has come through once does not always: be done with it
                self._passed.clear()
            self._redone = True
            raise Redo(self.fitting)
        return sum(self.run(half, records, work) for half in halves)

    def _try(self, piece: Piece, work: Callable[[Piece], None]) -> str | None:
        """Do the work; return what was said if memory ran out, with no frame of it left alive."""
        try:
            work(piece)
        except OutOfMemoryError as error:
            return words_of(error)  # of a window that the loss function runs inside: half of this piece leaves it more
        except (RuntimeError, MemoryError, OSError) as error:
            if not is_out_of_memory(error):
                raise
            return words_of(error)
        except ValueError as error:
            if not self._auto.shrunk or not too_few_rows(error):
                raise
            return words_of(error)
        return None

    @property
    def _limit(self) -> int:
        size = self._auto.size
        return size.budget if isinstance(size, Tokens) else size

    def _final(self, piece: Piece, said: str) -> str:
        leaves = ", ".join(str(leaf) for leaf in Nest(piece.load()).leaves)
        peak = peak_bytes(self._survey.device)
        held = "" if peak is None else f" The device has held up to {peak / 2**30:.2f} GiB."
        return (
            f"One row alone does not fit into memory, or is too few where larger ones do not fit: {leaves}. It failed "
            f"with: {said}{held} No smaller piece is left. Try activation checkpointing (wb.checkpointed(model)), "
            f"offload=True on a device, shorter rows, or parameters in {torch.bfloat16}."
        )
