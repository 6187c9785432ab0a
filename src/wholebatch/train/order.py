"""The order of the rows: each once an epoch, shuffled by seed and epoch alone, so that any step can be found again."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from wholebatch.batch.dealing import shuffled
from wholebatch.train.errors import ConfigError


@dataclass(frozen=True)
class Order:
    """Which rows make up which step's batch.

    The last batch of an epoch holds the remaining rows, however few: a short batch has its own denominator, so no
    row is dropped or repeated.

    Args:
        rows: how many there are.
        batch_size: rows of one step.
        seed: of the shuffling.

    Raises:
        ConfigError: if there are fewer rows than a batch needs.

    Example:
        >>> order = Order(rows=10, batch_size=4, seed=0)
        >>> [len(order.batch(step)) for step in range(4)]
        [4, 4, 2, 4]
    """

    rows: int
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        if self.rows < self.batch_size:
            raise ConfigError(
                f"A batch of {self.batch_size} rows cannot be met: there are {self.rows} rows to train on. "
                f"Choose batch_size {self.rows} or less, or give more data."
            )

    @property
    def steps_per_epoch(self) -> int:
        """How many batches an epoch has, the short one included."""
        return -(-self.rows // self.batch_size)

    def batch(self, step: int) -> list[int]:
        """Return the row numbers of a step, counted from 0."""
        epoch, place = divmod(step, self.steps_per_epoch)
        start = place * self.batch_size
        return _shuffled(self.rows, self.seed, epoch)[start : start + self.batch_size]

    def rows_before(self, step: int) -> int:
        """Return how many rows the steps before this one hold together."""
        epoch, place = divmod(step, self.steps_per_epoch)
        return epoch * self.rows + place * self.batch_size

    def __str__(self) -> str:
        full, rest = divmod(self.rows, self.batch_size)
        last = f" + 1 of {rest}" if rest else ""
        return f"{self.rows:,} rows = {full:,} batch{'es' if full > 1 else ''} of {self.batch_size}{last}"


_shuffled = lru_cache(maxsize=1)(shuffled)
