"""Windows shared out beforehand: factors for an engine's own backward, in one process and on two ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import wholebatch as wb
from tests.distributed import Ranks, RanksError, needs_shards
from tests.oracle import Gradients, assert_differs, assert_same_gradient, gradients_of, whole_batch

Batch = dict[str, Tensor]
SIZES = ([(7, 9), (2, 1), (4, 4)], [(5, 2)])  # (rows, targets of each) by micro-batch: the second rank has only one


def micro_batch(rows: int, targets: int, seed: int) -> Batch:
    """Make rows of ten tokens, the first `targets` of each to be predicted."""
    draws = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 5, (rows, 10), generator=draws)
    labels[:, targets:] = -100
    return {"x": torch.randn(rows, 10, 6, generator=draws, dtype=torch.float64), "labels": labels}


def window(rank: int) -> list[Batch]:
    return [micro_batch(*size, seed=10 * rank + place) for place, size in enumerate(SIZES[rank])]


def everything(ranks: int) -> Batch:
    held = [each for rank in range(ranks) for each in window(rank)]
    return {name: torch.cat([each[name] for each in held]) for name in held[0]}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double()


def loss_of(model: nn.Module, batch: Batch, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(model(batch["x"]).mT, batch["labels"], reduction=reduction)


def targets(batch: Batch) -> Tensor:
    return (batch["labels"] != -100).sum()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_shares_add_up_to_the_whole_batch(reduction: str) -> None:
    ours, expected = model(), whole_batch(model(), loss_of, everything(1))
    logged = torch.zeros(())
    shared = wb.shares(window(0), targets, reduction=reduction)  # type: ignore[arg-type]
    for batch, share in shared:
        loss = loss_of(ours, batch, reduction) * share
        loss.backward()
        logged = logged + loss.detach()
    assert_same_gradient(ours, expected)
    assert logged == pytest.approx(float(expected.loss))
    assert shared.items == 7 * 9 + 2 + 16 and len(shared) == 3


def test_a_mean_of_micro_batches_is_off() -> None:
    naive = model()
    for batch in window(0):
        (loss_of(naive, batch) / 3).backward()
    assert_differs(naive, whole_batch(model(), loss_of, everything(1)), by=0.05)


def test_an_engine_that_divides_by_more_is_told() -> None:
    assert [share for _, share in wb.shares(window(0), len_of, engine_divides=8)] == [
        7 * 8 / 13,
        2 * 8 / 13,
        4 * 8 / 13,
    ]


def len_of(batch: Batch) -> int:
    return len(batch["labels"])


def test_a_window_without_items_weighs_nothing() -> None:
    shared = wb.shares(window(0), lambda batch: 0)
    assert [share for _, share in shared] == [0.0, 0.0, 0.0] and not shared.items


@pytest.mark.parametrize("count", [-1, float("nan"), torch.ones(2), "three", None], ids=str)
def test_a_count_that_is_none_is_refused(count: object) -> None:
    with pytest.raises(wb.LossError, match="Return how many items it has"):
        wb.shares(window(0), lambda batch: count)  # type: ignore[arg-type, return-value]


def test_the_fields_of_a_micro_batch_are_not_its_rows() -> None:
    with pytest.raises(wb.LossError, match="counts the 2 fields of a dict"):
        wb.shares(window(0), len)


def test_what_cannot_be_shared_is_refused() -> None:
    with pytest.raises(wb.SplitError, match="rank 0 holds no micro-batch"):
        wb.shares([], len_of)
    with pytest.raises(ValueError, match="reduction='none' is none"):
        wb.shares(window(0), len_of, reduction="none")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="engine_divides=0 is no divisor"):
        wb.shares(window(0), len_of, engine_divides=0)


def wrapped(kind: str) -> nn.Module:
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model())
    from torch.distributed.fsdp import fully_shard

    sharded = model()
    for layer in (sharded[0], sharded[2]):  # type: ignore[index]
        fully_shard(layer)
    fully_shard(sharded)
    if kind == "fsdp2 sums":  # as torchtitan has it
        for module in (sharded[0], sharded[2], sharded):  # type: ignore[index]
            module.set_gradient_divide_factor(1.0)  # type: ignore[union-attr]
    return sharded


def on_a_rank(kind: str, naive: bool) -> tuple[str, Gradients]:
    """Go through this rank's window by the wrapper's own backward; naively, by means of means."""
    rank = dist.get_rank()
    engine = wrapped(kind)
    shared = wb.shares(window(rank), targets, engine_divides=1 if kind.endswith("sums") else None)
    for number, (batch, share) in enumerate(shared):
        last = number + 1 == len(shared)
        weight = 1 / len(shared) if naive else share
        if kind == "ddp":
            engine.require_backward_grad_sync = last
        else:
            engine.set_requires_gradient_sync(last)  # type: ignore[operator]
        (loss_of(engine, batch) * weight).backward()
    names = "/".join(kind.__name__ for kind in type(engine).__mro__)
    return names, gradients_of(engine)


KINDS = [("ddp", "DistributedDataParallel"), ("fsdp2", "FSDPModule"), ("fsdp2 sums", "FSDPModule")]


@needs_shards
@pytest.mark.distributed
@pytest.mark.parametrize(("kind", "wrapper"), KINDS, ids=[kind for kind, _ in KINDS])
def test_shares_over_uneven_ranks(two_ranks: Ranks, kind: str, wrapper: str) -> None:
    expected = whole_batch(model(), loss_of, everything(2))
    for names, gradients in two_ranks.run(on_a_rank, kind, False):
        assert wrapper in names
        assert_same_gradient(gradients, expected)
    for _, gradients in two_ranks.run(on_a_rank, kind, True):
        assert_differs(gradients, expected, by=0.05)


def count_badly_on_one_rank() -> None:
    wb.shares(window(0), lambda batch: 3 // dist.get_rank())


@pytest.mark.distributed
def test_ranks_fail_together(two_ranks: Ranks) -> None:
    with pytest.raises(RanksError, match=r"(?s)ZeroDivisionError.*Rank 0 could not count its window"):
        two_ranks.run(count_badly_on_one_rank, seconds=20.0)
