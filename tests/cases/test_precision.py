"""The sum of many small gradients, in few bits: nothing may vanish, nothing may overflow."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import wholebatch as wb
from tests.oracle import assert_differs, assert_same_gradient, gradients_of, relative_error, whole_batch
from wholebatch.gradient.separable import accumulate
from wholebatch.model.gradients import GradientAccumulator, total_norm


class Dot(nn.Module):
    """A scalar product with four weights in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.w).sum(-1)


def many_micro_batches() -> tuple[nn.Module, wb.Window, dict[str, torch.Tensor | None]]:
    """1024 micro-batches whose gradients are exact in bfloat16, and the mean of them in double precision."""
    draws = torch.Generator().manual_seed(46)
    x = (1 + torch.randint(0, 4, (1024, 4), generator=draws) / 4).bfloat16()
    return Dot(), wb.Window(x.split(1)), {"w": x.double().mean(0)}


def test_a_sum_in_float32_keeps_what_bfloat16_would_round_away() -> None:
    """deepspeedai/DeepSpeed#1800: the running sum stalls once it is 256 times a summand."""
    model, window, mean = many_micro_batches()
    wb.backward(model, lambda m, x: m(x), window, accumulate_in=torch.float32)
    assert_same_gradient(model, mean, tol=1e-2)
    assert model.w.grad.dtype == torch.bfloat16


def test_a_step_sums_in_float32_and_rounds_once() -> None:
    model, window, mean = many_micro_batches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handed: dict[str, torch.Tensor | None] = {}
    optimizer.register_step_pre_hook(lambda *_: handed.update(gradients_of(model)))
    wb.Step(model, optimizer, lambda m, x: m(x), accumulate_in=torch.float32)(window)
    assert_same_gradient(handed, mean, tol=3e-3)


def test_the_plain_sum_in_bfloat16_is_off_by_more_than_half() -> None:
    model, window, mean = many_micro_batches()
    for x in window:
        model(x).sum().backward()
    naive = {name: None if g is None else g.double() / 1024 for name, g in gradients_of(model).items()}
    assert_differs(naive, mean, by=0.5)


def test_a_few_micro_batches_in_bfloat16_are_as_good_as_bfloat16() -> None:
    torch.manual_seed(701)
    model, x = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).bfloat16(), torch.randn(12, 8).bfloat16()
    reference = whole_batch(model, lambda m, x: m(x).square().mean(), x)
    wb.backward(model, lambda m, x: m(x).square(), x, micro_batch_size=5)
    assert_same_gradient(model, reference, tol=2e-2)


def test_a_common_factor_is_not_rounded_to_the_parameters_precision() -> None:
    """Dividing by 3 in bfloat16 is off by 0.2 % for the whole gradient; the factor is applied in float32."""
    model, x = Dot(), torch.ones(3, 4).bfloat16()
    wb.backward(model, lambda m, x: m(x), x, micro_batch_size=1)
    assert torch.equal(model.w.grad, torch.ones(4).bfloat16())


def wide_sums() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(702)
    return nn.Linear(4, 1).half(), torch.randn(2, 3000, 4).half()


def test_half_precision_stays_in_range_under_a_scaler() -> None:
    """Sums of thousands of values, times a scale of 65536, leave the range of float16; means do not."""
    model, x = wide_sums()
    reference = whole_batch(model, lambda m, x: m(x).square().mean(), x)
    scaler = torch.amp.GradScaler("cpu", init_scale=8192.0)
    wb.backward(model, lambda m, x: m(x).square(), x, micro_batch_size=1, scaler=scaler)
    found = {name: None if g is None else g.double() / 8192 for name, g in gradients_of(model).items()}
    assert_same_gradient(found, reference, tol=5e-3)

    naive, x = wide_sums()
    for rows in x.split(1):
        (naive(rows).square().sum() * 8192).backward()
    assert not all(bool(torch.isfinite(g).all()) for g in gradients_of(naive).values() if g is not None)


def test_under_autocast_the_loss_is_summed_in_single_precision() -> None:
    torch.manual_seed(703)
    model, x, y = nn.Linear(8, 4), torch.randn(600, 8), torch.randint(0, 4, (600,))
    reference = whole_batch(model, lambda m, rows: F.cross_entropy(m(rows[0]), rows[1]), (x, y))

    def loss(model: nn.Module, rows: Any) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.cross_entropy(model(rows[0]), rows[1], reduction="none").bfloat16()

    result = wb.backward(model, loss, (x, y), micro_batch_size=200)
    assert result.loss.dtype == torch.float32
    assert result.loss.item() == pytest.approx(reference.loss.item(), rel=2e-3)
    assert_same_gradient(model, reference, tol=2e-2)


@pytest.mark.parametrize("rows", [3, 96, 4096])
def test_single_precision_is_as_good_as_one_pass_in_single_precision(rows: int) -> None:
    torch.manual_seed(704)
    model, x = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)), torch.randn(rows, 8)
    reference = whole_batch(model, lambda m, x: m(x).square().mean(), x)
    once = copy.deepcopy(model)
    once(x).square().mean().backward()
    wb.backward(model, lambda m, x: m(x).square(), x, micro_batch_size=-(-rows // 64))
    assert_same_gradient(model, reference)
    assert relative_error(model, reference) <= 4 * relative_error(once, reference) + 1e-7


needs_grad_dtype = pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="grad_dtype came with torch 2.10")


@needs_grad_dtype
@pytest.mark.parametrize("accumulate_in", [None, torch.float32, torch.float64], ids=str)
def test_gradients_that_torch_itself_keeps_wider_stay_wide(accumulate_in: torch.dtype | None) -> None:
    model, window, mean = many_micro_batches()
    model.w.grad_dtype = torch.float32
    for times in (1, 2):  # the second window is added to the first
        wb.backward(model, lambda m, x: m(x), window, accumulate_in=accumulate_in)
        assert model.w.grad.dtype == torch.float32
        assert_same_gradient(model, {"w": times * mean["w"]}, tol=2e-6)


@needs_grad_dtype
def test_rounding_them_to_the_parameter_misses_that() -> None:
    model, window, mean = many_micro_batches()
    wb.backward(model, lambda m, x: m(x), window, accumulate_in=torch.float32)
    assert_differs({"w": model.w.grad.double()}, mean, by=1e-4)


@needs_grad_dtype
def test_a_step_takes_gradients_that_are_wider_than_their_parameters() -> None:
    model, window, mean = many_micro_batches()
    model.w.grad_dtype = torch.float32
    handed: dict[str, torch.Tensor | None] = {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.step = lambda *_: handed.update(gradients_of(model))  # type: ignore[method-assign]
    result = wb.Step(model, optimizer, lambda m, x: m(x), accumulate_in=torch.float32)(window)
    assert_same_gradient(handed, mean, tol=2e-6)
    assert result.grad_norm == pytest.approx(float(mean["w"].norm()), rel=2e-6)


@pytest.mark.parametrize("clip", [None, 1e9, 0.1], ids=["no clip", "a clip that is not reached", "a clip"])
@pytest.mark.parametrize("accumulate_in", [None, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("held", [False, True], ids=["nothing before", "a gradient before"])
def test_the_norm_that_is_said_is_that_of_the_gradient_that_the_optimizer_gets(
    dtype: torch.dtype, accumulate_in: torch.dtype | None, clip: float | None, held: bool
) -> None:
    torch.manual_seed(705)
    model, x = nn.Linear(40, 8).to(dtype), torch.randn(11, 40).to(dtype)
    for parameter in model.parameters() if held else ():
        parameter.grad = torch.full_like(parameter, 0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    norms: list[float] = []

    def note(*_: object) -> None:
        norms.append(float(torch.stack([p.grad.double().norm() for p in model.parameters()]).norm()))

    optimizer.register_step_pre_hook(note)
    step = wb.Step(model, optimizer, squared, 3, max_grad_norm=clip, accumulate_in=accumulate_in)
    norm = step(x).grad_norm
    rounding = 4e-3 if dtype == torch.bfloat16 else 5e-4
    if clip == 0.1:
        assert norms[0] == pytest.approx(0.1, rel=rounding)
    else:
        assert norms[0] == pytest.approx(norm, rel=1e-6)


def squared(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().square().mean(1)


def test_the_norm_of_the_sum_before_it_is_rounded_is_another() -> None:
    torch.manual_seed(705)
    model, x = nn.Linear(40, 8).bfloat16(), torch.randn(11, 40).bfloat16()
    pending = accumulate(model, squared, x, 3, GradientAccumulator(), accumulate_in=torch.float32)
    pending.merge()
    before = float(total_norm(pending.gradients.held(), torch.device("cpu")))
    pending.gradients.round()
    after = float(total_norm([p.grad for p in model.parameters()], torch.device("cpu")))
    assert abs(before / after - 1) > 1e-6
