"""Words beside a user's own error: a group of rows or a leaf without rows was cut, or one that refers to places.

Answers of one prompt, class weights of ten classes in a batch of ten rows, an adjacency matrix, offsets: torch then
complains of a size that nobody wrote. That rows belong together, or a leaf should go whole, is said only where the
micro-batch runs as soon as they do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from wholebatch.batch.groups import group_of, said_of_groups
from wholebatch.batch.places import said_of_places
from wholebatch.batch.tree import BatchTree
from wholebatch.batch.window import MicroBatch, Window
from wholebatch.errors import SplitError, WholeBatchError
from wholebatch.first_window.cut_leaves import USER_ERRORS, leaf_to_go_whole, named_whole, runs, takes
from wholebatch.gradient.setup import Setup
from wholebatch.loss.terms import LossFunction
from wholebatch.model.memory import is_out_of_memory


@contextmanager
def noted_whole_leaves(
    setup: Setup, loss_fn: LossFunction, batch: Any, micro_batches: Sequence[MicroBatch]
) -> Iterator[None]:
    """Let a user's error pass, with a note that names the leaf that should have gone whole, if there is one.

    Raises:
        SplitError: in its place, where micro-batches that keep groups of rows together run.
    """
    try:
        yield
    except USER_ERRORS as error:
        alone = setup.ranks.world == 1  # else a forward may be a collective
        asked = setup.options.get("verify") != "never"  # else nothing is run but what was asked for
        foreign = isinstance(error, WholeBatchError) or is_out_of_memory(error)
        if not alone or not asked or foreign or len(micro_batches) < 2 or isinstance(batch, Window):
            raise
        _refuse_cut_groups(setup, loss_fn, micro_batches, error)
        if setup.options.get("collate") is None and hasattr(error, "add_note"):
            note = _note(setup, loss_fn, batch, micro_batches)
            if note:
                error.add_note(note)
        raise


def _refuse_cut_groups(
    setup: Setup, loss_fn: LossFunction, micro_batches: Sequence[MicroBatch], error: Exception
) -> None:
    first, rows = micro_batches[0], sum(micro_batch.rows for micro_batch in micro_batches)
    group = group_of(lambda index: takes(setup.model_info, loss_fn, lambda: first.cut(index)), rows, first.rows)
    if group:
        raise SplitError(said_of_groups(group, first.rows, by_length=bool(first.lengths))) from error


def _note(setup: Setup, loss_fn: LossFunction, batch: Any, micro_batches: Sequence[MicroBatch]) -> str:
    """Try leaf after leaf whole in a micro-batch that fails; nothing if none explains it."""
    info, whole = setup.model_info, named_whole(setup.options)
    for index in (micro_batches[0].index, micro_batches[-1].index):
        if runs(info, loss_fn, batch, whole, index):
            continue
        words = leaf_to_go_whole(info, loss_fn, batch, whole, index)
        if not words:
            cut = [leaf.rows for leaf in BatchTree(batch, whole).leaves if leaf.rows is not None and leaf.is_array]
            rows = cut[0] if cut else 0
            places = said_of_places(BatchTree(batch).leaves, rows) if cut else ""
            fits = bool(places) and runs(info, loss_fn, batch, whole, range(rows))  # else it is another error
            words = places if fits else ""
        return f"wholebatch: {words}" if words else ""
    return ""
