"""Whether the values that a loss function returned are one a row or token, as far as their shapes show."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wholebatch.errors import LossError
from wholebatch.loss.graphs import values_are_chosen, values_are_made_of_many_rows, values_come_by_rows
from wholebatch.loss.terms import LossSum, ParsedLoss

DEPTH = 6
"""How many containers inside of each other are looked through for masks and labels."""


class _NotedValues(NamedTuple):
    """One micro-batch's values: what they are like, and what the graph and the micro-batch say to their number."""

    rows: int
    shape: torch.Size
    joined: bool = False
    explained: bool = False

    @property
    def fits(self) -> bool:
        """Whether the shape carries the rows: one value a row, or as many for each, in any order of dimensions."""
        return self.rows in self.shape or self.shape[0] % self.rows == 0


class Shapes:
    """Collects the shapes of bare tensors over a window: what is averaged over must be rows, or be chosen from them.

    A tensor that a loss function returns without a word counts as one loss a row or token. Its first dimension has to
    say so: a multiple of the micro-batch's rows, or as many as a mask has chosen, or as many as a layer with parameters
    has worked on; and no operation in which rows meet may have made it. What is left is decided over the window: a
    number that changes between micro-batches of equal rows was chosen by the data; one that only follows the rows (half
    of them) or does not even do that (one a class) was made of all of them.
    """

    def __init__(self) -> None:
        self._noted: dict[object, list[_NotedValues]] = {}
        self._rows: dict[tuple[object, torch.Size], set[int]] = {}

    def note(self, answer: ParsedLoss | None, rows: int, micro_batch: Any) -> None:
        """Take note of one micro-batch's bare tensors."""
        if answer is None or rows < 2:
            return
        for key, term in [*answer.terms.items(), *answer.metrics.items()]:
            if term.kind == "bare":
                self._note(key, term, rows, micro_batch)

    def check(self) -> None:
        """Raise if a shape of this window shows that its values are not one a row or token.

        Raises:
            LossError: with the shape, and the forms that say what is meant.
        """
        for noted in self._noted.values():
            doubtful = [each for each in noted if not each.fits and not each.explained]
            joined = [each for each in noted if each.joined]
            if joined or (doubtful and not _varies(noted)):
                raise LossError(_refusal([*joined, *doubtful][0]))
            if _stays(noted):
                raise LossError(_refusal(noted[-1]))

    def _note(self, key: object, term: LossSum, rows: int, micro_batch: Any) -> None:
        new = _NotedValues(rows, _shape_of(term))
        same = self._rows.setdefault((key, new.shape), set())
        same.add(rows)
        if rows not in new.shape:
            new = new._replace(joined=values_are_made_of_many_rows(term))
        if len(same) > 1 or not new.fits:
            new = new._replace(explained=_explained(term, new, micro_batch))
        self._noted.setdefault(key, []).append(new)


def _explained(term: LossSum, noted: _NotedValues, micro_batch: Any) -> bool:
    """Look for what else makes the number right, the graph first: a mask on a device has to be waited for."""
    size = noted.shape[0]
    if values_are_chosen(term) or (noted.rows % size and values_come_by_rows(term)):
        return True
    return any(size == number for number in _numbers_in(micro_batch, DEPTH))


def _shape_of(term: LossSum) -> torch.Size:
    return term.source if isinstance(term.source, torch.Size) else torch.Size()


def _varies(noted: Sequence[_NotedValues]) -> bool:
    """Whether micro-batches of equal rows had different numbers of values, so that the data has chosen them."""
    found: dict[int, torch.Size] = {}
    return any(found.setdefault(each.rows, each.shape) != each.shape for each in noted)


def _stays(noted: Sequence[_NotedValues]) -> bool:
    """Whether the shape was the same for different numbers of rows, and nothing explains it."""
    same = len({each.shape for each in noted}) == 1 and len({each.rows for each in noted}) > 1
    return same and not all(each.explained for each in noted[1:] if each.rows != noted[0].rows)


def _numbers_in(value: Any, depth: int) -> Iterator[int]:
    """Yield how many tokens the masks, labels, lengths and lists of a micro-batch could have chosen."""
    if isinstance(value, Tensor):
        yield from _chosen_by(value)
    elif depth:
        inside = _inside(value)
        lengths = [len(each) for each in inside if isinstance(each, Tensor) and each.dim()]
        if len(lengths) > 1 and not isinstance(value, Mapping):  # one tensor a row, joined or shifted and joined
            yield sum(lengths)
            yield sum(lengths) - len(lengths)
        for each in inside:
            yield from _numbers_in(each, depth - 1)


def _inside(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple)):
        return list(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return list(vars(value).values()) if hasattr(value, "__dict__") else []
    return []


def _chosen_by(tensor: Tensor) -> Iterator[int]:
    """Yield what a tensor would choose as a mask, as labels of which some are ignored, or as lengths."""
    if tensor.is_nested:  # one tensor a row
        yield sum(len(row) for row in tensor.unbind())
        return
    if tensor.is_floating_point() or tensor.is_complex() or tensor.layout is not torch.strided:
        return
    if not tensor.dim() or not tensor.numel():
        return
    for part in (tensor, tensor[..., 1:]):  # a causal loss shifts its labels
        kept = part if part.dtype is torch.bool else (part >= 0) & (part != 255)
        yield int(kept.sum())
        yield int((~kept).sum())
        if tensor.dim() > 1:
            yield int((part != 0).sum())
    if tensor.dim() == 1 and tensor.dtype is not torch.bool and int(tensor.min()) > 0:
        yield int(tensor.sum())
        yield int(tensor.sum()) - len(tensor)


def _refusal(noted: _NotedValues) -> str:
    shape, rows = tuple(noted.shape), noted.rows
    if noted.shape.numel() == 1:
        found = f"one element for a micro-batch of {rows} rows"
    else:
        found = f"a tensor of shape {shape} for a micro-batch of {rows} rows, which is not one loss a row or token"
    return (
        f"The loss function returned {found}, and what it averages over cannot be known from that. If these are "
        "values of single rows, say so: wb.mean(values), or wb.mean(values, weights); if it is a sum, "
        "wb.total(values); if it is a mean, wb.from_mean(loss, items=n). If rows meet in it (a value a class or "
        "feature, pairs of rows, the hardest of all), micro-batches cannot give it: use wb.coupled_backward."
    )
