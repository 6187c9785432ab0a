"""Break windows off on one rank of several, at random, and hold what every rank is left with against the promises.

A trial is one random window, run three times by real gloo processes: undisturbed; with a fault on one rank, at one
operator or one line of the library; and undisturbed again. Other windows, which nothing disturbs, come before. Rows,
micro-batches and forms of the loss are random on each rank. Whoever ends without an error must have the gradient of all
rows of all ranks, whoever raises must have ``.grad`` as before, and all within seconds. After that the window is right,
or the process group is of no use and every rank says so.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from tests.distributed.launcher import Ranks, RanksError
from tests.faults.injection import ERRORS, MEMORY, AtLine, AtOperator
from wholebatch.ranks.agreement import ProcessGroups

Trial = Callable[[], tuple[str, str]]

CALM = 12
"""How many other random windows, which nothing disturbs, go before each that is broken off."""

SECONDS = 10.0
"""Within which every rank must have raised."""

PRELOADED = ["torch._dynamo", "torch.distributed.fsdp", "wholebatch", __name__]

KINDS = {
    "ddp": {},
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "fsdp": None,
}

FAULTS = {**ERRORS, **MEMORY}


@dataclass(frozen=True)
class Share:
    """What one rank brings: rows, how they are cut, and for which of them the loss function has nothing to say."""

    rows: int
    size: int | None
    auto: bool
    silent: Sequence[int]


@dataclass(frozen=True)
class Fault:
    """Where one rank is broken off: at a line or an operator, as far into the window as the fraction says."""

    rank: int
    at_line: bool
    name: str
    fraction: float


@dataclass(frozen=True)
class Plan:
    """One window over all ranks."""

    kind: str
    sync: str
    form: str
    seed: int
    gathered: bool
    verify: str
    shares: Sequence[Share]
    fault: Fault


@dataclass
class Report:
    """What one rank has to say of one window."""

    error: str = ""
    lost: bool = False
    seconds: float = 0.0
    grads: list[Tensor | None] = field(default_factory=list)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inside, self.last = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.inside(torch.tanh(self.first(x)))))  # type: ignore[no-any-return]


MET = [False]
"""Whether this rank has met the others in this window: before that, a rank that fails has not begun it."""


@cache
def watch_meetings() -> None:
    """Take note, from now on, of where the ranks of a window meet."""
    enter = ProcessGroups.__enter__

    def noting(self: ProcessGroups) -> Any:
        found = enter(self)
        MET[0] = True
        return found

    ProcessGroups.__enter__ = noting  # type: ignore[method-assign]


class AtLineOfWindow(AtLine):
    def _look(self, frame: FrameType, event: str, value: object) -> None:
        if MET[0]:
            super()._look(frame, event, value)


class AtOperatorOfWindow(AtOperator):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if MET[0]:
            return super().__torch_dispatch__(function, types, args, kwargs)
        return function(*args, **(kwargs or {}))


def rows_of(plan: Plan, rank: int) -> dict[str, Tensor]:
    draws, share = torch.Generator().manual_seed(plan.seed * 17 + rank), plan.shares[rank]
    keep = torch.tensor([row not in share.silent for row in range(share.rows)], dtype=torch.bool)
    x = torch.randn(share.rows, 5, generator=draws, dtype=torch.float64)
    y = torch.randint(0, 3, (share.rows,), generator=draws)
    y[:1] = 1
    return {"x": x, "y": y, "keep": keep}


def loss_of(form: str) -> Callable[[nn.Module, Any], Any]:
    def loss(model: nn.Module, rows: Any) -> Any:
        values = F.cross_entropy(model(rows["x"]), rows["y"], reduction="none")
        if not rows["keep"].any():
            return None
        if form == "two":
            return wb.mean(values, rows["keep"]) + 0.5 * wb.mean(values.square(), rows["keep"] & (rows["y"] != 0))
        if form == "dict":
            return {"mean": wb.mean(values, rows["keep"]), "total": 0.25 * wb.total(values * rows["keep"])}
        return wb.mean(values, rows["keep"])

    return loss


def truth(plan: Plan) -> list[Tensor]:
    """The gradient of all rows of all ranks: one forward, one backward, torch alone."""
    torch.manual_seed(0)
    model, shares = Net().double(), [rows_of(plan, rank) for rank in range(len(plan.shares))]
    rows = {name: torch.cat([share[name] for share in shares]) for name in shares[0]}
    values, keep = F.cross_entropy(model(rows["x"]), rows["y"], reduction="none"), rows["keep"]
    loss = values[keep].mean()
    if plan.form == "two":
        loss = loss + 0.5 * values[keep & (rows["y"] != 0)].square().mean()
    if plan.form == "dict":
        loss = loss + 0.25 * values[keep].sum()
    loss.backward()
    return [parameter.grad + 0.5 * plan.gathered for parameter in model.parameters()]  # type: ignore[operator]


@cache
def model_of(kind: str) -> nn.Module:
    """Build a model once in the life of a process; windows follow each other on it as in training."""
    watch_meetings()
    torch.manual_seed(0)
    model, options = Net().double(), KINDS[kind]
    if options is not None:
        return DistributedDataParallel(model, **options)  # type: ignore[arg-type]
    for part in (model.first, model.inside):
        fully_shard(part)
    return fully_shard(model)


def one_window(plan: Plan, injection: Any) -> Report:
    """Run a window; an error is reported."""
    share, model = plan.shares[dist.get_rank()], model_of(plan.kind)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5) if plan.gathered else None
    size: Any = wb.Auto(share.size or 8) if share.auto else share.size
    report, begun = Report(), time.monotonic()
    MET[0] = False
    try:
        with injection:
            wb.backward(
                model, loss_of(plan.form), rows_of(plan, dist.get_rank()), size,
                sync=plan.sync, verify=plan.verify,  # type: ignore[arg-type]
            )  # fmt: skip
    except BaseException as error:
        report.error = f"{type(error).__name__}: {error}"
        report.lost = isinstance(error, wb.SyncError) and "start the processes again" in str(error)
    report.seconds = time.monotonic() - begun
    grads = [parameter.grad for parameter in model.parameters()]
    report.grads = [g if g is None else (g.to_local() if hasattr(g, "to_local") else g).clone() for g in grads]
    return report


def windows(plan: Plan, others: Sequence[Plan]) -> tuple[list[Report], tuple[Report, Report, Report]]:
    """Run other windows, then one undisturbed, broken off, and undisturbed again, as one rank."""
    before, fault = [one_window(other, nullcontext()) for other in others], plan.fault
    count: Any = AtLineOfWindow() if fault.at_line else AtOperatorOfWindow()
    calm = one_window(plan, count)
    at = int(fault.fraction * count.count) if dist.get_rank() == fault.rank else -1
    injection: Any = AtLineOfWindow(at) if fault.at_line else AtOperatorOfWindow(at, FAULTS[fault.name])
    broken = one_window(plan, injection)
    if fault.at_line and broken.error.startswith("KeyboardInterrupt"):
        broken.error += f" at {injection.place}"
    return before, (calm, broken, one_window(plan, AtOperatorOfWindow()))


def drawn(order: random.Random, world: int) -> Plan:
    """Draw a window and its fault."""
    kind = order.choice(list(KINDS))
    every = kind in ("ddp", "fsdp") and order.random() < 0.4
    auto = not every and order.random() < 0.4
    counts = [order.choice([0, 1, 2, 3, 5, 8]) for _ in range(world)]
    if not any(counts):
        counts[order.randrange(world)] = 3
    quiet = order.random() < 0.4
    shares = [
        Share(
            rows,
            order.choice([1, 2, 3, 4, None]),
            auto,
            [row for row in range(rows) if quiet and order.random() < 0.3 and (row or any(counts[:rank]))],
        )
        for rank, rows in enumerate(counts)
    ]
    at_line = order.random() < 0.5
    name = "interrupt" if at_line else order.choice(list(FAULTS))
    return Plan(
        kind,
        "every" if every else "last",
        order.choice(["mean", "two", "dict"]),
        order.randrange(2**31),
        order.random() < 0.3,
        "always" if order.random() < 0.1 else "never",
        shares,
        Fault(order.randrange(world), at_line, name, order.random()),
    )


def broken_off(world: int, order: random.Random) -> Iterator[Trial]:
    """Yield trials on so many ranks, which are started anew where a process group is of no use any more."""
    ranks = Ranks(world, method="forkserver", preload=PRELOADED)

    def trial() -> tuple[str, str]:
        plan, others = drawn(order, world), [drawn(order, world) for _ in range(CALM)]
        try:
            found = ranks.run(windows, plan, others, seconds=4 * SECONDS)
        except RanksError as error:
            return "wrong", f"{plan}: {error}"
        reports = [last for _, last in found]
        for other, report in zip(others, zip(*(before for before, _ in found), strict=True), strict=True):
            if any(each.error for each in report) or not right(other, report, truth(other)):
                ranks.close()
                return "wrong", f"undisturbed: {other}: {[each.error for each in report]}"
        how, what = verdict(plan, reports)
        if what or any(report.lost for each in reports for report in each):
            ranks.close()
        return how, f"{plan}: {what}" if what else ""

    try:
        while True:
            yield trial
    finally:
        ranks.close()


def verdict(plan: Plan, reports: Sequence[tuple[Report, Report, Report]]) -> tuple[str, str]:
    """Say how the middle one of three windows ended, and what is wrong."""
    expected = truth(plan)
    calm, broken, after = zip(*reports, strict=True)
    slow = max(report.seconds for report in (*calm, *broken, *after))
    said = [[report.error for report in each] for each in (calm, broken, after)]
    if slow > SECONDS:
        return "wrong", f"{slow:.0f} s: {said}"
    if any(report.error for report in calm) or not right(plan, calm, expected):
        return "wrong", f"undisturbed: {said}"
    failed = [rank for rank, report in enumerate(broken) if report.error]
    if any(not untouched(plan, broken[rank]) for rank in failed):
        return "wrong", f".grad has changed: {said}"
    if not failed and not right(plan, broken, expected):
        return "wrong", f"silent: {said}"
    if failed and len(failed) < len(broken) and (failed != [plan.fault.rank] or not right_but(plan, broken, expected)):
        return "wrong", f"some went on: {said}"
    lost = all(report.lost for report in after)
    if not lost and (any(report.error for report in after) or not right(plan, after, expected)):
        return "wrong", f"the next window: {said}"
    return ("lost" if lost else "raised" if failed else "recovered"), ""


def right(plan: Plan, reports: Sequence[Report], expected: Sequence[Tensor]) -> bool:
    """Tell whether all ranks have the gradient of the whole batch; those of shards put together."""
    if KINDS[plan.kind] is None:
        return same([joined(parts) for parts in zip(*(report.grads for report in reports), strict=True)], expected)
    return all(same(report.grads, expected) for report in reports)


def right_but(plan: Plan, reports: Sequence[Report], expected: Sequence[Tensor]) -> bool:
    """Tell whether all ranks but the failing one have it; its shard is not there to be put together."""
    rest = [report for rank, report in enumerate(reports) if rank != plan.fault.rank]
    if KINDS[plan.kind] is not None:
        return right(plan, rest, expected)
    for number, whole in enumerate(expected):
        parts = whole.chunk(len(reports))
        for rank, report in enumerate(reports):
            part = parts[rank] if rank < len(parts) else whole[:0]
            if rank != plan.fault.rank and not same([report.grads[number]], [part]):
                return False
    return True


def joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    there = [part for part in parts if part is not None]
    return torch.cat(there) if there else None


def same(found: Sequence[Tensor | None], expected: Sequence[Tensor]) -> bool:
    scale = max(float(each.abs().max()) if each.numel() else 0.0 for each in expected) or 1.0
    return all(
        bool(((torch.zeros_like(b) if a is None else a) - b).abs().le(1e-9 * scale).all())
        for a, b in zip(found, expected, strict=True)
    )


def untouched(plan: Plan, report: Report) -> bool:
    return all(
        grad is None if not plan.gathered else grad is not None and bool((grad == 0.5).all()) for grad in report.grads
    )
