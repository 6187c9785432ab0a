"""The arithmetic of a batch, without a model: micro-batches, remainders, and the same set-up in other tools' words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from wholebatch.amounts import whole_number
from wholebatch.policies import scale_lr


@dataclass(frozen=True)
class Arrangement:
    """How a batch is cut over ranks and micro-batches; nothing is rounded, every remainder is said.

    Args:
        batch_size: rows of one optimizer step, over all ranks.
        micro_batch_size: rows of one forward and backward at most; None for one micro-batch a rank.
        ranks: how many processes share the batch.

    Raises:
        TypeError, ValueError: for what is no whole number of at least 1.

    Example:
        >>> print(Arrangement(130, 4, ranks=2))
        batch 130 = (4 rows x 16 micro-batches + 1 micro-batch of 1 row) x 2 ranks
    """

    batch_size: int
    micro_batch_size: int | None = None
    ranks: int = 1

    def __post_init__(self) -> None:
        whole_number(self.batch_size, "batch_size", "batch_size=128")
        whole_number(self.ranks, "ranks", "ranks=4")
        if self.micro_batch_size is not None:
            whole_number(self.micro_batch_size, "micro_batch_size", "micro_batch_size=4")

    def __str__(self) -> str:
        if not self._alike:
            limit = (
                "" if self.micro_batch_size is None else f", in micro-batches of at most {counted(self._rows, 'row')}"
            )
            return f"{self.shared_out}{limit}"
        full, rest = divmod(self.shares[0], self._rows)
        cut = f"{counted(self._rows, 'row')} x {counted(full, 'micro-batch')}"
        cut += f" + 1 micro-batch of {counted(rest, 'row')}" if rest else ""
        return f"batch {self.batch_size} = {f'({cut})' if rest and self.ranks > 1 else cut}{self._over_ranks}"

    @property
    def shared_out(self) -> str:
        """How the batch goes to the ranks, in words and without micro-batches: "batch 10 = 4 + 3 + 3 rows on 3
        ranks".
        """
        if self._alike:
            return f"batch {self.batch_size} = {counted(self.shares[0], 'row')}{self._over_ranks}"
        return f"batch {self.batch_size} = {' + '.join(map(str, self.shares))} rows on {self.ranks} ranks"

    @property
    def shares(self) -> list[int]:
        """Rows of each rank: as even as can be, the first ones one more."""
        return [self.batch_size // self.ranks + (rank < self.batch_size % self.ranks) for rank in range(self.ranks)]

    @property
    def micro_batches(self) -> int:
        """Micro-batches of the rank with most rows."""
        return -(-self.shares[0] // self._rows)

    @property
    def pieces(self) -> int:
        """The former name of `micro_batches`."""
        return self.micro_batches

    @property
    def remainder(self) -> int:
        """Rows of that rank's last micro-batch, if it is smaller than the others; else 0."""
        return self.shares[0] % self._rows

    @property
    def even(self) -> bool:
        """Whether every micro-batch of every rank has the same rows, as tools that count micro-batches need it."""
        return self._alike and not self.remainder

    def in_other_words(self) -> dict[str, dict[str, int]]:
        """Return the set-up in the words of other tools, empty where they cannot say it.

        They count micro-batches of equal size, so that a batch with a remainder becomes another batch there.
        """
        if not self.even:
            return {}
        rows, micro_batches = self._rows, self.micro_batches
        hugging_face = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": micro_batches}
        return {
            "Hugging Face": hugging_face,
            "Lightning": {"batch_size": rows, "accumulate_grad_batches": micro_batches},
            "Ultralytics": {"batch": rows * self.ranks, "nbs": self.batch_size},
            "DeepSpeed": {
                "train_batch_size": self.batch_size,
                "train_micro_batch_size_per_gpu": rows,
                "gradient_accumulation_steps": micro_batches,
            },
            "Megatron": {"global-batch-size": self.batch_size, "micro-batch-size": rows},
        }

    def nearest(self) -> tuple[int, ...]:
        """Return the batches just below and above that are cut into micro-batches of equal size; this one, if it is."""
        step = self._rows * self.ranks
        below = self.batch_size // step * step
        return tuple(sorted({batch for batch in (below, -(-self.batch_size // step) * step) if batch}))

    def rates(self, lr: float, base_batch: int) -> dict[str, float]:
        """Return a learning rate found at another batch, scaled to this one by both rules."""
        return {
            "linear": scale_lr(lr, self.batch_size, base_batch),
            "sqrt": scale_lr(lr, self.batch_size, base_batch, rule="sqrt"),
        }

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        return {
            "batch_size": self.batch_size,
            "micro_batch_size": self._rows,
            "ranks": self.ranks,
            "rows_per_rank": self.shares,
            "pieces": self.micro_batches,
            "last_piece_rows": self.remainder or self._rows,
            "in_other_words": self.in_other_words(),
        }

    @property
    def _alike(self) -> bool:
        return self.batch_size % self.ranks == 0

    @property
    def _over_ranks(self) -> str:
        return f" x {self.ranks} ranks" if self.ranks > 1 else ""

    @property
    def _rows(self) -> int:
        return min(self.micro_batch_size or self.shares[0], self.shares[0]) or 1


def counted(number: int, noun: str) -> str:
    """Say a number of things: "1 row", "4 rows"."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}{'es' if noun.endswith('ch') else 's'}"
