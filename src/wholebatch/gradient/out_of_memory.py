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

from wholebatch.batch.sizes import Auto, Tokens
from wholebatch.batch.tree import BatchTree
from wholebatch.batch.window import MicroBatch
from wholebatch.errors import OutOfMemoryError
from wholebatch.gradient.below_row import BelowRow
from wholebatch.model.gradients import GradientAccumulator
from wholebatch.model.inspection import ModelInfo
from wholebatch.model.memory import is_out_of_memory, peak_bytes, release, too_few_rows, words_of
from wholebatch.model.state import State


class RestartWindow(Exception):
    """What a failed micro-batch has added cannot be told apart: run the window from its start, in smaller
    micro-batches.

    Args:
        fitting: splits a micro-batch into those that are expected to fit.
    """

    def __init__(self, fitting: Callable[[MicroBatch], Iterable[MicroBatch]]) -> None:
        super().__init__("run the window again in smaller micro-batches")
        self.fitting = fitting


class Record(Protocol):
    """What is written down of every micro-batch, and taken back of one that failed."""

    def mark(self) -> Any:
        """Return how much there is, to rewind to."""

    def rewind(self, mark: Any) -> None:
        """Forget what has come since a mark."""


class OutOfMemoryRetry:
    """Runs micro-batches of an `Auto` size.

    Args:
        auto: remembers the size that fits.
        model_info: of the model, whose buffers and random state are rolled back with a failed micro-batch.
        gradients: the window's sums.
    """

    def __init__(self, auto: Auto, model_info: ModelInfo, gradients: GradientAccumulator) -> None:
        self._auto, self._model_info, self._gradients = auto, model_info, gradients
        self.below = BelowRow(auto, model_info.model)
        self._failed = self._redone = False
        self._passed: set[MicroBatch] = set()

    def run(self, micro_batch: MicroBatch, records: Sequence[Record], work: Callable[[MicroBatch], None]) -> int:
        """Run the work on a micro-batch, in as many parts as memory wants; return how many those were.

        Raises:
            OutOfMemoryError: if one row alone does not fit, or is too few for BatchNorm.
            Redo: if the backward failed after it had added to some parameter.
        """
        return sum(self._attempt(part, records, work) for part in self.fitting(micro_batch))

    def fitting(self, micro_batch: MicroBatch) -> Iterator[MicroBatch]:
        """Split a micro-batch beforehand that is larger than what has failed in this window, unless it has come
        through.
        """
        too_large = self._failed and micro_batch.held > self._limit and micro_batch not in self._passed
        halves = micro_batch.halves() if too_large else None
        if halves is None:
            yield micro_batch
        else:
            for half in halves:
                yield from self.fitting(half)

    def rest(self) -> None:
        """Take note of the window's end: after quiet ones a larger size is tried again."""
        if not self._failed:
            self._auto.rest()

    def _attempt(self, micro_batch: MicroBatch, records: Sequence[Record], work: Callable[[MicroBatch], None]) -> int:
        state, sums = State(self._model_info), self._gradients.mark()
        marks = [(record, record.mark()) for record in records]
        said = self._try(micro_batch, work)
        if said is None:
            self._passed.add(micro_batch)
            return 1
        release()
        state.restore()
        for record, mark in marks:
            record.rewind(mark)
        self._failed = True
        halves = micro_batch.halves()
        if halves is not None:
            self._auto.shrink(micro_batch.held)
        elif self.below.deepen():
            self._auto.failures += 1
        else:
            raise OutOfMemoryError(self._final(micro_batch, said))
        if self._gradients.moved(sums):
            if self._redone:  # what has come through once does not always: be done with it
                self._passed.clear()
            self._redone = True
            raise RestartWindow(self.fitting)
        return sum(self.run(half, records, work) for half in halves or [micro_batch])

    def _try(self, micro_batch: MicroBatch, work: Callable[[MicroBatch], None]) -> str | None:
        """Do the work; return what was said if memory ran out, with no frame of it left alive."""
        try:
            work(micro_batch)
        except OutOfMemoryError as error:
            return words_of(
                error
            )  # of a window that the loss function runs inside: half of this micro-batch leaves it more
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

    def _final(self, micro_batch: MicroBatch, said: str) -> str:
        leaves = ", ".join(str(leaf) for leaf in BatchTree(micro_batch.load()).leaves)
        peak = peak_bytes(self._model_info.device)
        held = "" if peak is None else f" The device has held up to {peak / 2**30:.2f} GiB."
        return (
            f"One row alone does not fit into memory, or is too few where larger ones do not fit: {leaves}. It failed "
            f"with: {said}{held} No smaller micro-batch is left, nor a way to keep less of a row (wb.tiled, "
            f"wb.checkpointed). Try offload=True on a device, shorter rows, or parameters in {torch.bfloat16}."
        )
