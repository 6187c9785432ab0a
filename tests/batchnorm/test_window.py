"""BatchNorm over the whole batch, whatever the net, and the traps on the way there.

The reference is one plain forward and backward over the batch in float64. Where a net draws, it is lock-step, which
runs the net's own code on all micro-batches side by side and draws in the same order.
"""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import wholebatch as wb
from tests.oracle import assert_differs, assert_same_gradient, gradients_of, whole_batch
from wholebatch.batchnorm.rematerialize import Value, least_bytes, peak_bytes

# Nets


class FusedNorm(nn.BatchNorm2d):
    """BatchNorm and its activation in one layer, as timm has it: who takes the class for plain BatchNorm loses one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(super().forward(x), inplace=True)


class Residual(nn.Module):
    def __init__(self, channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, stride, 1, bias=False)
        self.norm1, self.act = nn.BatchNorm2d(channels), nn.ReLU(inplace=True)
        self.conv2, self.norm2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False), nn.BatchNorm2d(channels)
        self.skip = nn.Sequential(nn.Conv2d(channels, channels, 1, stride, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.norm2(self.conv2(self.act(self.norm1(self.conv1(x)))))
        out += self.skip(x)
        result: torch.Tensor = self.act(out)
        return result


class PreActivation(nn.Module):
    """The input of the norm goes on beside it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(channels), nn.Conv2d(channels, channels, 3, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(F.relu(self.norm(x)))
        y += x
        return y


class Dense(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(channels + 2 * i), nn.ReLU(), nn.Conv2d(channels + 2 * i, 2, 3, 1, 1))
            for i in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return x


class UNet(nn.Module):
    """Skips that cross many stages, and three answers in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv2d(3, 4, 3, 1, 1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.down2 = nn.Sequential(nn.Conv2d(4, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.ReLU(inplace=True))
        self.up = nn.Sequential(nn.ConvTranspose2d(6, 4, 2, 2), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.out = nn.Conv2d(8, 2, 1)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        first = self.down1(x)
        second = self.down2(first)
        mask = self.out(torch.cat([first, self.up(second)], 1))
        return {"mask": mask, "early": first.mean((2, 3)), "input": x, "name": "unet"}


class OneLayerTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(5, 6), nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.second(torch.tanh(self.norm(self.first(x)))))
        return out


class Gated(nn.Module):
    """Squeeze and excite, a depthwise convolution, and a norm without parameters or running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 6, 1), nn.BatchNorm2d(6, affine=False, track_running_stats=False)
        self.deep, self.gate, self.last = nn.Conv2d(6, 6, 3, groups=6), nn.Linear(6, 6), nn.BatchNorm2d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.hardswish(self.norm(self.conv(x)))
        x = self.deep(x)
        return torch.tanh(self.last(x * torch.sigmoid(self.gate(x.mean((2, 3))))[:, :, None, None]))


class Teacher(nn.Module):
    """A part that learns nothing but sees, and normalises with, the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4))
        self.teacher = copy.deepcopy(self.student)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = self.teacher(x)
        return F.cosine_similarity(self.student(x), wanted)[:, None]


def images(rows: int = 11) -> torch.Tensor:
    return torch.randn(rows, 3, 8, 8) * torch.linspace(0.3, 3, rows)[:, None, None, None]


def vectors(rows: int = 11) -> torch.Tensor:
    return torch.randn(rows, 5) * torch.linspace(0.3, 3, rows)[:, None] + 1


def sequences(rows: int = 11) -> torch.Tensor:
    return torch.randn(rows, 7, 5) * torch.linspace(0.3, 3, rows)[:, None, None]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(5, 6, 3, padding=1), nn.BatchNorm1d(6)
        self.gru, self.last = nn.GRU(6, 4, batch_first=True), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.norm(self.conv(x.transpose(1, 2))))
        out: torch.Tensor = self.last(self.gru(x.transpose(1, 2))[0].transpose(1, 2))
        return out


def residual() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), Residual(4), Residual(4, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def spectral() -> nn.Module:
    if torch.__version__ < (2, 8):
        pytest.skip("torch.export refuses spectral norm before torch 2.8, and so do stages, with that reason")
    constrained = nn.utils.parametrizations.spectral_norm(nn.Linear(5, 6))
    return nn.Sequential(constrained, nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)), vectors),
    "residual, in place": (residual, images),
    "pre-activation": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), PreActivation(4), PreActivation(4)), images),
    "dense": (lambda: Dense(3), images),
    "U-Net": (UNet, images),
    "fused layer": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), FusedNorm(4), nn.Conv2d(4, 2, 3), FusedNorm(2)), images),
    "one layer twice, momentum None": (OneLayerTwice, vectors),
    "gated, no parameters": (Gated, images),
    "sequences": (Recurrent, sequences),
    "no_grad inside": (Teacher, vectors),
    "spectral norm": (spectral, vectors),
    "norm first": (lambda: nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 3)), vectors),
    "norm last": (lambda: nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)), vectors),
    "volumes": (lambda: nn.Sequential(nn.Conv3d(1, 3, 2), nn.BatchNorm3d(3), nn.SiLU()), lambda: images()[:, None]),
}


def built(make: Callable[[], nn.Module]) -> nn.Module:
    """Build a net in float64 whose parameters are not at their starting values."""
    torch.manual_seed(11)
    model = make().double().train()
    for parameter in model.parameters():
        parameter.data.add_(0.2 * torch.rand_like(parameter))
    return model


def told(answer: Any) -> torch.Tensor:
    """One smooth number for each row from all tensors that a net answers."""
    leaves = [answer[name] for name in ("mask", "early")] if isinstance(answer, dict) else [answer]
    return sum(
        (leaf.flatten(1).sin() * torch.linspace(1, 2, leaf[0].numel(), dtype=leaf.dtype)).sum(1) for leaf in leaves
    )


def values(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return told(model(x))


def average(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return told(model(x)).mean()


def assert_same_buffers(model: nn.Module, expected: nn.Module, tolerance: float = 1e-12) -> None:
    for name, buffer in expected.named_buffers():
        apart = (model.get_buffer(name).double() - buffer.double()).norm()
        assert apart <= tolerance * max(buffer.double().norm().item(), 1e-6), name


@pytest.mark.parametrize("size", [1, 4, 5, 11])
@pytest.mark.parametrize("name", NETS)
def test_a_net_of_any_form_has_the_whole_batch_s_gradient_and_statistics(name: str, size: int) -> None:
    make, data = NETS[name]
    model, x = built(make), data().double()
    reference = whole_batch(model, average, x)
    result = wb.backward(model, values, x, micro_batch_size=size, batch_norm="exact")
    assert_same_gradient(model, reference)
    assert_same_buffers(model, reference.model)
    assert result.loss.item() == pytest.approx(reference.loss.item(), rel=1e-11, abs=1e-13)


@pytest.mark.parametrize("name", NETS)
def test_the_plain_loop_fails_the_same_assertions(name: str) -> None:
    make, data = NETS[name]
    model, x = built(make), data().double()
    reference = whole_batch(model, average, x)
    wb.backward(model, values, x, micro_batch_size=4, batch_norm="micro")
    assert_differs(model, reference)
    if list(reference.model.buffers()):
        with pytest.raises(AssertionError):
            assert_same_buffers(model, reference.model)


@pytest.mark.parametrize("name", NETS)
def test_lock_step_is_exact_without_a_graph(name: str) -> None:
    make, data = NETS[name]
    model, x = built(make), data().double()
    reference = whole_batch(model, average, x)
    wb.backward(model, values, x, micro_batch_size=4, batch_norm="exact-lock-step")
    assert_same_gradient(model, reference)
    assert_same_buffers(model, reference.model)


# Draws


def drawing() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.Dropout(0.3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout2d(0.2),
        nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Dropout(0.4), nn.Linear(64, 3),
    )  # fmt: skip


def noisy(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return values(model, x + 0.1 * torch.randn_like(x) + random.random())


@pytest.mark.parametrize("loss", [values, noisy])
@pytest.mark.parametrize("size", [2, 4, 9])
def test_every_micro_batch_draws_once_and_the_same_when_it_runs_again(loss: Any, size: int) -> None:
    model, x = built(drawing), images(9).double()
    staged, lock_step = copy.deepcopy(model), copy.deepcopy(model)
    ends = []
    for net, choice in ((staged, "exact"), (lock_step, "exact-lock-step")):
        torch.manual_seed(3)
        random.seed(3)
        wb.backward(net, loss, x, micro_batch_size=size, batch_norm=choice)
        ends.append((torch.rand(()), random.random()))
    assert_same_gradient(staged, gradients_of(lock_step))
    assert_same_buffers(staged, lock_step)
    assert size == 9 or ends[0] == ends[1]


def test_draws_of_the_loss_function_before_and_after_the_call_are_those_that_count() -> None:
    model, x, drawn = built(residual), images(9).double(), []

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        noise = torch.randn_like(x)
        answer = model(x + noise)
        weights = torch.rand(len(x), dtype=x.dtype)
        drawn.append((noise, weights))
        return told(answer) * weights

    wb.backward(model, loss, x, micro_batch_size=4, batch_norm="exact")
    noise, weights = (torch.cat(column) for column in zip(*drawn, strict=True))
    assert_same_gradient(model, whole_batch(built(residual), lambda m, x: (told(m(x + noise)) * weights).mean(), x))
    assert len(noise.unique()) == noise.numel() and len(weights.unique()) == 9


def test_the_micro_batches_of_the_last_stage_draw_one_after_another() -> None:
    """Each micro-batch has its own mask: micro-batches of equal rows would answer the same if all began at the same
    draw."""
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)).double()
    x, answers = vectors(4).double().repeat(3, 1), []

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        answers.append(model(x))
        return answers[-1].square()

    wb.backward(model, loss, x, micro_batch_size=4, batch_norm="exact")
    zeros = [tuple((answer == 0).flatten().tolist()) for answer in answers]
    assert len(set(zeros)) == 3


# What is counted


def test_buffers_that_the_graph_counts_itself_move_once_a_window() -> None:
    model, x = built(residual), images().double()
    for windows in (1, 2):
        wb.backward(model, values, x, micro_batch_size=2, batch_norm="exact")
        assert {int(b) for name, b in model.named_buffers() if name.endswith("tracked")} == {windows}


class Counting(nn.Module):
    """Keeps a number of the rows themselves, which no two micro-batches agree on."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.largest.copy_(torch.maximum(self.largest, x.max()))
        out: torch.Tensor = self.norm(x)
        return out


@pytest.mark.parametrize("choice", ["exact", "exact-lock-step"])
def test_a_buffer_made_of_the_rows_is_refused_by_name(choice: Any) -> None:
    model = Counting().double()
    with pytest.raises(wb.InexactError, match=r"'largest'.*rows"):
        wb.backward(model, values, vectors().double(), micro_batch_size=4, batch_norm=choice)
    assert model.norm.num_batches_tracked == 0 and model.largest == 0
    assert set(gradients_of(model).values()) == {None}


def test_frozen_layers_and_parameters_stay_as_they_are() -> None:
    model, x = built(residual), images().double()
    model[1].eval()
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    reference = whole_batch(model, average, x)
    wb.backward(model, values, x, micro_batch_size=4, batch_norm="exact")
    assert_same_gradient(model, reference)
    assert_same_buffers(model, reference.model)
    assert model[1].norm1.num_batches_tracked == 0 and model[2].norm1.num_batches_tracked == 1


def test_several_denominators_a_window_and_gradients_already_there() -> None:
    model, x = built(residual), images().double()
    window = wb.Window(x.split([2, 5, 1, 3]))

    def two(net: nn.Module, x: torch.Tensor) -> Any:
        each = values(net, x)
        return {
            "a": each,
            "b": 0.3 * wb.mean(each.square(), each > 0),
            "c": 0.1 * wb.once(net[0].weight.square().sum()),
        }

    def both(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        each = values(net, x)
        return each.mean() + 0.3 * each[each > 0].square().mean() + 0.1 * net[0].weight.square().sum()

    reference = whole_batch(model, both, x)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    result = wb.backward(model, two, window, batch_norm="exact")
    expected = {name: 1 + gradient for name, gradient in reference.gradients.items() if gradient is not None}
    assert_same_gradient(model, expected)
    assert_same_buffers(model, reference.model)
    assert result.micro_batches == 4
    assert result.loss.item() == pytest.approx(reference.loss.item(), rel=1e-12)


@pytest.mark.parametrize("choice", ["exact", "exact-lock-step"])
@pytest.mark.parametrize("first", [0, 1], ids=["nothing", "little"])
def test_a_first_micro_batch_with_hardly_any_items_bends_no_gradient_that_waits(first: int, choice: str) -> None:
    model, x = built(residual), images(40).double()
    weights = torch.ones(40, dtype=torch.float64)
    weights[first:8] = 0

    def weighted(net: nn.Module, batch: Any) -> wb.LossSum:
        return wb.mean(values(net, batch["x"]), batch["w"])

    def plain(net: nn.Module, batch: Any) -> torch.Tensor:
        return (values(net, batch["x"]) * batch["w"]).sum() / batch["w"].sum()

    batch = {"x": x, "w": weights}
    reference = whole_batch(model, plain, batch)
    wb.backward(model, weighted, batch, micro_batch_size=8, batch_norm=choice)
    assert_same_gradient(model, reference)

    naive = copy.deepcopy(model)
    naive.zero_grad()
    for start in range(0, 40, 8):
        part = {name: leaf[start : start + 8] for name, leaf in batch.items()}
        ((values(naive, part["x"]) * part["w"]).sum() / part["w"].sum().clamp(min=1) / 5).backward()
    assert_differs(naive, reference)


def test_steps_train_as_on_the_whole_batch() -> None:
    """Five windows of changing sizes with an optimizer: captures are used again, parameters are the live ones."""
    model = built(lambda: nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.SiLU(), nn.Linear(6, 3)))
    whole, x = copy.deepcopy(model), vectors(30).double()
    ours, theirs = (torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9) for net in (model, whole))
    step = wb.Step(model, ours, values, micro_batch_size=4, batch_norm="exact")
    for rows in x.split([8, 8, 7, 4, 3]):
        step(rows)
        theirs.zero_grad()
        average(whole, rows).backward()
        theirs.step()
    for a, b in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)
    assert_same_buffers(model, whole, 1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_around_the_call_is_that_of_every_stage(dtype: torch.dtype) -> None:
    model, x = built(residual).float(), images()

    def cast(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=dtype):
            return told(net(x).float())

    reference = copy.deepcopy(model)
    cast(reference, x).mean().backward()
    truth = whole_batch(model, average, x)
    wb.backward(model, cast, x, micro_batch_size=4, batch_norm="exact")
    from tests.oracle import relative_error

    assert relative_error(model, truth) <= 2 * relative_error(reference, truth)
    assert_same_buffers(model, reference, 2e-2)


def test_float32_is_as_near_to_the_truth_as_the_whole_batch_is() -> None:
    from tests.oracle import relative_error

    model, x = built(residual).float(), images()
    truth, plain = whole_batch(model, average, x), copy.deepcopy(model)
    average(plain, x).backward()
    wb.backward(model, values, x, micro_batch_size=4, batch_norm="exact")
    assert relative_error(model, truth) <= 2 * relative_error(plain, truth) + 1e-6


# What is refused


class KeepsIt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(self.norm(x))
        self.auxiliary = hidden.square().mean(1)
        out: torch.Tensor = hidden
        return out


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(x if x.sum() > -1e9 else -x)
        return out


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient


class OwnBackward(Branching):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = Doubling.apply(self.norm(x))
        return out


class PythonDraws(Branching):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(x) * (1 + random.random())
        return out


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6))
    model[0].register_forward_hook(lambda module, args, output: None)
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (KeepsIt, r"'auxiliary'.*Return them from forward"),
        (Branching, r"torch.export.*lock-step"),
        (OwnBackward, r"gradient.*Custom autograd functions"),
        (PythonDraws, r"random state"),
        (hooked, r"1 hooks.*0 \("),
    ],
    ids=["tensors kept on the module", "data-dependent branch", "a backward of its own", "draws of Python", "hooks"],
)
def test_a_model_that_a_graph_would_falsify_is_refused_with_the_reason(make: Any, reason: str) -> None:
    model = built(make)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(wb.InexactError, match=f"(?s){reason}"):
        wb.backward(model, values, vectors().double(), micro_batch_size=4, batch_norm="exact")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not hasattr(model, "auxiliary")
    assert set(gradients_of(model).values()) == {None}


@pytest.mark.parametrize("make", [Branching, OwnBackward, hooked], ids=lambda make: make.__name__)
def test_lock_step_serves_what_no_graph_can(make: Any) -> None:
    model, x = built(make), vectors().double()
    reference = whole_batch(model, average, x)
    wb.backward(model, values, x, micro_batch_size=4, batch_norm="exact-lock-step")
    assert_same_gradient(model, reference)
    assert_same_buffers(model, reference.model)


class ByMicroBatch(Branching):
    """Takes another way for some rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.norm(x)) if len(x) < 4 else self.norm(x)
        return out


@pytest.mark.parametrize("choice", ["exact", "exact-lock-step"])
def test_micro_batches_that_go_different_ways_are_refused(choice: Any) -> None:
    with pytest.raises(wb.InexactError, match="different ways"):
        wb.backward(built(ByMicroBatch), values, vectors().double(), 4, batch_norm=choice, verify="never")


def test_an_error_in_a_thread_is_the_user_s_own() -> None:
    class Wrong(Branching):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        wb.backward(built(Wrong), values, vectors().double(), micro_batch_size=4, batch_norm="exact-lock-step")


def twice(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return told(model(x)) + told(model(-x))


def by_parts(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return told(model[1](model[0](x)))


def of_a_gradient(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return told(model(x.clone().requires_grad_()))


def beside(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return values(nn.BatchNorm1d(5).double(), x)


def changing() -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return lambda model, x: values(model, x + torch.randn(x.shape, generator=generator, dtype=x.dtype))


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (twice, "second time"),
        (by_parts, r"outside of its one call"),
        (beside, r"outside of its one call"),
        (of_a_gradient, "requires a gradient"),
        (changing(), "other inputs"),
    ],
    ids=["two calls", "submodules", "another model", "input gradients", "other inputs"],
)
def test_a_loss_function_that_stages_cannot_serve_is_refused_with_the_reason(loss: Any, reason: str) -> None:
    model = built(lambda: nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6)))
    with pytest.raises(wb.InexactError, match=reason):
        wb.backward(model, loss, vectors().double(), micro_batch_size=4, batch_norm="exact", verify="never")
    assert set(gradients_of(model).values()) == {None}
    assert model[1].num_batches_tracked == 0


def test_a_loss_function_may_use_all_of_the_model_but_its_normalised_parts() -> None:
    model = built(lambda: nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 5)))

    def loss(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(net, nn.Sequential) and net.training and len(list(net.parameters())) == 6
        return told(net(x)) + told(net[2](net[0](x)))

    x = vectors().double()
    reference = whole_batch(model, lambda net, x: loss(net, x).mean(), x)
    wb.backward(model, loss, x, micro_batch_size=4, batch_norm="exact")
    assert_same_gradient(model, reference)


def test_sizes_that_change_by_themselves_are_refused() -> None:
    with pytest.raises(wb.InexactError, match="Auto"):
        wb.backward(built(residual), values, images().double(), micro_batch_size=wb.Auto(4), batch_norm="exact")


# Memory


@pytest.mark.parametrize("size", [1, 4, 11])
@pytest.mark.parametrize("name", NETS)
def test_values_that_are_made_once_more_change_nothing(name: str, size: int) -> None:
    """`offload=True` on a machine without a device: only what crosses a few cuts is kept."""
    make, data = NETS[name]
    model, x = built(make), data().double()
    reference = whole_batch(model, average, x)
    wb.backward(model, values, x, micro_batch_size=size, batch_norm="exact", offload=True)
    assert_same_gradient(model, reference)
    assert_same_buffers(model, reference.model)


def test_values_that_are_made_once_more_draw_the_same() -> None:
    model, x = built(drawing), images(9).double()
    kept, again = copy.deepcopy(model), copy.deepcopy(model)
    for net, offload in ((kept, False), (again, True)):
        torch.manual_seed(3)
        wb.backward(net, values, x, micro_batch_size=4, batch_norm="exact", offload=offload)
    assert_same_gradient(again, gradients_of(kept))


def test_cuts_are_chosen_by_bytes() -> None:
    """Early values are large: a few cuts there save more than many late ones, and equal steps save less."""
    chain = [Value(stage, stage + 1, size) for stage, size in enumerate([64, 64, 64, 64, 16, 16, 4, 4, 1, 1, 1, 1])]
    few = least_bytes(chain, 12)
    everything = peak_bytes(chain, 12, frozenset(range(12)))
    by_count = min(peak_bytes(chain, 12, frozenset(range(k, 12, k + 1))) for k in range(1, 6))
    assert everything == sum(value.bytes for value in chain)
    assert peak_bytes(chain, 12, few) < by_count < everything


def test_no_choice_of_cuts_has_fewer_bytes() -> None:
    generator = random.Random(3)
    for _ in range(20):
        values = [Value(b, generator.randint(b + 1, 7), generator.randint(1, 50)) for b in range(7) for _ in range(2)]
        every = [frozenset(c for c in range(7) if bits >> c & 1) for bits in range(2**7)]
        assert peak_bytes(values, 7, least_bytes(values, 7)) == min(peak_bytes(values, 7, kept) for kept in every)


# What is remembered


def test_a_model_is_captured_once_for_each_form_of_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    export = torch.export.export
    monkeypatch.setattr(torch.export, "export", lambda *args, **kwargs: made.append(1) or export(*args, **kwargs))
    model, x = built(residual), images(12).double()
    wb.backward(model, values, x, micro_batch_size=4, batch_norm="exact")
    wb.backward(model, values, x[:8], micro_batch_size=4, batch_norm="exact")
    assert len(made) == 1
    for rows in (11, 10, 7):  # the last micro-batch has 3, 2, 3 rows: one program for all numbers
        wb.backward(model, values, x[:rows], micro_batch_size=4, batch_norm="exact")
    assert len(made) == 2
    model[1].act.inplace = False
    wb.backward(model, values, x[:8], micro_batch_size=4, batch_norm="exact")
    assert len(made) == 3


def test_what_the_code_reads_from_the_model_is_read_again_when_it_changes() -> None:
    model, x = built(residual), images().double()
    wb.backward(model, values, x, micro_batch_size=4, batch_norm="exact")
    model.zero_grad()
    model[1].norm1.eps, model[1].norm2.momentum = 0.5, 0.9
    model[2].eval()
    reference = whole_batch(model, average, x)
    wb.backward(model, values, x, micro_batch_size=4, batch_norm="exact")
    assert_same_gradient(model, reference)
    assert_same_buffers(model, reference.model)


def test_a_model_that_is_not_used_any_more_is_given_back() -> None:
    model = built(residual)
    wb.backward(model, values, images().double(), micro_batch_size=4, batch_norm="exact")
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own
def test_compiled_models_are_looked_into() -> None:
    model, x = built(residual), images().double()
    reference = whole_batch(model, average, x)
    wb.backward(torch.compile(model), values, x, micro_batch_size=4, batch_norm="exact")
    assert_same_gradient(model, reference)
