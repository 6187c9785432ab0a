"""FSDP2: every rank's shards are those of the whole batch's gradient, for one reduce-scatter or one a micro-batch."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import wholebatch as wb
from tests.distributed.collectives import Collectives
from tests.distributed.launcher import Ranks, needs_shards
from tests.distributed.problems import PROBLEMS, SHARES, logits, model_and_rows, own_mean, share_of
from tests.oracle import (
    Gradients,
    assert_differs,
    assert_same_gradient,
    assert_same_parameters,
    gradients_of,
    parameters_of,
    whole_batch,
)

SETTINGS: dict[str, dict[str, Any]] = {
    "nested": {},
    "nested, kept whole between forward and backward": {"reshard_after_forward": False},
    "one group": {"nested": False},
    "shards of other widths": {"shard_placement_fn": lambda parameter: None},
}

pytestmark = [pytest.mark.distributed, needs_shards]


def sharded(
    dtype: torch.dtype = torch.float64, mesh: tuple[int, ...] | None = None, nested: bool = True, **settings: Any
) -> tuple[nn.Module, Any]:
    """Return the problem's model, sharded, and all its rows."""
    model, rows = model_and_rows(dtype)
    names = ("replicate", "shard")[-len(mesh or (1,)) :]
    over = init_device_mesh("cpu", mesh or (dist.get_world_size(),), mesh_dim_names=names)
    for block in model[1:3] if nested else ():
        fully_shard(block, mesh=over, **settings)
    return fully_shard(model, mesh=over, **settings), rows


def window(share: str, problem: str, sync: str, dtype: torch.dtype = torch.float64, **settings: Any) -> Any:
    """Run two windows; return the second's gradient, what it says, and how many reduce-scatters it took."""
    model, rows = sharded(dtype, **settings)
    for _ in range(2):
        model.zero_grad()
        with Collectives() as seen:
            result = wb.backward(
                model, PROBLEMS[problem].ours, share_of(rows, share, dist.get_rank()), micro_batch_size=2, sync=sync
            )
    return gradients_of(model), result, seen.count("reduce_scatter")


def reference(problem: str, dtype: torch.dtype = torch.float64) -> Any:
    model, rows = model_and_rows(dtype)
    return whole_batch(model, PROBLEMS[problem].plain, rows)


def rounds_of(share: str) -> int:
    return -(-max(SHARES[share]) // 2)


@pytest.mark.parametrize("sync", ["last", "every"])
@pytest.mark.parametrize("share", ["uneven", "more micro-batches on rank 1", "no rows on rank 1", "no rows on rank 0"])
@pytest.mark.parametrize("problem", PROBLEMS)
def test_every_rank_holds_its_shards_of_the_whole_batch_s_gradient(
    two_ranks: Ranks, problem: str, share: str, sync: str
) -> None:
    plain = reference(problem)
    for gradients, result, reductions in two_ranks.run(window, share, problem, sync):
        assert_same_gradient(gradients, plain)
        assert float(result.loss) == pytest.approx(float(plain.loss), rel=1e-12)
        assert reductions == (1 if sync == "last" else 3 * rounds_of(share))


@pytest.mark.parametrize("sync", ["last", "every"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting_gives_it(two_ranks: Ranks, setting: str, dtype: torch.dtype, sync: str) -> None:
    plain = reference("token mean", dtype)
    for gradients, *_ in two_ranks.run(in_setting, setting, sync, dtype):
        assert_same_gradient(gradients, plain)


def in_setting(setting: str, sync: str, dtype: torch.dtype) -> Any:
    return window("uneven", "token mean", sync, dtype, **SETTINGS[setting])


def test_the_usual_loop_over_shards_misses_it(two_ranks: Ranks) -> None:
    plain = reference("token mean")
    for gradients in two_ranks.run(usual_loop):
        assert_differs(gradients, plain, by=0.01)


def usual_loop() -> Gradients:
    model, rows = sharded()
    micro_batches = list(zip(*(part.split(2) for part in share_of(rows, "uneven", dist.get_rank())), strict=True))[:2]
    for micro_batch in micro_batches:
        (own_mean(model, micro_batch) / len(micro_batches)).backward()
    return gradients_of(model)


@pytest.mark.parametrize("sync", ["last", "every"])
def test_two_by_two_replicas_of_shards(four_ranks: Ranks, sync: str) -> None:
    plain = reference("two denominators")
    for gradients, result, reductions in four_ranks.run(replicas_of_shards, sync):
        assert_same_gradient(gradients, plain)
        assert float(result.loss) == pytest.approx(float(plain.loss), rel=1e-12)
        assert reductions == (1 if sync == "last" else 3 * rounds_of("four uneven"))


def replicas_of_shards(sync: str) -> Any:
    return window("four uneven", "two denominators", sync, mesh=(2, 2))


@pytest.mark.parametrize("sync", ["last", "every"])
def test_mixed_precision_sums_in_the_precision_of_its_reduction(two_ranks: Ranks, sync: str) -> None:
    plain = reference("token mean", torch.float32)
    for gradients, *_ in two_ranks.run(in_bfloat16, sync):
        assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}
        assert_same_gradient(gradients, plain, tol=1e-2)


def in_bfloat16(sync: str) -> Any:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return window("uneven", "token mean", sync, torch.float32, mp_policy=policy)


def test_rounding_sums_at_each_micro_batch_is_refused(two_ranks: Ranks) -> None:
    for name, text in two_ranks.run(narrow_reduction):
        assert name == "SyncError"
        assert 'sync="every"' in text


def narrow_reduction() -> tuple[str, str]:
    return outcome(window, "uneven", "total", "last", mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))


def outcome(function: Any, *args: Any, **settings: Any) -> Any:
    try:
        return function(*args, **settings)
    except Exception as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize("sync", ["last", "every"])
def test_gradients_that_were_there_are_added_to(two_ranks: Ranks, sync: str) -> None:
    plain = reference("token mean")
    for gradients in two_ranks.run(twice, sync):
        assert_same_gradient({name: gradient / 2 for name, gradient in gradients.items()}, plain)


def twice(sync: str) -> Gradients:
    model, rows = sharded()
    for _ in range(2):
        share = share_of(rows, "uneven", dist.get_rank())
        wb.backward(model, PROBLEMS["token mean"].ours, share, micro_batch_size=3, sync=sync)
    return gradients_of(model)


@pytest.mark.parametrize("sync", ["last", "every"])
def test_settings_and_shards_are_as_before_after_a_window(two_ranks: Ranks, sync: str) -> None:
    for gradients in two_ranks.run(plain_after_window, sync):
        assert_same_gradient(gradients, reference("total"), tol=1e-12)


def plain_after_window(sync: str) -> Gradients:
    """A plain FSDP backward between windows averages over ranks and reshards, as it did before."""
    model, rows = sharded()
    share = share_of(rows, "uneven", dist.get_rank())
    for _ in range(2):
        wb.backward(model, PROBLEMS["token mean"].ours, share, micro_batch_size=3, sync=sync)
        model.zero_grad()
        (2 * PROBLEMS["total"].plain(model, share)).backward()
    whole = [p.shape for name, p in model.named_parameters() if not hasattr(p, "placements")]
    assert whole == []
    return gradients_of(model)


# The step


@pytest.mark.parametrize("sync", ["last", "every"])
@pytest.mark.parametrize("mesh", [(2,), (2, 2)], ids=["shards", "replicas of shards"])
def test_norm_and_clip_are_those_of_the_whole_gradient(request: Any, mesh: tuple[int, ...], sync: str) -> None:
    ranks: Ranks = request.getfixturevalue("two_ranks" if len(mesh) == 1 else "four_ranks")
    model, rows = model_and_rows()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    norms = []
    for _ in range(3):
        optimizer.zero_grad()
        PROBLEMS["token mean"].plain(model, rows).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
        optimizer.step()
    for parameters, found in ranks.run(steps, mesh, sync):
        assert all(isinstance(norm, float) for norm in found)
        assert found == pytest.approx(norms, rel=1e-9)
        assert_same_parameters(parameters, parameters_of(model), tol=1e-9)


def steps(mesh: tuple[int, ...], sync: str) -> Any:
    model, rows = sharded(mesh=mesh)
    share = share_of(rows, "uneven" if len(mesh) == 1 else "four uneven", dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step = wb.Step(model, optimizer, PROBLEMS["token mean"].ours, micro_batch_size=2, max_grad_norm=0.05, sync=sync)
    norms = [step(share).grad_norm for _ in range(3)]
    return parameters_of(model), norms


@pytest.mark.parametrize("sync", ["last", "every"])
def test_an_infinite_loss_on_one_rank_skips_the_step_on_all(two_ranks: Ranks, sync: str) -> None:
    for first, second, scale, moved in two_ranks.run(infinite_on_one, sync):
        assert (first.stepped, second.stepped) == (False, True)
        assert scale == 2.0**9
        assert not moved


def infinite_on_one(sync: str) -> Any:
    model, rows = sharded(torch.float32)
    share = share_of(rows, "uneven", dist.get_rank())
    infinite = [dist.get_rank() == 1]

    def loss(model: nn.Module, micro_batch: Any) -> Any:
        found, targets = logits(model, micro_batch)
        factor = float("inf") if infinite and infinite.pop() else 1.0
        return wb.losses.cross_entropy(found * factor, targets)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    step = wb.Step(model, optimizer, loss, micro_batch_size=2, scaler=scaler, sync=sync)
    before = parameters_of(model)
    first = step(share)
    moved = any(bool((before[name] != value).any()) for name, value in parameters_of(model).items())
    scale = scaler.get_scale()
    return first, step(share), scale, moved


# What goes wrong


@pytest.mark.parametrize("sync", ["last", "every"])
def test_an_error_on_one_rank_ends_the_window_on_all_and_the_next_one_is_exact(two_ranks: Ranks, sync: str) -> None:
    plain = reference("token mean")
    other, own = two_ranks.run(failing, sync)
    assert own[0] == ("ZeroDivisionError", "the loss of rank 1")
    assert other[0][0] == "SyncError"
    assert "the loss of rank 1" in other[0][1]
    for _, seconds, gradients in (other, own):
        assert seconds < 5
        assert_same_gradient(gradients, plain)


def failing(sync: str) -> Any:
    model, rows = sharded()
    share = share_of(rows, "uneven", dist.get_rank())
    calls: list[int] = []

    def loss(model: nn.Module, micro_batch: Any) -> Any:
        term = PROBLEMS["token mean"].ours(model, micro_batch)
        calls.append(1)
        if dist.get_rank() == 1 and len(calls) == 2:
            raise ZeroDivisionError("the loss of rank 1")
        return term

    began = time.monotonic()
    found = outcome(wb.backward, model, loss, share, micro_batch_size=2, sync=sync)
    seconds = time.monotonic() - began
    wb.backward(model, loss, share, micro_batch_size=2, sync=sync)
    return found, seconds, gradients_of(model)


def test_a_parameter_used_on_one_rank_or_in_one_micro_batch_only(two_ranks: Ranks) -> None:
    torch.manual_seed(8)
    model, rows = branches(), torch.randn(8, 3).double()
    plain = whole_batch(model, lambda m, x: torch.cat([m(x[:2], 0), m(x[2:], 1)]).square().mean(), rows)
    for gradients in two_ranks.run(branches_backward):
        assert_same_gradient(gradients, plain)


def branches() -> nn.Module:
    torch.manual_seed(7)
    return Branches().double()


class Branches(nn.Module):
    """Two branches, of which a call uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(3, 4)])

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        out: torch.Tensor = self.parts[which](x)
        return out


def branches_backward() -> Gradients:
    torch.manual_seed(8)
    model = branches()
    rows = torch.randn(8, 3).double()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    micro_batches = wb.Window([(rows[:2], 0), (rows[2:4], 1)] if dist.get_rank() == 0 else [(rows[4:], 1)])
    wb.backward(model, lambda m, micro_batch: m(*micro_batch).square(), micro_batches)
    return gradients_of(model)


def test_a_window_without_any_row_gives_no_gradient(two_ranks: Ranks) -> None:
    for sync in ("last", "every"):
        for gradients, rows in two_ranks.run(no_rows, sync):
            assert rows == 0
            assert set(gradients.values()) == {None}


def no_rows(sync: str) -> Any:
    model, rows = sharded()
    empty = tuple(part[:0] for part in rows)
    result = wb.backward(model, PROBLEMS["token mean"].ours, empty, micro_batch_size=2, sync=sync)
    return gradients_of(model), result.rows


def test_draws_and_buffers_do_not_see_the_micro_batches_that_weigh_nothing(two_ranks: Ranks) -> None:
    shares = two_ranks.run(after_filling)
    assert [counted for counted, _ in shares] == [4, 2]
    for _, (there, expected) in shares:
        assert there == expected


def after_filling() -> Any:
    torch.manual_seed(11)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 1)).double()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    rows = torch.randn(8 if dist.get_rank() == 0 else 4, 3).double()
    torch.manual_seed(5)
    wb.backward(model, lambda m, x: m(x).square(), rows, micro_batch_size=2, sync="every", batch_norm="micro")
    there = torch.rand(1).item()
    torch.manual_seed(5)
    for micro_batch in rows.split(2):
        nn.functional.dropout(torch.ones(len(micro_batch), 3, dtype=torch.float64))
    return int(model[1].num_batches_tracked), (there, torch.rand(1).item())


def test_a_loss_that_skips_the_model_in_step_is_told_what_to_do(two_ranks: Ranks) -> None:
    for name, text in two_ranks.run(outcome, skipping_all):
        assert name == "SyncError"
        assert "without calling the model" in text


def skipping_all() -> None:
    model, rows = sharded()
    wb.backward(model, lambda m, b: None, rows, micro_batch_size=4, sync="every")


def test_bfloat16_parameters_sum_in_float32(two_ranks: Ranks) -> None:
    """1 + 300 times 2^-9: in bfloat16 each addition is lost."""
    for sync in ("last", "every"):
        for total in two_ranks.run(many_small, sync):
            assert total == pytest.approx(1 + 300 * 2.0**-9, rel=5e-3)
    for total in two_ranks.run(many_small, "last", None):
        assert total < 1.3


def many_small(sync: str, accumulate_in: torch.dtype | None = torch.float32) -> float:
    model = nn.Linear(1, 1, bias=False).bfloat16()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    micro_batches = torch.tensor([1.0] + [2.0**-9] * 150).bfloat16()[:, None]
    if dist.get_rank() == 1:
        micro_batches = micro_batches[1:]
    options: Any = {"sync": sync, "accumulate_in": accumulate_in}
    wb.backward(model, lambda m, x: wb.total(m(x)), micro_batches, micro_batch_size=1, **options)
    return float(gradients_of(model)["weight"])


def test_an_older_torch_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sharded(nn.Linear, FSDPModule):
        def __new__(cls, *args: Any, **settings: Any) -> Any:
            return nn.Linear.__new__(cls)

    monkeypatch.setattr(torch, "__version__", "2.6.0+cpu")
    with pytest.raises(wb.SyncError, match=r"needs torch 2\.8 or newer.*2\.6\.0"):
        wb.backward(Sharded(2, 1), lambda m, x: m(x), torch.ones(2, 2))


def test_a_parameter_outside_of_the_shards_is_refused(two_ranks: Ranks) -> None:
    for sync in ("last", "every"):
        for name, text in two_ranks.run(outcome, parameter_outside, sync):
            assert name == "SyncError"
            assert "outside of the wrapped model" in text


def parameter_outside(sync: str) -> None:
    model, rows = sharded()
    scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def loss(model: nn.Module, micro_batch: Any) -> Any:
        return wb.total(logits(model, micro_batch)[0] * scale)

    wb.backward(model, loss, rows, micro_batch_size=4, sync=sync)


def test_out_of_memory_on_one_rank_is_split_there_alone(two_ranks: Ranks) -> None:
    plain = reference("token mean")
    (first, micro_batches), (second, more) = two_ranks.run(out_of_memory_on_one)
    for gradients in (first, second):
        assert_same_gradient(gradients, plain)
    assert (micro_batches, more) == (2, 2)  # seven rows by four, and four rows that had to be halved


def out_of_memory_on_one() -> Any:
    model, rows = sharded()

    def loss(model: nn.Module, micro_batch: Any) -> Any:
        if dist.get_rank() == 1 and len(micro_batch[0]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return PROBLEMS["token mean"].ours(model, micro_batch)

    result = wb.backward(model, loss, share_of(rows, "uneven", dist.get_rank()), wb.Auto(4))
    return gradients_of(model), result.micro_batches


def test_splitting_on_one_rank_alone_is_refused_in_step(two_ranks: Ranks) -> None:
    for name, text in two_ranks.run(outcome, auto_in_step):
        assert name == "SyncError"
        assert 'sync="last"' in text


def auto_in_step() -> None:
    model, rows = sharded()
    wb.backward(model, PROBLEMS["token mean"].ours, rows, wb.Auto(4), sync="every")
