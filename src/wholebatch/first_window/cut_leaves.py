"""Leaves that were cut because they have as many entries as the batch has rows, and should have gone whole.

Class weights of ten classes in a batch of ten rows, a mask over as many positions: named only where rows that do not
run as they were cut run as soon as the leaf goes whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from wholebatch.batch.tree import BatchTree, Leaf, move
from wholebatch.loss.terms import LossFunction
from wholebatch.model.inspection import ModelInfo
from wholebatch.model.state import left_alone
from wholebatch.options import Options

USER_ERRORS = (
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    OSError,
)
"""What code raises that was not written for so few rows, or not to be run in this way."""

MOST = 16
"""Up to how many leaves are tried one by one."""


def named_whole(options: Options) -> tuple[str, ...]:
    """Return the names of leaves that go whole already."""
    named = options.get("whole", ())
    return (named,) if isinstance(named, str) else tuple(named)


def takes(model_info: ModelInfo, loss_fn: LossFunction, make: Callable[[], Any]) -> bool:
    """Tell whether the loss function takes a micro-batch, and leave no trace of it."""
    try:
        with left_alone(model_info):
            loss_fn(model_info.model, move(make(), model_info.device))
    except (*USER_ERRORS, MemoryError):
        return False
    return True


def runs(
    model_info: ModelInfo, loss_fn: LossFunction, batch: Any, whole: tuple[str, ...], index: Sequence[int]
) -> bool:
    """Tell whether the loss function takes some rows, with these leaves whole."""
    return takes(model_info, loss_fn, lambda: BatchTree(batch, whole).take(index))


def leaf_to_go_whole(
    model_info: ModelInfo, loss_fn: LossFunction, batch: Any, whole: tuple[str, ...], index: Sequence[int]
) -> str:
    """Try leaf after leaf whole beside rows that do not run without; return words, or "" if none explains it.

    Args:
        whole: the names of those that go whole already.
        index: the rows.
    """
    leaves = [leaf for leaf in BatchTree(batch, whole).leaves if leaf.rows is not None and leaf.is_array]
    for leaf in leaves[:MOST] if len(leaves) > 1 else ():  # something has to be cut
        if leaf.path and runs(model_info, loss_fn, batch, (*whole, leaf.path), index):
            return _words(leaf, len(index))
    return ""


def _words(leaf: Leaf, rows: int) -> str:
    return (
        f"{leaf} has as many entries as the batch has rows ({leaf.rows}), so it was cut, too: {rows} of "
        "them in this micro-batch, which runs if it goes whole. If its entries are no rows, say "
        f"whole=({leaf.path!r},)."
    )
