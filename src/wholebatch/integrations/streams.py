"""Datasets without a length over several ranks, whose last batch Accelerate fills up with rows of the first."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset

from wholebatch.batch.tree import take
from wholebatch.errors import InexactError
from wholebatch.integrations.foreign_loop import world


def draw(batches: Iterator[Any], number: int, accelerator: Any) -> list[Any]:
    """Draw so many batches, or those that are left, without the rows that fill up the last one."""
    found = (_without_repeats(batch, accelerator) for batch in islice(batches, number))
    return [batch for batch in found if batch is not None]


def _without_repeats(batch: Any, accelerator: Any) -> Any:
    """Cut the last batch that one rank has read for all to the rows that were read; None where this rank has none."""
    loader = accelerator.gradient_state.active_dataloader
    if type(loader).__name__ != "DataLoaderDispatcher" or not loader.end_of_dataloader:
        return batch
    each = -(-loader.remainder // accelerator.num_processes)
    left = min(max(loader.remainder - accelerator.process_index * each, 0), each)
    if left == each:
        return batch
    return take(batch, slice(0, left)) if left else None


def refuse_repeats(loader: Any) -> None:
    """Let a stream that each rank reads for itself be refused at its end, if it is not a whole number of batches.

    There Accelerate fills the last batch up with the first rows, and does not say how many.
    """
    shard: Any = getattr(loader, "dataset", None)
    if type(shard).__name__ == "IterableDatasetShard" and not shard.drop_last:
        shard.dataset = _Measured(shard.dataset, shard.batch_size * (1 if shard.split_batches else shard.num_processes))


class _Measured(IterableDataset[Any]):
    """A stream that is refused at its end if it is not a whole number of batches."""

    def __init__(self, stream: Any, rows: int) -> None:
        self._stream, self._rows = stream, rows

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_stream" not in vars(self):
            raise AttributeError(name)
        return getattr(self._stream, name)

    def __iter__(self) -> Iterator[Any]:
        count = 0
        for row in self._stream:
            count += 1
            yield row
        if count % self._rows:
            raise InexactError(
                f"The stream ends after {count} rows, no whole number of batches of {self._rows} rows over "
                f"{world()} ranks: Accelerate would fill the last one up with the first rows, which would count "
                "twice. Let one rank read for all (accelerator_config={'dispatch_batches': True}), or drop the last "
                "batch (dataloader_drop_last=True)."
            )
