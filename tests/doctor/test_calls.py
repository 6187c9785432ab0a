"""Every function that the doctor replaces passes on what its caller wrote: by place or name, answers and errors too."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from wholebatch.doctor import watch


class Things:
    """A model with gradients, and what steps it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(6, 3)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=0)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        self.average = torch.optim.swa_utils.AveragedModel(self.model)
        self.loss().backward()
        self.optimizer.step()

    def loss(self) -> Tensor:
        return self.model(torch.ones(4, 6)).square().mean()

    @property
    def ps(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def scaled(self) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale(self.loss()).backward()


utils = torch.nn.utils
CALLS: dict[str, Callable[[Things], Any]] = {
    "clip_grad_norm_(p, n)": lambda t: utils.clip_grad_norm_(t.model.parameters(), 0.1),
    "clip_grad_norm_(p, tensor)": lambda t: utils.clip_grad_norm_(t.ps, torch.tensor(0.1)),
    "clip_grad_norm_(p, n, type, error, foreach)": lambda t: utils.clip_grad_norm_(t.ps, 0.1, 1.0, True, False),
    "clip_grad_norm_(p, max_norm=)": lambda t: utils.clip_grad_norm_(t.ps, max_norm=0.1, norm_type=float("inf")),
    "clip_grad_norm_(parameters=, max_norm=)": lambda t: utils.clip_grad_norm_(
        max_norm=0.1, parameters=t.model.parameters(), error_if_nonfinite=False
    ),
    "clip_grad_norm_(one)": lambda t: utils.clip_grad_norm_(t.model.weight, max_norm=0.1),
    "clip_grad_norm_(iterator)": lambda t: utils.clip_grad_norm_(iter(t.ps), 0.1),
    "clip_grad_norm_(filter)": lambda t: utils.clip_grad_norm_(filter(lambda p: p.dim() > 1, t.ps), 0.1),
    "clip_grad_norm_(set)": lambda t: utils.clip_grad_norm_(set(t.ps), 0.1),
    "clip_grad_norm_(nothing)": lambda t: utils.clip_grad_norm_([], 0.1),
    "clip_grad_norm_(p)": lambda t: utils.clip_grad_norm_(t.ps),
    "clip_grad_norm_(p, text)": lambda t: utils.clip_grad_norm_(t.ps, "much"),
    "clip_grad_norm_(3, n)": lambda t: utils.clip_grad_norm_(3, 1.0),
    "clip_grad_norm_(p, n, norm=)": lambda t: utils.clip_grad_norm_(t.ps, 1.0, norm=2),
    "clip_grad_value_(p, v)": lambda t: utils.clip_grad_value_(t.ps, 0.01),
    "clip_grad_value_(p, clip_value=)": lambda t: utils.clip_grad_value_(t.model.parameters(), clip_value=0.01),
    "clip_grad_value_(parameters=, clip_value=)": lambda t: utils.clip_grad_value_(parameters=t.ps, clip_value=0.01),
    "clip_grads_with_norm_": lambda t: utils.clip_grads_with_norm_(t.ps, 0.1, torch.tensor(2.0)),
    "clip_grads_with_norm_(max_norm=)": lambda t: utils.clip_grads_with_norm_(
        parameters=t.ps, max_norm=0.1, total_norm=torch.tensor(2.0)
    ),
    "backward()": lambda t: t.loss().backward(),
    "backward(gradient=)": lambda t: t.loss().backward(gradient=torch.tensor(2.0)),
    "backward(inputs=)": lambda t: t.loss().backward(inputs=[t.model.weight]),
    "backward of a vector": lambda t: t.model(torch.ones(2, 6)).backward(),
    "autograd.backward(tensor)": lambda t: torch.autograd.backward(t.loss()),
    "autograd.backward(tensors=)": lambda t: torch.autograd.backward(tensors=t.loss(), retain_graph=False),
    "autograd.backward([a, b], grads)": lambda t: torch.autograd.backward([t.loss(), t.loss()], [None, torch.ones(())]),
    "autograd.backward((a,), grad_tensors=)": lambda t: torch.autograd.backward(
        (t.model(torch.ones(2, 6)),), grad_tensors=(torch.ones(2, 3),)
    ),
    "autograd.backward()": lambda t: torch.autograd.backward(),
    "zero_grad()": lambda t: t.optimizer.zero_grad(),
    "zero_grad(False)": lambda t: t.optimizer.zero_grad(False),
    "zero_grad(set_to_none=)": lambda t: t.model.zero_grad(set_to_none=False),
    "zero_grad(1, 2)": lambda t: t.model.zero_grad(1, 2),
    "scale(loss)": lambda t: t.scaler.scale(t.loss()),
    "scale(outputs=)": lambda t: t.scaler.scale(outputs=t.loss()),
    "scale([a, b])": lambda t: t.scaler.scale([t.loss(), t.loss()]),
    "scale(generator)": lambda t: list(t.scaler.scale(t.loss() for _ in range(2))),
    "unscale_(optimizer)": lambda t: (t.scaled(), t.scaler.unscale_(t.optimizer))[1],
    "unscale_(optimizer=)": lambda t: (t.scaled(), t.scaler.unscale_(optimizer=t.optimizer))[1],
    "scaler.step(optimizer)": lambda t: (t.scaled(), t.scaler.step(t.optimizer))[1],
    "scaler.step(optimizer=)": lambda t: (t.scaled(), t.scaler.step(optimizer=t.optimizer))[1],
    "scaler.update(2.0)": lambda t: (t.scaled(), t.scaler.step(t.optimizer), t.scaler.update(2.0))[2],
    "scaler.update(new_scale=)": lambda t: (t.scaled(), t.scaler.step(t.optimizer), t.scaler.update(new_scale=2.0))[2],
    "scaler.update() too early": lambda t: t.scaler.update(),
    "scheduler.step()": lambda t: t.scheduler.step(),
    "plateau.step(1.0)": lambda t: t.plateau.step(1.0),
    "plateau.step(metrics=)": lambda t: t.plateau.step(metrics=torch.tensor(1.0)),
    "plateau.step()": lambda t: t.plateau.step(),
    "update_parameters(model)": lambda t: t.average.update_parameters(t.model),
    "update_parameters(model=)": lambda t: t.average.update_parameters(model=t.model),
    "loader": lambda t: list(torch.utils.data.DataLoader(torch.arange(4.0), batch_size=2)),
    "all_reduce(tensor=)": lambda t: torch.distributed.all_reduce(tensor=torch.ones(1)),
}


def outcome(call: Callable[[Things], Any], watched: bool) -> tuple[str, Any]:
    things = Things()
    told: Any = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if watched:
                with watch():
                    told = call(things)
            else:
                told = call(things)
        except (TypeError, ValueError, RuntimeError, AssertionError) as error:
            told = f"{type(error).__name__}: {str(error)[:60]}"
    gradients = [None if p.grad is None else p.grad.tolist() for p in things.ps]
    return repr(told), (gradients, things.scaler.state_dict(), [g["lr"] for g in things.optimizer.param_groups])


@pytest.mark.parametrize("name", CALLS)
def test_a_call_has_the_same_answer_error_and_effect_while_it_is_watched(name: str) -> None:
    assert outcome(CALLS[name], watched=True) == outcome(CALLS[name], watched=False)


def test_the_comparison_would_notice_another_effect() -> None:
    clipped, other = CALLS["clip_grad_norm_(p, n)"], CALLS["clip_grad_value_(p, v)"]
    assert outcome(clipped, watched=True) != outcome(other, watched=False)


def test_a_clip_by_keyword_is_seen_like_any_other() -> None:
    things = Things()
    with watch() as seen:
        torch.nn.utils.clip_grad_norm_(max_norm=0.5, parameters=things.model.parameters())
    (clip,) = [event for event in seen.trace.events if event.kind == "clip"]
    assert (clip.bound, len(clip.parameters)) == (0.5, 2)
    assert clip.norm is not None
