"""What a forward pass or a loss function keeps for itself: each must be right for the window, or be refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import wholebatch as wb
from tests.oracle import assert_differs, assert_same_gradient, gradients_of, whole_batch


def squares(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model(rows).square()
    return out


def mean_square(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return squares(model, rows).mean()


def exact_or_refused(model: nn.Module, rows: torch.Tensor, size: int) -> None:
    """Hold gradient and buffers against one pass over all rows, unless the window is refused."""
    reference = whole_batch(model, mean_square, rows)
    try:
        wb.backward(model, squares, rows, micro_batch_size=size)
    except wb.InexactError:
        return
    assert_same_gradient(model, reference)
    for name, buffer in reference.model.named_buffers():
        assert torch.allclose(model.get_buffer(name), buffer, rtol=1e-9), name


def test_a_power_iteration_in_each_forward_is_exact_or_refused() -> None:
    """Spectral norm in training mode moves its vectors with every forward, four times where the batch does it once."""
    torch.manual_seed(801)
    layer = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
    exact_or_refused(nn.Sequential(layer, nn.Linear(6, 1)).double(), torch.randn(8, 6).double(), size=2)


def test_running_statistics_of_instance_norm_are_exact_or_refused() -> None:
    """Its output is within the row, the statistics that it keeps for evaluation are not."""
    torch.manual_seed(802)
    model = nn.Sequential(
        nn.Conv1d(3, 4, 1), nn.InstanceNorm1d(4, track_running_stats=True), nn.Conv1d(4, 1, 1)
    ).double()
    exact_or_refused(model, torch.randn(8, 3, 5).double(), size=2)


class Codebook(nn.Module):
    """A layer that moves a buffer with the mean of the rows that it sees, as vector quantisation does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("centre", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x)
        if self.training:
            self.centre.mul_(0.9).add_(out.detach().mean(0), alpha=0.1)
        return out - self.centre


def test_a_user_s_own_running_average_is_exact_or_refused() -> None:
    torch.manual_seed(803)
    exact_or_refused(Codebook().double(), torch.randn(8, 3).double(), size=2)


def test_a_plain_loop_moves_such_buffers_with_every_micro_batch() -> None:
    """The twin."""
    torch.manual_seed(803)
    model, rows = Codebook().double(), torch.randn(8, 3).double()
    reference = whole_batch(model, mean_square, rows)
    for piece in rows.split(2):
        (squares(model, piece).sum() / 16).backward()
    assert_differs(model, reference)


class Schedule(nn.Module):
    """A layer that anneals with the calls that it counts; a late one only begins to after its first call."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.waits = late

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.waits:
            self.waits = False
        else:
            self.calls += 1
        out: torch.Tensor = self.linear(x)
        return out / (1 + self.calls)


@pytest.mark.parametrize("late", [False, True], ids=["from the first call on", "from the second call on"])
def test_a_counter_that_the_model_reads_is_exact_or_refused(late: bool) -> None:
    torch.manual_seed(805)
    exact_or_refused(Schedule(late).double(), torch.randn(8, 3).double(), size=2)


def test_a_plain_loop_counts_every_micro_batch() -> None:
    """The twin."""
    torch.manual_seed(805)
    model, rows = Schedule(late=False).double(), torch.randn(8, 3).double()
    reference = whole_batch(model, mean_square, rows)
    for piece in rows.split(2):
        (squares(model, piece).sum() / 16).backward()
    assert_differs(model, reference)


# Parameters outside of the model


def head_problem() -> tuple[nn.Module, nn.Module, wb.Window]:
    torch.manual_seed(804)
    model, head = nn.Linear(3, 2).double(), nn.Linear(2, 1).double()
    return model, head, wb.Window(torch.randn(7, 3).double().split([2, 4, 1]))


@pytest.mark.parametrize("used", ["always", "later"])
def test_parameters_of_the_loss_itself_are_served(used: str) -> None:
    """A criterion with weights of its own, which the model does not hold; "later" is not in the first micro-batch."""
    model, head, window = head_problem()

    def loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        out = model(rows)
        if used == "later" and len(rows) == 2:
            return out[:, 0].square()
        return head(out).squeeze(-1).square()  # type: ignore[no-any-return]

    expected, twin, _ = head_problem()
    both = nn.ModuleList([expected, twin])
    total = torch.zeros((), dtype=torch.float64)
    for rows in window:
        out = expected(rows)
        total = total + (out[:, :1] if used == "later" and len(rows) == 2 else twin(out)).square().sum()
    (total / 7).backward()
    wb.backward(model, loss, window)
    assert_same_gradient(nn.ModuleList([model, head]), gradients_of(both))


def test_inputs_that_require_a_gradient_get_the_whole_batch_s() -> None:
    torch.manual_seed(805)
    model, rows = nn.Linear(3, 1).double(), torch.randn(7, 3).double().requires_grad_()
    wb.backward(model, squares, rows, micro_batch_size=3)
    found = rows.grad
    rows.grad = None
    mean_square(model, rows).backward()
    assert found is not None
    assert rows.grad is not None
    assert torch.allclose(found, rows.grad, rtol=1e-12)


# Loss functions that remember


def two_terms(out: torch.Tensor, mask: torch.Tensor) -> Any:
    return wb.mean(out.square()) + wb.mean(out.abs(), weights=mask)


def exact_or_inexact_error(run: Callable[[], object], model: nn.Module, expected: dict[str, Any]) -> None:
    try:
        run()
    except wb.InexactError:
        assert set(gradients_of(model).values()) == {None}
        return
    assert_same_gradient(model, expected)


def test_draws_from_a_generator_of_the_user_s_own_are_the_same_twice_or_refused() -> None:
    """The counting pass restores torch's random state; a generator in the user's hands it cannot know."""
    torch.manual_seed(806)
    model, rows = nn.Linear(3, 1).double(), torch.randn(8, 3).double()
    draws = torch.Generator().manual_seed(2)

    def loss(model: nn.Module, piece: torch.Tensor) -> Any:
        return two_terms(model(piece), torch.rand(len(piece), 1, generator=draws) < 0.5)

    again = torch.Generator().manual_seed(2)
    expected = copy.deepcopy(model)
    masks = torch.cat([torch.rand(2, 1, generator=again) < 0.5 for _ in range(4)])
    out = expected(rows)
    (out.square().mean() + out.abs()[masks].mean()).backward()
    exact_or_inexact_error(lambda: wb.backward(model, loss, rows, micro_batch_size=2), model, gradients_of(expected))


def test_a_state_carried_through_the_counting_pass_is_exact_or_refused() -> None:
    """Time chunks with two denominators: counted beforehand, the first chunk would begin with the last one's state."""
    torch.manual_seed(807)
    net = nn.ModuleDict({"rnn": nn.GRU(3, 4), "out": nn.Linear(4, 1)}).double()
    chunks = list(torch.randn(7, 2, 3).double().split(3))
    masks = list((torch.rand(7, 2, 1) < 0.6).split(3))

    def loss_from(carried: list[torch.Tensor]) -> Callable[[nn.Module, Any], Any]:
        def loss(net: nn.Module, piece: Any) -> Any:
            hidden, state = net["rnn"](piece[0], carried[-1] if carried else None)  # type: ignore[index]
            carried.append(state.detach())
            return two_terms(net["out"](hidden), piece[1])  # type: ignore[index]

        return loss

    expected, state, outs = copy.deepcopy(net), None, []
    for chunk in chunks:
        hidden, state = expected["rnn"](chunk, None if state is None else state.detach())  # type: ignore[index]
        outs.append(expected["out"](hidden))  # type: ignore[index]
    out, mask = torch.cat(outs), torch.cat(masks)
    (out.square().mean() + out.abs()[mask].mean()).backward()
    window = wb.Window(zip(chunks, masks, strict=True))

    def items(piece: Any) -> Any:
        return piece[0].shape[0] * piece[0].shape[1], piece[1].sum()

    stated = copy.deepcopy(net)
    wb.backward(stated, loss_from([]), window, items=items)
    assert_same_gradient(stated, gradients_of(expected))
    exact_or_inexact_error(lambda: wb.backward(net, loss_from([]), window), net, gradients_of(expected))


# Hooks and recomputation


def test_a_hook_that_masks_rows_of_a_gradient_works_as_in_one_backward() -> None:
    torch.manual_seed(808)
    model, ids = nn.Embedding(6, 2).double(), torch.randint(0, 6, (9, 3))
    model.weight.register_hook(lambda gradient: gradient * torch.tensor([[0.0], *[[1.0]] * 5]).double())
    expected = copy.deepcopy(model)
    expected.weight.register_hook(lambda gradient: gradient * torch.tensor([[0.0], *[[1.0]] * 5]).double())
    mean_square(expected, ids).backward()
    wb.backward(model, squares, ids, micro_batch_size=4)
    assert_same_gradient(model, gradients_of(expected))


@pytest.mark.filterwarnings("ignore:.*None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_recomputation_with_dropout_gives_the_same_bits(reentrant: bool) -> None:
    torch.manual_seed(809)
    first, block = nn.Linear(3, 8), nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh())
    model, rows = nn.Sequential(first, block, nn.Linear(8, 1)).double(), torch.randn(7, 3).double()

    def recomputed(model: nn.Module, piece: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(model[1], model[0](piece), use_reentrant=reentrant)  # type: ignore[index]
        out: torch.Tensor = model[2](hidden).square()  # type: ignore[index]
        return out

    plain = copy.deepcopy(model)
    torch.manual_seed(810)
    wb.backward(plain, squares, rows, micro_batch_size=3)
    torch.manual_seed(810)
    wb.backward(model, recomputed, rows, micro_batch_size=3)
    for name, gradient in gradients_of(plain).items():
        assert gradient is not None
        assert torch.equal(gradient, gradients_of(model)[name]), name


def test_a_lazy_layer_is_served_from_its_first_window_on() -> None:
    torch.manual_seed(811)
    model, rows = nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(8, 3)
    wb.backward(model, squares, rows, micro_batch_size=3)
    found = gradients_of(model)
    model.zero_grad()
    assert_same_gradient(found, whole_batch(model, mean_square, rows))
