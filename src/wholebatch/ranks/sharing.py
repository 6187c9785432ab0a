"""A window shared out beforehand: for engines that run their own backward, and loops that are not ours."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import TypeVar

from wholebatch.errors import LossError, SplitError, SyncError
from wholebatch.ranks.agreement import message_device

T = TypeVar("T", default=Any)


def shares(
    window: Iterable[T],
    items: Callable[[T], Tensor | float],
    *,
    group: dist.ProcessGroup | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    engine_divides: float | None = None,
) -> Shares[T]:
    """Share a window out: each micro-batch with the factor for its loss, to go back from in an engine's own backward.

    All items are counted first, over all ranks: N. A micro-batch whose loss is the mean of its n items then weighs
    n / N, one whose loss is a sum 1 / N, times what the engine divides gradients by. Each micro-batch runs at its own
    time, and nothing of gradients is touched: whatever shards, reduces, offloads or clips them does so as ever. Every
    rank gets as many micro-batches as the one with most, its last again with the factor 0, so that ranks of a sharded
    model run in step.

    What is believed: that the loss is a mean (or a sum) over what ``items`` counts, and that rows do not meet. Terms
    with different denominators go into one loss times their own factors: ``zip`` two of these over one window. Layers
    that normalise over rows are as the engine has them.

    Args:
        window: this rank's micro-batches of one optimizer step, one or more; `wb.windows` makes them.
        items: counts what the loss of a micro-batch averages over on this rank: its rows, or targets after the shift.
        group: the ranks whose rows, or parts of a sequence, are different; None for all. Ranks that hold copies of the
            same rows (tensor parallelism) are left out: ``group=mesh["dp"].get_group()``.
        reduction: whether the loss of a micro-batch is the mean or the sum of its items.
        engine_divides: by what the engine divides the sum of the ranks' gradients, accumulation included. None for the
            ranks of the group, as ``DistributedDataParallel``, FSDP and DeepSpeed (``scale_wrt_gas=False``) do; 1
            where gradients are added up.

    Returns:
        Pairs of micro-batch and factor, once or many times over, with a length and the items of the window.

    Raises:
        SplitError: on all ranks, if the window of one is empty.
        LossError: if a count is no number, or below 0; `SyncError` on the other ranks.
        ValueError: for another ``reduction``, or an ``engine_divides`` that is not above 0.

    Example:
        >>> model, window = torch.nn.Linear(3, 1), [torch.randn(4, 3), torch.randn(2, 3)]
        >>> for x, share in wb.shares(window, items=len):
        ...     (model(x).square().mean() * share).backward()
        >>> [round(share, 3) for _, share in wb.shares(window, items=len)]
        [0.667, 0.333]
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f'reduction={reduction!r} is none: the loss of a micro-batch is the "mean" or the "sum".')
    ranks = dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1
    divides = float(ranks) if engine_divides is None else float(engine_divides)
    if not divides > 0:
        raise ValueError(f"engine_divides={engine_divides!r} is no divisor. Leave it out, or say 1 for plain sums.")
    micro_batches = list(window)
    counts: list[float] | None = None
    try:
        counts = [_counted(items, each) for each in micro_batches]
    finally:  # an error in items= on one rank must not leave the others waiting
        heard = _from_all(_message(counts), group, ranks)
    total, most = _agreed(heard)
    weights = [count if reduction == "mean" else float(count > 0) for count in counts]
    factors = [weight * divides / total if total else 0.0 for weight in weights]
    repeated = most - len(factors)
    return Shares(micro_batches + micro_batches[-1:] * repeated, factors + [0.0] * repeated, total)


class Shares(Generic[T]):
    """What `shares` returns: a window's micro-batches, each with the factor for its loss.

    Args:
        micro_batches: in order, as many on every rank.
        factors: of their losses.
        items: what the window averages over, over all ranks; 0 if there was nothing to learn from.
    """

    def __init__(self, micro_batches: list[T], factors: list[float], items: float) -> None:
        self.items = items
        self._micro_batches, self._factors = micro_batches, factors

    def __iter__(self) -> Iterator[tuple[T, float]]:
        return iter(zip(self._micro_batches, self._factors, strict=True))

    def __len__(self) -> int:
        """How many micro-batches every rank runs."""
        return len(self._factors)


def _counted(items: Callable[[Any], Tensor | float], micro_batch: Any) -> float:
    """Return a count as a number.

    Raises:
        LossError: if it is none, is below 0, or counts the fields of a micro-batch.
    """
    if cast("object", items) is len and isinstance(micro_batch, (Mapping, tuple)):
        raise LossError(
            f"items=len counts the {len(micro_batch)} fields of a {type(micro_batch).__name__}, not its rows. Name "
            f"one: "
            "items=lambda batch: len(batch['labels'])."
        )
    count = items(micro_batch)
    try:
        number = float(count)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise LossError(
            f"items= returned {count!r:.80} for a micro-batch. Return how many items it has: a number, 0 or more."
        )
    return number


def _message(counts: list[float] | None) -> Tensor:
    """What a rank tells the others: its micro-batches, their items, and whether counting went well."""
    said = [0.0, 0.0, 0.0] if counts is None else [len(counts), sum(counts), 1.0]
    return torch.tensor(said, dtype=torch.float64)


def _agreed(heard: list[list[float]]) -> tuple[float, int]:
    """Return the items over all ranks, and the micro-batches of the rank with most."""
    failed = next((rank for rank, (_, _, counted) in enumerate(heard) if not counted), None)
    if failed is not None:
        raise SyncError(f"Rank {failed} could not count its window with items=, so no rank may step.")
    empty = next((rank for rank, (length, _, _) in enumerate(heard) if not length), None)
    if empty is not None:
        raise SplitError(
            f"The window of rank {empty} holds no micro-batch, so there is none that it could run beside those of the "
            "others. Give every rank one at least; it may have no items."
        )
    return sum(items for _, items, _ in heard), int(max(length for length, _, _ in heard))


def _from_all(numbers: Tensor, group: dist.ProcessGroup | None, ranks: int) -> list[list[float]]:
    if ranks == 1:
        return [numbers.tolist()]
    near = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    numbers = numbers.to(message_device(group, near))
    heard = [torch.empty_like(numbers) for _ in range(ranks)]
    dist.all_gather(heard, numbers, group=group)
    return [each.tolist() for each in heard]
