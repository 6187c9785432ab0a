"""A loss that is bent behind a mean of the micro-batch is refused although no part is beyond the kink yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import assert_differs, assert_same_gradient, whole_batch
from torch import Tensor, nn

import wholebatch as wb
from wholebatch.errors import InexactError

D = torch.float64


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(5, 3).double(), nn.Parameter(torch.tensor(2.0, dtype=D))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def model() -> Model:
    torch.manual_seed(0)
    return Model()


def batch(size: float = 1.0, n: int = 16) -> dict[str, Tensor]:
    """Rows that become larger: those of later micro-batches lie beyond a kink that the first ones do not reach."""
    torch.manual_seed(1)
    return {"x": torch.randn(n, 5, dtype=D) * torch.linspace(1, size, n, dtype=D)[:, None], "y": torch.arange(n) % 3}


FAR = 20.0
KINKS: dict[str, Callable[[Tensor], Tensor]] = {
    "clamp": lambda kl: torch.clamp(kl.mean(), max=FAR),
    "clamp beyond, a constant": lambda kl: torch.clamp(kl.mean(), min=FAR),
    "hinge": lambda kl: F.relu(FAR - kl.mean()),
    "abs": lambda kl: abs(kl.mean() - FAR),
    "maximum": lambda kl: torch.maximum(kl.mean(), kl.new_tensor(FAR)),
    "max of a stack": lambda kl: torch.stack([kl.mean(), kl.mean() / 2]).max(),
    "where": lambda kl: torch.where(kl.mean() > FAR, FAR, kl.mean()),
    "free bits of each feature": lambda kl: kl.mean(0).clamp(max=FAR).mean(),
    "module": lambda kl: nn.ReLU()(FAR - kl.mean(0, keepdim=True)).mean(),
}


def with_kink(kink: Callable[[Tensor], Tensor]) -> Callable[[Any, Any], wb.LossSum]:
    def loss_fn(model: Any, batch: Any) -> wb.LossSum:
        out = model(batch["x"])
        loss = F.cross_entropy(out, batch["y"]) + 0.5 * kink(out.square())
        return wb.from_mean(loss, items=len(out))

    return loss_fn


@pytest.mark.parametrize("name", KINKS)
def test_a_kink_behind_a_mean_is_refused_before_it_binds(name: str) -> None:
    with pytest.raises(InexactError, match=r"bends a value .* of all rows.*wb.coupled_backward"):
        wb.backward(model(), with_kink(KINKS[name]), batch(), 4)


def test_what_a_kink_costs_once_it_binds() -> None:
    """Without the proof a window is wrong whose micro-batches lie on both sides; as a coupled loss it is right."""
    learner, large, loss_fn = model(), batch(size=12.0), with_kink(KINKS["clamp"])
    reference = whole_batch(learner, lambda m, b: loss_fn(m, b).total / 16, large)
    wb.backward(learner, loss_fn, large, 4, verify="never")
    assert_differs(learner, reference)
    learner.zero_grad()

    def loss(out: Tensor) -> Tensor:
        return F.cross_entropy(out, large["y"]) + 0.5 * KINKS["clamp"](out.square())

    wb.coupled_backward(learner, lambda m, b: m(b["x"]), loss, large, 4)
    assert_same_gradient(learner, reference)


def per_row(model: Any, batch: Any) -> Tensor:
    return torch.stack([F.relu(row.mean() - 0.1) + 0.1 * abs(row.sum()) for row in model(batch["x"])])


def of_parameters(model: Any, batch: Any) -> Any:
    scale = model.scale.exp().clamp(max=100.0)
    values = F.cross_entropy(scale * model(batch["x"]), batch["y"], reduction="none")
    return wb.mean(values) + wb.once(F.relu(model.layer.weight.norm() - 0.5))


def in_a_metric(model: Any, batch: Any) -> Any:
    values = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    return wb.mean(values), {"excess": wb.mean(F.relu(values.mean() - 5.0).detach().expand(len(values)))}


def guarded(model: Any, batch: Any) -> wb.LossSum:
    """A mean by a mask, which may leave nothing."""
    values, mask = model(batch["x"]).square().mean(1), batch["y"] > 0
    count = mask.sum()
    return wb.from_mean(torch.where(count > 0, (values * mask).sum() / count.clamp(min=1), 0.0), items=count)


@pytest.mark.parametrize("loss_fn", [per_row, of_parameters, in_a_metric, guarded])
def test_kinks_of_a_row_of_parameters_and_of_metrics_are_right(loss_fn: Callable[..., Any]) -> None:
    found = wb.backward(model(), loss_fn, batch(), 4).verified
    assert found.startswith("verified") and "not shown" not in found


def test_a_choice_by_comparison_is_said() -> None:
    """Which Python makes, so that the graph holds nothing of what was not chosen."""

    def loss_fn(model: Any, batch: Any) -> wb.LossSum:
        out = model(batch["x"])
        return wb.from_mean(F.cross_entropy(out, batch["y"]) + max(out.square().mean(), 1e-9), items=len(out))

    found = wb.backward(model(), loss_fn, batch(), 4).verified
    assert "lt (in loss_fn, test_kinks.py" in found and "not shown" in found


# What no graph shows: values of all rows bent inside of a function of one's own, on detached values, in a backward.


class Bounded(torch.autograd.Function):
    """Weighs rows by their mean, above a bound."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        weight = values.mean().clamp(min=FAR)
        ctx.save_for_backward(weight)
        return values * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0]  # the bound binds


class Limited(torch.autograd.Function):
    """Passes values, and keeps the norm of their gradient below a bound."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * (FAR / gradient.norm()).clamp(max=1.0)


class Steep(Limited):
    """Bounds the gradient of each number by itself."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-FAR, FAR)


def row_losses(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def through(function: Any) -> Callable[[Any, Any], Tensor]:
    return lambda model, batch: F.cross_entropy(function.apply(model(batch["x"])), batch["y"], reduction="none")


def weighed_aside(model: Any, batch: Any) -> Tensor:
    values = row_losses(model, batch)
    return values * values.detach().mean().clamp(min=FAR)


def weighed_without_grad(model: Any, batch: Any) -> Tensor:
    values = row_losses(model, batch)
    with torch.no_grad():
        weight = torch.maximum(values.mean(), values.new_tensor(FAR))
    return values * weight


ASIDE: dict[str, Callable[[Any, Any], Tensor]] = {
    "in a forward of its own": through(Bounded),
    "detached": weighed_aside,
    "without a graph": weighed_without_grad,
}


@pytest.mark.parametrize("name", ASIDE)
def test_a_kink_that_no_graph_shows_is_refused_before_it_binds(name: str) -> None:
    with pytest.raises(InexactError, match=r"bends a value .* of all rows.*wb.coupled_backward"):
        wb.backward(model(), ASIDE[name], batch(), 4)


def test_a_clip_within_a_backward_is_refused_before_it_binds() -> None:
    with pytest.raises(InexactError, match=r"clamp \(in backward.*of all rows.*max_grad_norm"):
        wb.backward(model(), through(Limited), batch(), 4)
    learner = model()
    learner.layer.weight.register_hook(lambda gradient: gradient.clamp(-FAR, FAR))
    with pytest.raises(InexactError, match=r"clamp \(in <lambda>.*gradient of a parameter.*max_grad_norm"):
        wb.backward(learner, row_losses, batch(), 4)


def test_a_clip_of_each_number_wants_the_true_denominator() -> None:
    """It is right if the batch's items are known first, and off where they are provisional."""
    steep = through(Steep)
    with pytest.raises(InexactError, match=r"clamp \(in backward.*items="):
        wb.backward(model(), steep, batch(n=12), 4)
    large, learner = {**batch(n=12), "x": 1e5 * batch(n=12)["x"]}, model()

    def tight(model: Any, batch: Any) -> Tensor:
        return 1e3 * steep(model, batch)

    reference = whole_batch(learner, lambda m, b: tight(m, b).mean(), large)
    wb.backward(learner, tight, large, 4, items=len_of_rows)
    assert_same_gradient(learner, reference)
    learner.zero_grad()
    wb.backward(learner, tight, large, 4, verify="never")
    assert_differs(learner, reference)


def len_of_rows(micro_batch: Any) -> int:
    return len(micro_batch["x"])


def test_what_kinks_without_a_graph_cost_once_they_bind() -> None:
    learner, large = model(), batch(size=12.0)

    def loss_fn(model: Any, batch: Any) -> Tensor:
        values = row_losses(model, batch)
        return values * values.detach().mean().clamp(min=2.0)

    reference = whole_batch(learner, lambda m, b: loss_fn(m, b).mean(), large)
    wb.backward(learner, loss_fn, large, 4, verify="never")
    assert_differs(learner, reference)


LOG: list[float] = []


def logged(model: Any, batch: Any) -> Tensor:
    """Bends, compares and reads for a log alone."""
    values = row_losses(model, batch)
    LOG.append(values.mean().item())
    with torch.no_grad():
        LOG.append(float(values.mean().clamp(max=FAR)))
        if values.mean() > FAR:
            LOG.append(0.0)
    return values


def test_what_is_only_logged_is_no_kink() -> None:
    learner = model()
    learner.layer.weight.register_hook(lambda gradient: LOG.append(float(gradient.abs().max())))
    found = wb.backward(learner, logged, batch(), 4).verified
    assert found.startswith("verified") and "not shown" not in found


def test_a_number_that_python_bends_is_said() -> None:
    def loss_fn(model: Any, batch: Any) -> Tensor:
        values = row_losses(model, batch)
        return values * max(FAR, values.mean().item())

    found = wb.backward(model(), loss_fn, batch(), 4).verified
    assert "item (in loss_fn, test_kinks.py" in found and "not shown" in found
