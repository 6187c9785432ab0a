"""Which backwards of a window are micro-batches of one loss, and which are losses of their own.

Two losses of one step may be added on purpose: a discriminator's on real and on false rows, one a task, one a head.
Micro-batches are the same lines run again on other rows. So micro-batches are gathered by where they stand in the
user's code, and each gathering is split again where its micro-batches are seen to be different losses.
"""

from __future__ import annotations

import collections
from collections.abc import Hashable, Sequence
from itertools import combinations

from wholebatch.doctor.micro_batch import WatchedMicroBatch


def gathered(micro_batches: Sequence[WatchedMicroBatch]) -> list[list[WatchedMicroBatch]]:
    """Return the backwards in groups that may be micro-batches of one loss, in the order of their first ones."""
    group = list(range(len(micro_batches)))
    often = collections.Counter(micro_batch.backward.path for micro_batch in micro_batches)
    for here, there in combinations(range(len(micro_batches)), 2):
        times = often[micro_batches[here].backward.path], often[micro_batches[there].backward.path]
        # A branch for the last micro-batch: many times here, once there, and on the loader's next batch.
        branch = min(times) == 1 < max(times) and micro_batches[here].alike(micro_batches[there])
        branch = branch and not micro_batches[here].same_batch(micro_batches[there])
        if group[here] != group[there] and (branch or run_again(micro_batches[here], micro_batches[there])):
            old, new = group[there], group[here]
            group = [new if number == old else number for number in group]
    return [
        [micro_batch for micro_batch, own in zip(micro_batches, group, strict=True) if own == number]
        for number in dict.fromkeys(group)
    ]


def run_again(one: WatchedMicroBatch, other: WatchedMicroBatch) -> bool:
    """Tell whether the same lines made both: the loop went round between them.

    The same backward did, or the same forward on other rows (a branch such as ``with no_sync()`` may hold the
    backward twice), or the loader gave a batch in between, or DDP was to reduce one of them and not the other.
    """
    if one.backward.path == other.backward.path:
        return True
    if one.same_forwards(other):
        return False
    shared = {forward.path for forward in one.last_forwards} & {forward.path for forward in other.last_forwards}
    return bool(shared) or one.next_batch(other) or {one.asks_for_sync, other.asks_for_sync} == {True, False}


def losses_of(micro_batches: Sequence[WatchedMicroBatch]) -> list[list[WatchedMicroBatch]]:
    """Split a gathering where its micro-batches are different losses, so that each part holds micro-batches of one
    loss.

    Different are micro-batches that call other modules or have another sign, those that compare all their rows with
    another number each (true and false), those that reach parameters of their own (heads), and micro-batches over the
    same rows: the first ones stay together, and the second ones.
    """
    targets = all(micro_batch.targets() for micro_batch in micro_batches)
    heads = own_parameters({micro_batch.backward.touched for micro_batch in micro_batches})
    found: dict[Hashable, list[WatchedMicroBatch]] = {}
    for place, micro_batch in enumerate(micro_batches):
        earlier = sum(other.same_rows(micro_batch) for other in micro_batches[:place])
        character = (micro_batch.targets() if targets else (), micro_batch.backward.touched if heads else ())
        found.setdefault((micro_batch.signs(), micro_batch.modules(), character, earlier), []).append(micro_batch)
    return list(found.values())


def own_parameters(touched: set[frozenset[int]]) -> bool:
    """Tell whether each of several sets holds something that none of the others does."""
    return len(touched) > 1 and all(
        each - frozenset().union(*(other for other in touched if other != each)) for each in touched
    )
