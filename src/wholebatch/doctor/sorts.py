"""Which backwards of a window are micro-batches of one loss, and which are losses of their own.

Two losses of one step may be added on purpose: a discriminator's on real and on false rows, one a task, one a head.
Micro-batches are the same lines run again on other rows. So pieces are gathered by where they stand in the user's
code, and each gathering is split again where its pieces are seen to be different losses.
"""

from __future__ import annotations

import collections
from collections.abc import Hashable, Sequence
from itertools import combinations

from wholebatch.doctor.piece import Piece


def gathered(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Return the pieces in groups that may be micro-batches of one loss, in the order of their first ones."""
    group = list(range(len(pieces)))
    often = collections.Counter(piece.backward.path for piece in pieces)
    for here, there in combinations(range(len(pieces)), 2):
        times = often[pieces[here].backward.path], often[pieces[there].backward.path]
        # A branch for the last micro-batch: many times here, once there, and on the loader's next batch.
        branch = min(times) == 1 < max(times) and pieces[here].alike(pieces[there])
        branch = branch and not pieces[here].same_batch(pieces[there])
        if group[here] != group[there] and (branch or run_again(pieces[here], pieces[there])):
            old, new = group[there], group[here]
            group = [new if number == old else number for number in group]
    return [
        [piece for piece, own in zip(pieces, group, strict=True) if own == number] for number in dict.fromkeys(group)
    ]


def run_again(one: Piece, other: Piece) -> bool:
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


def losses_of(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Split a gathering where its pieces are different losses, so that each part holds micro-batches of one loss.

    Different are pieces that call other modules or have another sign, those that compare all their rows with another
    number each (true and false), those that reach parameters of their own (heads), and pieces over the same rows:
    the first ones stay together, and the second ones.
    """
    targets = all(piece.targets() for piece in pieces)
    heads = own_parameters({piece.backward.touched for piece in pieces})
    found: dict[Hashable, list[Piece]] = {}
    for place, piece in enumerate(pieces):
        earlier = sum(other.same_rows(piece) for other in pieces[:place])
        character = (piece.targets() if targets else (), piece.backward.touched if heads else ())
        found.setdefault((piece.signs(), piece.modules(), character, earlier), []).append(piece)
    return list(found.values())


def own_parameters(touched: set[frozenset[int]]) -> bool:
    """Tell whether each of several sets holds something that none of the others does."""
    return len(touched) > 1 and all(
        each - frozenset().union(*(other for other in touched if other != each)) for each in touched
    )
