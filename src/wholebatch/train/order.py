"""The order of the rows: each once an epoch, shuffled by seed and epoch alone, so that any step can be found again."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from wholebatch.batch.batch_schedule import BatchSchedule, as_schedule, steps_of
from wholebatch.batch.dealing import shuffled
from wholebatch.train.errors import ConfigError


class _Place(NamedTuple):
    """Where a step's batch lies: its epoch, its first row in the epoch's order, and how many rows were asked for."""

    epoch: int
    start: int
    rows: int


class Order:
    """Which rows make up which step's batch.

    The last batch of an epoch holds the remaining rows, however few: a short batch has its own denominator, so no
    row is dropped or repeated.

    Args:
        rows: how many there are.
        batch_size: rows of one step, or a schedule of them.
        seed: of the shuffling.

    Raises:
        ConfigError: if there are fewer rows than a batch needs.

    Example:
        >>> order = Order(rows=10, batch_size=4, seed=0)
        >>> [len(order.batch(step)) for step in range(4)]
        [4, 4, 2, 4]
    """

    def __init__(self, rows: int, batch_size: int | BatchSchedule, seed: int) -> None:
        self.rows, self.seed = rows, seed
        self.schedule = as_schedule(batch_size, "batch_size", "--batch-size 64")
        self._places: list[_Place] = []
        if rows < self.schedule.largest:
            raise ConfigError(
                f"A batch of {self.schedule.largest} rows cannot be met: there are {rows} rows to train on. "
                f"Choose batch_size {rows} or less, or give more data."
            )

    def batch(self, step: int) -> list[int]:
        """Return the row numbers of a step, counted from 0."""
        place = self._place(step)
        return _shuffled(self.rows, self.seed, place.epoch)[place.start : place.start + place.rows]

    def rows_before(self, step: int) -> int:
        """Return how many rows the steps before this one hold together."""
        return self._after(step).epoch * self.rows + self._after(step).start

    def epochs_before(self, step: int) -> float:
        """Return how many epochs the steps before this one make."""
        return self.rows_before(step) / self.rows

    def steps_in(self, epochs: int) -> int:
        """Return how many steps so many epochs have.

        Raises:
            ConfigError: if the batch follows the noise, so that nobody knows.
        """
        if not self.schedule.settled:
            raise ConfigError(
                f"How many steps {epochs} epochs have is not known, since the batch {self.schedule} follows the noise. "
                "Say when to end: --steps 1000."
            )
        steps = 0
        for epoch in range(epochs):
            steps += len(steps_of(self.schedule, self.rows, steps, epoch))
        return steps

    def _place(self, step: int) -> _Place:
        while len(self._places) <= step:
            following = self._after(len(self._places))
            size = self.schedule.at(len(self._places), following.epoch)
            self._places.append(following._replace(rows=size))
        return self._places[step]

    def _after(self, steps: int) -> _Place:
        """Where the batch begins that comes after so many."""
        if not steps:
            return _Place(0, 0, 0)
        last = self._place(steps - 1)
        end = last.start + last.rows
        return _Place(last.epoch + 1, 0, 0) if end >= self.rows else _Place(last.epoch, end, 0)

    def __str__(self) -> str:
        if not self.schedule.settled or self.schedule.smallest != self.schedule.largest:
            return f"{self.rows:,} rows in batches of {self.schedule}"
        size = self.schedule.largest
        full, rest = divmod(self.rows, size)
        last = f" + 1 of {rest}" if rest else ""
        return f"{self.rows:,} rows = {full:,} batch{'es' if full > 1 else ''} of {size}{last}"


_shuffled = lru_cache(maxsize=1)(shuffled)
