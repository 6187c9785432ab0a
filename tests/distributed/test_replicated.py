"""DistributedDataParallel: in each setting, the whole batch's gradient on every rank, and reductions counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as across
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from tests.distributed.collectives import Collectives
from tests.distributed.launcher import Ranks
from tests.distributed.problems import PROBLEMS, SHARES, model_and_rows, own_mean, share_of
from tests.distributed.test_sharded import outcome, reference, rounds_of
from tests.oracle import Gradients, assert_differs, assert_same_gradient, gradients_of, whole_batch

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bucket views": {"gradient_as_bucket_view": True},
    "unused parameters": {"find_unused_parameters": True},
    "static graph": {"static_graph": True},
    "static graph and bucket views": {"static_graph": True, "gradient_as_bucket_view": True},
}

pytestmark = pytest.mark.distributed


def windows(share: str, problem: str, sync: str, setting: str, dtype: torch.dtype = torch.float64) -> Any:
    """Run three windows; return each one's gradient, loss, and number of gradient reductions."""
    model, rows = model_and_rows(dtype)
    wrapped, found = DistributedDataParallel(model, **SETTINGS[setting]), []
    for _ in range(3):
        model.zero_grad()
        with Collectives() as seen:
            result = wb.backward(
                wrapped, PROBLEMS[problem].ours, share_of(rows, share, dist.get_rank()), micro_batch_size=2, sync=sync
            )
        found.append((gradients_of(wrapped), float(result.loss), seen.gradient_reductions(model)))
    return found


@pytest.mark.parametrize("sync", ["last", "every"])
@pytest.mark.parametrize("share", ["uneven", "no rows on rank 1", "no rows on rank 0"])
@pytest.mark.parametrize("problem", PROBLEMS)
def test_every_rank_has_the_whole_batch_s_gradient(two_ranks: Ranks, problem: str, share: str, sync: str) -> None:
    plain = reference(problem)
    for found in two_ranks.run(windows, share, problem, sync, "plain"):
        for gradients, loss, reductions in found:
            assert_same_gradient(gradients, plain)
            assert loss == pytest.approx(float(plain.loss), rel=1e-12)
            assert reductions == (1 if sync == "last" else rounds_of(share))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("sync", ["last", "every"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting_gives_it(two_ranks: Ranks, setting: str, sync: str, dtype: torch.dtype) -> None:
    plain = reference("token mean", dtype)
    for found in two_ranks.run(windows, "uneven", "token mean", sync, setting, dtype):
        for gradients, _, reductions in found:
            assert_same_gradient(gradients, plain)
            # What a static graph has learnt is no count for a window: it travels once, outside of the backwards.
            assert reductions == (rounds_of("uneven") if sync == "every" and "static" not in setting else 1)


@pytest.mark.parametrize("problem", ["two denominators", "None where nothing is"])
def test_a_static_graph_gives_it_for_every_loss(two_ranks: Ranks, problem: str) -> None:
    plain = reference(problem)
    for found in two_ranks.run(windows, "no rows on rank 1", problem, "last", "static graph"):
        for gradients, *_ in found:
            assert_same_gradient(gradients, plain)


def test_four_ranks_have_it(four_ranks: Ranks) -> None:
    plain = reference("two denominators")
    for found in four_ranks.run(windows, "four uneven", "two denominators", "last", "plain"):
        for gradients, _, reductions in found:
            assert_same_gradient(gradients, plain)
            assert reductions == 1


def test_the_mean_of_the_ranks_misses_it(two_ranks: Ranks) -> None:
    plain = reference("token mean")
    for gradients in two_ranks.run(usual_loop):
        assert_differs(gradients, plain, by=0.01)


def usual_loop() -> Gradients:
    model, rows = model_and_rows()
    wrapped = DistributedDataParallel(model)
    own_mean(wrapped, share_of(rows, "uneven", dist.get_rank())).backward()
    return gradients_of(wrapped)


@pytest.mark.parametrize("sync", ["last", "every"])
def test_compressed_communication_is_exact_to_its_own_precision(two_ranks: Ranks, sync: str) -> None:
    plain = reference("token mean", torch.float32)
    for gradients, hooked in two_ranks.run(compressed, sync):
        assert_same_gradient(gradients, plain, tol=1e-2)
        assert_differs(gradients, plain, by=1e-5)
        assert hooked == (1 if sync == "last" else rounds_of("uneven"))


def compressed(sync: str) -> Any:
    model, rows = model_and_rows(torch.float32)
    wrapped, calls = DistributedDataParallel(model), []

    def halved(_, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations, and ours are strings
        """Average in bfloat16, which gloo cannot sum: gather, and add up."""
        calls.append(1)
        sent = bucket.buffer().to(torch.bfloat16)
        parts = [torch.empty_like(sent) for _ in range(2)]
        dist.all_gather(parts, sent)
        done = torch.futures.Future()
        done.set_result((torch.stack(parts).float().sum(0) / 2).to(torch.float32))
        return done

    wrapped.register_comm_hook(None, halved)
    wb.backward(
        wrapped, PROBLEMS["token mean"].ours, share_of(rows, "uneven", dist.get_rank()), micro_batch_size=2, sync=sync
    )
    return gradients_of(wrapped), len(calls)


def test_torch_s_own_hooks_are_called_as_they_are(two_ranks: Ranks) -> None:
    plain = reference("token mean")
    for gradients in two_ranks.run(with_own_hook):
        assert_same_gradient(gradients, plain)


def with_own_hook() -> Gradients:
    model, rows = model_and_rows()
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
    share = share_of(rows, "uneven", dist.get_rank())
    wb.backward(wrapped, PROBLEMS["token mean"].ours, share, micro_batch_size=2)
    return gradients_of(wrapped)


# SyncBatchNorm


class SyncedOnHost(nn.SyncBatchNorm):
    """SyncBatchNorm for the host, where torch's own refuses to run: the same statistics, by collectives in forward."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = across.all_reduce(torch.tensor(float(len(input)), dtype=input.dtype))
        mean = across.all_reduce(input.sum(0)) / rows
        variance = across.all_reduce((input - mean).square().sum(0)) / rows
        return (input - mean) / (variance + self.eps).sqrt() * self.weight + self.bias


def normalised() -> tuple[nn.Sequential, torch.Tensor]:
    torch.manual_seed(21)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double(), torch.randn(10, 3).double()


def squares(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(rows).square()
    return found


def synced(sizes: tuple[int, int], sync: str) -> Any:
    model, rows = normalised()
    wrapped = DistributedDataParallel(model)
    model[1].__class__ = SyncedOnHost  # the wrapper refuses it on the host, too
    share = rows[:6] if dist.get_rank() == 0 else rows[6:]
    size = sizes[dist.get_rank()]
    wb.backward(wrapped, squares, share, micro_batch_size=size, batch_norm="micro", sync=sync)
    return gradients_of(wrapped)


@pytest.mark.parametrize("sync", ["last", "every"])
def test_synchronised_batch_norm_is_left_alone(two_ranks: Ranks, sync: str) -> None:
    """With one micro-batch a rank it is the BatchNorm of the whole batch; with more, of each round."""
    model, rows = normalised()
    plain = whole_batch(model, lambda m, x: squares(m, x).mean(), rows)
    for gradients in two_ranks.run(synced, (6, 6), sync):
        assert_same_gradient(gradients, plain)
    in_rounds = whole_batch(model, rounds_mean, rows)
    for gradients in two_ranks.run(synced, (3, 2), sync):
        assert_same_gradient(gradients, in_rounds)
        assert_differs(gradients, plain)


def rounds_mean(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    first, second = torch.cat([rows[:3], rows[6:8]]), torch.cat([rows[3:6], rows[8:]])
    return torch.cat([squares(model, first), squares(model, second)]).mean()


@pytest.mark.parametrize("sync", ["last", "every"])
def test_synchronised_batch_norm_with_unequal_rounds_is_refused_at_once(two_ranks: Ranks, sync: str) -> None:
    for name, text in two_ranks.run(outcome, synced, (2, 2), sync):
        assert name == "SyncError"
        assert "[3, 2]" in text


# Rows and errors


def test_every_share_of_the_rows_is_a_share() -> None:
    assert all(sum(rows) == 11 for rows in SHARES.values())


def test_an_error_in_step_ends_the_window_on_all(two_ranks: Ranks) -> None:
    own, other = sorted(two_ranks.run(outcome, failing_in_step), key=lambda found: found[0] == "SyncError")
    assert own == ("ZeroDivisionError", "the loss of rank 1")
    assert other[0] == "SyncError"
    assert "the loss of rank 1" in other[1]


def failing_in_step() -> None:
    model, rows = model_and_rows()
    wrapped, calls = DistributedDataParallel(model), []

    def loss(model: nn.Module, micro_batch: Any) -> Any:
        calls.append(1)
        if dist.get_rank() == 1 and len(calls) == 2:
            raise ZeroDivisionError("the loss of rank 1")
        return PROBLEMS["token mean"].ours(model, micro_batch)

    share = share_of(rows, "uneven", dist.get_rank())
    wb.backward(wrapped, loss, share, micro_batch_size=2, sync="every")


@pytest.mark.parametrize("kind", ["fully sharded of old", "replicas in threads"])
def test_other_wrappers_are_refused_with_the_one_to_use(kind: str) -> None:
    if kind == "replicas in threads":
        model, cure = nn.DataParallel(nn.Linear(2, 1)), "DistributedDataParallel"
    else:
        model, cure = type("FullyShardedDataParallel", (nn.Linear,), {})(2, 1), "fully_shard"
    with pytest.raises(wb.SyncError, match=cure):
        wb.backward(model, lambda m, x: m(x), torch.ones(2, 2))
