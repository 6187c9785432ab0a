"""What a step refuses, remembers, and does at the boundary besides the gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholebatch as wb

ROWS = torch.randn(10, 3, generator=torch.Generator().manual_seed(1))


def loss(model: nn.Module, rows: Tensor) -> Tensor:
    out: Tensor = model(rows).square()
    return out


def build(**arguments: Any) -> tuple[nn.Module, wb.Step]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = arguments.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.1)
    return model, wb.Step(model, optimizer, loss, **{"micro_batch_size": 4} | arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"optimizer": torch.optim.LBFGS([nn.Parameter(torch.ones(1))])}, TypeError, "closure"),
        ({"optimizer": "sgd"}, TypeError, "optimizer is str"),
        ({"optimizer": [1, 2]}, TypeError, r"optimizer is list.*For several call wb\.backward"),
        ({"max_grad_norm": 0.0}, ValueError, "positive"),
        ({"max_grad_norm": float("nan")}, ValueError, "positive"),
        ({"on_nonfinite": "ignore"}, ValueError, '"raise" or "skip"'),
        ({"after_step": [lambda model: None]}, TypeError, "without arguments"),
        ({"max_grad_norm": "1"}, TypeError, r"max_grad_norm is '1', of type str; pass a number"),
        ({"max_grad_norm": True}, TypeError, r"of type bool; pass a number"),
        ({"scaler": True}, TypeError, r"scaler is True, of type bool.*GradScaler"),
        ({"after_step": [3]}, TypeError, r"after_step has 3, of type int, which cannot be called"),
        ({"after_step": 3}, TypeError, r"after_step has 3, of type int, which cannot be called"),
        ({"after_step": lambda model: None}, TypeError, "without arguments"),
        ({"colate": list}, TypeError, "Did you mean 'collate'"),
    ],
)
def test_a_wrong_argument_is_refused_when_the_step_is_built(
    arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        build(**arguments)


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("microbatch_size", "micro_batch_size"),
        ("micro_batchsize", "micro_batch_size"),
        ("accumulation_steps", "micro_batch_size', the rows of one micro-batch"),
        ("gradient_accumulation_steps", "micro_batch_size"),
        ("clip", "max_grad_norm"),
        ("max_norm", "max_grad_norm"),
        ("gradient_clip_val", "max_grad_norm"),
        ("lr_scheduler", "scheduler"),
        ("grad_scaler", "scaler"),
        ("scalar", "scaler"),
        ("criterion", "loss_fn"),
        ("collate_fn", "collate"),
        ("acumulate_in", "accumulate_in"),
    ],
)
def test_another_word_for_an_argument_is_answered_with_ours(word: str, meant: str) -> None:
    with pytest.raises(TypeError, match=f"There is no option '{word}'. Did you mean '{meant}"):
        build(**{word: 4})


@pytest.mark.parametrize("word", ["clip", "max_norm", "lr_scheduler"])
def test_what_only_a_step_takes_is_said_where_the_gradient_alone_is_wanted(word: str) -> None:
    with pytest.raises(TypeError, match=r"wb\.Step\(\.\.\., (max_grad_norm|scheduler)=\.\.\.\) takes it"):
        wb.backward(nn.Linear(3, 2), loss, ROWS, **{word: 1.0})  # type: ignore[arg-type]


def test_the_size_stands_in_the_place_that_backward_has_it_in() -> None:
    model = nn.Linear(3, 2)
    step = wb.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, 3)
    assert step(ROWS).micro_batches == wb.backward(model, loss, ROWS, 3).micro_batches == 4


def test_what_is_no_scaler_is_refused_wherever_one_is_taken() -> None:
    model = nn.Linear(3, 2)
    model.weight.grad = torch.ones_like(model.weight)
    for call in (
        lambda: wb.backward(model, loss, ROWS, 4, scaler=3),  # type: ignore[arg-type]
        lambda: wb.coupled_backward(model, loss, lambda z: z.mean(), ROWS, 4, scaler=3),  # type: ignore[arg-type]
    ):
        with pytest.raises(TypeError, match=r"scaler is 3, of type int.*scaler=torch\.amp\.GradScaler"):
            call()
    assert torch.equal(model.weight.grad, torch.ones_like(model.weight))


def test_one_function_to_call_after_a_step_needs_no_list() -> None:
    calls: list[int] = []
    _, step = build(after_step=lambda: calls.append(1))
    step(ROWS)
    step(ROWS[:0])
    assert calls == [1]


def test_a_scheduler_that_waits_for_a_metric_is_refused() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(TypeError, match="once an evaluation"):
        build(optimizer=optimizer, scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))


def test_several_schedulers_step_together_and_the_rate_reported_is_the_one_used() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for _ in range(2)]
    step = wb.Step(model, optimizer, loss, micro_batch_size=4, scheduler=schedulers)
    assert [step(ROWS).lrs for _ in range(3)] == [[1.0], [0.25], [0.0625]]


def test_counters_and_the_size_found_are_part_of_the_state() -> None:
    auto = wb.Auto(8)
    _, step = build(micro_batch_size=auto)
    auto.shrink()
    step(ROWS)
    step(ROWS)
    _, other = build(micro_batch_size=wb.Auto(8))
    other.load_state_dict(step.state_dict())
    assert (other.windows, other.steps, other.rows) == (2, 2, 20)
    assert other.micro_batch_size.size == auto.size == 4  # type: ignore[union-attr]


def test_a_state_can_be_saved_without_code(tmp_path: Any) -> None:
    _, step = build(scaler=torch.amp.GradScaler("cpu"), micro_batch_size=wb.Auto(8))
    step(ROWS)
    torch.save(step.state_dict(), tmp_path / "step.pt")
    assert torch.load(tmp_path / "step.pt", weights_only=True) == step.state_dict()


def test_a_foreign_state_is_refused() -> None:
    _, step = build()
    with pytest.raises(ValueError, match="layout 7"):
        step.load_state_dict({"version": 7})
    _, scaled = build(scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match="saved with no scaler and this step has a scaler"):
        scaled.load_state_dict(step.state_dict())


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"counters": None}, ValueError, "no state of a step"),
        ({"counters": {"windows": 5, "steps": 5}}, ValueError, "no state of a step"),
        ({"counters": {"windows": 5, "steps": 5, "rows": "many"}}, ValueError, "no state of a step"),
        ({"size": {"limit": 3}}, ValueError, "no state of Auto"),
        ({"scaler": ...}, ValueError, "no state of a step"),
        (None, TypeError, "state is NoneType"),
    ],
    ids=str,
)
def test_a_state_with_parts_missing_is_refused_and_changes_nothing(
    change: dict[str, Any] | None, error: type[Exception], words: str
) -> None:
    _, other = build(micro_batch_size=wb.Auto(8))
    other(ROWS)
    _, step = build(micro_batch_size=wb.Auto(8))
    before = step.state_dict()
    broken = None if change is None else {k: v for k, v in (other.state_dict() | change).items() if v is not ...}
    with pytest.raises(error, match=words):
        step.load_state_dict(broken)  # type: ignore[arg-type]
    assert step.state_dict() == before


def test_a_scaler_that_is_switched_off_is_none() -> None:
    model, step = build(scaler=torch.amp.GradScaler("cpu", enabled=False))
    twin, plain = build()
    step(ROWS)
    plain(ROWS)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_gradients_are_none_after_a_step_and_after_none() -> None:
    model, step = build()
    step(ROWS)
    assert all(p.grad is None for p in model.parameters())
    step(ROWS[:0])
    assert all(p.grad is None for p in model.parameters())


def test_a_parameter_of_the_optimizer_outside_of_the_model_is_stepped_too() -> None:
    torch.manual_seed(0)
    model, scale = nn.Linear(3, 2).double(), nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1)
    rows = ROWS.double()
    expected = 2.0 - 0.1 * float(model(rows).square().mean().detach())
    wb.Step(model, optimizer, lambda model, rows: model(rows).square() * scale, micro_batch_size=3)(rows)
    assert scale.item() == pytest.approx(expected, rel=1e-12)


def test_parameters_of_another_optimizer_are_named_once_as_it_would_find_no_gradient() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    first, second = (torch.optim.SGD(part.parameters(), lr=0.1) for part in model)
    step = wb.Step(model, first, loss, micro_batch_size=4, after_step=second.step)
    before = model[1].weight.clone()
    with pytest.warns(
        UserWarning, match=r"2 parameters .* in no step's optimizer \(first: 1\.weight, 1\.bias\)"
    ) as told:
        step(ROWS)
    assert told[0].filename == __file__
    step(ROWS)
    assert torch.equal(model[1].weight, before)  # what the warning is about
    wb.backward(model, loss, ROWS, 4)
    second.step()
    assert not torch.equal(model[1].weight, before)


def test_the_sum_in_float32_is_what_the_norm_and_the_clip_see() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).bfloat16()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    before = model.weight.detach().float().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    options = {"accumulate_in": torch.float32}
    step = wb.Step(model, optimizer, loss, micro_batch_size=1, max_grad_norm=1e-2, **options)  # type: ignore[arg-type]
    result = step(ROWS.bfloat16())
    moved = torch.linalg.vector_norm(model.weight.detach().float() - before)
    assert result.grad_norm > 1.0
    assert model.weight.dtype is torch.bfloat16
    assert float(moved) < 2e-2
