"""How a rank leaves the others when they cannot be told at an agreement: they wait for it inside of a collective.

Nothing can take part in a reduction of the wrapper's in its place. So the rank leaves word in the store at which the
processes have met, and cuts its connections; whoever waits for it, wherever that is, then fails at once and finds the
word. The process group is of no use afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from wholebatch.errors import WholeBatchError

LOST = re.compile(
    "connection closed by peer|application timeout caused pair closure|connection reset by peer|broken pipe|timed out"
    "|socket timeout|connection refused|remote process exited|nccl communicator was aborted",
    re.IGNORECASE,
)
"""What backends say when a rank is not there any more."""

PATIENCE = timedelta(seconds=2)
"""How long others that fail as well are waited for."""

NOBODY = 0x77B4
"""A tag that no message bears."""


def is_lost(error: BaseException | None) -> bool:
    """Tell whether an error means that another rank has left.

    Example:
        >>> is_lost(RuntimeError("[...] Connection closed by peer [127.0.0.1]:5267."))
        True
    """
    told = isinstance(error, WholeBatchError) or not isinstance(error, RuntimeError)
    return not told and LOST.search(str(error)) is not None


def all_here(groups: Sequence[dist.ProcessGroup], error: BaseException) -> bool:
    """Tell whether all other ranks have failed at the same point too, so that none waits for this one.

    They mostly do: an error in the loss function is an error on every rank. The point is told by how many collectives
    there have been before.
    """
    if is_lost(error):
        return False
    keys = [_places(group) for group in groups]
    with suppress(RuntimeError):
        store = dist.distributed_c10d._get_default_store()
        for group, names in zip(groups, keys, strict=True):
            store.set(names[dist.get_rank(group)], "failed")
        for names in keys:
            store.wait(names, PATIENCE)
        return True
    return False


def leave_word(groups: Sequence[dist.ProcessGroup], word: str) -> None:
    """Write down, for those who will be left, why."""
    with suppress(RuntimeError):  # the store may be gone with the process that kept it
        store = dist.distributed_c10d._get_default_store()
        for group in groups:
            store.set(_key_of(group), word)


def word_of(groups: Sequence[dist.ProcessGroup]) -> str | None:
    """Read what a rank has left; None if none did."""
    with suppress(RuntimeError):
        store = dist.distributed_c10d._get_default_store()
        for key in map(_key_of, groups):
            if store.check([key]):
                return str(store.get(key).decode(errors="replace"))
    return None


def cut(groups: Sequence[dist.ProcessGroup]) -> None:
    """Close the connections to all other ranks, so that none waits for this one.

    Gloo has no call for that (torch 2.6 to 2.14), but closes them when a message does not come in time: so one is
    waited for that nobody sends. Other backends let go when the process ends.
    """
    for group in groups:
        if dist.get_backend(group) == "gloo":
            for other in set(dist.get_process_group_ranks(group)) - {dist.get_rank()}:
                _let_go(group, other)


def _let_go(group: dist.ProcessGroup, other: int) -> None:
    with suppress(RuntimeError):  # which is what comes of it
        work = dist.irecv(torch.zeros(1), src=other, group=group, tag=NOBODY)
        if work is not None:
            work.wait(timedelta(milliseconds=1))


def _places(group: Any) -> list[str]:
    """Name where each rank says that it has failed at this point."""
    point = f"{_key_of(group)}/{group._get_sequence_number_for_group()}"
    return [f"{point}/{rank}" for rank in range(dist.get_world_size(group))]


def _key_of(group: dist.ProcessGroup) -> str:
    return f"wholebatch/parting/{','.join(map(str, dist.get_process_group_ranks(group)))}"
