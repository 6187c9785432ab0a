"""Who computes which row: a batch is one set of rows, dealt out so that all ranks finish together."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from wholebatch.batch.batch_schedule import BatchSchedule, as_schedule, steps_of
from wholebatch.batch.sizes import Cost, Tokens

VERSION = 1
"""Of the state dict's layout."""


def deal(lengths: Sequence[int], ranks: int, size: Tokens | None = None) -> list[list[int]]:
    """Deal rows out to ranks so that the slowest finishes soonest, by the modelled time of its own micro-batches.

    Three ways are tried, and the one with the smallest maximum taken: the heaviest rows first, each to the rank with
    the least work; the micro-batches of the whole batch in the same way; and smaller micro-batches, about four a rank.
    Finding the best of all deals is NP-hard; the heaviest-first rule is at most a third above it.

    Args:
        lengths: of each row, in tokens.
        ranks: how many.
        size: how each rank will cut its rows; None for rows that all cost the same.

    Returns:
        The row numbers of each rank, ascending.

    Example:
        >>> deal([8, 1, 1, 9, 1], ranks=2, size=Tokens(16, overhead=0))
        [[2, 3], [0, 1, 4]]
    """
    if size is None:
        return [list(range(rank, len(lengths), ranks)) for rank in range(ranks)]

    def together(rows: Sequence[int]) -> float:
        return _seconds([lengths[row] for row in rows], size)

    def alone(rows: Sequence[int]) -> float:
        return together(rows) - _cost_of(size).overhead

    narrow = replace(size, budget=max(1, min(size.budget, sum(lengths) // (4 * ranks))))
    deals = [_heaviest_first([[row] for row in range(len(lengths))], ranks, alone)]
    deals += [_heaviest_first(each.plan(lengths), ranks, together) for each in (size, narrow)]
    return min(deals, key=lambda dealt: max(map(together, dealt)))


class DealtBatches(Sampler[list[int]]):
    """Yield this rank's rows of one batch after the other: a batch sampler whose batches do not depend on the ranks.

    Every rank knows all lengths, so all come to the same deal without a message. Each row comes exactly once an
    epoch, on one rank: none is repeated to even ranks out, and a rank may have no row in a short last batch. The
    batches follow from seed and epoch alone, so a run resumed on another number of ranks goes on with the same ones.
    For ``DataLoader(dataset, batch_sampler=dealt, collate_fn=list)``.

    Args:
        dataset: with a length; read once, row by row, if ``length`` is a function or a key.
        batch_size: rows of one batch, over all ranks; or a :class:`wholebatch.BatchSchedule` of them.
        length: of each row: a list of numbers; a function of a sample, or a key of it, as for ``Tokens``; None for
            rows that all cost the same.
        size: how each rank cuts its rows; its cost decides the deal. Rows of up to 8192 tokens a micro-batch if None.
        rank: this rank; asked of ``torch.distributed`` if None.
        ranks: how many ranks; asked likewise.
        seed: of the order of rows.
        shuffle: whether rows are drawn in a new order each epoch.
        drop_last: whether a last batch of fewer rows is left out.

    Raises:
        ValueError: for a batch size below 1, a rank that is none of the ranks, or a list of lengths of another length
            than the dataset.

    Example:
        >>> dealt = wb.DealtBatches(range(5), 4, ranks=2, rank=1, shuffle=False)
        >>> list(dealt)
        [[1, 3], []]
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | BatchSchedule,
        length: Sequence[int] | Callable[[Any], int] | str | None = None,
        *,
        size: Tokens | None = None,
        rank: int | None = None,
        ranks: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        self.schedule = as_schedule(batch_size, "batch_size", "wb.DealtBatches(dataset, 64)")
        self.seed, self.shuffle, self.drop_last = seed, shuffle, drop_last
        known = dist.is_available() and dist.is_initialized()
        self.rank = (dist.get_rank() if known else 0) if rank is None else rank
        self.ranks = (dist.get_world_size() if known else 1) if ranks is None else ranks
        if self.ranks < 1 or not 0 <= self.rank < self.ranks:
            raise ValueError(
                f"rank={self.rank} of ranks={self.ranks}: ranks count from 0, and each deals itself its own rows. Give "
                "both as torch.distributed counts them, such as rank=0, ranks=2; or neither."
            )
        self.epoch = 0
        self.batch = 0
        self._first = 0
        self._rows = len(dataset)
        self._size = None if length is None else size or Tokens(8192)
        self._lengths = _lengths_of(dataset, length, self._size)

    @property
    def batch_size(self) -> int:
        """The rows of the batch that comes next."""
        return self.schedule.at(self._first + self.batch, self.epoch)

    def __len__(self) -> int:
        """How many batches this epoch has, the same on every rank.

        Raises:
            TypeError: if the batch follows the noise, so that nobody knows.
        """
        if not self.schedule.settled:
            raise TypeError(
                f"How many batches an epoch has is not known beforehand: {self.schedule!r} follows the noise. Count "
                "steps, or iterate without a length."
            )
        return self._batches(self._first, self.epoch)

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order()
        start = sum(self.schedule.at(self._first + batch, self.epoch) for batch in range(self.batch))
        while start < self._rows:
            size = self.batch_size
            if self.drop_last and start + size > self._rows:
                break
            rows = order[start : start + size]
            dealt = deal([self._lengths[row] for row in rows], self.ranks, self._size)
            self.batch, start = self.batch + 1, start + size
            yield [rows[place] for place in dealt[self.rank]]
        self._first += self.batch
        self.epoch, self.batch = self.epoch + 1, 0

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch; happens by itself when one has been read to its end."""
        if epoch != self.epoch and self.schedule.settled:
            self._first = 0
            for earlier in range(epoch):
                self._first += self._batches(self._first, earlier)
        self.epoch, self.batch = epoch, 0

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """Return where this epoch stands.

        Args:
            batches: how many batches of the epoch have been trained on. A loader with workers has asked for more
                than that; None stands for as many as were asked for.
        """
        return {
            "version": VERSION,
            "seed": self.seed,
            "epoch": self.epoch,
            "batch": self.batch if batches is None else batches,
            "batch_size": self._said,
            "rows": self._rows,
            "first": self._first,
            "schedule": self.schedule.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, also one that another number of ranks has written.

        Raises:
            ValueError: if it belongs to another layout, seed, batch size or number of rows: the batches would differ.
        """
        mine = self.state_dict()
        for name in ("version", "seed", "batch_size", "rows"):
            if state.get(name) != mine[name]:
                raise ValueError(
                    f"The state was saved with {name}={state.get(name)}, this sampler has {mine[name]}: its batches "
                    "would not be the same. Build it with the same dataset, batch_size and seed."
                )
        if "schedule" in state:
            self.schedule.load_state_dict(state["schedule"])
        self.set_epoch(state["epoch"])
        self._first, self.batch = state.get("first", self._first), state["batch"]

    @property
    def _said(self) -> int | str:
        """The batch size in plain words."""
        said = str(self.schedule)
        return int(said) if said.isdigit() else said

    def _batches(self, first: int, epoch: int) -> int:
        """How many batches an epoch has whose first step is this one."""
        sizes = steps_of(self.schedule, self._rows, first, epoch)
        short = bool(sizes) and sizes[-1] < self.schedule.at(first + len(sizes) - 1, epoch)
        return len(sizes) - (self.drop_last and short)

    def _order(self) -> list[int]:
        """The rows in the order in which this epoch takes them."""
        return shuffled(self._rows, self.seed, self.epoch) if self.shuffle else list(range(self._rows))


def shuffled(rows: int, seed: int, epoch: int) -> list[int]:
    """Return the numbers of all rows in the order of an epoch."""
    draws = torch.Generator().manual_seed(seed_of(seed, epoch))
    order: list[int] = torch.randperm(rows, generator=draws).tolist()
    return order


def seed_of(seed: int, number: int) -> int:
    """Return the seed of one of many streams of draws: an epoch's, or a rank's."""
    # A prime far above any number of epochs keeps neighbouring seeds from sharing an order.
    product = seed * 1_000_003 + number
    return product if -(2**63) <= product < 2**64 else product % 2**64  # torch takes 64 bits


def _heaviest_first(
    micro_batches: Sequence[Sequence[int]], ranks: int, seconds: Callable[[Sequence[int]], float]
) -> list[list[int]]:
    """Give each micro-batch, the heaviest first, to the rank with the least work so far."""
    work = [(0.0, rank) for rank in range(ranks)]
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    for weight, place in sorted(((-seconds(rows), place) for place, rows in enumerate(micro_batches))):
        done, rank = heapq.heappop(work)
        dealt[rank] += micro_batches[place]
        heapq.heappush(work, (done - weight, rank))
    return [sorted(rows) for rows in dealt]


def _seconds(lengths: Sequence[int], size: Tokens) -> float:
    """The modelled time of a rank's rows, cut as it will cut them."""
    cost = _cost_of(size)
    micro_batches = ([lengths[row] for row in micro_batch] for micro_batch in size.plan(lengths)) if lengths else ()
    if size.packed:
        return sum(cost(1, sum(micro_batch)) for micro_batch in micro_batches)
    return sum(cost(len(micro_batch), max(micro_batch)) for micro_batch in micro_batches)


def _cost_of(size: Tokens) -> Cost:
    return size.cost or Cost(overhead=size.overhead)


def _lengths_of(dataset: Any, length: Any, size: Tokens | None) -> list[int]:
    rows = len(dataset)
    if length is None:
        return [1] * rows
    if callable(length) or isinstance(length, str):
        return Tokens(1, length=length).lengths(dataset[row] for row in range(rows))
    lengths = [int(each) for each in itertools.islice(length, rows + 1)]
    if len(lengths) != rows or len(length) != rows:
        raise ValueError(f"length= holds {len(length)} numbers for {rows} rows. Give one for each row of the dataset.")
    return lengths
