"""Leaves that refer to rows by their place: edges of a graph, offsets of sequences that lie one behind the other.

A micro-batch has other places, so such a batch can be cut only where nothing refers across. Looked at where something
does not fit, for words alone: labels may look the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

MEND = (
    "A micro-batch has other places than the batch, so cut where nothing refers across: wb.Window([...]) of "
    "micro-batches that are complete in themselves (one graph, one pack of documents each), or samples with collate=, "
    "which makes edges and offsets anew. A loss over the outputs of all rows takes wb.coupled_backward; a model in "
    "which rows need each other has one micro-batch, micro_batch_size=None."
)


class Named(Protocol):
    """A leaf of a batch."""

    @property
    def value(self) -> object:
        """What lies there."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its dimensions."""


def said_of_places(leaves: Iterable[Named], rows: int) -> str:
    """Name the leaf that most likely refers to rows by their place, and what to do; "" if none does.

    Args:
        leaves: of the whole batch.
        rows: how many it has.

    Example:
        >>> from wholebatch.batch.tree import BatchTree
        >>> said_of_places(BatchTree({"x": torch.zeros(4, 2), "adj": torch.eye(4)}).leaves, 4)[:51]
        "'adj' (4, 4) has the rows on both dimensions: pairs"
    """
    tensors = [(leaf, leaf.value) for leaf in leaves if isinstance(leaf.value, Tensor) and not leaf.value.is_nested]
    lengths = [value.shape[0] for _, value in tensors if value.dim()]
    for leaf, value in tensors:
        if value.dim() > 1 and tuple(value.shape[:2]) == (rows, rows):
            return f"{leaf} has the rows on both dimensions: pairs of rows, such as edges. {MEND}"
    counted = [(leaf, value.flatten()) for leaf, value in tensors if _is_countable(value)]
    for leaf, value in counted:
        if leaf.shape == (len(value),) and _are_offsets(value, rows, lengths):
            return f"{leaf} looks like offsets: places at which sequences begin. {MEND}"
    for leaf, value in counted:
        total = int(value.sum())
        if leaf.shape == (rows,) and rows < total and total in lengths:
            return f"{leaf} adds up to {total}, the length of another tensor: sequences, one behind the other. {MEND}"
    for leaf, value in counted:
        if len(leaf.shape) > 1 and int(value.max()) < rows <= 2 * (int(value.max()) + 1):
            return f"{leaf} holds numbers up to {int(value.max())}, which look like places of {rows} rows. {MEND}"
    return ""


def _is_countable(value: Tensor) -> bool:
    plain = value.layout is torch.strided and value.device.type == "cpu" and value.numel() > 1
    return plain and value.dtype in (torch.int32, torch.int64) and int(value.min()) >= 0


def _are_offsets(value: Tensor, rows: int, lengths: Sequence[int]) -> bool:
    """Tell whether numbers rise from zero, as many as rows or one more, to within something longer, or to its end."""
    if int(value[0]) != 0 or len(value) not in (rows, rows + 1) or not bool((value.diff() >= 0).all()):
        return False
    last = int(value[-1])
    return any(len(value) - 1 <= last <= length for length in lengths) and last >= rows - 1
