"""With whom the statistics of a batch are shared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from wholebatch.batchnorm.operations import Operation, Statistic
from wholebatch.batchnorm.partition import MeetingPoint
from wholebatch.errors import SyncError
from wholebatch.ranks.agreement import ProcessGroups, Ranks


class Alone:
    """One process holds the whole batch."""

    def couplings(self, here: Sequence[MeetingPoint]) -> Sequence[MeetingPoint]:
        """Agree on where rows meet."""
        return here

    def fail(self) -> None:
        """Tell the others, who wait for a statistic, that there will be none."""

    def written(self, here: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Learn the buffers that some rank has written."""
        return here

    def merge(self, operation: Operation, parts: Sequence[Statistic]) -> Statistic:
        """Make the statistic of the whole batch."""
        return operation.merge(parts)

    def sum(self, gradient: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Add up what all micro-batches say about the statistic."""
        return gradient


class Together(Alone):
    """Ranks that each hold a share of the batch, of any size.

    Every exchange begins with a sign of life, so that a rank that fails ends all of them instead of being waited for.
    """

    def __init__(self, peers: ProcessGroups) -> None:
        self._peers = peers
        self._empty = False

    def couplings(self, here: Sequence[MeetingPoint]) -> Sequence[MeetingPoint]:
        """Let ranks without rows know where those of others meet."""
        self._alive(True)
        told = self._objects(list(here))
        known = [couplings for couplings in told if couplings]
        self._empty = len(known) < len(told)
        if any(couplings != known[0] for couplings in known):
            raise SyncError(
                f"Rows meet {sorted({len(c) for c in known})} times on different ranks. Run one model on all."
            )
        return known[0] if known else here

    def fail(self) -> None:
        """Join the exchange that the others wait in, to end it."""
        self._alive(False)

    def written(self, here: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Take the buffers of a rank that had rows."""
        if not self._empty:
            return here
        told: Mapping[str, Tensor] = next(
            (values for values in self._objects({n: v.cpu() for n, v in here.items()}) if values), {}
        )
        return here or told

    def merge(self, operation: Operation, parts: Sequence[Statistic]) -> Statistic:
        """Merge first here, then over ranks."""
        here = operation.merge(parts) if parts else None
        self._alive(True)
        if self._empty or here is None:  # a rank without rows cannot say what form a statistic has: objects can
            return operation.merge([part for part in self._objects(here) if part is not None])
        return operation.merge([_like(here, numbers) for numbers in self._gather(_flat(here))])

    def sum(self, gradient: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Add up what the micro-batches of all ranks say."""
        self._alive(True)
        if self._empty:  # a rank without rows cannot say which parts have a gradient: objects can
            return self._sum_of_objects(gradient)
        present = [g for g in gradient if g is not None]
        numbers = iter(torch.split(self._peers.total(_flat(present)), [g.numel() for g in present]))
        return [None if g is None else next(numbers).view(g.shape).to(g) for g in gradient]

    def _sum_of_objects(self, gradient: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        told = self._objects([None if g is None else g.cpu() for g in gradient])
        columns = [[g for g in column if g is not None] for column in zip(*told, strict=True)]
        return [torch.stack(column).sum(0) if column else None for column in columns]

    def _alive(self, here: bool) -> None:
        failed = self._peers.total(torch.tensor([float(not here)]))
        if here and float(failed):
            raise SyncError(
                f"{int(failed)} of {self._peers.world} ranks failed while the others waited for statistics."
            )

    def _objects(self, thing: Any) -> list[Any]:
        things = [thing]
        for group in reversed(self._peers.groups):
            gathered: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(gathered, things, group=group)
            things = [each for some in gathered for each in some]
        return things

    def _gather(self, flat: Tensor) -> list[Tensor]:
        rows = flat.to(self._peers.device)[None]
        for group in reversed(self._peers.groups):
            gathered = [torch.empty_like(rows) for _ in range(dist.get_world_size(group))]
            dist.all_gather(gathered, rows, group=group)
            rows = torch.cat(gathered)
        return list(rows)


def _flat(statistic: Sequence[Any]) -> Tensor:
    return torch.cat([torch.as_tensor(s, dtype=torch.float64).detach().cpu().flatten() for s in statistic])


def _like(statistic: Statistic, numbers: Tensor) -> Statistic:
    """Give numbers the form of a statistic."""
    sizes = [s.numel() if isinstance(s, Tensor) else 1 for s in statistic]
    parts = torch.split(numbers.cpu(), sizes)
    return tuple(
        part.view(s.shape).to(s) if isinstance(s, Tensor) else float(part)
        for s, part in zip(statistic, parts, strict=True)
    )


def statistics_over(ranks: Ranks) -> Alone:
    """Share statistics over the ranks of a window."""
    return Together(ranks) if isinstance(ranks, ProcessGroups) else Alone()
