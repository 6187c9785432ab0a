"""Whether the micro-batches of a window are still what they were when the loader yielded them.

Some loaders write each batch into the memory of the one before: a ring of pinned buffers, one array filled again and
again, one dict that gets new entries. A loop that uses each at once never notices; a window would hold the last one
several times. So each micro-batch is remembered by a sample of its numbers, and looked at again when the window is
full. Memory that is merely shared is fine: views of one tensor, the same class weights in each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wholebatch.batch.leaf_kinds import SCALARS
from wholebatch.batch.tree import BatchTree, Leaf
from wholebatch.errors import SplitError

SAMPLED = 4096
"""Numbers of a tensor that are remembered: all of them, or spread evenly over every dimension."""

LEAVES = 32
"""Leaves of a micro-batch that are remembered, spread evenly."""


class Memory:
    """What the micro-batches of one window were when they came.

    Example:
        >>> place, memory = torch.zeros(3), Memory()
        >>> memory.add({"x": place})
        >>> place.fill_(1.0).sum().item()
        3.0
        >>> memory.check([{"x": place}])
        Traceback (most recent call last):
        wholebatch.errors.SplitError: Micro-batch 0 of the window ('x' (3,)) has been overwritten since ...
    """

    def __init__(self) -> None:
        self._seen: list[list[tuple[Leaf, Any]]] = []

    def add(self, micro_batch: Any) -> None:
        """Remember one as it is now."""
        self._seen.append([(leaf, _sample(leaf.value)) for leaf in _spread(BatchTree(micro_batch).leaves)])

    def check(self, micro_batches: Sequence[Any]) -> None:
        """Compare those that were remembered with what they are now, at the time when all have come.

        Raises:
            SplitError: if one has changed; names the call that keeps each by a copy.
        """
        leaves = [_spread(BatchTree(micro_batch).leaves) for micro_batch in micro_batches]
        places = Counter(_place(leaf.value) for some in leaves for leaf in some if _on_device(leaf.value))
        for number, (seen, now) in enumerate(zip(self._seen, leaves, strict=False)):
            if [leaf.path for leaf, _ in seen] != [leaf.path for leaf in now]:
                _refuse(number, f"with {len(seen)} leaves, now {len(now)}")
            for (then, sample), leaf in zip(seen, now, strict=True):
                # To look at a device waits for it, which is worth it only if others of the window lie there too.
                alone = _on_device(leaf.value) and places[_place(leaf.value)] < 2
                if not alone and not _same(sample, _sample(leaf.value)):
                    _refuse(number, str(then))


def _refuse(number: int, what: str) -> None:
    raise SplitError(
        f"Micro-batch {number} of the window ({what}) has been overwritten since the loader yielded it: the loader "
        "writes each one into the same memory, and a window holds several at once. Keep each by a copy: "
        "wb.windows((copy.deepcopy(batch) for batch in loader), 8)."
    )


def _spread(leaves: Sequence[Leaf]) -> Sequence[Leaf]:
    return leaves[:: max(1, -(-len(leaves) // LEAVES))]


def _sample(value: Any) -> Any:
    """Numbers of a tensor or array, copied; the first entries of a list; None for what cannot be written into so."""
    if type(value) is Tensor and value.layout is torch.strided and not (value.is_nested or value.is_meta):
        return value.detach()[_sparsely(value.shape)].clone()
    if hasattr(type(value), "__array_interface__") and hasattr(value, "dtype"):
        return value[_sparsely(value.shape)].tobytes() if not value.dtype.hasobject else None
    if type(value) is list:
        return [entry if isinstance(entry, SCALARS) else None for entry in value[:SAMPLED]]
    return value if isinstance(value, SCALARS) else None


def _sparsely(shape: Sequence[int]) -> tuple[slice, ...]:
    each = max(1, int(SAMPLED ** (1 / max(1, len(shape))) + 1e-6))
    return tuple(slice(None, None, max(1, -(-size // each))) for size in shape)


def _same(then: Any, now: Any) -> bool:
    if isinstance(then, Tensor) and isinstance(now, Tensor):
        return then.shape == now.shape and bool((_bits(then) == _bits(now)).all())
    if isinstance(then, list) and isinstance(now, list):
        return len(then) == len(now) and all(map(_same, then, now))
    return then is now or bool(then == now) or (then != then and now != now)


def _bits(sample: Tensor) -> Tensor:
    """A tensor as bytes, in which what is no number equals itself."""
    return sample.reshape(-1).view(torch.uint8) if sample.numel() else sample


def _on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type not in ("cpu", "meta")


def _place(value: Any) -> int:
    return int(value.data_ptr())
