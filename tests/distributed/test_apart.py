"""What ranks do not share: parameters that the wrapper leaves out, models of their own; and what it cannot reduce."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import wholebatch as wb
from tests.distributed.launcher import Ranks, needs_shards
from tests.distributed.test_sharded import outcome
from tests.oracle import assert_differs, assert_same_gradient, gradients_of, whole_batch

pytestmark = pytest.mark.distributed

DRAWS = torch.Generator().manual_seed(91)
ROWS = torch.randn(10, 3, generator=DRAWS).double()
SHARES = (ROWS[:7], ROWS[7:])


class Expert(nn.Module):
    """A part that all ranks share and a part that each has for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.own = nn.Linear(3, 4), nn.Linear(4, 2)
        self.register_buffer("mark", torch.zeros(1))
        self.own.register_buffer("kept", torch.zeros(1))

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = self.own(torch.tanh(self.shared(rows)))
        return out


def experts(rank: int) -> Expert:
    torch.manual_seed(0)
    model = Expert().double()
    with torch.no_grad():
        for parameter in model.own.parameters():
            parameter.add_(rank)
        model.own.kept.fill_(rank + 1.0)
    return model


def loss(model: nn.Module, rows: Tensor) -> Tensor:
    return model(rows).square().mean(1)  # type: ignore[no-any-return]


def wrapped(kind: str, rank: int) -> nn.Module:
    model = experts(rank)
    if kind == "fsdp":
        return fully_shard(model, ignored_params=set(model.own.parameters()))
    names = [*(f"own.{name}" for name, _ in model.own.named_parameters()), "own.kept"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    return DistributedDataParallel(model)


def truth() -> tuple[list[dict[str, Tensor | None]], float]:
    """Return what every rank must hold, and the norm: of one loss over all rows, in which each has its own experts."""
    models = [experts(rank) for rank in range(2)]
    losses = [loss(model, rows).sum() / len(ROWS) for model, rows in zip(models, SHARES, strict=True)]
    torch.autograd.backward(losses)
    shared = {
        name: models[0].get_parameter(name).grad + models[1].get_parameter(name).grad  # type: ignore[operator]
        for name in ("shared.weight", "shared.bias")
    }
    own = [{f"own.{name}": p.grad for name, p in model.own.named_parameters()} for model in models]
    parts = [*shared.values(), *own[0].values(), *own[1].values()]
    norm = torch.stack([part.norm() for part in parts if part is not None]).norm()
    return [{**shared, **each} for each in own], float(norm)


def with_experts(kind: str, sync: str, size: Any, step: bool) -> Any:
    rank = dist.get_rank()
    model = wrapped(kind, rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    norm = 0.0
    if step:
        norm = wb.Step(model, optimizer, loss, size, sync=sync)(SHARES[rank]).grad_norm
    wb.backward(model, loss, SHARES[rank], size, sync=sync)
    return {k.removeprefix("module."): g for k, g in gradients_of(model).items()}, norm, float(inner(model).own.kept)


def inner(model: Any) -> Any:
    return getattr(model, "module", model)


@needs_shards
@pytest.mark.parametrize("size", [2, wb.Auto(2)], ids=["fixed", "auto"])
@pytest.mark.parametrize(("kind", "sync"), [("ddp", "last"), ("ddp", "every"), ("fsdp", "last"), ("fsdp", "every")])
def test_a_parameter_that_the_wrapper_leaves_out_has_each_rank_s_part_of_the_whole_gradient(
    two_ranks: Ranks, kind: str, sync: str, size: Any
) -> None:
    if sync == "every" and isinstance(size, wb.Auto):
        pytest.skip("refused")
    expected, norm = truth()
    for rank, (gradients, said, kept) in enumerate(two_ranks.run(with_experts, kind, sync, size, True)):
        assert_same_gradient(gradients, expected[rank])
        assert said == pytest.approx(norm, rel=1e-12)
        assert kept == rank + 1.0
        assert_differs(gradients, expected[1 - rank])


def test_world_times_that_part_and_its_mean_over_ranks_are_others() -> None:
    first, second = truth()[0]
    for name in ("own.weight", "own.bias"):
        assert_differs({name: 2 * first[name]}, {name: first[name]})  # type: ignore[operator]
        assert_differs({name: (first[name] + second[name]) / 2}, {name: first[name]})  # type: ignore[operator]


def unfrozen() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    model[1].requires_grad_(False)
    wrapper = DistributedDataParallel(model)
    model[1].requires_grad_(True)
    wb.backward(wrapper, loss, SHARES[dist.get_rank()], 2)


def test_a_parameter_unfrozen_after_wrapping_is_refused(two_ranks: Ranks) -> None:
    for name, text in two_ranks.run(outcome, unfrozen):
        assert name == "SyncError"
        assert "built when 2 parameters required a gradient, and now 4 do" in text and "Wrap the model anew" in text


# Bare models


def bare(**options: Any) -> Any:
    torch.manual_seed(0)
    model, rows = nn.Linear(3, 2).double(), SHARES[dist.get_rank()]
    model.weight.grad = torch.ones_like(model.weight)
    said = outcome(wb.backward, model, loss, rows, 2, **options)
    assert torch.equal(model.weight.grad, torch.ones_like(model.weight)) is isinstance(said, tuple)
    model.zero_grad()
    if not isinstance(said, tuple):
        wb.backward(model, loss, rows, 2, **options)
    return said if isinstance(said, tuple) else None, gradients_of(model)


def test_several_ranks_with_a_bare_model_are_asked_whether_they_mean_to_be_alone(two_ranks: Ranks) -> None:
    for (name, text), _ in two_ranks.run(bare):
        assert name == "SyncError"
        assert "2 processes have joined" in text and 'sync="alone"' in text and "DistributedDataParallel(model)" in text


def alone() -> Any:
    return bare(sync="alone")


def test_ranks_that_are_alone_have_the_gradient_of_their_own_rows(two_ranks: Ranks) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    for rank, (said, gradients) in enumerate(two_ranks.run(alone)):
        assert said is None
        assert_same_gradient(gradients, whole_batch(model, lambda m, rows: loss(m, rows).mean(), SHARES[rank]))
        assert_differs(gradients, whole_batch(model, lambda m, rows: loss(m, rows).mean(), ROWS))


def alone_though_wrapped() -> None:
    wb.backward(DistributedDataParallel(nn.Linear(3, 2).double()), loss, SHARES[0], 2, sync="alone")


def wrapped_inside() -> None:
    model = nn.Sequential(DistributedDataParallel(nn.Linear(3, 4).double()), nn.Linear(4, 2).double())
    wb.backward(model, loss, SHARES[0], 2)


@pytest.mark.parametrize(
    ("case", "says"),
    [(alone_though_wrapped, "Pass the model unwrapped"), (wrapped_inside, "Wrap the model as a whole")],
)
def test_a_wrapper_where_none_is_meant_to_be_is_refused(two_ranks: Ranks, case: Any, says: str) -> None:
    for name, text in two_ranks.run(outcome, case):
        assert name == "SyncError"
        assert says in text


def test_a_process_by_itself_is_asked_nothing() -> None:
    assert wb.backward(nn.Linear(3, 2).double(), loss, ROWS, 2).micro_batches == 5


def test_a_plan_for_one_process_needs_no_word(two_ranks: Ranks) -> None:
    assert all(two_ranks.run(planned))


def planned() -> int:
    return len(wb.plan(nn.Linear(3, 4).double(), loss, ROWS).choices)


# Static graphs


class Twice(nn.Module):
    """A block that is used twice, under checkpoints whose backwards run inside of the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.unused = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, rows: Tensor) -> Tensor:
        x = self.first(rows)
        for _ in range(2):
            x = checkpoint(self.run_block, x, use_reentrant=True)
        return x  # type: ignore[no-any-return]

    def run_block(self, x: Tensor) -> Tensor:
        return torch.tanh(self.block(x))


class Plain(Twice):
    def forward(self, rows: Tensor) -> Tensor:
        return self.run_block(self.run_block(self.first(rows)))


def static(kind: str, sync: str, cuts: Any) -> Any:
    torch.manual_seed(0)
    model = {"reentrant": Twice, "plain": Plain}[kind]().double()
    wrapper, found = DistributedDataParallel(model, static_graph=True), []
    for sizes in cuts:
        model.zero_grad()
        rows = SHARES[dist.get_rank()]
        take = rows[: sizes[dist.get_rank()]]
        wb.backward(wrapper, loss, take, 2, sync=sync)
        found.append({name: g for name, g in gradients_of(model).items() if not name.startswith("unused")})
    return found


CUTS = {
    "uneven": [(7, 3)] * 3,
    "one micro-batch first, then several": [(2, 2), (7, 3), (7, 3)],
    "a rank without rows first": [(7, 0), (7, 3), (7, 0)],
    "a rank without rows later": [(2, 2), (7, 0), (7, 3)],
}


@pytest.mark.parametrize("sync", ["last", "every"])
@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("kind", ["reentrant", "plain"])
def test_a_static_graph_is_right_in_every_window(two_ranks: Ranks, kind: str, cuts: str, sync: str) -> None:
    torch.manual_seed(0)
    model = Plain().double()
    results = two_ranks.run(static, kind, sync, CUTS[cuts])
    for window, sizes in enumerate(CUTS[cuts]):
        rows = torch.cat([share[:size] for share, size in zip(SHARES, sizes, strict=True)])
        reference = whole_batch(copy.deepcopy(model), lambda m, x: loss(m, x).mean(), rows)
        expected = {name: g for name, g in reference.gradients.items() if not name.startswith("unused")}
        for found in results:
            assert_same_gradient(found[window], expected)


def test_a_rank_s_own_gradient_is_another() -> None:
    model = Plain().double()
    reference = whole_batch(model, lambda m, x: loss(m, x).mean(), ROWS)
    own = whole_batch(model, lambda m, x: loss(m, x).mean(), SHARES[0])
    names = ("first.weight", "block.weight")
    assert_differs({n: own.gradients[n] for n in names}, {n: reference.gradients[n] for n in names}, by=0.01)
