"""How the micro-batches of a check were cut: through what, and how wide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from wholebatch.batch.groups import group_of, said_of_groups
from wholebatch.batch.places import said_of_places
from wholebatch.batch.sizes import Auto, Size
from wholebatch.batch.tree import BatchTree
from wholebatch.batch.window import MicroBatch
from wholebatch.errors import SplitError, WholeBatchError
from wholebatch.verify.explaining import FOREIGN


def said_of_cut(run: Callable[[Any], None], first: MicroBatch, sizes: Sequence[int], batch: Any) -> str:
    """Say what a micro-batch that does not run is cut through: a group of rows, or what refers to rows by place.

    Args:
        run: runs a micro-batch, and raises what it raises.
        first: the first one.
        sizes: of all of them.
        batch: whose rows they are; None where they are made of samples.
    """

    def runs(index: Sequence[int]) -> bool:
        try:
            run(first.cut(index))
        except (*FOREIGN, WholeBatchError):
            return False
        return True

    group = group_of(runs, sum(sizes), sizes[0])
    if group:
        return said_of_groups(group, sizes[0], by_length=bool(first.lengths))
    return "" if batch is None else said_of_places(BatchTree(batch).leaves, sum(sizes))


def first_size(size: Size) -> Any:
    """The size that micro-batches begin with."""
    return size.start if isinstance(size, Auto) else size


def as_wide(whole: Any, rows: Sequence[Sequence[int]], names: Sequence[str]) -> list[Any] | None:
    """Cut micro-batches of the whole batch and leave them as wide; None where it is not made of rows."""
    try:
        tree = BatchTree(whole, names)
        return [tree.take(index) for index in rows]
    except SplitError:  # made by collate=
        return None
