"""Watching changes nothing: the same bits, the same torch afterwards, and little time."""

from __future__ import annotations

import copy
import sys
import types
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from wholebatch.doctor import watch

WATCHED = [
    (torch.autograd, "backward"),
    (torch.nn.utils, "clip_grad_norm_"),
    (torch.nn.utils, "clip_grad_value_"),
    (torch.optim.Optimizer, "zero_grad"),
    (nn.Module, "zero_grad"),
    (torch.amp.GradScaler, "scale"),
    (torch.amp.GradScaler, "unscale_"),
    (torch.amp.GradScaler, "step"),
    (torch.amp.GradScaler, "update"),
    (torch.optim.lr_scheduler.LRScheduler, "step"),
    (torch.optim.lr_scheduler.ReduceLROnPlateau, "step"),
    (torch.optim.swa_utils.AveragedModel, "update_parameters"),
    (torch.utils.data.DataLoader, "__iter__"),
    (torch.distributed, "all_reduce"),
    (torch.multiprocessing, "start_processes"),
]


class Loop:
    """A loop that uses everything the doctor listens to."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 3))
        self.average = copy.deepcopy(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        data = torch.utils.data.TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,)))
        self.loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)

    def run(self) -> None:
        for i, (inputs, targets) in enumerate(self.loader):
            loss = F.cross_entropy(self.model(inputs), targets) / 2
            self.scaler.scale(loss).backward()
            if i % 2:
                self.scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.scheduler.step()
                self.optimizer.zero_grad()
                with torch.no_grad():
                    for kept, current in zip(self.average.parameters(), self.model.parameters(), strict=True):
                        kept.lerp_(current, 0.1)

    def state(self) -> list[torch.Tensor]:
        tensors = [*self.model.state_dict().values(), *self.average.state_dict().values()]
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return [*tensors, *moments, torch.get_rng_state()]


def test_a_watched_loop_computes_the_same_bits() -> None:
    alone, watched = Loop(), Loop()
    torch.manual_seed(5)
    alone.run()
    expected = [tensor.clone() for tensor in alone.state()]
    torch.manual_seed(5)
    with watch() as seen:
        watched.run()
    assert all(torch.equal(a, b) for a, b in zip(expected, watched.state(), strict=True))
    assert seen.trace.steps == 5


def test_two_runs_that_differ_are_told_apart_by_the_same_comparison() -> None:
    one, other = Loop(), Loop()
    torch.manual_seed(5)
    one.run()
    torch.manual_seed(6)
    other.run()
    assert not all(torch.equal(a, b) for a, b in zip(one.state(), other.state(), strict=True))


def originals() -> list[object]:
    return [vars(owner).get(name) for owner, name in WATCHED]


def hooks() -> tuple[int, ...]:
    module, optimizer = sys.modules["torch.nn.modules.module"], sys.modules["torch.optim.optimizer"]
    return (
        len(module._global_forward_hooks),
        len(module._global_forward_pre_hooks),
        len(module._global_forward_hooks_with_kwargs),
        len(module._global_forward_hooks_always_called),
        len(optimizer._global_optimizer_pre_hooks),
        len(optimizer._global_optimizer_post_hooks),
        torch._C._len_torch_function_stack(),
    )


def test_torch_is_as_before_when_the_context_ends() -> None:
    before, counts = originals(), hooks()
    with watch():
        assert originals() != before
        Loop().run()
    assert originals() == before
    assert hooks() == counts


@pytest.mark.parametrize("place", ["forward", "backward", "step", "between"])
def test_torch_is_as_before_after_an_error_anywhere(place: str) -> None:
    before, counts = originals(), hooks()
    loop = Loop()

    def fail(*args: object) -> None:
        raise KeyError(place)

    if place == "forward":
        loop.model[0].register_forward_hook(fail)
    elif place == "backward":
        next(loop.model.parameters()).register_hook(fail)
    elif place == "step":
        loop.optimizer.register_step_pre_hook(fail)
    with pytest.raises(KeyError, match=place), watch() as seen:
        loop.run()
        raise KeyError(place)
    assert originals() == before
    assert hooks() == counts
    assert not seen.trace.complete


def test_a_name_imported_while_watching_is_the_original_afterwards() -> None:
    space: dict[str, object] = {"__name__": "somewhere"}
    module = types.ModuleType("somewhere_in_tests")
    sys.modules[module.__name__] = module
    try:
        with watch():
            exec("from torch.nn.utils import clip_grad_norm_", module.__dict__, space)
            module.clip = torch.nn.utils.clip_grad_norm_
        assert module.clip is torch.nn.utils.clip_grad_norm_
    finally:
        del sys.modules[module.__name__]


def test_a_mode_of_the_users_is_entered_and_left_by_nobody_else() -> None:
    depth = torch._C._len_torch_function_stack()
    model = nn.Linear(2, 1)
    with watch() as seen:
        with torch.device("meta"):
            model(torch.ones(2, 2, device="cpu")).mean().backward()
            assert torch.empty(1).is_meta
        assert not torch.empty(1).is_meta
        model(torch.ones(2, 2)).mean().backward()
        with torch.device("meta"):
            model(torch.ones(2, 2, device="cpu")).mean().backward()
            assert torch.empty(1).is_meta
        assert not torch.empty(1).is_meta
    assert torch._C._len_torch_function_stack() == depth
    assert sum(event.kind == "backward" for event in seen.trace.events) == 3


def test_watching_stops_after_the_steps_asked_for() -> None:
    loop = Loop()
    with watch(steps=2) as seen:
        loop.run()
        pytest.fail("the loop went on")
    assert seen.trace.steps == 2
    assert len(seen.trace.of(type(next(e for e in seen.trace.events if e.kind == "schedule")))) == 2


def test_names_and_sites_are_the_users_own() -> None:
    with watch() as seen:
        Loop().run()
    backward = next(event for event in seen.trace.events if event.kind == "backward")
    assert backward.site is not None
    assert backward.site.file == __file__
    assert "backward()" in backward.site.text
    assert "0.weight" in seen.trace.names


def test_forwards_tell_rows_mode_draws_and_layers() -> None:
    with watch() as seen:
        Loop().run()
    forward = next(event for event in seen.trace.events if event.kind == "forward")
    assert (forward.rows, forward.shape, forward.training, forward.random) == (4, (4, 6), True, True)
    assert forward.batch_norms == ("1",)


def test_a_weight_average_written_in_any_way_is_noticed() -> None:
    model = nn.Linear(3, 2)
    ways: dict[str, Callable[[nn.Module], None]] = {
        "lerp_": lambda a: [k.lerp_(c, 0.1) for k, c in zip(a.parameters(), model.parameters(), strict=True)],
        "mul_add_": lambda a: [
            k.mul_(0.9).add_(c.data, alpha=0.1) for k, c in zip(a.parameters(), model.parameters(), strict=True)
        ],
        "copy_": lambda a: [
            k.copy_(0.9 * k + 0.1 * c) for k, c in zip(a.parameters(), model.parameters(), strict=True)
        ],
        "sub_": lambda a: [k.sub_(0.1 * (k - c)) for k, c in zip(a.parameters(), model.parameters(), strict=True)],
        "foreach": lambda a: torch._foreach_lerp_(list(a.parameters()), list(model.parameters()), 0.1),
        "data": lambda a: [
            setattr(k, "data", 0.9 * k.data + 0.1 * c.data)
            for k, c in zip(a.parameters(), model.parameters(), strict=True)
        ],
    }
    for name, blend in ways.items():
        average = copy.deepcopy(model).requires_grad_(False)
        with watch() as seen:
            model(torch.ones(1, 3)).mean().backward()
            with torch.no_grad():
                blend(average)
        assert sum(event.kind == "average" for event in seen.trace.events) == 1, name


def test_looking_at_gradients_is_no_weight_average() -> None:
    model = nn.Linear(3, 2)
    with watch() as seen:
        loss = model(torch.ones(1, 3)).mean()
        loss.backward()
        total = torch.zeros(())
        for parameter in model.parameters():
            total = total + parameter.detach().square().sum()
            parameter.grad.mul_(0.5)
        model.weight.data.clamp_(-1, 1)
    assert not any(event.kind == "average" for event in seen.trace.events)


def test_a_model_may_be_traced_while_it_is_watched() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    rows = torch.export.Dim("rows", min=2)
    with watch() as seen:
        model(torch.ones(4, 3)).mean().backward()
        program = torch.export.export(model, (torch.ones(4, 3),), dynamic_shapes=({0: rows},))
    assert torch.equal(program.module()(torch.ones(5, 3)), model(torch.ones(5, 3)))
    assert sum(event.kind == "forward" for event in seen.trace.events) == 1
