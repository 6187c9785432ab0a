"""Two ranks, one batch: the gradient on each is the whole batch's, for one reduction, and nobody waits for ever."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import wholebatch as wb
from tests.cases.kinds import KINDS
from tests.cases.reported import REPORTED, TokenMeans
from tests.cases.situation import Situation
from tests.distributed import Collectives, Ranks, needs_shards
from tests.oracle import (
    Gradients,
    assert_differs,
    assert_same_gradient,
    assert_same_parameters,
    gradients_of,
    parameters_of,
    relative_error,
    whole_batch,
)

SITUATIONS = {repr(situation): situation for situation in [*REPORTED, *KINDS] if situation.wrapped}
in_every_situation = pytest.mark.parametrize("name", SITUATIONS)
UNUSED = ("FrozenAndUnused", "UsedInOneMicroBatch")
"""Situations in which a rank may not reach every parameter, so that the wrapper must look for them."""


def shared(
    name: str, first: int, dtype: torch.dtype = torch.float64, **settings: Any
) -> tuple[Situation, nn.Module, Any]:
    """Return the situation, the wrapped model, and this rank's share: `first` micro-batches go to rank 0."""
    situation = SITUATIONS[name]
    model, window = situation.start(dtype)
    settings = {"find_unused_parameters": name in UNUSED, **settings}
    share = window[:first] if dist.get_rank() == 0 else window[first:]
    return situation, DistributedDataParallel(model, **settings), wb.Window(share)


def ours(name: str, first: int, dtype: torch.dtype = torch.float64, stated: bool = False, **settings: Any) -> Any:
    """Run a situation's window on this rank and return its gradient, its loss, and the reductions."""
    situation, model, share = shared(name, first, dtype, **settings)
    options: Any = {"items": situation.items} if stated else {}
    with Collectives() as seen:
        result = wb.backward(model, situation.loss, share, **options)
    return gradients_of(model), result.loss.item(), seen.gradient_reductions(model)


def of_each_rank(name: str, first: int) -> Gradients:
    """The twin: every rank takes the mean over its own share, the wrapper averages the ranks."""
    situation, model, share = shared(name, first)
    if len(share):
        situation.whole(model, share).backward()
    return gradients_of(model)


def reference_of(name: str, dtype: torch.dtype = torch.float64) -> Any:
    situation = SITUATIONS[name]
    return situation.reference(*situation.start(dtype))


@pytest.mark.parametrize("side", ["most on rank 0", "most on rank 1"])
@in_every_situation
def test_every_rank_has_the_gradient_of_the_whole_batch(two_ranks: Ranks, name: str, side: str) -> None:
    window = SITUATIONS[name].start()[1]
    first = len(window) - 1 if side == "most on rank 0" else 1
    reference = reference_of(name)
    for gradients, loss, _ in two_ranks.run(ours, name, first):
        assert_same_gradient(gradients, reference)
        assert loss == pytest.approx(float(reference.loss), rel=1e-12)


@pytest.mark.parametrize("name", [name for name in SITUATIONS if name not in UNUSED])
def test_the_mean_of_the_ranks_misses_it(two_ranks: Ranks, name: str) -> None:
    reference = reference_of(name)
    first = 2 if name in ("SkippedFirst", "OnceAfterNone") else 1  # each rank needs a mean to take
    for gradients in two_ranks.run(of_each_rank, name, first):
        assert_differs(gradients, reference, by=1e-3)


@pytest.mark.parametrize("name", [name for name, situation in SITUATIONS.items() if situation.counts_known])
def test_every_rank_has_it_with_counts_known_beforehand(two_ranks: Ranks, name: str) -> None:
    reference = reference_of(name)
    for gradients, *_ in two_ranks.run(ours, name, 1, torch.float64, True):
        assert_same_gradient(gradients, reference)


@in_every_situation
def test_every_rank_has_it_in_single_precision(two_ranks: Ranks, name: str) -> None:
    reference = reference_of(name, torch.float32)
    for gradients, *_ in two_ranks.run(ours, name, 1, torch.float32):
        assert_same_gradient(gradients, reference)


SETTINGS: dict[str, dict[str, Any]] = {
    "bucket views": {"gradient_as_bucket_view": True},
    "unused parameters": {"find_unused_parameters": True},
    "both": {"gradient_as_bucket_view": True, "find_unused_parameters": True},
    "no broadcast": {"broadcast_buffers": False},
    "small buckets": {"bucket_cap_mb": 1e-5},
}


@pytest.mark.parametrize(
    "name", ["TokenMeans", "IgnoredMicroBatch", "TokensAndSequences", "EqualByChance", "SkippedLast"]
)
@pytest.mark.parametrize("settings", SETTINGS)
def test_every_setting_of_the_wrapper_gives_it(two_ranks: Ranks, name: str, settings: str) -> None:
    reference = reference_of(name)
    for gradients, *_ in two_ranks.run(in_setting, name, settings):
        assert_same_gradient(gradients, reference)


def in_setting(name: str, settings: str) -> Any:
    return ours(name, 1, **SETTINGS[settings])


def test_sums_are_divided_by_the_items_of_all_ranks_and_not_by_the_number_of_ranks(two_ranks: Ranks) -> None:
    """huggingface/transformers#34242: micro-batches of 5 and 1 tokens here, of 2 and 6 there, 14 in all."""
    model, window = tokens_on_ranks()
    reference = whole_batch(model, TokenMeans().whole, [ids for share in window for ids in share])
    for gradients, items, reductions in two_ranks.run(tokens_backward):
        assert_same_gradient(gradients, reference)
        assert (items, reductions) == ([14.0], 1)
    for own, unscaled in two_ranks.run(tokens_twins):
        assert_differs(own, reference, by=0.05)
        assert_differs(unscaled, reference, by=0.4)


def tokens_on_ranks() -> tuple[nn.Module, list[list[torch.Tensor]]]:
    torch.manual_seed(12)
    model = nn.Sequential(nn.Embedding(9, 5), nn.Linear(5, 9)).double()
    return model, [[torch.randint(0, 9, (tokens + 1,)) for tokens in share] for share in ((5, 1), (2, 6))]


def tokens_backward() -> Any:
    model, window = tokens_on_ranks()
    wrapped = DistributedDataParallel(model)
    with Collectives() as seen:
        result = wb.backward(wrapped, TokenMeans().loss, wb.Window(window[dist.get_rank()]))
    assert isinstance(result.items, tuple)
    return gradients_of(wrapped), [float(count) for count in result.items], seen.gradient_reductions(model)


def tokens_twins() -> tuple[Gradients, Gradients]:
    found = []
    for divisor in (None, 14):
        model, window = tokens_on_ranks()
        share = window[dist.get_rank()]
        wrapped = DistributedDataParallel(model)
        losses = torch.cat([TokenMeans().values(wrapped, ids) for ids in share])
        (losses.sum() / (divisor or len(losses))).backward()
        found.append(gradients_of(wrapped))
    return found[0], found[1]


def test_gradients_travel_once_a_window(two_ranks: Ranks) -> None:
    """huggingface/accelerate#1726: `no_sync` round the backward alone saves nothing, and no gradient shows it."""
    model, shares = rows_on_ranks()
    plain = whole_batch(model, lambda m, rows: F.cross_entropy(m(rows[0]), rows[1]), joined(shares))
    for found in two_ranks.run(rows_backward):
        for gradients, reductions, agreements in found:
            assert_same_gradient(gradients, plain)
            assert (reductions, agreements) == (1, 1)
    for gradients, reductions in two_ranks.run(rows_no_sync_too_late):
        assert_same_gradient(gradients, plain)
        assert reductions == 3


def rows_on_ranks(seed: int = 15) -> tuple[nn.Module, list[list[Any]]]:
    torch.manual_seed(seed)
    model = nn.Linear(4, 3).double()
    x, y = torch.randn(12, 4).double(), torch.randint(0, 3, (12,))
    rows = list(zip(x.split(2), y.split(2), strict=True))
    return model, [rows[:3], rows[3:]]


def joined(shares: list[list[Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    rows = [row for share in shares for row in share]
    return torch.cat([x for x, _ in rows]), torch.cat([y for _, y in rows])


def class_losses(model: nn.Module, rows: Any) -> torch.Tensor:
    return F.cross_entropy(model(rows[0]), rows[1], reduction="none")


def rows_backward() -> Any:
    model, shares = rows_on_ranks()
    wrapped, found = DistributedDataParallel(model), []
    for _ in range(3):
        model.zero_grad()
        with Collectives() as seen:
            wb.backward(wrapped, class_losses, wb.Window(shares[dist.get_rank()]))
        reductions = seen.gradient_reductions(model)
        agreements = seen.count("allreduce") + seen.count("allgather") - reductions
        found.append((gradients_of(wrapped), reductions, agreements))
    return found


def rows_no_sync_too_late() -> Any:
    model, shares = rows_on_ranks()
    wrapped = DistributedDataParallel(model)
    with Collectives() as seen:
        for rows in shares[dist.get_rank()]:
            loss = class_losses(wrapped, rows).mean() / 3
            with wrapped.no_sync():
                loss.backward()
    return gradients_of(wrapped), seen.gradient_reductions(model)


def test_a_branch_that_the_last_micro_batch_does_not_use_is_reduced_too(two_ranks: Ranks) -> None:
    """pytorch/pytorch#69031: only what the synchronised backward used was marked for reduction."""
    model, shares = branches_on_ranks()
    plain = whole_batch(model, branches_whole, [rows for share in shares for rows in share])
    found = two_ranks.run(branches_backward)
    for gradients in found:
        assert_same_gradient(gradients, plain)
    for local in two_ranks.run(branches_unsynchronised):  # what every rank would keep to itself
        assert_differs(local, plain)


def branches_on_ranks() -> tuple[nn.Module, list[list[Any]]]:
    torch.manual_seed(17)
    model = Two().double()
    rows = list(zip(torch.randn(8, 3).double().split(2), "abab", strict=True))
    return model, [rows[:2], rows[2:]]


class Two(nn.Module):
    """Two branches, of which a call uses the named one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, which: str) -> torch.Tensor:
        out: torch.Tensor = getattr(self, which)(x)
        return out


def branches_whole(model: nn.Module, window: list[Any]) -> torch.Tensor:
    return torch.cat([model(*rows) ** 2 for rows in window]).mean()


def branches_backward() -> Gradients:
    model, shares = branches_on_ranks()
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    wb.backward(wrapped, lambda m, rows: m(*rows) ** 2, wb.Window(shares[dist.get_rank()]))
    return gradients_of(wrapped)


def branches_unsynchronised() -> Gradients:
    model, shares = branches_on_ranks()
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    for rows in shares[dist.get_rank()]:
        with wrapped.no_sync() if rows[1] == "a" else nullcontext():
            module = wrapped.module if rows[1] == "a" else wrapped
            ((module(*rows) ** 2).sum() / 4).backward()
        if rows[1] == "a":
            kept = wrapped.module.a.weight.grad.clone()
    wrapped.module.a.weight.grad = kept
    return gradients_of(wrapped)


class Reused(nn.Module):
    """A checkpointed block that the forward goes through twice."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inp, self.block = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inp(x)
        for _ in range(2):
            hidden = checkpoint(self.block, hidden, use_reentrant=self.reentrant)
        return hidden


def reused_on_ranks(reentrant: bool) -> tuple[nn.Module, list[list[torch.Tensor]]]:
    torch.manual_seed(32)
    model = Reused(reentrant).double()
    rows = list(torch.randn(8, 3).double().split(2))
    return model, [rows[:2], rows[2:]]


def reused_backward(reentrant: bool) -> Gradients:
    model, shares = reused_on_ranks(reentrant)
    wrapped = DistributedDataParallel(model)
    wb.backward(wrapped, lambda m, x: (m(x) ** 2).sum(1), wb.Window(shares[dist.get_rank()]))
    return gradients_of(wrapped)


def reused_plain(reentrant: bool) -> Gradients:
    model, shares = reused_on_ranks(reentrant)
    wrapped = DistributedDataParallel(model)
    for index, x in enumerate(shares[dist.get_rank()]):
        with wrapped.no_sync() if index == 0 else nullcontext():
            ((wrapped(x) ** 2).sum() / 4).backward()
    return gradients_of(wrapped)


def attempted(function: Callable[..., Any], *args: Any) -> Any:
    """Return what the function returns, or the error's class and text."""
    try:
        return function(*args)
    except Exception as error:
        return type(error).__name__, str(error)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_a_checkpointed_block_used_twice_is_exact_or_refused_with_the_cure(two_ranks: Ranks, reentrant: bool) -> None:
    """microsoft/FocalNet#4: a reentrant checkpoint marks the block's parameters ready twice."""
    model, shares = reused_on_ranks(False)
    rows = [x for share in shares for x in share]
    reference = whole_batch(model, lambda m, x: (m(x) ** 2).sum() / 8, torch.cat(rows))
    for found in two_ranks.run(attempted, reused_backward, reentrant):
        if isinstance(found, dict):
            assert_same_gradient(found, reference)
        else:
            assert reentrant
            assert "use_reentrant=False" in found[1], found


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_plain_loop_fails_on_a_reentrant_checkpoint(two_ranks: Ranks) -> None:
    for found in two_ranks.run(attempted, reused_plain, True):
        assert found[0] == "RuntimeError"
        assert "ready only once" in found[1]


# Rows, micro-batches, and nothing to do


def cut_on_ranks(rows: tuple[int, int], size: int) -> Any:
    torch.manual_seed(501)
    model, x = nn.Linear(3, 1).double(), torch.randn(sum(rows), 3).double()
    wrapped = DistributedDataParallel(model)
    result = wb.backward(
        wrapped, lambda m, x: m(x).square(), x.split(list(rows))[dist.get_rank()], micro_batch_size=size
    )
    return gradients_of(wrapped), result.loss.item(), result.rows, result.micro_batches, parameters_of(wrapped), x


@pytest.mark.parametrize("rows", [(7, 2), (1, 8), (4, 4), (3, 1)], ids=str)
@pytest.mark.parametrize("size", [1, 3, 8])
def test_ranks_may_bring_different_numbers_of_rows_and_micro_batches(
    two_ranks: Ranks, rows: tuple[int, int], size: int
) -> None:
    torch.manual_seed(501)
    model, x = nn.Linear(3, 1).double(), torch.randn(sum(rows), 3).double()
    reference = whole_batch(model, lambda m, x: m(x).square().mean(), x)
    for rank, (gradients, loss, seen, micro_batches, *_) in enumerate(two_ranks.run(cut_on_ranks, rows, size)):
        assert_same_gradient(gradients, reference)
        assert loss == pytest.approx(float(reference.loss), rel=1e-12)
        assert (seen, micro_batches) == (rows[rank], -(-rows[rank] // size))


EMPTY: dict[str, Callable[[Any, Any], Any]] = {
    "None": lambda model, rows: None,
    "ignored labels": lambda model, rows: wb.losses.cross_entropy(model(rows[0]), rows[1] * 0 - 100),
}


def idle_rank(kind: str, idle: int, door: str) -> Any:
    model, shares = rows_on_ranks(502)
    wrapped = DistributedDataParallel(model)
    rank = dist.get_rank()

    def loss(model: nn.Module, rows: Any) -> Any:
        return EMPTY[kind](model, rows) if rank == idle else wb.losses.cross_entropy(model(rows[0]), rows[1])

    share = wb.Window([] if kind == "no rows" and rank == idle else shares[rank])
    if door == "backward":
        wb.backward(wrapped, loss, share)
        return gradients_of(wrapped)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handed: Gradients = {}
    optimizer.register_step_pre_hook(lambda *_: handed.update(gradients_of(wrapped)))
    assert wb.Step(wrapped, optimizer, loss)(share).stepped
    return handed


@pytest.mark.parametrize("door", ["backward", "Step"])
@pytest.mark.parametrize("idle", [0, 1])
@pytest.mark.parametrize("kind", ["None", "ignored labels", "no rows"])
def test_a_rank_with_nothing_to_learn_from_gets_the_others_gradient(
    two_ranks: Ranks, kind: str, idle: int, door: str
) -> None:
    model, shares = rows_on_ranks(502)
    reference = whole_batch(model, lambda m, rows: F.cross_entropy(m(rows[0]), rows[1]), joined([shares[1 - idle]]))
    for gradients in two_ranks.run(idle_rank, kind, idle, door):
        assert_same_gradient(gradients, reference)


def nothing_anywhere(kind: str) -> Any:
    model, shares = rows_on_ranks()
    wrapped = DistributedDataParallel(model)
    before = parameters_of(wrapped)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, weight_decay=0.1)
    result = wb.Step(wrapped, optimizer, EMPTY[kind])(wb.Window(shares[dist.get_rank()]))
    return result.stepped, result.reason, relative_error(parameters_of(wrapped), before)


@pytest.mark.parametrize("kind", EMPTY)
def test_a_window_without_items_on_any_rank_is_no_step_on_any(two_ranks: Ranks, kind: str) -> None:
    for stepped, reason, moved in two_ranks.run(nothing_anywhere, kind):
        assert (stepped, moved) == (False, 0)
        assert reason


def once_with_an_idle_rank(idle: int) -> Any:
    situation = SITUATIONS["LearnedVariance"]
    model, window = situation.start()
    wrapped, rank = DistributedDataParallel(model), dist.get_rank()

    def loss(model: nn.Module, rows: Any) -> Any:
        return None if rank == idle else situation.loss(model, rows)

    wb.backward(wrapped, loss, wb.Window(window))
    return gradients_of(wrapped)


@pytest.mark.parametrize("idle", [0, 1])
def test_a_term_that_exists_once_counts_once_though_a_rank_is_idle(two_ranks: Ranks, idle: int) -> None:
    reference = reference_of("LearnedVariance")
    for gradients in two_ranks.run(once_with_an_idle_rank, idle):
        assert_same_gradient(gradients, reference)


def added_to() -> Any:
    found = []
    for settings in ({}, {"gradient_as_bucket_view": True}):
        model, shares = rows_on_ranks()
        wrapped = DistributedDataParallel(model, **settings)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.25)
        wb.backward(wrapped, class_losses, wb.Window(shares[dist.get_rank()]))
        wb.backward(wrapped, class_losses, wb.Window(shares[dist.get_rank()]))
        found.append(gradients_of(wrapped))
    return found


def test_gradients_that_are_there_already_are_added_to_on_every_rank(two_ranks: Ranks) -> None:
    model, shares = rows_on_ranks()
    plain = whole_batch(model, lambda m, rows: F.cross_entropy(m(rows[0]), rows[1]), joined(shares))
    expected = {name: 0.25 + 2 * gradient for name, gradient in plain.gradients.items() if gradient is not None}
    for found in two_ranks.run(added_to):
        for gradients in found:
            assert_same_gradient(gradients, expected)


# What the ranks report, and how a run goes


def reported() -> Any:
    model, shares = rows_on_ranks(503)
    shares = [[*shares[0], *shares[1][1:]], shares[1][:1]]

    def loss(model: nn.Module, rows: Any) -> Any:
        out = model(rows[0])
        metrics = {"accuracy": (out.argmax(-1) == rows[1]).double()}
        terms = {"ce": F.cross_entropy(out, rows[1], reduction="none"), "sum": 0.01 * wb.total(out.square())}
        return terms, metrics

    wrapped = DistributedDataParallel(model)
    result = wb.backward(wrapped, loss, wb.Window(shares[dist.get_rank()]))
    assert isinstance(result.terms, dict)
    assert isinstance(result.items, dict)
    numbers = {**result.terms, **result.metrics, "loss": result.loss, "items": result.items["ce"]}
    return {name: float(number) for name, number in numbers.items()}, result.rows, gradients_of(wrapped)


def test_loss_terms_and_metrics_are_those_of_all_ranks(two_ranks: Ranks) -> None:
    model, shares = rows_on_ranks(503)
    x, y = joined(shares)
    out = model(x)
    ce, total = F.cross_entropy(out, y).item(), out.square().sum().item()
    accuracy = (out.argmax(-1) == y).double().mean().item()
    expected = {"ce": ce, "sum": total, "loss": ce + 0.01 * total, "accuracy": accuracy, "items": 12.0}
    plain = whole_batch(
        model, lambda m, rows: F.cross_entropy(m(rows[0]), rows[1]) + 0.01 * m(rows[0]).square().sum(), (x, y)
    )
    for (numbers, rows, gradients), own in zip(two_ranks.run(reported), (10, 2), strict=True):
        assert numbers == pytest.approx(expected, rel=1e-12)
        assert rows == own
        assert_same_gradient(gradients, plain)


def run_of_steps(clip: float) -> Any:
    model, windows = several_windows()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    step = wb.Step(wrapped, optimizer, class_losses, max_grad_norm=clip, scheduler=schedule)
    results = [step(wb.Window(shares[dist.get_rank()])) for shares in windows]
    return parameters_of(wrapped), [(float(r.loss), float(r.grad_norm), r.lrs) for r in results]


def several_windows() -> tuple[nn.Module, list[list[list[Any]]]]:
    """Three windows on two ranks, in micro-batches of unequal number and size; the last is short."""
    torch.manual_seed(504)
    model, windows = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double(), []
    for sizes in (([2, 1, 4], [3]), ([1], [2, 2, 5]), ([1], [1])):
        windows.append([[(torch.randn(n, 4).double(), torch.randint(0, 3, (n,))) for n in share] for share in sizes])
    return model, windows


def one_process(clip: float) -> tuple[nn.Module, list[Any]]:
    """Train on whole batches in plain torch, and return loss, norm and learning rates of each step."""
    model, windows = several_windows()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    expected = []
    for shares in windows:
        optimizer.zero_grad()
        x, y = joined(shares)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
        expected.append((loss.item(), norm.item(), schedule.get_last_lr()))
        optimizer.step()
        schedule.step()
    return model, expected


def assert_same_run(parameters: Gradients, results: list[Any], model: nn.Module, expected: list[Any]) -> None:
    assert_same_parameters(parameters, model, tol=1e-12)
    for found, wanted in zip(results, expected, strict=True):
        assert found[0] == pytest.approx(wanted[0], rel=1e-11)
        assert found[1] == pytest.approx(wanted[1], rel=1e-11)
        assert found[2] == pytest.approx(wanted[2])


@pytest.mark.parametrize("clip", [0.05, 100.0])
def test_a_run_on_two_ranks_is_the_run_of_one_process(two_ranks: Ranks, clip: float) -> None:
    model, expected = one_process(clip)
    for parameters, results in two_ranks.run(run_of_steps, clip):
        assert_same_run(parameters, results, model, expected)


def overflow_on_one() -> Any:
    torch.manual_seed(505)
    model, x = nn.Linear(3, 1), torch.randn(6, 3)
    wrapped = DistributedDataParallel(model)
    before = parameters_of(wrapped)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    step = wb.Step(wrapped, optimizer, lambda m, x: m(x).square(), scaler=scaler, micro_batch_size=1)
    share = x.split(3)[dist.get_rank()].clone()
    if dist.get_rank() == 1:
        share[1] = float("inf")
    first = step(share)
    moved = relative_error(parameters_of(wrapped), before)
    second = step(x.split(3)[dist.get_rank()])
    return first.stepped, first.reason, moved, scaler.get_scale(), second.stepped, parameters_of(wrapped)


def test_an_overflow_on_one_rank_skips_the_step_on_all(two_ranks: Ranks) -> None:
    torch.manual_seed(505)
    model, x = nn.Linear(3, 1), torch.randn(6, 3)
    model(x).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for stepped, reason, moved, scale, again, parameters in two_ranks.run(overflow_on_one):
        assert (stepped, moved, scale, again) == (False, 0, 512.0, True)
        assert reason
        assert_same_parameters(parameters, model)


# Errors end on all ranks


class Broken(Exception):
    """What the user's own code raises on one rank."""


def failing(where: str) -> Any:
    model, shares = rows_on_ranks()
    wrapped = DistributedDataParallel(model)
    calls = [0]

    def loss(model: nn.Module, rows: Any) -> Any:
        calls[0] += 1
        if dist.get_rank() == 1 and calls[0] == {"first": 1, "middle": 2, "last": 3}[where]:
            raise Broken("the reader of rank 1 broke")
        return class_losses(model, rows)

    began = time.monotonic()
    outcome = attempted(wb.backward, wrapped, loss, wb.Window(shares[dist.get_rank()]))
    untouched = set(gradients_of(wrapped).values()) == {None}
    calls[0] = 10
    wb.backward(wrapped, loss, wb.Window(shares[dist.get_rank()]))
    return outcome, untouched, time.monotonic() - began, gradients_of(wrapped)


@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_an_error_on_one_rank_ends_the_window_on_all_and_the_next_one_is_exact(two_ranks: Ranks, where: str) -> None:
    model, shares = rows_on_ranks()
    plain = whole_batch(model, lambda m, rows: F.cross_entropy(m(rows[0]), rows[1]), joined(shares))
    other, own = two_ranks.run(failing, where)
    assert own[0] == ("Broken", "the reader of rank 1 broke")
    assert other[0][0] == "SyncError"
    assert "the reader of rank 1 broke" in other[0][1]
    for _, untouched, seconds, gradients in (other, own):
        assert untouched
        assert seconds < 10
        assert_same_gradient(gradients, plain)


def refused_on_one(kind: str) -> Any:
    model, shares = rows_on_ranks()
    wrapped = DistributedDataParallel(model)
    guilty = dist.get_rank() == 1
    if kind == "split":
        batch: Any = {"x": torch.randn(4, 4).double(), "y": torch.zeros(3 if guilty else 4).long()}
        outcome = attempted(wb.backward, wrapped, lambda m, b: class_losses(m, (b["x"], b["y"])), batch, 2)
    else:
        outcome = attempted(
            wb.backward,
            wrapped,
            lambda m, rows: class_losses(m, rows).mean() if guilty else class_losses(m, rows),
            wb.Window(shares[dist.get_rank()]),
        )
    return outcome[0], outcome[1]


@pytest.mark.parametrize(("kind", "error"), [("split", "SplitError"), ("form", "LossError")])
def test_what_one_rank_refuses_all_refuse(two_ranks: Ranks, kind: str, error: str) -> None:
    other, own = two_ranks.run(refused_on_one, kind)
    assert own[0] == error
    assert other[0] == "SyncError"
    assert error in other[1]


# Wrappers and hooks beyond the plain one


def compressed(_, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations, and ours are strings
    """Average in half precision; torch's own compression wants another backend."""
    buffer = bucket.buffer()
    sent = dist.all_reduce(buffer.to(torch.float16).div_(dist.get_world_size()), async_op=True).get_future()
    return sent.then(lambda done: done.value()[0].to(buffer.dtype))


def with_hook(kind: str) -> Any:
    model, shares = rows_on_ranks()
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, default_hooks.allreduce_hook if kind == "allreduce" else compressed)
    wb.backward(wrapped, class_losses, wb.Window(shares[dist.get_rank()]))
    return gradients_of(wrapped)


@pytest.mark.parametrize(("kind", "tol"), [("allreduce", 1e-12), ("compressed", 1e-3)])
def test_a_communication_hook_is_honoured(two_ranks: Ranks, kind: str, tol: float) -> None:
    model, shares = rows_on_ranks()
    plain = whole_batch(model, lambda m, rows: F.cross_entropy(m(rows[0]), rows[1]), joined(shares))
    for gradients in two_ranks.run(with_hook, kind):
        assert_same_gradient(gradients, plain, tol=tol)
        assert kind == "allreduce" or relative_error(gradients, plain) > 1e-6  # it did compress


def static_graph() -> Any:
    model, shares = rows_on_ranks()
    wrapped = DistributedDataParallel(model, static_graph=True)
    found = []
    for _ in range(3):
        model.zero_grad()
        wb.backward(wrapped, class_losses, wb.Window(shares[dist.get_rank()]))
        found.append(gradients_of(wrapped))
    return found


def test_a_static_graph_is_served(two_ranks: Ranks) -> None:
    """pytorch/pytorch#143580: `no_sync` in the first window fails inside torch."""
    model, shares = rows_on_ranks()
    plain = whole_batch(model, lambda m, rows: F.cross_entropy(m(rows[0]), rows[1]), joined(shares))
    for found in two_ranks.run(static_graph):
        for gradients in found:
            assert_same_gradient(gradients, plain)


# Shards


def sharded_problem() -> tuple[nn.Module, list[list[Any]]]:
    torch.manual_seed(63)
    x, y = torch.randn(12, 4).double(), torch.randn(12, 2).double()
    rows = list(zip(x.split(2), y.split(2), strict=True))
    return nn.Linear(4, 2).double(), [rows[:3], rows[3:]]


def shards_of(model: nn.Module) -> nn.Module:
    """Shard a model over both ranks, its blocks first where it has some."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model if isinstance(model, nn.Sequential) else ():
        if any(True for _ in block.parameters()):
            fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def row_errors(model: nn.Module, rows: Any) -> torch.Tensor:
    return F.mse_loss(model(rows[0]), rows[1], reduction="none").mean(1)


def sharded(sync: str) -> Any:
    model, shares = sharded_problem()
    model = shards_of(model)
    with Collectives() as seen:
        if sync == "plain":
            for rows in shares[dist.get_rank()]:
                (row_errors(model, rows).mean() / 3).backward()
        else:
            options: Any = {} if sync == "default" else {"sync": sync}
            wb.backward(model, row_errors, wb.Window(shares[dist.get_rank()]), **options)
    return gradients_of(model), seen.count("reduce_scatter")


@needs_shards
@pytest.mark.parametrize(("sync", "reductions"), [("default", 1), ("last", 1), ("every", 3)])
def test_shards_are_reduced_once_a_window_or_with_every_micro_batch_as_asked(
    two_ranks: Ranks, sync: str, reductions: int
) -> None:
    """NVIDIA/cosmos-framework#161: a switch that only knows DDP leaves FSDP2 reducing with every micro-batch."""
    model, shares = sharded_problem()
    plain = whole_batch(model, lambda m, rows: row_errors(m, rows).mean(), joined(shares))
    for gradients, seen in two_ranks.run(sharded, sync):
        assert_same_gradient(gradients, plain)
        assert seen == reductions


@needs_shards
def test_a_plain_loop_reduces_shards_with_every_micro_batch(two_ranks: Ranks) -> None:
    for _, reductions in two_ranks.run(sharded, "plain"):
        assert reductions == 3


SHARDED = [
    "TokenMeans",
    "IgnoredMicroBatch",
    "RowWeights",
    "PolicyValueEntropy",
    "SumAndMean",
    "SkippedLast",
    "WideSpread",
]


def sharded_situation(name: str, first: int, sync: Any) -> Any:
    situation = SITUATIONS[name]
    model, window = situation.start()
    model = shards_of(model)
    share = window[:first] if dist.get_rank() == 0 else window[first:]
    result = wb.backward(model, situation.loss, wb.Window(share), sync=sync)
    return gradients_of(model), result.loss.item()


@needs_shards
@pytest.mark.parametrize("sync", ["last", "every"])
@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize("name", SHARDED)
def test_shards_get_the_whole_batch_s_gradient_whatever_each_rank_brings(
    two_ranks: Ranks, name: str, first: int, sync: str
) -> None:
    """Different numbers of micro-batches on the ranks, and no row on one (first = 0): FSDP2 itself would wait for
    ever."""
    reference = reference_of(name)
    for gradients, loss in two_ranks.run(sharded_situation, name, first, sync):
        assert_same_gradient(gradients, reference)
        assert loss == pytest.approx(float(reference.loss), rel=1e-12)


def sharded_run(clip: float, sync: Any) -> Any:
    model, windows = several_windows()
    model = shards_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    step = wb.Step(model, optimizer, class_losses, max_grad_norm=clip, scheduler=schedule, sync=sync)
    results = [step(wb.Window(shares[dist.get_rank()])) for shares in windows]
    return parameters_of(model), [(float(r.loss), float(r.grad_norm), r.lrs) for r in results]


@needs_shards
@pytest.mark.parametrize("sync", ["last", "every"])
@pytest.mark.parametrize("clip", [0.05, 100.0])
def test_a_run_on_shards_is_the_run_of_one_process(two_ranks: Ranks, clip: float, sync: str) -> None:
    """The norm is that of all shards together, a plain number on every rank."""
    model, expected = one_process(clip)
    for parameters, results in two_ranks.run(sharded_run, clip, sync):
        assert_same_run(parameters, results, model, expected)


def in_no_sync() -> Any:
    model, shares = rows_on_ranks()
    wrapped = DistributedDataParallel(model)
    context: AbstractContextManager[Any] = wrapped.no_sync()
    with context:
        outcome = attempted(wb.backward, wrapped, class_losses, wb.Window(shares[dist.get_rank()]))
    return gradients_of(wrapped) if isinstance(outcome, wb.Result) else outcome


def test_a_window_inside_the_user_s_own_no_sync_is_exact_or_refused(two_ranks: Ranks) -> None:
    """Never this rank's share alone in silence: it would be stepped as if it were the whole batch's."""
    model, shares = rows_on_ranks()
    plain = whole_batch(model, lambda m, rows: F.cross_entropy(m(rows[0]), rows[1]), joined(shares))
    for found in two_ranks.run(in_no_sync):
        if isinstance(found, dict):
            assert_same_gradient(found, plain)
        else:
            assert found[0] == "SyncError"


def after_plain_training() -> Any:
    """A window between plain DDP steps: the wrapper must be left as it was found."""
    model, shares = rows_on_ranks()
    wrapped = DistributedDataParallel(model)
    x, y = joined([shares[dist.get_rank()]])
    found = []
    for _ in range(2):
        model.zero_grad()
        F.cross_entropy(wrapped(x), y).backward()
        found.append(gradients_of(wrapped))
        model.zero_grad()
        wb.backward(wrapped, class_losses, wb.Window(shares[dist.get_rank()]))
        found.append(gradients_of(wrapped))
    return found


def test_plain_backwards_before_and_after_a_window_still_synchronise(two_ranks: Ranks) -> None:
    model, shares = rows_on_ranks()
    plain = whole_batch(model, lambda m, rows: F.cross_entropy(m(rows[0]), rows[1]), joined(shares))
    for found in two_ranks.run(after_plain_training):
        for gradients in found:  # both ranks hold six rows, so the mean of ranks is right here
            assert_same_gradient(gradients, plain)


def normalised() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(506)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    x = torch.randn(8, 3).double() * torch.linspace(0.5, 3, 8).double()[:, None]
    return model, x


def buffers_on_ranks() -> Any:
    model, x = normalised()
    wrapped = DistributedDataParallel(model)
    for _ in range(2):
        wb.backward(
            wrapped, lambda m, x: m(x).square(), x.split(4)[dist.get_rank()], micro_batch_size=2, batch_norm="micro"
        )
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def test_buffers_are_broadcast_once_a_window_as_the_wrapper_would(two_ranks: Ranks) -> None:
    """Each window begins with rank 0's running statistics on every rank."""
    counts = [found["1.num_batches_tracked"].item() for found in two_ranks.run(buffers_on_ranks)]
    assert counts == [4, 4]
