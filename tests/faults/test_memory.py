"""Memory runs out at every operator of a window: it ends as a plain loop would, or raises and has changed nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import wholebatch as wb
from tests.faults.cases import CASES, Batch, Case, Layers, MicroNorm, Trial, assert_survived, begun, run
from tests.faults.injection import MEMORY, AtOperator, device_memory


def operators(kind: type[Case]) -> int:
    """How many there are in a window that nothing disturbs; which is itself as it should be."""
    calm = AtOperator()
    assert_survived(run(kind, calm), gathered=False)
    return calm.count


@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_memory_that_runs_out_at_any_operator_leaves_no_trace(kind: type[Case]) -> None:
    """At 80 of them or more, evenly spread; benchmarks/attacks.py takes all."""
    makers, tried, recovered = list(MEMORY.values()), 0, 0
    count = operators(kind)
    for at in range(0, count, 1 + count // 80):
        trial = run(kind, AtOperator(at, makers[tried % len(makers)]), gathered=tried % 2 == 1)
        assert_survived(trial, gathered=tried % 2 == 1)
        tried, recovered = tried + 1, recovered + (trial.error is None)
    assert recovered > tried / 3, "most of a window is forward and backward passes"


def naive(model: nn.Module, case: Case, batch: Batch, rows: list[int]) -> None:
    """What everybody writes: catch it, and go on with the halves."""
    try:
        case.share(model, case.cut(batch, rows)).backward()
    except torch.OutOfMemoryError:
        for half in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
            naive(model, case, batch, half)


def test_going_on_with_halves_and_undoing_nothing_is_wrong() -> None:
    case, wrong = Layers(), 0
    for at in range(100):
        model, learning = begun(case, gathered=False)
        batch = case.batch()
        with AtOperator(at, device_memory) as failing:
            for rows in ([0, 1, 2, 3, 4], [5, 6, 7, 8, 9]):
                naive(model, case, batch, rows)
        if at >= failing.count:
            break
        left: dict[str, Tensor | None] = {name: tensor.grad for name, tensor in learning.items()}
        halves = [[0, 1], [2, 3, 4], [5, 6], [7, 8, 9]]
        trial = Trial(case, model, learning, {}, left, halves)
        try:
            assert_survived(trial, gathered=False, draws=False)
        except AssertionError:
            wrong += 1
    assert wrong > 3


class Full(torch.autograd.Function):
    """A memory for less rows than there are, felt in the backward."""

    @staticmethod
    def forward(ctx: object, x: Tensor, rows: int) -> Tensor:
        if len(x) > rows:
            raise device_memory()
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


@pytest.mark.parametrize("size", [5, 2], ids=["in this window", "in the one before"])
def test_one_row_under_batch_norm_ends_as_out_of_memory(size: int) -> None:
    model, _ = begun(MicroNorm(), gathered=True)
    auto, x = wb.Auto(5), MicroNorm().batch()["x"]
    while auto.size != size:
        auto.shrink()
    if size == 2:
        x = x[:5]  # by twos, so that one is left
    with pytest.raises(wb.OutOfMemoryError, match=r"too few.*Expected more than 1 value per channel"):
        wb.backward(model, lambda m, x: Full.apply(m(x), 2).square(), x, auto, batch_norm="micro")  # type: ignore[no-untyped-call]
    assert all(bool((p.grad == 0.25).all()) for p in model.parameters() if p.grad is not None)


def test_a_batch_that_ends_with_one_row_is_torchs_own_error_where_memory_has_nothing_to_do_with_it() -> None:
    model, _ = begun(MicroNorm(), gathered=False)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel") as raised:
        wb.backward(model, lambda m, x: m(x).square(), MicroNorm().batch()["x"][:6], wb.Auto(5), batch_norm="micro")
    assert not isinstance(raised.value, wb.OutOfMemoryError)


def test_a_window_inside_of_a_window_leaves_its_shortage_to_the_outer_one() -> None:
    """The inner one cannot split further, the outer one can."""
    torch.manual_seed(0)
    outer, inner = nn.Linear(5, 3).double(), nn.Linear(5, 3).double()
    x = torch.randn(8, 5, dtype=torch.float64)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        if len(x) > 4:  # what the outer micro-batch holds leaves no room for a single row of the inner one
            wb.backward(inner, lambda m, x: Full.apply(m(x), 0).square(), x[:1], wb.Auto(1))  # type: ignore[no-untyped-call]
        return model(x).square()

    assert wb.backward(outer, loss, x, wb.Auto(8), verify="never").micro_batches == 2
    (expected,) = torch.autograd.grad(outer(x).square().mean(), [outer.weight])
    assert torch.allclose(outer.weight.grad, expected, rtol=1e-12)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [4, wb.Auto(4)], ids=["fixed", "Auto"])
def test_a_window_inside_of_a_window_of_the_same_parameters_is_named(size: object) -> None:
    model, _ = begun(Layers(), gathered=True)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        wb.backward(model, lambda m, x: m(x).square(), x, size)  # type: ignore[arg-type]
        return model(x).square()

    with pytest.raises(wb.LossError, match=r"same model: they share 4 of 4.*outside of loss_fn"):
        wb.backward(model, loss, Layers().batch()["x"], 4)
    assert all(bool((p.grad == 0.25).all()) for p in model.parameters() if p.grad is not None)
