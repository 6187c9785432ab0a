"""Optimizers that keep all gradients in one flat buffer and read that."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wholebatch as wb

DRAWS = torch.Generator().manual_seed(113)
BATCH = torch.randn(12, 5, generator=DRAWS).double(), torch.randint(0, 3, (12,), generator=DRAWS)


class FlatSGD(torch.optim.Optimizer):
    """Descends along a flat buffer, of which every ``.grad`` is a part.

    Args:
        late: whether gradients are moved into the buffer in the first step, not when it is built.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 0.5, late: bool = False) -> None:
        self.mine = list(parameters)
        super().__init__(self.mine, {"lr": lr})
        self.flat = torch.zeros(sum(p.numel() for p in self.mine), dtype=self.mine[0].dtype)
        self.placed = not late
        if self.placed:
            self.place()

    def parts(self) -> list[Tensor]:
        parts = self.flat.split([p.numel() for p in self.mine])
        return [part.view_as(p) for part, p in zip(parts, self.mine, strict=True)]

    def place(self) -> None:
        for parameter, part in zip(self.mine, self.parts(), strict=True):
            if parameter.grad is not None:
                part.copy_(parameter.grad)
            parameter.grad = part

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not self.placed:
            self.place()
            self.placed = True
        for parameter, part in zip(self.mine, self.parts(), strict=True):
            parameter.add_(part, alpha=-self.param_groups[0]["lr"])


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def by_hand() -> Tensor:
    """Three steps of plain SGD on the whole batch."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        loss(model, BATCH).mean().backward()
        optimizer.step()
    return weights(model)


def by_steps(model: nn.Module, optimizer: FlatSGD, **options: Any) -> None:
    step = wb.Step(model, optimizer, loss, micro_batch_size=5, **options)
    for _ in range(3):
        step(BATCH)


def by_backward(model: nn.Module, optimizer: FlatSGD) -> None:
    for _ in range(3):
        optimizer.zero_grad(set_to_none=False)
        wb.backward(model, loss, BATCH, 5)
        optimizer.step()


def cut_off(model: nn.Module, optimizer: FlatSGD) -> None:
    """The naive way: the loop that sets gradients to None, which takes them out of the buffer."""
    for _ in range(3):
        wb.backward(model, loss, BATCH, 5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


WAYS: dict[str, Callable[..., None]] = {
    "step": by_steps,
    "step with a clip": lambda *a: by_steps(*a, max_grad_norm=1e9),
    "step with a scaler": lambda *a: by_steps(*a, scaler=torch.amp.GradScaler("cpu", init_scale=4.0)),
    "backward": by_backward,
}


@pytest.mark.parametrize("late", [False, True], ids=["from the start", "from the first step"])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_stay_in_the_buffer_that_the_optimizer_reads(way: str, late: bool) -> None:
    model = build()
    WAYS[way](model, FlatSGD(model.parameters(), late=late))
    assert torch.allclose(weights(model), by_hand(), rtol=0, atol=1e-14)


def test_setting_them_to_none_cuts_the_buffer_off() -> None:
    model = build()
    cut_off(model, FlatSGD(model.parameters()))
    assert (weights(model) - by_hand()).norm() / by_hand().norm() > 0.05


def test_a_buffer_is_zero_and_in_place_after_each_window_also_an_empty_one() -> None:
    model = build()
    optimizer = FlatSGD(model.parameters())
    step = wb.Step(model, optimizer, loss, micro_batch_size=5)
    held = [p.grad for p in model.parameters()]
    for batch in (BATCH, (BATCH[0][:0], BATCH[1][:0]), BATCH):
        step(batch)
        assert all(p.grad is grad for p, grad in zip(model.parameters(), held, strict=True))
        assert not optimizer.flat.any()


def test_gradients_that_autograd_made_are_let_go_of() -> None:
    """Also those that are parts of something larger, such as the gradients of weights that were joined."""
    torch.manual_seed(0)
    first, second = nn.Parameter(torch.randn(5, 2).double()), nn.Parameter(torch.randn(5, 1).double())
    model = nn.ParameterList([first, second])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def joined(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(batch[0] @ torch.cat([first, second], 1), batch[1], reduction="none")

    wb.Step(model, optimizer, joined, micro_batch_size=5)(BATCH)
    assert first.grad is None and second.grad is None


def test_a_failing_window_leaves_the_buffer_as_it_was() -> None:
    model = build()
    optimizer = FlatSGD(model.parameters())
    optimizer.flat.fill_(2.0)
    held = [p.grad for p in model.parameters()]

    def failing(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if len(batch[0]) < 5:
            raise ZeroDivisionError
        return loss(model, batch)

    with pytest.raises(ZeroDivisionError):
        wb.Step(model, optimizer, failing, micro_batch_size=5)(copy.deepcopy(BATCH))
    assert all(p.grad is grad for p, grad in zip(model.parameters(), held, strict=True))
    assert bool((optimizer.flat == 2.0).all())
