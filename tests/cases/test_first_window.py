"""What a first window shows while it runs: layers that nobody has registered, state that moves, steps inside."""

from __future__ import annotations

import copy
import warnings
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import wholebatch as wb
from tests.oracle import assert_differs, assert_same_gradient, gradients_of, whole_batch

STEPS = 0


def squares(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model(rows).square().mean(1)
    return out


def mean_square(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return squares(model, rows).mean()


def rows_of(seed: int, rows: int = 12) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randn(rows, 3).double() + 1.0


def assert_untouched(model: nn.Module, before: dict[str, Any]) -> None:
    assert set(gradients_of(model).values()) == {None}
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


# Normalisation over the rows, wherever the layer is kept


class Helper:
    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def __call__(self, x: torch.Tensor) -> Any:
        return self.layer(x)


class Slots:
    __slots__ = ("layer",)

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer


class OfAClass:
    layer: Any = None


def in_a_closure(layer: nn.Module) -> Callable[..., Any]:
    def find() -> Any:
        return layer

    return find


def of_a_class(layer: nn.Module) -> Callable[..., Any]:
    OfAClass.layer = layer
    return lambda: OfAClass.layer


def in_slots(layer: nn.Module) -> Callable[..., Any]:
    kept = Slots(layer)
    return lambda: kept.layer


def deep_in_objects(layer: nn.Module) -> Callable[..., Any]:
    kept = SimpleNamespace(a=SimpleNamespace(b=SimpleNamespace(c=SimpleNamespace(d=SimpleNamespace(layer=layer)))))
    return lambda: kept.a.b.c.d.layer


def in_a_dict_of_lists(layer: nn.Module) -> Callable[..., Any]:
    kept = {"layers": [[{"norm": layer}]]}
    return lambda: kept["layers"][0][0]["norm"]


def in_a_generator(layer: nn.Module) -> Callable[..., Any]:
    def forever() -> Any:
        while True:
            yield layer

    kept = forever()
    return lambda: next(kept)


PLACES = [in_a_closure, of_a_class, in_slots, deep_in_objects, in_a_dict_of_lists, in_a_generator]


class Hiding(nn.Module):
    """Runs a layer that it finds in a place of its own."""

    def __init__(self, find: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4).double(), nn.Linear(4, 2).double()
        self._find = find

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self._find()(self.first(x)).tanh())
        return out


LAYERS: dict[str, Callable[[], Any]] = {
    "BatchNorm": lambda: nn.BatchNorm1d(4).double(),
    "BatchNorm behind a wrapper": lambda: nn.DataParallel(nn.Sequential(nn.BatchNorm1d(4).double())),
    "a function": lambda: lambda x: nn.functional.batch_norm(x, None, None, training=True),
    "torch's own function": lambda: lambda x: torch.batch_norm(x, None, None, None, None, True, 0.1, 1e-5, False),
    "the native function": lambda: lambda x: torch.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5)[0],
    "a helper": lambda: Helper(nn.BatchNorm1d(4).double()),
}


@pytest.mark.parametrize("verify", ["first", "never"])
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_a_layer_that_normalises_over_rows_is_refused_wherever_it_is_kept(place: Any, verify: Any) -> None:
    layer = nn.BatchNorm1d(4).double()
    model, before = Hiding(place(layer)), layer.running_mean.clone()  # type: ignore[union-attr, operator]
    with pytest.raises(wb.InexactError, match="eval mode"):
        wb.backward(model, squares, rows_of(1), 4, verify=verify)
    assert set(gradients_of(model).values()) == {None}
    if verify == "first" and place is not in_a_generator:
        assert torch.equal(layer.running_mean, before)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())
def test_a_call_that_normalises_over_rows_is_refused_by_whatever_name(make: Callable[[], Any]) -> None:
    with pytest.raises(wb.InexactError, match=r"test_first_window.py, line \d+"):
        wb.backward(Hiding(in_a_closure(make())), squares, rows_of(2), 4, verify="never")


def test_a_layer_that_one_micro_batch_normalises_by_is_another_function() -> None:
    """The twin: what runs on each micro-batch alone, as in a plain loop, is not the batch's gradient."""
    layer = nn.BatchNorm1d(4).double()
    model, rows = Hiding(in_a_closure(layer)), rows_of(3)
    mean_square(model, rows).backward()
    reference = gradients_of(model)
    model.zero_grad()
    wb.backward(model, squares, rows, 4, batch_norm="micro")
    assert_differs(model, reference)


@pytest.mark.parametrize("make", [nn.GroupNorm, nn.LayerNorm, nn.BatchNorm1d], ids=lambda m: m.__name__)
def test_layers_that_normalise_within_a_row_or_by_fixed_numbers_pass(make: Any) -> None:
    layer = make(2, 4).double() if make is nn.GroupNorm else make(4).double().eval()
    model, rows = Hiding(in_a_closure(layer)), rows_of(4)
    reference = whole_batch(model, mean_square, rows)
    wb.backward(model, squares, rows, 4)
    assert_same_gradient(model, reference)


def test_statistics_in_a_later_window_of_a_layer_in_training_mode_by_then_are_watched_anew() -> None:
    """The model's mode is part of what makes a window the first of its kind."""
    model, rows = Hiding(in_a_generator(nn.BatchNorm1d(4).double().eval())), rows_of(5)
    wb.backward(model.eval(), squares, rows, 4)
    model._find().train()
    with pytest.raises(wb.InexactError, match="BatchNorm1d"):
        wb.backward(model.train(), squares, rows, 4)


def test_an_unregistered_layer_that_a_graph_would_freeze_is_refused_under_exact() -> None:
    for layer in (nn.BatchNorm1d(4).double(), nn.Linear(4, 4).double()):
        model = nn.Sequential(nn.BatchNorm1d(3).double(), Hiding(in_a_dict_of_lists(layer)))
        with pytest.raises(wb.InexactError, match=r"not registered.*nn\.ModuleList"):
            wb.backward(model, squares, rows_of(6), 4, batch_norm="exact")
        assert set(gradients_of(model).values()) == {None}


def test_a_layer_without_running_statistics_is_served_under_exact() -> None:
    torch.manual_seed(14)
    norm = nn.BatchNorm1d(4, track_running_stats=False)
    model, rows = nn.Sequential(nn.Linear(3, 4), norm, nn.Linear(4, 2)).double(), rows_of(14)
    reference = whole_batch(model, mean_square, rows)
    wb.backward(model, squares, rows, 4, batch_norm="exact")
    assert_same_gradient(model, reference)


# State that moves


class Moving(nn.Module):
    """Divides its answer by something that each of its forwards moves."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2).double()
        start = torch.full((), 2.0, dtype=torch.float64)
        self.plain, self.tensor, self.frozen = 2.0, start.clone(), nn.Parameter(start.clone(), requires_grad=False)
        self.seen, self.table, self.queue = 0, {"scale": [2.0]}, deque([2.0], maxlen=1)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x)
        scale = KINDS[self.kind](self, out.detach().square().mean())
        return out / scale


def as_a_counter(model: Moving, size: torch.Tensor) -> Any:
    model.seen += 1
    return model.seen


def as_a_number(model: Moving, size: torch.Tensor) -> Any:
    model.plain = 0.9 * model.plain + 0.1 * float(size)
    return model.plain


def as_a_tensor(model: Moving, size: torch.Tensor) -> Any:
    model.tensor = 0.9 * model.tensor + 0.1 * size
    return model.tensor


def as_a_tensor_in_place(model: Moving, size: torch.Tensor) -> Any:
    model.tensor.mul_(0.9).add_(0.1 * size)
    return model.tensor.clone()


def as_a_frozen_parameter(model: Moving, size: torch.Tensor) -> Any:
    model.frozen.data.mul_(0.9).add_(0.1 * size)
    return model.frozen.clone()


def in_a_table(model: Moving, size: torch.Tensor) -> Any:
    model.table["scale"][0] = 0.9 * model.table["scale"][0] + 0.1 * float(size)
    return model.table["scale"][0]


def in_a_queue(model: Moving, size: torch.Tensor) -> Any:
    model.queue.append(0.9 * model.queue[0] + 0.1 * float(size))
    return model.queue[0]


def as_a_global(model: Moving, size: torch.Tensor) -> Any:
    global STEPS
    STEPS += 1
    return STEPS


KINDS: dict[str, Callable[[Moving, torch.Tensor], Any]] = {
    move.__name__: move
    for move in (
        as_a_counter,
        as_a_number,
        as_a_tensor,
        as_a_tensor_in_place,
        as_a_frozen_parameter,
        in_a_table,
        in_a_queue,
        as_a_global,
    )
}


@pytest.mark.parametrize("kind", KINDS)
def test_state_that_changes_what_later_micro_batches_say_is_refused_and_put_back(kind: str) -> None:
    model, rows = Moving(kind), rows_of(7)
    before, kept = (
        copy.deepcopy(model.state_dict()),
        copy.deepcopy({k: vars(model)[k] for k in ("plain", "seen", "tensor")}),
    )
    steps = STEPS
    with pytest.raises(wb.InexactError, match=r'after_step=.*verify="never"'):
        wb.backward(model, squares, rows, 4)
    assert_untouched(model, before)
    assert {k: vars(model)[k] for k in kept} == kept
    assert (model.table["scale"][0], model.queue[0], STEPS) == (2.0, 2.0, steps)


@pytest.mark.parametrize("kind", KINDS)
def test_as_in_a_plain_loop_such_state_gives_another_gradient(kind: str) -> None:
    """The twin: with the check switched off, each micro-batch follows the one before."""
    model, rows = Moving(kind), rows_of(7)
    twin = copy.deepcopy(model)
    mean_square(twin, rows).backward()
    wb.backward(model, squares, rows, 4, verify="never")
    assert_differs(model, gradients_of(twin))


def test_a_loss_function_with_a_moving_centre_is_refused_and_moved_after_the_step_it_is_exact() -> None:
    class Centred:
        def __init__(self, moves: bool) -> None:
            self.centre, self.moves, self.seen = torch.zeros(2).double(), moves, torch.zeros(2).double()

        def __call__(self, model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
            out = model(rows)
            if self.moves:
                self.centre = 0.9 * self.centre + 0.1 * out.detach().mean(0)
            loss: torch.Tensor = (out - self.centre).square().sum(1)
            return loss

    model, rows = nn.Linear(3, 2).double(), rows_of(8)
    moving, fixed = Centred(moves=True), Centred(moves=False)
    with pytest.raises(wb.InexactError, match=r"Centred\.centre"):
        wb.backward(model, moving, rows, 4)
    assert torch.equal(moving.centre, torch.zeros(2).double())
    reference = whole_batch(model, lambda m, x: m(x).square().sum(1).mean(), rows)
    wb.backward(model, fixed, rows, 4)
    assert_same_gradient(model, reference)


class Harmless(nn.Module):
    """Keeps what models keep: counters, a cache that grows, its last answer, a log, a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2).double()
        self.calls, self.last, self.log, self.ready = 0, None, [], False
        self.cache: dict[int, torch.Tensor] = {}
        self.longest, self.positions = 0, torch.zeros(0).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls, self.ready = self.calls + 1, True
        if len(x) > self.longest:
            self.longest, self.positions = len(x), torch.arange(2 * len(x)).double()
        mask = self.cache.setdefault(len(x), torch.ones(len(x), 1).double())
        self.last = self.linear(x) * mask + 0 * self.positions[: len(x), None]
        self.log.append(float(self.last.detach().mean()))
        out: torch.Tensor = self.last
        return out


def test_counters_caches_and_logs_that_change_nothing_pass_and_stay_as_the_window_left_them() -> None:
    model, rows = Harmless(), rows_of(9)
    reference = whole_batch(model, mean_square, rows)
    wb.backward(model, squares, rows, 5)
    assert_same_gradient(model, reference)
    assert (model.calls, model.longest, len(model.log)) == (3, 5, 3)
    wb.backward(model, squares, rows, 5)
    assert (model.calls, len(model.log)) == (6, 6)


def test_draws_from_a_generator_of_the_model_s_own_are_no_state_that_matters() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.draws = nn.Linear(3, 2).double(), torch.Generator().manual_seed(1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.linear(x) + torch.randn(len(x), 2, generator=self.draws).double()
            return out

    model = Noisy()
    wb.backward(model, squares, rows_of(10), 4)
    after = model.draws.get_state()
    again = torch.Generator().manual_seed(1)
    for _ in range(3):
        torch.randn(4, 2, generator=again)
    assert torch.equal(after, again.get_state())


# Steps inside


def step_with(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.data.add_(parameter.grad, alpha=-0.1)
    parameter.grad = None


KEPT: list[Any] = []


def on_the_node(model: nn.Module) -> None:
    for parameter in model.parameters():
        node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        KEPT.append(node)  # torch forgets the hook with the node
        node.register_hook(lambda *_, parameter=parameter: step_with(parameter))  # type: ignore[misc]


def by_torch_s_own(model: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch, about itself
        from torch.distributed.optim import _apply_optimizer_in_backward
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})


def on_tensors(model: nn.Module) -> None:
    def update(gradient: torch.Tensor) -> torch.Tensor:
        for parameter in model.parameters():
            if parameter.grad is not None:
                step_with(parameter)
        return gradient

    for parameter in model.parameters():
        parameter.register_hook(update)


def on_a_module(model: nn.Module) -> None:
    def update(module: nn.Module, *gradients: Any) -> None:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(0.9)

    model.register_full_backward_hook(update)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("verify", ["first", "never"])
@pytest.mark.parametrize("install", [on_the_node, by_torch_s_own, on_tensors, on_a_module], ids=lambda f: f.__name__)
def test_what_steps_in_the_backward_is_refused_by_whatever_road(install: Any, verify: Any) -> None:
    torch.manual_seed(11)
    model, rows = nn.Linear(3, 1).double(), rows_of(11)
    install(model)
    before = copy.deepcopy(model.state_dict())
    if verify == "never" and install is not by_torch_s_own and install is not on_a_module:
        pytest.skip("what is written by way of .data shows by comparing alone")
    with pytest.raises(wb.InexactError, match=r"steps inside.*wb\.Step"):
        wb.backward(model, squares, rows, 4, verify=verify)
    if verify == "first":
        assert_untouched(model, before)


def test_a_hook_on_a_head_outside_of_the_model_is_seen_as_well() -> None:
    torch.manual_seed(12)
    model, head = nn.Linear(3, 2).double(), nn.Linear(2, 1).double()
    for parameter in head.parameters():
        parameter.register_post_accumulate_grad_hook(step_with)
    before = copy.deepcopy(head.state_dict())
    with pytest.raises(wb.InexactError, match="steps inside"):
        wb.backward(model, lambda model, rows: head(model(rows)).square(), rows_of(12), 4)
    assert_untouched(head, before)


def test_steps_in_the_backward_of_each_micro_batch_are_another_update() -> None:
    """The twin: a plain loop with such a hook steps k times, each with one micro-batch's gradient."""
    torch.manual_seed(13)
    model, rows = nn.Linear(3, 1).double(), rows_of(13)
    expected = copy.deepcopy(model)
    mean_square(expected, rows).backward()
    with torch.no_grad():
        for parameter in expected.parameters():
            parameter -= 0.1 * parameter.grad
    by_torch_s_own(model)
    for micro_batch in rows.split(4):
        (squares(model, micro_batch).sum() / len(rows)).backward()
    assert any(
        not torch.allclose(a, b, rtol=1e-6) for a, b in zip(model.parameters(), expected.parameters(), strict=True)
    )
