"""The whole batch read plainly: untouched, in double precision where the code allows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from wholebatch.batch.window import micro_batches_of
from wholebatch.errors import WholeBatchError
from wholebatch.loss.terms import LossFunction
from wholebatch.verify.explaining import FOREIGN
from wholebatch.verify.gluing import Unlike, glued
from wholebatch.verify.reference import OtherName, Reference, plain_gradient, whole_micro_batches
from wholebatch.verify.running import Bench, shares


class TruthReader:
    """Reads the batch of one check.

    Args:
        stage: on which the model is put back after each reading.
        dtype: the model's own.
        names: of leaves that go whole.
        collate: makes a batch of samples.
        wrapped: whether the batch is that of all ranks.

    Attributes:
        whole: the whole batch in one micro-batch; None where it had to be read in several.
        reading: how it was read, for further readings that are to be compared.
        notes: how, in words, where that matters.
        not_shown: what such a reading cannot show.
    """

    def __init__(
        self,
        stage: Bench,
        loss_fn: LossFunction,
        batch: Any,
        dtype: torch.dtype,
        names: Sequence[str],
        collate: Callable[[list[Any]], Any] | None,
        wrapped: bool,
    ) -> None:
        self.stage, self.loss_fn, self.batch, self.dtype = stage, loss_fn, batch, dtype
        self.names, self.collate, self.wrapped = names, collate, wrapped
        self.whole: Any = None
        self.reading: dict[str, Any] = {}
        self.notes: list[str] = []
        self.not_shown: list[str] = []

    def untouched(self) -> list[Any]:
        """Return the whole batch as it is, over all ranks; in several micro-batches where these can't be put side by
        side.
        """
        own = shares(lambda: whole_micro_batches(self.batch, self.names, self.collate), self.wrapped)
        if not self.wrapped or len(own) < 2:
            return own
        try:
            return [glued(own, self.names)]
        except Unlike:
            return own

    def truths(self, whole: Sequence[Any]) -> tuple[Reference, Reference | None]:
        """Return the plain reading in double precision, and in the model's own as a yardstick of rounding."""
        self.whole = whole[0] if len(whole) == 1 else None
        try:
            truth = self.read(whole)
        except torch.OutOfMemoryError:
            self.whole = None
            self.not_shown.append(
                "The whole batch does not fit into memory, so the other side ran one row at a time, and rows that meet "
                "do not show: give a smaller batch."
            )
            cut = micro_batches_of(self.batch, 1, whole=self.names, collate=self.collate)
            truth = self.read([micro_batch.load() for micro_batch in cut])
        wide = all(p.dtype == torch.float64 for p in self.stage.model.parameters() if p.is_floating_point())
        if wide or self.reading["dtype"] != torch.float64 or truth.micro_batches != 1:
            return truth, None
        reading = {**self.reading, "dtype": self.dtype, "as_is": True}
        try:
            return truth, plain_gradient(self.stage.model, self.loss_fn, whole, **reading)
        except FOREIGN:
            return truth, None
        finally:
            self.stage.back()

    def read(self, micro_batches: Sequence[Any]) -> Reference:
        """Read micro-batches plainly: in double precision on a copy, or else as nearly so as the code allows."""
        refused: Exception | None = None
        for dtype, in_place in dict.fromkeys([(torch.float64, False), (self.dtype, False), (self.dtype, True)]):
            self.reading = {"dtype": dtype, "in_place": in_place, "outside": self.stage.outside}
            try:
                truth = plain_gradient(self.stage.model, self.loss_fn, micro_batches, **self.reading)
            except torch.OutOfMemoryError:
                raise
            except (OtherName, *FOREIGN) as error:
                if isinstance(error, WholeBatchError):
                    raise
                refused = refused or error
            else:
                if dtype != torch.float64:
                    self.notes.append(
                        f"The whole batch was read in {dtype}, as it can't be in float64: {_why(refused)}."
                    )
                return truth
            finally:
                self.stage.back()
        raise refused or RuntimeError("There is no way to read the batch.")


def _why(refused: Exception | None) -> str:
    if isinstance(refused, OtherName):
        return "the loss function reaches the model by another name than its argument"
    return " ".join(str(refused).split())[:120] or type(refused).__name__
