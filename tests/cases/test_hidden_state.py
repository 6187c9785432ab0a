"""What a forward pass or a loss function keeps for itself: each must be right for the window, or be refused."""

from __future__ import annotations

import copy
import weakref
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
    for micro_batch in rows.split(2):
        (squares(model, micro_batch).sum() / 16).backward()
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
    for micro_batch in rows.split(2):
        (squares(model, micro_batch).sum() / 16).backward()
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


class Pointer:
    """Leads to a head that nobody finds by reading, since a weak reference says nothing of what it refers to."""

    def __init__(self, head: nn.Module, first: int) -> None:
        self.head, self.first, self.calls = weakref.ref(head), first, 0

    def __call__(self, model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model(rows)
        head = self.head()
        assert head is not None
        return head(out).squeeze(-1).square() if len(rows) >= self.first else out[:, 0].square()


def with_a_hidden_head(first: int, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, nn.Module, wb.Window]:
    torch.manual_seed(812)
    model, head = nn.Linear(3, 2).to(dtype), nn.Linear(2, 1).to(dtype)
    return model, head, wb.Window(torch.randn(9, 3).to(dtype).split([1, 2, 4, 2]))


def expected_with_a_hidden_head(first: int, before: float = 0.0) -> dict[str, Any]:
    model, head, window = with_a_hidden_head(first)
    both = nn.ModuleList([model, head])
    for parameter in both.parameters():
        parameter.grad = torch.full_like(parameter, before)
    loss = Pointer(head, first)
    (torch.cat([loss(model, rows) for rows in window]).sum() / 9).backward()
    return gradients_of(both)


WAYS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "in a size that adapts": {"micro_batch_size": wb.Auto(8)},
    "summed in a wider precision": {"accumulate_in": torch.float64},
}


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("first", [1, 2, 4], ids=lambda first: f"first reached with {first} rows")
def test_a_leaf_is_served_whichever_micro_batch_reaches_it_first(first: int, options: dict[str, Any]) -> None:
    model, head, window = with_a_hidden_head(first)
    both, wide = nn.ModuleList([model, head]), "accumulate_in" in options
    if wide:
        both.float()
        window = wb.Window(rows.float() for rows in window)
    for parameter in both.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    wb.backward(model, Pointer(head, first), window, **options)
    assert_same_gradient(both, expected_with_a_hidden_head(first, before=0.5), tol=2e-6 if wide else None)


def test_a_hidden_leaf_is_served_after_a_counting_pass() -> None:
    """Two denominators: the pass that counts reaches the head first, without going backward."""
    model, head, window = with_a_hidden_head(2)
    point = Pointer(head, 2)

    def loss(model: nn.Module, rows: torch.Tensor) -> Any:
        return wb.mean(point(model, rows)) + wb.mean(model(rows)[:, 1].abs(), weights=(rows[:, 0] > 0).double())

    wb.backward(model, loss, window)
    found = gradients_of(nn.ModuleList([model, head]))
    model, head, window = with_a_hidden_head(2)
    point, rows = Pointer(head, 2), torch.cat(list(window))
    second = model(rows)[:, 1].abs()[rows[:, 0] > 0].mean()
    (torch.cat([point(model, each) for each in window]).mean() + second).backward()
    assert_same_gradient(found, gradients_of(nn.ModuleList([model, head])))


def test_the_usual_loop_leaves_such_a_leaf_off_by_the_number_of_micro_batches() -> None:
    """The twin."""
    model, head, window = with_a_hidden_head(2)
    point = Pointer(head, 2)
    for rows in window:
        (point(model, rows).mean() / len(window)).backward()
    assert_differs(nn.ModuleList([model, head]), expected_with_a_hidden_head(2))


def test_a_failure_takes_back_what_a_hidden_leaf_has_received() -> None:
    model, head, window = with_a_hidden_head(2)
    point = Pointer(head, 2)
    head.weight.grad = torch.full_like(head.weight, 7.0)

    def fails_at_last(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        point.calls += 1
        if point.calls == len(window):
            raise KeyError("a fault of the user's own")
        return point(model, rows)

    with pytest.raises(KeyError):
        wb.backward(model, fails_at_last, window)
    assert torch.equal(head.weight.grad, torch.full_like(head.weight, 7.0))
    assert head.bias.grad is None


def test_every_micro_batch_may_bring_a_leaf_of_its_own() -> None:
    """Inputs that require a gradient, made by the loader: each gets its own rows' share of the batch's mean."""
    torch.manual_seed(813)
    model, rows = nn.Linear(3, 1).double(), torch.randn(7, 3).double()
    leaves = [part.clone().requires_grad_() for part in rows.split([3, 3, 1])]
    wb.backward(model, squares, wb.Window(leaves))
    whole = rows.clone().requires_grad_()
    mean_square(model, whole).backward()
    assert whole.grad is not None
    for leaf, expected in zip(leaves, whole.grad.split([3, 3, 1]), strict=True):
        assert leaf.grad is not None
        assert torch.allclose(leaf.grad, expected, rtol=1e-12)


def test_leaves_that_a_loss_function_makes_are_not_kept() -> None:
    """A gradient penalty has an input of its own in each micro-batch; held until the end they would fill the memory."""
    torch.manual_seed(814)
    model, rows, made = nn.Linear(3, 1).double(), torch.randn(12, 3).double(), []

    def loss(model: nn.Module, micro_batch: torch.Tensor) -> torch.Tensor:
        assert sum(leaf() is not None for leaf in made) <= 2
        points = micro_batch.clone().requires_grad_()
        made.append(weakref.ref(points))
        out = model(points)
        slope = torch.autograd.grad(out.sum(), points, create_graph=True)[0]
        return out.square().squeeze(-1) + slope.square().sum(1)

    reference = whole_batch(model, lambda m, x: loss(m, x).mean(), rows)
    wb.backward(model, loss, rows, micro_batch_size=1)
    assert_same_gradient(model, reference)


def test_a_module_that_the_loss_function_trains_itself_keeps_what_it_was_given() -> None:
    """Its gradient is none of the window's: nothing is divided, multiplied or taken back."""
    torch.manual_seed(815)
    model, critic, rows = nn.Linear(3, 2).double(), nn.Linear(2, 1).double(), torch.randn(12, 3).double()

    def loss(model: nn.Module, micro_batch: torch.Tensor) -> torch.Tensor:
        fake = model(micro_batch)
        critic.zero_grad(set_to_none=True)
        critic(fake.detach()).square().sum().backward()
        out: torch.Tensor = fake.square().mean(1)
        return out

    wb.backward(model, loss, rows, micro_batch_size=5)
    own = torch.autograd.grad(critic(model(rows[10:]).detach()).square().sum(), critic.weight)[0]
    assert critic.weight.grad is not None
    assert torch.allclose(critic.weight.grad, own, rtol=1e-12)
    found = gradients_of(model)
    model.zero_grad()
    model(rows).square().mean().backward()
    assert_same_gradient(found, gradients_of(model))


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

    def loss(model: nn.Module, micro_batch: torch.Tensor) -> Any:
        return two_terms(model(micro_batch), torch.rand(len(micro_batch), 1, generator=draws) < 0.5)

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
        def loss(net: nn.Module, micro_batch: Any) -> Any:
            hidden, state = net["rnn"](micro_batch[0], carried[-1] if carried else None)  # type: ignore[index]
            carried.append(state.detach())
            return two_terms(net["out"](hidden), micro_batch[1])  # type: ignore[index]

        return loss

    expected, state, outs = copy.deepcopy(net), None, []
    for chunk in chunks:
        hidden, state = expected["rnn"](chunk, None if state is None else state.detach())  # type: ignore[index]
        outs.append(expected["out"](hidden))  # type: ignore[index]
    out, mask = torch.cat(outs), torch.cat(masks)
    (out.square().mean() + out.abs()[mask].mean()).backward()
    window = wb.Window(zip(chunks, masks, strict=True))

    def items(micro_batch: Any) -> Any:
        return micro_batch[0].shape[0] * micro_batch[0].shape[1], micro_batch[1].sum()

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

    def recomputed(model: nn.Module, micro_batch: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(model[1], model[0](micro_batch), use_reentrant=reentrant)  # type: ignore[index]
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


# Hooks that read gradients


def seen_by(model: nn.Module, run: Callable[[], Any]) -> list[torch.Tensor]:
    """Run, and return what a backward hook on a layer saw of each row."""
    seen: list[torch.Tensor] = []
    handle = model[2].register_full_backward_hook(lambda *gradients: seen.append(gradients[2][0].clone()))  # type: ignore[index]
    run()
    handle.remove()
    return seen


def layers() -> nn.Sequential:
    torch.manual_seed(812)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


@pytest.mark.parametrize("size", [4, 3, 7])
@pytest.mark.parametrize("items", [None, len], ids=["counted", "stated"])
def test_a_hook_that_reads_gradients_sees_each_row_s_share_of_the_batch(size: int, items: Any) -> None:
    model, rows = layers(), torch.randn(10, 3).double()
    (expected,) = seen_by(model, lambda: mean_square(model, rows).backward())
    found = seen_by(model, lambda: wb.backward(model, squares, rows, size, items=items))
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-12, atol=0.0)


def test_a_hook_sees_another_share_where_nothing_is_counted_first() -> None:
    model, rows = layers(), torch.randn(10, 3).double()
    (expected,) = seen_by(model, lambda: mean_square(model, rows).backward())
    found = seen_by(model, lambda: [mean_square(model, micro_batch).backward() for micro_batch in rows.split(4)])
    assert float((torch.cat(found) - expected).norm() / expected.norm()) > 0.1


def on_a_parameter(model: nn.Sequential, read: Callable[[Any], None]) -> Any:
    return model[2].weight.register_hook(read)


def before_a_module(model: nn.Sequential, read: Callable[[Any], None]) -> Any:
    return model[2].register_full_backward_pre_hook(lambda module, gradients: read(gradients[0]))


def of_every_module(model: nn.Sequential, read: Callable[[Any], None]) -> Any:
    def noted(module: nn.Module, inside: Any, outside: Any) -> None:
        if module is model[2]:
            read(outside[0])

    return nn.modules.module.register_module_full_backward_hook(noted)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("register", [on_a_parameter, before_a_module, of_every_module], ids=lambda f: f.__name__)
def test_whatever_reads_gradients_sees_the_share_that_a_loop_over_sums_would_show(register: Any) -> None:
    model, rows = layers(), torch.randn(10, 3).double()
    norms: list[float] = []
    handle = register(model, lambda gradient: norms.append(float(gradient.norm())))
    for micro_batch in rows.split(4):
        (squares(model, micro_batch).sum() / 10).backward()
    expected, norms[:] = norms[:], []
    model.zero_grad()
    wb.backward(model, squares, rows, micro_batch_size=4)
    handle.remove()
    assert norms == pytest.approx(expected, rel=1e-12)


def test_nothing_is_counted_where_nobody_reads() -> None:
    model, rows, calls = layers(), torch.randn(10, 3).double(), []

    def counted(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        calls.append(len(rows))
        return squares(model, rows)

    wb.backward(model, counted, rows, micro_batch_size=4, verify="never")
    assert calls == [4, 4, 2]
