"""Everything that a forward can move is named and put back, wherever it is kept."""

from __future__ import annotations

import random
import types
from collections import OrderedDict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import wholebatch as wb
from wholebatch.model.inspection import ModelInfo
from wholebatch.model.snapshot import Snapshot

CALLS = 0
SETTINGS = SimpleNamespace(scale=1.0)


class Slotted:
    __slots__ = ("seen",)

    def __init__(self) -> None:
        self.seen = 0


class Criterion:
    """A loss function that keeps values of its own, in every place that there is."""

    total = 0

    def __init__(self) -> None:
        self.center = torch.zeros(2)
        self.meters = {"loss": [0.0, {"steps": 0}]}
        self.recent = deque([1, 2], maxlen=2)
        self.slotted = Slotted()
        self.draws = torch.Generator().manual_seed(1)
        self.noise = np.random.default_rng(1)
        self.shuffle = random.Random(1)
        self.table = np.zeros(3)
        self.seen: set[int] = set()

    def __call__(self, model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        global CALLS
        CALLS += 0
        out: torch.Tensor = model(rows) * SETTINGS.scale
        return out


class Head(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 2)
        self.register_buffer("calls", torch.zeros(()))
        self.fixed = nn.Parameter(torch.ones(2), requires_grad=False)
        self.normaliser = 10.0
        self.code = torch.ones(2)
        self.phase = "warm"
        self.cached: torch.Tensor | None = None
        self.helper = [nn.BatchNorm1d(2)]


def add(tensor: torch.Tensor) -> None:
    tensor.data.add_(1)


def count_globally(head: Head, criterion: Criterion) -> None:
    global CALLS
    CALLS += 1


MOVES: dict[str, tuple[Callable[[Head, Criterion], Any], str, str]] = {
    "a number": (lambda m, c: setattr(m, "normaliser", 9.5), "normaliser", "value"),
    "a text": (lambda m, c: setattr(m, "phase", "cold"), "phase", "value"),
    "a new attribute": (lambda m, c: setattr(m, "last_loss", 1.0), "last_loss", "value"),
    "a buffer in place": (lambda m, c: m.calls.add_(1), "calls", "buffer"),
    "a buffer replaced": (lambda m, c: setattr(m, "calls", m.calls + 1), "calls", "buffer"),
    "a frozen parameter": (lambda m, c: add(m.fixed), "fixed", "frozen parameter"),
    "a parameter": (lambda m, c: add(m.weight), "weight", "parameter"),
    "a plain tensor in place": (lambda m, c: m.code.mul_(2), "code", "tensor"),
    "a plain tensor replaced": (lambda m, c: setattr(m, "code", m.code * 2), "code", "tensor"),
    "a cache": (lambda m, c: setattr(m, "cached", torch.ones(1)), "cached", "tensor"),
    "statistics of a layer in a list": (lambda m, c: add(m.helper[0].running_mean), "running_mean", "buffer"),
    "an object's tensor": (lambda m, c: setattr(c, "center", c.center + 1), "Criterion.center", "tensor"),
    "deep in containers": (lambda m, c: c.meters["loss"][1].update(steps=1), "['steps']", "value"),
    "a list that grows": (lambda m, c: c.meters["loss"].append(1.0), "['loss'][2]", "value"),
    "a deque": (lambda m, c: c.recent.append(3), "recent[0]", "value"),
    "a set": (lambda m, c: c.seen.add(7), "seen[7]", "value"),
    "a slot": (lambda m, c: setattr(c.slotted, "seen", 1), "slotted.seen", "value"),
    "an attribute of a class": (lambda m, c: setattr(Criterion, "total", 1), "Criterion.total", "value"),
    "a global": (count_globally, "test_snapshot.CALLS", "value"),
    "an object that is a global": (lambda m, c: setattr(SETTINGS, "scale", 2.0), "SETTINGS.scale", "value"),
    "torch's generator": (lambda m, c: torch.rand(1, generator=c.draws), "draws", "generator"),
    "NumPy's generator": (lambda m, c: c.noise.random(), "noise", "generator"),
    "Python's generator": (lambda m, c: c.shuffle.random(), "shuffle", "generator"),
    "an array": (lambda m, c: c.table.__iadd__(1), "table", "array"),
}


@pytest.mark.parametrize(("move", "name", "kind"), MOVES.values(), ids=MOVES.keys())
def test_what_has_moved_is_named_and_put_back(move: Callable[..., Any], name: str, kind: str) -> None:
    head, criterion = Head(), Criterion()
    before = Snapshot(ModelInfo(head), criterion)
    assert before.moved() == []
    move(head, criterion)
    moved = before.moved()
    assert [each.kind for each in moved] == [kind] * len(moved)
    assert any(each.name.endswith(name) for each in moved), moved
    assert before.restore() == []
    assert before.moved() == []


def test_what_a_loss_function_closes_over_is_named_and_put_back() -> None:
    step, history = 0, [0.0]

    def loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        nonlocal step
        step += 1
        history.append(float(step))
        out: torch.Tensor = model(rows)
        return out

    model = nn.Linear(2, 1)
    before = Snapshot(ModelInfo(model), loss)
    loss(model, torch.ones(1, 2))
    assert [each.name for each in before.moved()] == ["loss.step", "loss.history[1]"]
    before.restore()
    assert (step, history) == (0, [0.0])


def test_an_optimizer_that_is_reached_goes_back_with_its_state() -> None:
    model = nn.Linear(2, 1)
    adam = torch.optim.Adam(model.parameters())

    def loss(model: nn.Module, rows: torch.Tensor) -> None:
        model(rows).sum().backward()
        adam.step()

    loss(model, torch.ones(1, 2))
    before, moment = Snapshot(ModelInfo(model), loss), adam.state[model.weight]["exp_avg"].clone()
    loss(model, torch.ones(1, 2))
    assert {each.kind for each in before.moved()} == {"parameter", "tensor"}
    before.restore()
    assert before.moved() == []
    assert torch.equal(adam.state[model.weight]["exp_avg"], moment)


def test_what_is_too_large_to_be_copied_is_named_but_stays() -> None:
    model = nn.Linear(2, 1)
    before = Snapshot(ModelInfo(model), keep=0)
    model.weight.data.add_(1)
    assert [each.name for each in before.moved()] == ["weight"]
    assert [each.name for each in before.restore()] == ["weight"]


def test_a_tensor_written_with_what_it_held_has_not_moved() -> None:
    model = nn.BatchNorm1d(2)
    before = Snapshot(ModelInfo(model))
    model.running_mean.copy_(model.running_mean.clone())  # type: ignore[union-attr, operator]
    model.running_var = model.running_var.clone()  # type: ignore[union-attr, operator]
    assert before.moved() == []


def test_a_lazy_layer_is_left_to_itself() -> None:
    model = nn.Sequential(nn.LazyLinear(2), nn.Linear(2, 1))
    before = Snapshot(ModelInfo(model))
    model(torch.ones(1, 3))
    before.restore()
    assert model(torch.ones(1, 3)).shape == (1, 1)


def test_the_global_random_state_goes_back_unless_it_is_to_stay() -> None:
    before = Snapshot(ModelInfo(nn.Linear(2, 1)))
    first = torch.rand(1)
    before.restore(draws=False)
    assert not torch.equal(torch.rand(1), first)
    before.restore()
    assert torch.equal(torch.rand(1), first)


def raises(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    torch.rand(3)
    model(rows)
    raise KeyError("a fault of the user's own")


@pytest.mark.parametrize(
    "call",
    [lambda m, x: wb.find_coupling(m, raises, x), lambda m, x: wb.plan(m, raises, x, memory="1GiB")],
    ids=["find_coupling", "plan"],
)
def test_random_state_and_buffers_are_as_before_though_an_experiment_fails(call: Callable[..., Any]) -> None:
    model, rows, before = nn.BatchNorm1d(3), torch.randn(4, 3), torch.get_rng_state()
    with pytest.raises((KeyError, ValueError)):  # a plan tries one row as well, which BatchNorm refuses
        call(model, rows)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.num_batches_tracked == 0


ASKED: list[str] = []


class Lazy(types.ModuleType):
    """A framework's module that would load everything once it is asked for a name that it has not loaded yet."""

    def __getattr__(self, name: str) -> Any:
        ASKED.append(name)
        raise AttributeError(name)


class LazyMapping(OrderedDict[str, str]):
    """A framework's table whose values are loaded when they are looked up."""

    def __getitem__(self, key: str) -> str:
        raise AssertionError(f"looked up {key}")

    def keys(self) -> Any:
        raise AssertionError("looked through")

    items = values = keys


framework, settings, table = Lazy("framework"), types.ModuleType("settings"), LazyMapping()
OrderedDict.__setitem__(table, "bert", "Bert")
framework.__dict__.update(loaded=object(), more=Lazy("framework.more"))
settings.scale, settings.seen, settings.unused = 2.0, [], []  # type: ignore[attr-defined]


def mentions(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    if not table.__len__():  # as code that asks for what it needs, once it needs it
        framework.more.Model(framework.loaded)
    settings.seen.append(1)
    settings.scale += 1
    out: torch.Tensor = model(rows).squeeze(1) * 2.0
    return out


def test_a_lazy_module_that_a_loss_function_mentions_is_not_touched() -> None:
    ASKED.clear()
    before = Snapshot(ModelInfo(nn.Linear(2, 1)), mentions)
    assert before.moved() == []
    assert wb.backward(nn.Linear(2, 1), lambda m, x: (table, framework) and m(x)[:, 0], torch.ones(4, 2)).verified
    assert ASKED == []
    assert dict.items(table) == {("bert", "Bert")}


def test_what_stands_in_a_module_of_the_users_own_is_named_and_put_back_where_the_code_names_it() -> None:
    before = Snapshot(ModelInfo(nn.Linear(2, 1)), mentions)
    mentions(nn.Linear(2, 1), torch.ones(1, 2))
    settings.unused.append(1)
    assert [each.name for each in before.moved()] == ["settings.scale", "settings.seen[0]"]
    before.restore()
    assert (settings.scale, settings.seen, settings.unused) == (2.0, [], [1])
    settings.unused.clear()


def test_a_container_of_a_class_of_its_own_goes_back_with_its_attributes_and_its_order() -> None:
    class Meters(OrderedDict[str, float]):
        calls = 0

        def __setitem__(self, key: str, value: float) -> None:
            self.calls += 1
            super().__setitem__(key, value)

    meters = Meters(a=1.0, b=2.0)
    before = Snapshot(ModelInfo(nn.Linear(2, 1)), lambda model, rows: meters)
    meters["c"] = 3.0
    meters.move_to_end("a")
    assert {each.name for each in before.moved()} == {"<lambda>.meters['c']", "<lambda>.meters['calls']"}
    before.restore()
    assert (list(meters), meters.calls) == (["a", "b"], 2)


def test_objects_of_libraries_are_looked_into_only_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wholebatch.model.holders.of_library", lambda kind: kind is Criterion)
    monkeypatch.setattr("wholebatch.model.snapshot.WITHIN", 100)
    trainer, mine = Criterion(), Criterion()
    trainer.dataset, deepest = Criterion(), trainer  # type: ignore[attr-defined]
    for _ in range(50):
        deepest.inner = deepest = Criterion()  # type: ignore[attr-defined]
    before = Snapshot(ModelInfo(nn.Linear(2, 1)), lambda model, rows: (trainer, mine))
    for each in (trainer, mine, trainer.dataset, deepest):  # type: ignore[attr-defined]
        each.center = torch.ones(2)
    assert {each.name.removeprefix("<lambda>.") for each in before.moved()} == {
        "trainer.center",
        "mine.center",
        "trainer.dataset.center",
    }


class Recording(nn.Linear):
    """A model that sets a hook in its first forward, notes that it has, and gives back what the hook has seen."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "installed"):
            self.register_forward_hook(lambda module, given, out: (out, seen.append(out))[0])
            self.installed = True
        seen.clear()
        return super().forward(rows)


seen: list[torch.Tensor] = []


def test_hooks_that_a_model_sets_in_its_first_forward_are_not_set_twice() -> None:
    model = Recording(2, 1)
    before = Snapshot(ModelInfo(model))
    model(torch.ones(1, 2))
    before.restore()
    assert not model._forward_hooks
    assert not hasattr(model, "installed")

    def loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        out = model(rows)[:, 0]
        assert len(seen) <= 1  # torch looks for hooks before the first forward sets one
        return out.square()

    wb.backward(model, loss, torch.randn(6, 2), 2)
    assert len(model._forward_hooks) == 1


def test_nested_tensors_are_compared_row_by_row() -> None:
    rows = [torch.zeros(2, 3), torch.zeros(4, 3)]
    held = {"rows": torch.nested.nested_tensor(rows, layout=torch.jagged)}

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return held["rows"].values().sum() + model(batch)

    before = Snapshot(ModelInfo(nn.Linear(3, 1)), loss_fn)
    assert not before.moved()
    held["rows"] = torch.nested.nested_tensor([rows[0], torch.ones(4, 3)], layout=torch.jagged)
    assert [each.name for each in before.moved()] == ["loss_fn.held['rows']"]
