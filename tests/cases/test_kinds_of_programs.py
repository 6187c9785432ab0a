"""Programs of many kinds, as people write them: one loss a row, cut raggedly, against one backward over all rows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap
from torch.nn.utils.parametrizations import orthogonal, weight_norm

import wholebatch as wb
from tests.oracle import assert_differs, assert_same_gradient, to_float64, whole_batch

ROWS, SIZE = 10, 4
Made = tuple[nn.Module, dict[str, Tensor], Callable[[Any, Any], Tensor]]


def network(inputs: int = 4, outputs: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


def drawn(**more: Tensor) -> dict[str, Tensor]:
    return {"x": torch.randn(ROWS, 4), "y": torch.randint(0, 3, (ROWS,)), **more}


def classes(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def meta_learning() -> Made:
    """An inner step a task, by functional_call, grad and vmap."""
    points = {name: torch.randn(ROWS, 5, 4 if "x" in name else 1) for name in ("xs", "ys", "xq", "yq")}

    def loss(model: nn.Module, batch: Any) -> Tensor:
        weights = dict(model.named_parameters())

        def error(weights: Any, x: Tensor, y: Tensor) -> Tensor:
            return (functional_call(model, weights, (x,)) - y).square().mean()

        def task(xs: Tensor, ys: Tensor, xq: Tensor, yq: Tensor) -> Tensor:
            steps = grad(error)(weights, xs, ys)
            return error({name: weight - 0.1 * steps[name] for name, weight in weights.items()}, xq, yq)

        return vmap(task)(batch["xs"], batch["ys"], batch["xq"], batch["yq"])

    return network(4, 1), points, loss


def jacobian_penalty() -> Made:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return classes(model, batch) + vmap(jacrev(model))(batch["x"]).square().sum((1, 2))

    return network(), drawn(), loss


def gradient_penalty() -> Made:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        between = (batch["e"] * batch["x"] + (1 - batch["e"]) * batch["z"]).requires_grad_()
        (slope,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
        return (model(batch["z"]) - model(batch["x"])).squeeze(-1) + 10 * (slope.norm(dim=1) - 1).square()

    return network(4, 1), drawn(z=torch.randn(ROWS, 4), e=torch.rand(ROWS, 1)), loss


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.weight.dtype) @ self.weight


def complex_weights() -> Made:
    return Complex(), drawn(), lambda model, batch: (model(batch["x"]) - 1).abs().square().sum(1)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.EmbeddingBag(9, 4, sparse=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x))  # type: ignore[no-any-return]


def sparse_table() -> Made:
    return Words(), {**drawn(), "x": torch.randint(0, 9, (ROWS, 5))}, classes


def parametrised() -> Made:
    return nn.Sequential(weight_norm(nn.Linear(4, 8)), nn.Tanh(), orthogonal(nn.Linear(8, 3))), drawn(), classes


class Margin(nn.Module):
    """Angles to the classes' centres, the label's made harder, and the distance to its centre."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.centres, self.spread = (
            nn.Linear(4, 5),
            nn.Parameter(torch.randn(3, 5)),
            nn.Parameter(torch.ones(2)),
        )

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(x)
        cosine = F.linear(F.normalize(features), F.normalize(self.centres)).clamp(-0.999, 0.999)
        hard = torch.cos(torch.acos(cosine) + 0.2 * F.one_hot(y, 3).to(cosine.dtype))
        return 10 * hard, (features - self.centres[y]).square().sum(1)


def margins_and_uncertainty() -> Made:
    def loss(model: Any, batch: Any) -> Tensor:
        logits, apart = model(batch["x"], batch["y"])
        first, second = F.cross_entropy(logits, batch["y"], reduction="none"), apart
        return torch.exp(-model.spread[0]) * first + torch.exp(-model.spread[1]) * second + model.spread.sum()

    return Margin(), drawn(), loss


def policy() -> Made:
    """Clipped ratios, a clipped value, entropy and the distance to a reference policy."""
    model, reference = nn.ModuleDict({"policy": network(), "value": network(4, 1)}), network().double()
    more = {name: torch.randn(ROWS) for name in ("advantage", "target", "before")}

    def loss(model: Any, batch: Any) -> Tensor:
        logs = model["policy"](batch["x"]).log_softmax(-1)
        ratio = (logs.gather(1, batch["y"][:, None]).squeeze(1) - batch["old"]).exp()
        gain = torch.min(ratio * batch["advantage"], ratio.clamp(0.8, 1.2) * batch["advantage"])
        value = model["value"](batch["x"]).squeeze(-1)
        near = batch["before"] + (value - batch["before"]).clamp(-0.2, 0.2)
        error = torch.max((value - batch["target"]).square(), (near - batch["target"]).square())
        with torch.no_grad():
            others = reference(batch["x"].double()).log_softmax(-1).to(logs.dtype)
        return 0.5 * error - gain + (logs.exp() * (0.1 * (logs - others) + 0.01 * logs)).sum(-1)

    return model, drawn(old=-torch.rand(ROWS) - 0.5, **more), loss


def odds_of_pairs() -> Made:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        good, bad = (model(batch[name]).log_softmax(-1)[:, 0] for name in ("x", "worse"))
        odds = good - bad - (torch.log1p(-good.exp()) - torch.log1p(-bad.exp()))
        return -good - 0.1 * F.logsigmoid(odds)

    return network(4, 2), drawn(worse=torch.randn(ROWS, 4)), loss


def mixed_labels() -> Made:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        outputs = model(batch["x"])
        one, other = (F.cross_entropy(outputs, batch[name], reduction="none") for name in ("y", "y_other"))
        return 0.3 * one + 0.7 * other

    return network(), drawn(y_other=torch.randint(0, 3, (ROWS,))), loss


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.cell(packed)[1][0][-1])  # type: ignore[no-any-return]


def packed_sequences() -> Made:
    batch = {**drawn(), "x": torch.randn(ROWS, 6, 4), "lengths": torch.randint(1, 7, (ROWS,))}
    return (
        Sequences(),
        batch,
        lambda model, b: F.cross_entropy(model(b["x"], b["lengths"]), b["y"], reduction="none"),
    )


def distilled() -> Made:
    teacher = network().double()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            soft = teacher(batch["x"].double()).softmax(-1).to(batch["x"].dtype)
        return 4 * F.kl_div((model(batch["x"]) / 2).log_softmax(-1), soft, reduction="none").sum(-1) + classes(
            model, batch
        )

    return network(), drawn(), loss


def groups_of_completions() -> Made:
    """Advantages within each of the groups of two that a micro-batch holds whole."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        rewards = batch["reward"].view(-1, 2)
        better = (rewards - rewards.mean(1, keepdim=True)).flatten()
        return -better * model(batch["x"]).log_softmax(-1).gather(1, batch["y"][:, None]).squeeze(1)

    return network(), drawn(reward=torch.randn(ROWS)), loss


PROGRAMS = [
    meta_learning,
    jacobian_penalty,
    gradient_penalty,
    complex_weights,
    sparse_table,
    parametrised,
    margins_and_uncertainty,
    policy,
    odds_of_pairs,
    mixed_labels,
    packed_sequences,
    distilled,
    groups_of_completions,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_has_the_gradient_of_its_batch_and_the_mean_of_means_has_not(program: Callable[[], Made]) -> None:
    torch.manual_seed(11)
    model, batch, loss = program()
    model, batch = to_float64(model), to_float64(batch)
    reference = whole_batch(model, lambda model, batch: loss(model, batch).mean(), batch)

    usual = copy.deepcopy(model)
    parts = [{name: value[start : start + SIZE] for name, value in batch.items()} for start in range(0, ROWS, SIZE)]
    for part in parts:
        (loss(usual, part).mean() / len(parts)).backward()
    assert_differs(usual, reference)

    result = wb.backward(model, loss, batch, SIZE)
    assert result.verified.startswith("verified")
    assert_same_gradient(model, reference)
