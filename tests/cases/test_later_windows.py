"""What a loss is made of may change after the first window, or from one micro-batch to the next: that is tried too."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wholebatch as wb
from tests.oracle import assert_differs, assert_same_gradient, whole_batch
from wholebatch.first_window.trial import Trial

Switch = Callable[[], None]
PHASE = "first"


def drawn(seed: int, rows: int = 10) -> dict[str, Any]:
    torch.manual_seed(seed)
    return {"x": torch.randn(rows, 4).double(), "y": torch.randint(0, 3, (rows,))}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def classes(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs, labels, reduction="none")


def pairs(outputs: Tensor, labels: Tensor) -> Tensor:
    """In-batch negatives: rows meet."""
    units = F.normalize(outputs, dim=-1)
    return F.cross_entropy(5 * units @ units.T, torch.arange(len(units)), reduction="none")


def sizes(outputs: Tensor, labels: Tensor) -> Tensor:
    """A loss of single rows."""
    return outputs.abs().sum(1).log1p()


def by_a_name(other: Any) -> tuple[Any, Switch]:
    phase = {"name": "first"}

    def loss(model: nn.Module, batch: Any) -> Any:
        return (classes if phase["name"] == "first" else other)(model(batch["x"]), batch["y"])

    return loss, lambda: phase.update(name="second")


def by_a_global(other: Any) -> tuple[Any, Switch]:
    global PHASE
    PHASE = "first"

    def loss(model: nn.Module, batch: Any) -> Any:
        return (classes if PHASE == "first" else other)(model(batch["x"]), batch["y"])

    def switch() -> None:
        global PHASE
        PHASE = "second"

    return loss, switch


def by_an_epoch(other: Any) -> tuple[Any, Switch]:
    state = SimpleNamespace(epoch=0)

    def loss(model: nn.Module, batch: Any) -> Any:
        values = classes(outputs := model(batch["x"]), batch["y"])
        return values + other(outputs, batch["y"]) if state.epoch >= 3 else values

    return loss, lambda: vars(state).update(epoch=3)


def by_another_criterion(other: Any) -> tuple[Any, Switch]:
    class Trainer:
        criterion = staticmethod(classes)

        def loss(self, model: nn.Module, batch: Any) -> Any:
            return self.criterion(model(batch["x"]), batch["y"])

    trainer = Trainer()
    return trainer.loss, lambda: setattr(trainer, "criterion", other)


def by_a_list_that_grows(other: Any) -> tuple[Any, Switch]:
    parts = [classes]

    def loss(model: nn.Module, batch: Any) -> Any:
        outputs = model(batch["x"])
        return sum(part(outputs, batch["y"]) for part in parts)

    return loss, lambda: parts.append(other)


def by_a_weight_that_was_zero(other: Any) -> tuple[Any, Switch]:
    weight = {"other": 0.0}

    def loss(model: nn.Module, batch: Any) -> Any:
        outputs = model(batch["x"])
        return classes(outputs, batch["y"]) + weight["other"] * other(outputs, batch["y"])

    return loss, lambda: weight.update(other=0.5)


def by_a_tensor_that_was_zero(other: Any) -> tuple[Any, Switch]:
    weight = torch.zeros((), dtype=torch.float64)

    def loss(model: nn.Module, batch: Any) -> Any:
        outputs = model(batch["x"])
        return classes(outputs, batch["y"]) + weight * other(outputs, batch["y"])

    return loss, lambda: weight.fill_(0.5)  # type: ignore[return-value]


def by_a_term_of_weight_zero(other: Any) -> tuple[Any, Switch]:
    weight = {"other": 0.0}

    def loss(model: nn.Module, batch: Any) -> Any:
        outputs = model(batch["x"])
        values = classes(outputs, batch["y"]), other(outputs, batch["y"])
        return wb.mean(values[0]) + weight["other"] * wb.mean(values[1])

    return loss, lambda: weight.update(other=0.5)


CHANGES = [
    by_a_name,
    by_a_global,
    by_an_epoch,
    by_another_criterion,
    by_a_list_that_grows,
    by_a_weight_that_was_zero,
    by_a_tensor_that_was_zero,
    by_a_term_of_weight_zero,
]
each_change = pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)


@each_change
def test_a_loss_in_which_rows_begin_to_meet_is_refused_when_they_do(change: Any) -> None:
    model, (loss, switch) = network(), change(pairs)
    assert wb.backward(model, loss, drawn(1), 4).verified.startswith("verified")
    model.zero_grad()
    switch()
    wb.backward(model, loss, drawn(2), 4, verify="never")
    gradients = {name: p.grad for name, p in model.named_parameters()}
    weight = 1.0 if change in CHANGES[:5] else 0.5

    def meant(model: nn.Module, batch: Any) -> Tensor:
        outputs = model(batch["x"])
        first = 0.0 if change in (by_a_name, by_a_global, by_another_criterion) else classes(outputs, batch["y"]).mean()
        return first + weight * pairs(outputs, batch["y"]).mean()

    assert_differs(gradients, whole_batch(model, meant, drawn(2)))  # the usual loop, unseen
    model.zero_grad()
    with pytest.raises(wb.InexactError, match="Rows meet"):
        wb.backward(model, loss, drawn(2), 4)
    assert {p.grad for p in model.parameters()} == {None}
    with pytest.raises(wb.InexactError, match="Rows meet"):
        wb.backward(model, loss, drawn(3), 4)


@each_change
def test_a_loss_of_single_rows_goes_on_and_is_exact(change: Any) -> None:
    model, (loss, switch) = network(), change(sizes)
    wb.backward(model, loss, drawn(1), 4)
    switch()
    for seed in (2, 3):
        model.zero_grad()
        assert wb.backward(model, loss, drawn(seed), 4).verified.startswith("verified")
    weight = 1.0 if change in CHANGES[:5] else 0.5

    def meant(model: nn.Module, batch: Any) -> Tensor:
        outputs = model(batch["x"])
        first = 0.0 if change in (by_a_name, by_a_global, by_another_criterion) else classes(outputs, batch["y"]).mean()
        return first + weight * sizes(outputs, batch["y"]).mean()

    assert_same_gradient(model, whole_batch(model, meant, drawn(3)))


def of_tasks(other: Any) -> tuple[Any, list[Any], Callable[[nn.Module, Any], Tensor]]:
    """A window whose micro-batches say of which task they are; each task's loss is the mean over its own rows."""
    tasks = {"classes": classes, "other": other}
    window = [{**drawn(seed, rows), "task": name} for seed, rows, name in [
        (1, 4, "classes"), (2, 3, "other"), (3, 2, "classes"), (4, 4, "other"),
    ]]  # fmt: skip

    def loss(model: nn.Module, batch: Any) -> Any:
        return {batch["task"]: wb.mean(tasks[batch["task"]](model(batch["x"]), batch["y"]))}

    def meant(model: nn.Module, _: Any) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for name, task in tasks.items():
            rows = [micro_batch for micro_batch in window if micro_batch["task"] == name]
            x, y = (torch.cat([each[key] for each in rows]) for key in ("x", "y"))
            total = total + task(model(x), y).mean()
        return total

    return loss, window, meant


def test_each_task_of_a_window_is_tried_and_the_one_in_which_rows_meet_is_refused() -> None:
    loss, window, meant = of_tasks(pairs)
    model = network()
    wb.backward(model, loss, wb.Window(window), verify="never")
    assert_differs({name: p.grad for name, p in model.named_parameters()}, whole_batch(model, meant, None))
    model.zero_grad()
    with pytest.raises(wb.InexactError, match="Rows meet"):
        wb.backward(model, loss, wb.Window(window))
    assert {p.grad for p in model.parameters()} == {None}


def test_tasks_of_single_rows_share_a_window() -> None:
    loss, window, meant = of_tasks(sizes)
    model = network()
    assert wb.backward(model, loss, wb.Window(window)).verified.startswith("verified")
    assert_same_gradient(model, whole_batch(model, meant, None))


@pytest.mark.parametrize("accumulate_in", [None, torch.float32], ids=str)
def test_what_is_tried_at_the_end_of_a_window_leaves_its_sum_and_what_was_there_alone(accumulate_in: Any) -> None:
    model, (loss, switch) = network().bfloat16(), by_a_name(sizes)
    batches = [{"x": drawn(seed)["x"].bfloat16(), "y": drawn(seed)["y"]} for seed in (1, 2)]
    wb.backward(model, loss, batches[0], 4, accumulate_in=accumulate_in)
    switch()
    before = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    def after(verify: Any) -> dict[str, Any]:
        for name, p in model.named_parameters():
            p.grad = before[name].clone()
        wb.backward(model, loss, batches[1], 4, accumulate_in=accumulate_in, verify=verify)
        return {name: p.grad for name, p in model.named_parameters()}

    tried, untried = after("first"), after("never")
    assert all(torch.equal(tried[name], untried[name]) for name in before)


def test_nothing_is_tried_again_that_has_been_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    compare = Trial.compare

    def counted(self: Trial, *args: Any, **settings: Any) -> Any:
        tried.append(phase["name"])
        return compare(self, *args, **settings)

    monkeypatch.setattr(Trial, "compare", counted)
    phase = {"name": "a"}

    def loss(model: nn.Module, batch: Any) -> Any:
        return (classes if phase["name"] == "a" else sizes)(model(batch["x"]), batch["y"])

    model, counts = network(), []
    for seed, name in enumerate("aabbaabb"):
        phase["name"] = name
        wb.backward(model, loss, drawn(seed), 5)
        counts.append(len(tried))
        tried.clear()
    assert counts[0] and counts[2] and not any(counts[1:2] + counts[3:])


def test_a_loss_that_is_made_of_something_else_again_and_again_is_said_to_be_not_verified() -> None:
    number = {"window": 0}
    functions = [torch.sin, torch.cos, torch.tan, torch.exp, torch.abs, torch.square, torch.sigmoid, torch.tanh,
                 torch.sinh, torch.cosh, torch.atan, torch.erf, torch.relu, torch.expm1, torch.asinh, F.silu,
                 F.softplus, F.gelu, F.elu, F.mish]  # fmt: skip

    def loss(model: nn.Module, batch: Any) -> Any:
        return functions[number["window"]](0.1 * model(batch["x"])).sum(1)

    model, said = network(), []
    for seed in range(len(functions)):
        number["window"] = seed
        model.zero_grad()
        said.append(wb.backward(model, loss, drawn(seed), 4).verified)
        assert_same_gradient(model, whole_batch(model, lambda m, b: loss(m, b).mean(), drawn(seed)))
    assert said[0].startswith("verified") and "again and again" in said[-1]


def test_an_encoder_in_which_rows_begin_to_meet_is_refused_when_they_do() -> None:
    phase = {"normalises": 1}

    def encode(model: nn.Module, batch: Any) -> Tensor:
        outputs: Tensor = model(batch["x"])
        return outputs if phase["normalises"] == 1 else (outputs - outputs.mean(0)) / (1 + outputs.std(0))

    def spread(encoded: Tensor) -> Tensor:
        return torch.pdist(encoded).mean()

    model = network()
    assert wb.coupled_backward(model, encode, spread, drawn(1), 4).verified.startswith("verified")
    phase["normalises"] = 2
    model.zero_grad()
    wb.coupled_backward(model, encode, spread, drawn(2), 4, verify="never")
    assert_differs(
        {name: p.grad for name, p in model.named_parameters()},
        whole_batch(model, lambda model, batch: spread(encode(model, batch)), drawn(2)),
    )
    model.zero_grad()
    with pytest.raises(wb.InexactError, match="Rows meet"):
        wb.coupled_backward(model, encode, spread, drawn(2), 4)
    assert {p.grad for p in model.parameters()} == {None}


# Items that are stated beside a mean: right as long as nothing is ignored


def labelled(ignored: int | None, seed: int = 7) -> dict[str, Any]:
    """Six rows of five positions; some labels of the first two rows are the one to be ignored."""
    torch.manual_seed(seed)
    batch = {"x": torch.randn(6, 5, 4).double(), "y": torch.randint(0, 3, (6, 5))}
    if ignored is not None:
        batch["y"][0, :4] = batch["y"][1, :2] = ignored
    return batch


def mean_of_all(ignored: int, weight: Any = None, factor: float = 1.0, smoothing: float = 0.0) -> Any:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        outputs, labels = model(batch["x"]).flatten(0, 1), batch["y"].flatten()
        return factor * F.cross_entropy(outputs, labels, weight, ignore_index=ignored, label_smoothing=smoothing)

    return loss


STATED = {
    "an index of torch's": mean_of_all(-100),
    "255": mean_of_all(255),
    "padding": mean_of_all(0),
    "times a number": mean_of_all(255, factor=0.5),
    "with smoothing": mean_of_all(255, smoothing=0.1),
}
IGNORED = {"an index of torch's": -100, "padding": 0}


@pytest.mark.parametrize("name", STATED)
def test_labels_that_are_ignored_for_the_first_time_do_not_pass_among_the_stated_items(name: str) -> None:
    model, mean, ignored = network(), STATED[name], IGNORED.get(name, 255)

    def stated(model: nn.Module, batch: Any) -> Any:
        return wb.from_mean(mean(model, batch), items=batch["y"].numel())

    def counted(model: nn.Module, batch: Any) -> Any:
        return wb.from_mean(mean(model, batch), items=(batch["y"] != ignored).sum())

    first, later = labelled(None), labelled(ignored)
    first["y"] = first["y"].clamp(min=1)  # nothing that is ignored
    wb.backward(model, stated, first, 2)
    model.zero_grad()
    reference = whole_batch(model, mean, later)
    wb.backward(model, stated, later, 2, verify="never")  # as a plain loop would
    assert_differs(model, reference)
    model.zero_grad()
    with pytest.raises((wb.LossError, wb.InexactError), match="items"):
        wb.backward(model, stated, later, 2)
    assert {p.grad for p in model.parameters()} == {None}
    wb.backward(model, counted, later, 2)
    assert_same_gradient(model, reference)


def test_items_in_proportion_to_what_the_mean_was_divided_by_are_exact() -> None:
    model, mean = network(), mean_of_all(255, torch.full((3,), 2.0).double())
    batch = labelled(255)
    reference = whole_batch(model, mean, batch)
    wb.backward(model, lambda m, b: wb.from_mean(mean(m, b), items=(b["y"] != 255).sum()), batch, 2)
    assert_same_gradient(model, reference)
