"""What happens once a window and not once a micro-batch: clip, unscale, step, schedule, average, zero, save."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import wholebatch as wb
from tests.oracle import (
    assert_differs,
    assert_same_gradient,
    assert_same_parameters,
    gradients_of,
    parameters_of,
    relative_error,
    whole_batch,
)

Pair = tuple[torch.Tensor, torch.Tensor]


def squared_error(model: nn.Module, rows: Pair) -> torch.Tensor:
    return F.mse_loss(model(rows[0]), rows[1], reduction="none")


def mean_squared_error(model: nn.Module, rows: Pair) -> torch.Tensor:
    return F.mse_loss(model(rows[0]), rows[1])


def squares(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model(rows) ** 2
    return out


def together(window: list[Pair]) -> Pair:
    return torch.cat([x for x, _ in window]), torch.cat([y for _, y in window])


def norm_of(gradients: dict[str, torch.Tensor | None]) -> float:
    zeros = {name: None if gradient is None else torch.zeros_like(gradient) for name, gradient in gradients.items()}
    return relative_error(gradients, zeros)


def scaled(gradients: dict[str, torch.Tensor | None], factor: float) -> dict[str, torch.Tensor | None]:
    return {name: None if gradient is None else gradient * factor for name, gradient in gradients.items()}


def recorded(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor | None]:
    """Return a dict that holds, after each step, the gradients that the optimizer was handed."""
    handed: dict[str, torch.Tensor | None] = {}
    optimizer.register_step_pre_hook(lambda *_: handed.update(gradients_of(model)))
    return handed


# Clipping


def clip_problem() -> tuple[nn.Module, wb.Window]:
    torch.manual_seed(19)
    model = nn.Linear(5, 1).double()
    x, y = torch.randn(6, 5).double(), torch.randn(6, 1).double() * 4
    return model, wb.Window(zip(x.split(2), y.split(2), strict=True))


def test_the_gradient_is_clipped_once_and_its_norm_is_the_whole_batch_s() -> None:
    """facebookresearch/lingua#59: clip(clip(a) + b) is not clip(a + b)."""
    model, window = clip_problem()
    reference = whole_batch(model, mean_squared_error, together(window))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handed = recorded(model, optimizer)
    result = wb.Step(model, optimizer, squared_error, max_grad_norm=0.5)(window)
    norm = norm_of(reference.gradients)
    assert float(result.grad_norm) == pytest.approx(norm, rel=1e-12)
    clipped = scaled(reference.gradients, 0.5 / norm)
    assert_same_gradient(handed, clipped, tol=1e-5)  # torch adds 1e-6 to the norm it divides by
    assert norm_of(handed) == pytest.approx(0.5, rel=1e-5)

    naive, window = clip_problem()
    for rows in window:
        (mean_squared_error(naive, rows) / 3).backward()
        seen = nn.utils.clip_grad_norm_(naive.parameters(), 0.5)
    assert_differs(naive, clipped, by=0.1)
    assert abs(float(seen) - norm) > 0.1


def test_a_norm_below_the_limit_is_left_alone_and_reported() -> None:
    model, window = clip_problem()
    reference = whole_batch(model, mean_squared_error, together(window))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handed = recorded(model, optimizer)
    result = wb.Step(model, optimizer, squared_error, max_grad_norm=100.0)(window)
    assert_same_gradient(handed, reference)
    assert float(result.grad_norm) == pytest.approx(norm_of(reference.gradients), rel=1e-12)


def test_a_tied_parameter_counts_once_in_the_norm() -> None:
    """NVIDIA/Megatron-LM#7228: counted under both of its names, the norm is up to sqrt(2) too large."""
    torch.manual_seed(34)
    sequences = [torch.randint(0, 8, (tokens + 1,)) for tokens in (6, 2, 3)]
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 8, bias=False)).double()
    model[3].weight = model[0].weight

    def tokens(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(ids[:-1]), ids[1:], reduction="none")

    def plain(model: nn.Module, sequences: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([tokens(model, ids) for ids in sequences]).mean()

    reference = whole_batch(model, plain, sequences)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handed = recorded(model, optimizer)
    result = wb.Step(model, optimizer, tokens, max_grad_norm=0.05)(wb.Window(sequences))
    norm = norm_of(reference.gradients)
    assert float(result.grad_norm) == pytest.approx(norm, rel=1e-12)
    assert norm_of(handed) == pytest.approx(0.05, rel=1e-4)

    twice = [p.grad for _, p in reference.model.named_parameters(remove_duplicate=False)]
    naive = torch.stack([gradient.norm() for gradient in twice if gradient is not None]).norm().item()
    assert naive > 1.01 * norm


def test_the_norm_of_a_sparse_gradient_is_taken_after_its_rows_are_added_up() -> None:
    """An embedding row that occurs twice is one row: the norm of the parts is another number."""
    torch.manual_seed(35)
    model = nn.EmbeddingBag(6, 3, mode="sum", sparse=True).double()
    window = wb.Window(torch.tensor([[1, 1], [2, 1], [1, 5], [3, 3]]).split(1))
    reference = whole_batch(model, lambda model, ids: squares(model, ids).mean(), torch.cat(window))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handed = recorded(model, optimizer)
    result = wb.Step(model, optimizer, squares, max_grad_norm=0.1)(window)
    norm = norm_of(reference.gradients)
    assert float(result.grad_norm) == pytest.approx(norm, rel=1e-12)
    assert_same_gradient(handed, scaled(reference.gradients, 0.1 / norm), tol=1e-5)

    naive = copy.deepcopy(reference.model)
    naive.zero_grad()
    for ids in window:
        (squares(naive, ids).mean() / 4).backward()
    parts = naive.weight.grad
    assert parts is not None
    assert abs(parts._values().norm().item() - norm) > 0.01 * norm


class MixedModel(nn.Module):
    """Parameters in three precisions, and a frozen one that is nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 4).double(), nn.Linear(4, 4).float(), nn.Linear(4, 1).bfloat16()
        self.spare = nn.Linear(2, 2, device="meta").requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.b(self.a(x).float().tanh()).bfloat16().tanh()
        out: torch.Tensor = self.c(hidden).double()
        return out


def test_one_norm_over_gradients_of_several_precisions() -> None:
    """pytorch/pytorch#12159: each gradient keeps its dtype, the norm is taken in double precision."""
    torch.manual_seed(45)
    model, window = MixedModel(), wb.Window(torch.randn(6, 3).double().split(2))
    plain = copy.deepcopy(model)  # not in float64: the model casts by itself
    (9 * squares(plain, torch.cat(window)).mean()).backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    handed = recorded(model, optimizer)
    result = wb.Step(model, optimizer, lambda m, x: 9 * squares(m, x), max_grad_norm=0.01)(window)
    norm = norm_of(gradients_of(plain))
    assert float(result.grad_norm) == pytest.approx(norm, rel=1e-2)
    assert_same_gradient(handed, scaled(gradients_of(plain), 0.01 / norm), tol=1e-2)
    dtypes = {name: gradient.dtype for name, gradient in handed.items() if gradient is not None}
    assert dtypes == {name: p.dtype for name, p in model.named_parameters() if p.requires_grad}

    torch.manual_seed(46)  # eight rows: the last factor is a power of two, which rounds nothing
    window = wb.Window(torch.randn(8, 3).double().split(2))
    held = copy.deepcopy(plain)
    held.zero_grad()
    wb.backward(held, lambda m, x: 9 * squares(m, x), window)
    exact = norm_of(gradients_of(held))
    again = MixedModel()
    again.load_state_dict(held.state_dict(), assign=True)
    optimizer = torch.optim.SGD([p for p in again.parameters() if p.requires_grad], lr=0.1)
    result = wb.Step(again, optimizer, lambda m, x: 9 * squares(m, x))(window)
    assert float(result.grad_norm) == pytest.approx(exact, rel=1e-6)
    flat = torch.cat([g.flatten().bfloat16() for g in gradients_of(held).values() if g is not None])
    assert flat.norm().item() != pytest.approx(exact, rel=1e-5)  # the twin: one low precision for all


# Scaled losses


def scaled_problem(scale: float = 1024.0, **settings: Any) -> tuple[nn.Module, wb.Window, torch.amp.GradScaler]:
    torch.manual_seed(21)
    model = nn.Linear(4, 2)
    x, y = torch.randn(6, 4), torch.randint(0, 2, (6,))
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, **settings)
    return model, wb.Window(zip(x.split(2), y.split(2), strict=True)), scaler


def class_losses(model: nn.Module, rows: Pair) -> torch.Tensor:
    return F.cross_entropy(model(rows[0]), rows[1], reduction="none")


def class_mean(model: nn.Module, rows: Pair) -> torch.Tensor:
    return F.cross_entropy(model(rows[0]), rows[1])


def test_a_scaled_window_is_unscaled_once_then_clipped_once() -> None:
    """microsoft/Swin-Transformer#311: unscaling with each micro-batch is an error at the second one."""
    model, window, scaler = scaled_problem()
    reference = whole_batch(model, class_mean, together(window))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    handed = recorded(model, optimizer)
    result = wb.Step(model, optimizer, class_losses, max_grad_norm=0.1, scaler=scaler)(window)
    norm = norm_of(reference.gradients)
    assert float(result.grad_norm) == pytest.approx(norm, rel=2e-6)
    assert_same_gradient(handed, scaled(reference.gradients, 0.1 / norm), tol=2e-5)
    assert (result.stepped, scaler.get_scale()) == (True, 1024.0)

    naive, window, scaler = scaled_problem()
    optimizer = torch.optim.SGD(naive.parameters(), lr=1.0)
    with pytest.raises(RuntimeError, match="unscale_"):
        for rows in window:
            scaler.scale(class_mean(naive, rows) / 3).backward()
            scaler.unscale_(optimizer)


def test_the_norm_is_that_of_the_unscaled_gradient() -> None:
    """Clipped before unscaling, the norm is a thousand times too large and next to nothing is left."""
    model, window, scaler = scaled_problem(4096.0)
    reference = whole_batch(model, class_mean, together(window))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    handed = recorded(model, optimizer)
    result = wb.Step(model, optimizer, class_losses, max_grad_norm=1.0, scaler=scaler)(window)
    assert float(result.grad_norm) == pytest.approx(norm_of(reference.gradients), rel=2e-6)
    clipped = scaled(reference.gradients, min(1.0, 1.0 / norm_of(reference.gradients)))
    assert_same_gradient(handed, clipped, tol=2e-5)

    naive, window, scaler = scaled_problem(4096.0)
    for rows in window:
        scaler.scale(class_mean(naive, rows) / 3).backward()
    seen = nn.utils.clip_grad_norm_(naive.parameters(), 1.0)
    assert float(seen) > 1000 * float(result.grad_norm)
    optimizer = torch.optim.SGD(naive.parameters(), lr=1.0)
    scaler.unscale_(optimizer)
    assert_differs(naive, clipped, by=0.9)


def test_the_scale_moves_once_a_window_and_never_inside_it() -> None:
    """A scaler that grows at every update, updated with each micro-batch, adds up gradients of different scales."""
    model, window, scaler = scaled_problem(growth_interval=1)
    reference = whole_batch(model, class_mean, together(window))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    handed = recorded(model, optimizer)
    wb.Step(model, optimizer, class_losses, scaler=scaler)(window)
    assert_same_gradient(handed, reference)
    assert scaler.get_scale() == 2048.0

    naive, window, scaler = scaled_problem(growth_interval=1)
    optimizer = torch.optim.SGD(naive.parameters(), lr=1.0)
    for rows in window:
        scale = scaler.get_scale()
        scaler.scale(class_mean(naive, rows) / 3).backward()
        scaler.unscale_(optimizer)
        scaler.update()
    assert scale == 4096.0
    assert_differs(naive, reference, by=0.1)


def test_backward_with_a_scaler_leaves_the_scaled_gradient_to_the_user_s_own_loop() -> None:
    model, window, scaler = scaled_problem()
    reference = whole_batch(model, class_mean, together(window))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    wb.backward(model, class_losses, window, scaler=scaler)
    assert_same_gradient(model, scaled(reference.gradients, 1024.0))
    scaler.unscale_(optimizer)
    assert_same_gradient(model, reference)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 1024.0


def test_a_disabled_scaler_is_none() -> None:
    model, window, _ = scaled_problem()
    reference = whole_batch(model, class_mean, together(window))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    handed = recorded(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    wb.backward(model, class_losses, window, scaler=scaler)
    assert_same_gradient(model, reference)
    model.zero_grad()
    assert wb.Step(model, optimizer, class_losses, scaler=scaler)(window).stepped
    assert_same_gradient(handed, reference)


def overflowing() -> tuple[nn.Module, list[wb.Window], torch.amp.GradScaler]:
    torch.manual_seed(23)
    model = nn.Linear(2, 1)
    x, y = torch.randn(8, 2), torch.randn(8, 1)
    y[1] = float("inf")  # the second micro-batch of the first window
    rows = list(zip(x.split(1), y.split(1), strict=True))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    return model, [wb.Window(rows[:4]), wb.Window(rows[4:])], scaler


def test_an_overflow_in_one_micro_batch_skips_the_whole_window_and_nothing_of_it_stays() -> None:
    """espnet/espnet#3283: gradients that are not cleared after the skipped step spoil the next windows."""
    model, windows, scaler = overflowing()
    before = parameters_of(model)
    expected = copy.deepcopy(model)
    mean_squared_error(expected, together(windows[1])).backward()
    torch.optim.SGD(expected.parameters(), lr=0.1).step()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (step + 1))
    averages: list[int] = []
    step = wb.Step(
        model, optimizer, squared_error, scaler=scaler, scheduler=schedule, after_step=[lambda: averages.append(1)]
    )

    first = step(windows[0])
    assert (first.stepped, scaler.get_scale(), schedule.last_epoch, averages) == (False, 512.0, 0, [])
    assert first.reason
    assert relative_error(parameters_of(model), before) == 0
    assert all(parameter.grad is None for parameter in model.parameters())

    second = step(windows[1])
    assert (second.stepped, second.reason, scaler.get_scale()) == (True, None, 512.0)
    assert (schedule.last_epoch, averages) == (1, [1])
    assert_same_parameters(model, expected)

    naive, windows, scaler = overflowing()
    optimizer = torch.optim.SGD(naive.parameters(), lr=0.1)
    for window in windows:
        for rows in window:
            scaler.scale(mean_squared_error(naive, rows) / 4).backward()
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= scale:  # cleared after real steps only
            optimizer.zero_grad()
    with pytest.raises(AssertionError):
        assert_same_parameters(naive, expected)


# Windows that are no step


def ignored(model: nn.Module, rows: Pair) -> Any:
    return wb.losses.cross_entropy(model(rows[0]), rows[1])


@pytest.mark.parametrize("scaler", [None, 1024.0], ids=["plain", "scaled"])
@pytest.mark.parametrize("loss", [ignored, lambda model, rows: None], ids=["labels ignored", "None"])
def test_a_window_without_items_is_no_step(loss: Callable[..., Any], scaler: float | None) -> None:
    """Momentum and weight decay would move the weights, the schedule and the average would move on."""
    model, window, _ = scaled_problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (step + 1))
    averages: list[int] = []
    scaling = None if scaler is None else torch.amp.GradScaler("cpu", init_scale=scaler, growth_interval=1)
    step = wb.Step(
        model,
        optimizer,
        lambda model, rows: loss(model, rows) if loss is not ignored else ignored(model, (rows[0], rows[1] * 0 - 100)),
        scheduler=schedule,
        after_step=[lambda: averages.append(1)],
        scaler=scaling,
    )
    before = parameters_of(model)
    result = step(window)
    assert not result.stepped
    assert result.reason
    assert relative_error(parameters_of(model), before) == 0
    assert (schedule.last_epoch, averages, dict(optimizer.state)) == (0, [], {})
    assert float(result.loss) == 0
    assert all(parameter.grad is None for parameter in model.parameters())
    if scaling is not None:
        assert scaling.get_scale() == scaler


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_loss_without_a_scaler_names_its_micro_batch(bad: float) -> None:
    model, windows, _ = overflowing()
    windows[0][1] = (windows[0][1][0], torch.full((1, 1), bad))
    before = parameters_of(model)
    step = wb.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), squared_error, max_grad_norm=1.0)
    with pytest.raises(wb.NonFiniteError, match=r"micro-batch (1|2)"):
        step(windows[0])
    assert relative_error(parameters_of(model), before) == 0


def test_a_non_finite_loss_can_be_skipped_and_the_next_window_is_clean() -> None:
    model, windows, _ = overflowing()
    expected = copy.deepcopy(model)
    mean_squared_error(expected, together(windows[1])).backward()
    torch.optim.SGD(expected.parameters(), lr=0.1).step()
    step = wb.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), squared_error, on_nonfinite="skip")
    assert [step(window).stepped for window in windows] == [False, True]
    assert_same_parameters(model, expected)


# What moves with the steps


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # the twin's own order
def test_the_schedule_moves_once_a_step() -> None:
    """Lightning-AI/pytorch-lightning#1476: moved with each micro-batch, a warm-up of ten steps is over after three."""

    def problem() -> tuple[nn.Module, torch.optim.Optimizer, Any, list[torch.Tensor]]:
        torch.manual_seed(25)
        model = nn.Linear(2, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
        return model, optimizer, schedule, list(torch.randn(24, 1, 2).double().unbind(0))

    model, optimizer, schedule, rows = problem()
    step = wb.Step(model, optimizer, squares, scheduler=schedule)
    results = [step(window) for window in wb.windows(rows, 4)]
    assert [result.lrs for result in results] == [pytest.approx([lr / 10]) for lr in range(1, 7)]
    assert schedule.get_last_lr() == pytest.approx([0.7])

    expected, optimizer, schedule, rows = problem()
    for start in range(0, 24, 4):
        optimizer.zero_grad()
        squares(expected, torch.cat(rows[start : start + 4])).mean().backward()
        optimizer.step()
        schedule.step()
    assert_same_parameters(model, expected)

    naive, optimizer, schedule, rows = problem()
    for index, row in enumerate(rows):
        (squares(naive, row).mean() / 4).backward()
        if index % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
    assert schedule.get_last_lr() == [1.0]
    with pytest.raises(AssertionError):
        assert_same_parameters(naive, expected)


def test_the_average_of_the_weights_moves_once_a_step() -> None:
    """SWivid/F5-TTS#631: updated with each micro-batch it follows the weights four times too fast."""

    def problem() -> tuple[nn.Module, torch.optim.Optimizer, nn.Module, list[torch.Tensor]]:
        torch.manual_seed(27)
        model = nn.Linear(2, 1).double()
        average = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        average.update_parameters(model)  # the first update copies
        rows = list(torch.randn(12, 2, 2).double().unbind(0))
        return model, torch.optim.SGD(model.parameters(), lr=0.5), average, rows

    model, optimizer, average, rows = problem()
    calls: list[int] = []
    step = wb.Step(
        model, optimizer, squares, after_step=[lambda: average.update_parameters(model), lambda: calls.append(1)]
    )
    for window in wb.windows(rows, 4):
        step(window)
    assert calls == [1, 1, 1]

    expected, optimizer, wanted, rows = problem()
    for start in range(0, 12, 4):
        optimizer.zero_grad()
        squares(expected, torch.cat(rows[start : start + 4])).mean().backward()
        optimizer.step()
        wanted.update_parameters(expected)
    assert_same_parameters(average.module, wanted.module)

    naive, optimizer, fast, rows = problem()
    for index, row in enumerate(rows):
        (squares(naive, row).mean() / 4).backward()
        if index % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
        fast.update_parameters(naive)
    with pytest.raises(AssertionError):
        assert_same_parameters(fast.module, wanted.module)


def test_several_schedules_move_together_and_only_with_steps() -> None:
    model, windows, _ = overflowing()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedules = [
        torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=2),
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1),
    ]
    step = wb.Step(model, optimizer, squared_error, scheduler=schedules, on_nonfinite="skip")
    assert [step(window).lrs for window in (*windows, windows[1])] == [pytest.approx([lr]) for lr in (0.5, 0.5, 0.075)]


def test_adam_counts_windows() -> None:
    model, window = clip_problem()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step = wb.Step(model, optimizer, squared_error, micro_batch_size=1)
    for _ in range(3):
        step(window)
    assert {int(state["step"]) for state in optimizer.state.values()} == {3}


def test_a_gradient_that_is_there_before_the_step_is_part_of_it() -> None:
    """A term that the user has propagated beforehand is added, clipped and stepped with the window's."""
    model, window = clip_problem()

    def whole(model: nn.Module, rows: Pair) -> torch.Tensor:
        return mean_squared_error(model, rows) + 0.3 * model.weight.square().sum()  # type: ignore[operator, union-attr]

    reference = whole_batch(model, whole, together(window))
    (0.3 * model.weight.square().sum()).backward()  # type: ignore[operator, union-attr]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handed = recorded(model, optimizer)
    result = wb.Step(model, optimizer, squared_error)(window)
    assert_same_gradient(handed, reference)
    assert float(result.grad_norm) == pytest.approx(norm_of(reference.gradients), rel=1e-12)


# Several optimizers, closures, two passes


class Adversaries(nn.ModuleDict):
    """A generator and its discriminator behind one module."""

    def __init__(self) -> None:
        discriminator = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        super().__init__({"G": nn.Linear(2, 3), "D": discriminator})


def fooling(net: nn.Module, rows: Pair) -> torch.Tensor:
    return F.softplus(-net["D"](net["G"](rows[0]))).squeeze(-1)  # type: ignore[index]


def telling(net: nn.Module, rows: Pair) -> torch.Tensor:
    fake, real = net["D"](net["G"](rows[0]).detach()), net["D"](rows[1])  # type: ignore[index]
    return (F.softplus(fake) + F.softplus(-real)).squeeze(-1)


def adversarial_problem() -> tuple[nn.Module, wb.Window]:
    torch.manual_seed(36)
    net = Adversaries().double()
    latent, real = torch.randn(6, 2).double(), torch.randn(6, 3).double()
    return net, wb.Window(zip(latent.split(2), real.split(2), strict=True))


def part(gradients: dict[str, torch.Tensor | None], name: str) -> dict[str, torch.Tensor | None]:
    return {key: gradient for key, gradient in gradients.items() if key.startswith(name)}


def test_two_optimizers_on_one_model_take_their_own_gradients_only() -> None:
    """FoundationVision/OmniTokenizer#15: the generator's loss flows through the discriminator and may not stay."""
    net, window = adversarial_problem()
    wanted = {
        name: part(whole_batch(net, lambda net, rows, f=f: f(net, rows).mean(), together(window)).gradients, name)
        for name, f in (("G", fooling), ("D", telling))
    }
    steps, handed = {}, {}
    for name, loss in (("G", fooling), ("D", telling)):
        optimizer = torch.optim.SGD(net[name].parameters(), lr=0.0)  # both at the same weights
        handed[name] = recorded(net, optimizer)
        steps[name] = wb.Step(net, optimizer, loss)
    assert steps["G"](window).stepped
    assert set(gradients_of(net).values()) == {None}
    assert steps["D"](window).stepped
    for name in ("G", "D"):
        assert_same_gradient(part(handed[name], name), wanted[name])

    naive, window = adversarial_problem()
    for rows in window:
        for loss in (fooling, telling):
            (loss(naive, rows).sum() / 6).backward()
    assert_differs(part(gradients_of(naive), "D"), wanted["D"], by=0.1)


def test_what_lies_in_the_other_optimizer_s_gradients_stays_there() -> None:
    net, window = adversarial_problem()
    for parameter in net["D"].parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    optimizer = torch.optim.SGD(net["G"].parameters(), lr=0.1)
    wb.Step(net, optimizer, fooling, max_grad_norm=1e-3)(window)
    assert all(torch.equal(p.grad, torch.full_like(p, 0.5)) for p in net["D"].parameters())


@pytest.mark.filterwarnings("ignore:.*in no step.s optimizer")
def test_the_norm_and_the_clip_are_those_of_the_step_s_own_parameters() -> None:
    net, window = adversarial_problem()
    reference = whole_batch(net, lambda net, rows: fooling(net, rows).mean(), together(window))
    optimizer = torch.optim.SGD(net["G"].parameters(), lr=0.1)
    result = wb.Step(net, optimizer, fooling, max_grad_norm=1.0)(window)
    own, all_of_it = norm_of(part(reference.gradients, "G")), norm_of(reference.gradients)
    assert float(result.grad_norm) == pytest.approx(own, rel=1e-12)
    assert all_of_it > 1.1 * own


def test_a_closure_walks_through_the_whole_window_each_time() -> None:
    """NeuroDiffGym/neurodiffeq#159: one step of LBFGS over micro-batches of 4, 4 and 2 rows."""
    settings: dict[str, Any] = {"lr": 0.5, "max_iter": 5, "history_size": 5, "tolerance_grad": 0, "tolerance_change": 0}

    def problem() -> tuple[nn.Module, list[Pair], torch.optim.Optimizer]:
        torch.manual_seed(43)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        x, y = torch.randn(10, 3).double(), torch.randn(10, 1).double()
        rows = list(zip(x.split(4), y.split(4), strict=True))
        return model, rows, torch.optim.LBFGS(model.parameters(), **settings)

    def whole(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Pair, losses: list[float]) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = mean_squared_error(model, batch)
            loss.backward()
            losses.append(loss.item())
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]

    model, rows, optimizer = problem()
    losses: list[float] = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = wb.backward(model, squared_error, wb.Window(rows)).loss
        losses.append(loss.item())
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    expected, rows, optimizer = problem()
    wanted: list[float] = []
    whole(expected, optimizer, together(rows), wanted)
    assert losses == pytest.approx(wanted, rel=1e-9)
    assert_same_parameters(model, expected, tol=1e-9)

    naive, rows, optimizer = problem()
    tried: list[float] = []
    for batch in rows:
        whole(naive, optimizer, batch, tried)
    assert len(tried) != len(wanted)
    with pytest.raises(AssertionError):
        assert_same_parameters(naive, expected, tol=1e-9)


def test_two_passes_of_a_sharpness_aware_step_see_the_same_batch() -> None:
    def climb(model: nn.Module, rho: float = 0.05) -> list[torch.Tensor]:
        size = norm_of(gradients_of(model))
        moves = [rho * p.grad / size for p in model.parameters() if p.grad is not None]
        with torch.no_grad():
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.add_(move)
        model.zero_grad()
        return moves

    def descend(model: nn.Module, moves: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.sub_(move)
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    model, window = clip_problem()
    wb.backward(model, squared_error, window)
    moves = climb(model)
    wb.backward(model, squared_error, window)
    descend(model, moves)

    expected, window = clip_problem()
    mean_squared_error(expected, together(window)).backward()
    moves = climb(expected)
    mean_squared_error(expected, together(window)).backward()
    descend(expected, moves)
    assert_same_parameters(model, expected)

    naive, window = clip_problem()  # the perturbation of each micro-batch alone
    for rows in window:
        before = gradients_of(naive)
        naive.zero_grad()
        mean_squared_error(naive, rows).backward()
        moves = climb(naive)
        (mean_squared_error(naive, rows) / 3).backward()
        with torch.no_grad():
            for (name, parameter), move in zip(naive.named_parameters(), moves, strict=True):
                parameter.sub_(move)
                if before[name] is not None:
                    parameter.grad += before[name]
    torch.optim.SGD(naive.parameters(), lr=0.1).step()
    with pytest.raises(AssertionError):
        assert_same_parameters(naive, expected)


@pytest.mark.parametrize("door", ["backward", "Step"])
def test_an_optimizer_inside_the_backward_pass_is_refused_before_it_can_step(door: str) -> None:
    """pytorch/pytorch#124523: its hook would step with each micro-batch's part of the gradient."""

    def problem() -> tuple[nn.Module, list[Pair], list[int]]:
        torch.manual_seed(50)
        model, calls = nn.Linear(3, 1).double(), list[int]()
        for parameter in model.parameters():
            inside = torch.optim.SGD([parameter], lr=0.3)

            def hook(parameter: torch.Tensor, inside: torch.optim.Optimizer = inside) -> None:
                inside.step()
                inside.zero_grad()
                calls.append(1)

            parameter.register_post_accumulate_grad_hook(hook)
        x, y = torch.randn(8, 3).double(), torch.randn(8, 1).double()
        return model, list(zip(x.split(2), y.split(2), strict=True)), calls

    model, rows, calls = problem()
    before = parameters_of(model)
    with pytest.raises(wb.InexactError, match="hook"):
        if door == "backward":
            wb.backward(model, squared_error, wb.Window(rows))
        else:
            wb.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), squared_error)(wb.Window(rows))
    assert (calls, relative_error(parameters_of(model), before)) == ([], 0)

    naive, rows, calls = problem()
    for batch in rows:
        (squared_error(naive, batch).sum() / 8).backward()
    assert len(calls) == 8  # two parameters, four micro-batches: four partial updates


# Saving, and state that is carried


def resumable() -> tuple[nn.Module, torch.optim.Optimizer, list[Pair]]:
    torch.manual_seed(57)
    x, y = torch.randn(16, 3).double(), torch.randn(16, 1).double()
    model = nn.Linear(3, 1).double()
    return (
        model,
        torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9),
        list(zip(x.split(2), y.split(2), strict=True)),
    )


def test_a_run_resumed_in_the_middle_of_a_window_ends_where_the_undisturbed_one_does() -> None:
    """huggingface/transformers#22143: eight micro-batches in windows of four, stopped after the sixth.

    A window is what a step takes: the state of the last boundary is saved, and the window begins again.
    """
    model, optimizer, rows = resumable()
    step = wb.Step(model, optimizer, squared_error)
    step(wb.Window(rows[:4]))
    saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step.state_dict()})

    model, optimizer, rows = resumable()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # a new process knows nothing
    step = wb.Step(model, optimizer, squared_error)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step.load_state_dict(saved["step"])
    step(wb.Window(rows[4:]))

    expected, optimizer, rows = resumable()
    for window in (rows[:4], rows[4:]):
        optimizer.zero_grad()
        mean_squared_error(expected, together(window)).backward()
        optimizer.step()
    assert_same_parameters(model, expected)

    naive, optimizer, rows = resumable()
    for start in (0, 4):
        optimizer.zero_grad()
        for index in range(start, start + 4):
            (mean_squared_error(naive, rows[index]) / 4).backward()
            if index == 5:
                optimizer.zero_grad()  # stopped here: the gradient is in no checkpoint
        optimizer.step()
    with pytest.raises(AssertionError):
        assert_same_parameters(naive, expected)


def test_the_scale_is_part_of_the_step_s_state() -> None:
    model, windows, scaler = overflowing()
    step = wb.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), squared_error, scaler=scaler)
    step(windows[0])
    saved = copy.deepcopy(step.state_dict())
    model, windows, scaler = overflowing()
    step = wb.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), squared_error, scaler=scaler)
    step.load_state_dict(saved)
    assert scaler.get_scale() == 512.0


def test_time_chunks_hand_on_their_state_in_order() -> None:
    """OpenNMT/OpenNMT-py#891: seven steps of two sequences in chunks of 3, 3 and 1, the state detached between."""

    def problem() -> tuple[nn.Module, list[torch.Tensor]]:
        torch.manual_seed(61)
        net = nn.ModuleDict({"rnn": nn.GRU(3, 4), "out": nn.Linear(4, 1)}).double()
        return net, list(torch.randn(7, 2, 3).double().split(3))

    def plain(net: nn.Module, chunks: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        state, losses = None, []
        for chunk in chunks:
            hidden, state = net["rnn"](chunk, None if state is None else state.detach())  # type: ignore[index]
            losses.append(net["out"](hidden).pow(2).flatten())  # type: ignore[index]
        return torch.cat(losses).mean(), state

    net, chunks = problem()
    carried: list[torch.Tensor] = []

    def loss(net: nn.Module, chunk: torch.Tensor) -> torch.Tensor:
        hidden, state = net["rnn"](chunk, carried[-1] if carried else None)  # type: ignore[index]
        carried.append(state.detach())
        out: torch.Tensor = net["out"](hidden).pow(2)  # type: ignore[index]
        return out

    reference = whole_batch(net, lambda net, chunks: plain(net, chunks)[0], chunks)
    result = wb.backward(net, loss, wb.Window(chunks))
    assert "carried" in result.verified and result.verified.startswith("not verified")
    assert_same_gradient(net, reference)
    assert len(carried) == 3
    assert torch.allclose(carried[-1], plain(net, chunks)[1], rtol=1e-12)
    assert result.loss.item() == pytest.approx(reference.loss.item(), rel=1e-12)

    naive, chunks = problem()
    state = None
    for chunk in chunks:
        naive.zero_grad()  # inside the loop: the last chunk's gradient alone is left
        hidden, state = naive["rnn"](chunk, state)  # type: ignore[index]
        (naive["out"](hidden).pow(2).sum() / 14).backward()  # type: ignore[index]
        state = state.detach()
    assert_differs(naive, reference, by=0.1)


# Draws


def test_dropout_draws_what_a_hand_written_loop_over_the_same_micro_batches_would_draw() -> None:
    """Exact means for the same draws: each micro-batch its own, none twice, and the generator moves on."""
    torch.manual_seed(401)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1)).double()
    rows = torch.randn(6, 3).double()

    torch.manual_seed(402)
    expected = copy.deepcopy(model)
    for micro_batch in rows.split(2):
        (squares(expected, micro_batch).sum() / 6).backward()
    after = torch.rand(())

    torch.manual_seed(402)
    wb.backward(model, squares, rows, micro_batch_size=2)
    assert_same_gradient(model, gradients_of(expected))
    assert torch.equal(torch.rand(()), after)

    naive = copy.deepcopy(model)
    naive.zero_grad()
    for micro_batch in rows.split(2):
        torch.manual_seed(402)  # the same mask for every micro-batch
        (squares(naive, micro_batch).sum() / 6).backward()
    assert_differs(naive, gradients_of(expected), by=0.1)


def test_counting_denominators_beforehand_draws_nothing_and_moves_no_buffer() -> None:
    torch.manual_seed(403)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 2)).double()
    rows, mask = torch.randn(6, 3).double(), torch.tensor([1, 0, 0, 1, 1, 0]).bool()

    def two_terms(model: nn.Module, micro_batch: Any) -> Any:
        out = model(micro_batch[0]).square()
        return wb.mean(out[:, 0]) + wb.mean(out[:, 1], weights=micro_batch[1])

    torch.manual_seed(404)
    expected = copy.deepcopy(model)
    for x, m in zip(rows.split(3), mask.split(3), strict=True):
        out = squares(expected, x)
        (out[:, 0].sum() / 6 + (out[:, 1] * m).sum() / 3).backward()
    after = torch.rand(())

    torch.manual_seed(404)
    wb.backward(model, two_terms, (rows, mask), micro_batch_size=3, batch_norm="micro")
    assert_same_gradient(model, gradients_of(expected))
    assert torch.equal(torch.rand(()), after)
    for name, buffer in expected.named_buffers():
        assert torch.equal(buffer, model.get_buffer(name)), name
