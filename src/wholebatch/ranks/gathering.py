"""Encoded rows of all ranks in one place, with the right gradient."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from wholebatch.errors import SyncError
from wholebatch.ranks.agreement import ProcessGroups, Ranks


class LocalRows:
    """A loss over the rows of this rank alone."""

    meets = False
    """Whether ranks gather rows before the loss, in collectives that none can leave out."""

    def gather(self, leaf: Tensor) -> Tensor:
        """Return the rows that the loss is taken over."""
        return leaf

    def share(self, gradient: Tensor) -> Tensor:
        """Return the gradient of this rank's rows."""
        return gradient


class AllGatherRows(LocalRows):
    """A loss that each rank takes over the rows of all.

    Every rank computes the same number. A parameter of the loss gets the same gradient on each, and their mean is
    right. The rows of a rank get theirs from its own copy, which is the whole of it: the reduction will divide it
    by the number of ranks, so it is multiplied by that number here. (A gather whose backward sums over ranks would be
    too large by the number of ranks, one without gradient for the others' rows but with their mean too small.)
    """

    meets = True

    def __init__(self, peers: ProcessGroups) -> None:
        if len(peers.groups) != 1:
            raise SyncError(f"gather=True needs one process group; the model lies on a mesh of {len(peers.groups)}.")
        self._group, self._rank, self._divides = peers.groups[0], peers.rank, peers.divides

    def share(self, gradient: Tensor) -> Tensor:
        """Undo the division that the reduction will make."""
        return gradient * self._divides

    def gather(self, leaf: Tensor) -> Tensor:
        """Put the rows of all ranks one behind another, in the order of ranks."""
        world = dist.get_world_size(self._group)
        counts = [torch.zeros(1, dtype=torch.long, device=leaf.device) for _ in range(world)]
        dist.all_gather(counts, torch.tensor([len(leaf)], device=leaf.device), group=self._group)
        sizes = [int(count) for count in counts]
        padded = leaf.detach().new_zeros((max(sizes), *leaf.shape[1:]))
        padded[: len(leaf)] = leaf.detach()
        gathered = [torch.empty_like(padded) for _ in range(world)]
        dist.all_gather(gathered, padded, group=self._group)
        parts = [part[:size] for part, size in zip(gathered, sizes, strict=True)]
        parts[self._rank] = leaf
        return torch.cat(parts)


def everyone(ranks: Ranks, gather: bool) -> LocalRows:
    """Say over whose rows the loss is taken.

    Raises:
        SyncError: if the rows of all ranks are wanted and these lie on a mesh.
    """
    return AllGatherRows(ranks) if gather and isinstance(ranks, ProcessGroups) and ranks.world > 1 else LocalRows()
