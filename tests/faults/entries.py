"""Every way into a window, to be broken off anywhere and used again."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wholebatch as wb

Batch = dict[str, Tensor]


class Net(nn.Module):
    """A normalising layer, dropout, and a part that does not learn."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 3)
        self.norm = nn.BatchNorm1d(6) if norm else nn.Identity()
        self.drop = nn.Dropout(0.3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.last(self.drop(torch.tanh(self.norm(self.first(x))))))  # type: ignore[no-any-return]


def net(norm: bool = False, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return Net(norm).to(dtype)


def batch(dtype: torch.dtype = torch.float64) -> Batch:
    draws = torch.Generator().manual_seed(1)
    x = torch.randn(8, 5, generator=draws, dtype=torch.float64).to(dtype)
    return {"x": x, "y": torch.randint(0, 3, (8,), generator=draws)}


def one(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def two(model: nn.Module, batch: Batch) -> Any:
    values = one(model, batch)
    return wb.mean(values) + 0.5 * wb.mean(values.square(), weights=batch["y"] != 0)


def float_one(model: nn.Module, batch: Batch) -> Tensor:
    return one(model, batch).float()


def encode(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["x"])  # type: ignore[no-any-return]


def spread(z: Tensor) -> Tensor:
    return torch.pdist(z).mean()


@dataclass
class Entry:
    """A model and a call that runs a window on it."""

    model: nn.Module
    call: Callable[[], Any]
    optimizer: torch.optim.Optimizer | None = None
    step: wb.Step | None = None
    reached: list[int] = field(default_factory=list)
    """One number for each time that the optimizer has begun to write."""


def window(loss: Any = one, size: Any = 3, norm: bool = False, wide: bool = False, **options: Any) -> Entry:
    dtype = torch.bfloat16 if wide else torch.float64
    model = net(norm, dtype)
    options = {"verify": "never", **options}
    return Entry(model, lambda: wb.backward(model, loss, batch(dtype), size, **options))


def coupled(norm: bool = False, **options: Any) -> Entry:
    model = net(norm)
    options = {"verify": "never", **options}
    return Entry(model, lambda: wb.coupled_backward(model, encode, spread, batch(), 3, **options))


def step(wide: bool = False, scaled: bool = False, size: Any = 3, **options: Any) -> Entry:
    dtype = torch.bfloat16 if wide else torch.float64
    model = net(dtype=dtype)
    adam = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    options = {"verify": "never", **options}
    schedule = torch.optim.lr_scheduler.LambdaLR(adam, lambda n: 1 / (n + 1))
    if scaled:
        scaler = options["scaler"] = torch.amp.GradScaler("cpu", init_scale=64.0)
        scaler.scale(torch.ones(()))  # what torch breaks off here, it does not take up again
    taking = wb.Step(model, adam, float_one if wide else one, size, max_grad_norm=0.5, scheduler=schedule, **options)
    entry = Entry(model, lambda: taking(batch(dtype)), adam, taking)
    adam.register_step_pre_hook(lambda *_: entry.reached.append(len(entry.reached)))
    return entry


@cache
def captured(make: Callable[..., Entry]) -> Entry:
    """With a model that has been captured beforehand, which is slow and done once."""
    entry = make(norm=True, batch_norm="exact")
    seed()
    entry.call()
    return entry


def exact(make: Callable[..., Entry]) -> Entry:
    entry = captured(make)
    with torch.no_grad():
        again(entry)
    return entry


ENTRIES: dict[str, Callable[[], Entry]] = {
    "pieces": window,
    "proven": lambda: window(verify="first"),
    "whole": lambda: window(size=None),
    "counted": lambda: window(two),
    "stated": lambda: window(two, items=lambda b: (len(b["y"]), (b["y"] != 0).sum())),
    "Auto": lambda: window(size=wb.Auto(3)),
    "wide": lambda: window(float_one, wide=True, accumulate_in=torch.float32),
    "micro": lambda: window(norm=True, batch_norm="micro"),
    "pooled": lambda: window(norm=True, batch_norm="pooled"),
    "exact": lambda: exact(window),
    "lock-step": lambda: window(norm=True, batch_norm="exact-lock-step"),
    "coupled": coupled,
    "coupled, proven": lambda: coupled(verify="first"),
    "coupled, pooled": lambda: coupled(norm=True, batch_norm="pooled"),
    "coupled, exact": lambda: exact(coupled),
    "step": step,
    "step, proven": lambda: step(verify="first"),
    "step, wide": lambda: step(wide=True, accumulate_in=torch.float32),
    "step, scaled": lambda: step(scaled=True),
    "step, Auto": lambda: step(size=wb.Auto(3)),
}


def seed() -> None:
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)


def again(entry: Entry) -> None:
    for parameter in entry.model.parameters():
        parameter.grad = None
    for name, buffer in entry.model.named_buffers():
        buffer.copy_(dict(net(norm=True).named_buffers())[name])


def outcome(entry: Entry) -> list[Tensor]:
    """All that a window or a step leaves on the model."""
    grads = [torch.zeros(()) if p.grad is None else p.grad for p in entry.model.parameters()]
    return [t.detach().double().clone() for t in (*grads, *entry.model.parameters(), *entry.model.buffers())]


def surroundings() -> dict[str, Any]:
    """What belongs to the process, and no window may change."""
    return {
        "grad mode": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "hooks on what autograd saves": torch._C._autograd._top_saved_tensors_default_hooks(False),
        "threads of torch": torch.get_num_threads(),
        "threads": threading.active_count(),
    }


def kept(entry: Entry) -> dict[str, Any]:
    """What a window that was broken off may not have changed on its model."""
    found: dict[str, Any] = {}
    for name, module in entry.model.named_modules():
        kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        found[f"{name}: hooks"] = [len(getattr(module, kind)) for kind in kinds]
        found[f"{name}: attributes"] = sorted(vars(module)), module.training
        found[f"{name}: tensors"] = [id(t) for t in (*module._parameters.values(), *module._buffers.values())]
    for name, parameter in entry.model.named_parameters():
        found[f"{name}: hooks"] = len(getattr(parameter, "_post_accumulate_grad_hooks", None) or {})
        found[f"{name}: learns"] = parameter.requires_grad
    return found


def grads(entry: Entry) -> list[tuple[Tensor | None, Tensor | None]]:
    """Each ``.grad``, and a copy of it."""
    return [(p.grad, None if p.grad is None else p.grad.clone()) for p in entry.model.parameters()]


def gather(entry: Entry) -> None:
    """Let every parameter have a gradient of earlier calls."""
    for parameter in entry.model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, 0.25)


Verdict = tuple[list[str], str]
"""What is not as it was before, and how the call ended."""


def faults_after(make: Callable[[], Entry], injection: Any, gathered: bool, expected: list[Tensor]) -> Verdict:
    """Break a call off, look at what it has left, and call it again."""
    entry = make()
    seed()
    if gathered:
        gather(entry)
    before, around, held, weights = kept(entry), surroundings(), grads(entry), parameters(entry)
    try:
        with injection:
            entry.call()
    except BaseException as error:
        raised = type(error).__name__
    else:
        return [], "came through"
    now, after = surroundings(), kept(entry)
    faults = [what for what in around if around[what] != now[what]]
    faults += [what for what in before if before[what] != after[what]]
    for place, (parameter, (grad, copy)) in enumerate(zip(entry.model.parameters(), held, strict=True)):
        if parameter.grad is not grad or (grad is not None and copy is not None and not torch.equal(grad, copy)):
            faults.append(f"the gradient of parameter {place}")
    if entry.reached:
        return faults, f"raised {raised} when the optimizer had begun"
    if entry.step is not None and entry.optimizer is not None and (entry.step.windows or len(entry.optimizer.state)):
        faults.append("counters, or the optimizer's state")
    if any(not torch.equal(a, b) for a, b in zip(parameters(entry), weights, strict=True)):
        faults.append("weights")
    with torch.no_grad():
        again(entry)
    seed()
    entry.call()
    if any(not torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(outcome(entry), expected, strict=True)):
        faults.append("the next call")
    return faults, f"raised {raised}"


def parameters(entry: Entry) -> list[Tensor]:
    return [p.detach().clone() for p in entry.model.parameters()]


def undisturbed(make: Callable[[], Entry]) -> list[Tensor]:
    """What the call leaves when nothing disturbs it."""
    entry = make()
    seed()
    entry.call()
    return outcome(entry)
