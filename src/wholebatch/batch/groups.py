"""Rows that belong together in groups, as the answers to one prompt do: what lays them side by side fails when cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence

LARGEST = 64
"""Up to how many rows are tried as a group."""

Runs = Callable[[Sequence[int]], bool]


def group_of(runs: Runs, rows: int, failed: int) -> int:
    """Return of how many rows a group is, 0 if nothing says that rows belong together.

    A number of rows is one group if these run and the next as many, and both together, and not with one row more.

    Args:
        runs: whether these rows run as a micro-batch.
        rows: of the whole batch.
        failed: of the micro-batch that did not run.

    Example:
        >>> group_of(lambda index: len(index) % 4 == 0, 24, 6)
        4
    """
    for size in range(2, min(rows // 2, LARGEST) + 1):
        if rows % size or not failed % size or not runs(range(size)):
            continue
        several = runs(range(size, 2 * size)) and runs(range(2 * size))
        return size if several and not runs(range(size + 1)) else 0
    return 0


def said_of_groups(group: int, failed: int, by_length: bool) -> str:
    """Say that rows belong together, and what to do.

    Args:
        group: how many do.
        failed: how many rows ran alone.
        by_length: whether micro-batches are cut by the lengths of rows.
    """
    size = max(failed // group, 1) * group
    number = f"a number of rows that is a multiple of {group}, such as micro_batch_size={size}"
    laid = f"lay each group on one row, such as (groups, {group}, ...)"
    mend = f"Rows are taken by their lengths here, so {laid}, or give {number}" if by_length else f"Give {number}"
    return (
        f"Rows belong together in groups of {group}: so many of them run, and twice as many, and {failed} do not, as a "
        f"group is cut through. {mend}{'' if by_length else f', or {laid}'}."
    )


def sizes_in_words(sizes: Sequence[int], unit: str = "rows") -> str:
    """Say how large micro-batches are.

    Example:
        >>> sizes_in_words([3, 3, 3]), sizes_in_words([4, 4, 2], "samples")
        ('3 rows', '2 to 4 samples')
    """
    least, most = min(sizes, default=0), max(sizes, default=0)
    return f"{most} {unit}" if least == most else f"{least} to {most} {unit}"
