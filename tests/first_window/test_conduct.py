"""What a loss function must not do beside returning a loss, and what is no loss function at all."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wholebatch as wb
from tests.oracle import assert_differs, assert_same_gradient, gradients_of, whole_batch

Rows = Tensor
Make = Callable[[nn.Module, torch.optim.Optimizer], Callable[[nn.Module, Rows], Any]]


def network() -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    torch.manual_seed(1202)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(20)), nn.Linear(3, 1)).double()
    for layer in model[:-1]:
        nn.init.orthogonal_(layer.weight)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(12, 3).double()


def squares(model: nn.Module, rows: Rows) -> Tensor:
    return model(rows).square()


def clears(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return lambda net, rows: (optimizer.zero_grad(), squares(net, rows))[1]


def clears_in_place(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return lambda net, rows: (net.zero_grad(set_to_none=False), squares(net, rows))[1]


def clears_the_head(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return lambda net, rows: (model[-1].zero_grad(), squares(net, rows))[1]  # type: ignore[index,operator]


def goes_backward(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    def loss(net: nn.Module, rows: Rows) -> Tensor:
        values = squares(net, rows)
        values.mean().backward()
        return values

    return loss


def goes_backward_and_keeps_the_graph(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    def loss(net: nn.Module, rows: Rows) -> Tensor:
        values = squares(net, rows)
        values.mean().backward(retain_graph=True)
        return values

    return loss


def goes_backward_and_returns_nothing(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return lambda net, rows: squares(net, rows).mean().backward()


def trains(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    def loss(net: nn.Module, rows: Rows) -> Tensor:
        optimizer.zero_grad()
        values = squares(net, rows)
        values.mean().backward()
        optimizer.step()
        return values.detach()

    return loss


def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return lambda net, rows: (optimizer.step(), squares(net, rows))[1]


WAYS: dict[str, tuple[Make, str]] = {
    "optimizer.zero_grad()": (clears, r"has cleared the gradients of 42 parameters.*zero_grad\(\) out of loss_fn"),
    "zero_grad in place": (clears_in_place, r"has cleared the gradients.*zero_grad\(\) out of loss_fn"),
    "zero_grad of a part": (clears_the_head, r"has cleared the gradients of 2 parameters"),
    "backward": (goes_backward, r"has added to the gradients.*leave backward\(\) out.*torch\.autograd\.grad"),
    "backward with the graph kept": (goes_backward_and_keeps_the_graph, r"has added to the gradients of 42 parameters"),
    "backward without a loss": (goes_backward_and_returns_nothing, r"has added to the gradients.*Return the loss"),
    "a whole step": (trains, r"has changed .* parameters.*Step once, after wb\.backward"),
    "a step": (steps, r"has changed .* parameters.*Step once, after wb\.backward"),
}


@pytest.mark.parametrize(("make", "words"), WAYS.values(), ids=WAYS.keys())
def test_a_loss_function_that_does_more_than_return_a_loss_is_told_what(make: Make, words: str) -> None:
    model, optimizer, rows = network()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.25)
    before = gradients_of(model)
    with pytest.raises(wb.LossError, match=f"(?s){words}"):
        wb.backward(model, make(model, optimizer), rows, 4)
    assert_same_gradient(model, before, tol=0.0)


def test_what_clears_gradients_in_a_plain_loop_keeps_the_last_micro_batch_alone() -> None:
    model, optimizer, rows = network()
    for micro_batch in rows.split(4):
        (clears(model, optimizer)(model, micro_batch).mean() / 3).backward()
    assert_differs(model, whole_batch(model, lambda model, rows: squares(model, rows).mean(), rows), by=0.1)


def test_a_loss_function_may_take_gradients_of_its_own() -> None:
    def penalty(model: nn.Module, rows: Rows) -> Tensor:
        rows = rows.detach().requires_grad_()
        squares(model, rows).sum().backward(inputs=[rows])
        assert rows.grad is not None
        (slope,) = torch.autograd.grad(model(rows).sum(), rows, create_graph=True)
        return squares(model, (rows + 0.1 * rows.grad.sign()).detach()) + slope.square().sum(1, keepdim=True)

    model, _, rows = network()
    wb.backward(model, penalty, rows, 5)
    assert_same_gradient(model, whole_batch(model, lambda model, rows: penalty(model, rows).mean(), rows))


# A loss that is not returned


def forgets(model: nn.Module, rows: Rows) -> None:
    squares(model, rows)


class Forgets:
    """A loss function that is an object, and forgets."""

    def __call__(self, model: nn.Module, rows: Rows) -> None:
        squares(model, rows).mean()

    def method(self, model: nn.Module, rows: Rows) -> None:
        squares(model, rows)


FORGETFUL: dict[str, Any] = {
    "a function": forgets,
    "an object": Forgets(),
    "a method": Forgets().method,
    "a partial": functools.partial(lambda scale, model, rows: forgets(model, rows), 1.0),
    "a function that calls another": lambda model, rows: forgets(model, rows),
}


@pytest.mark.parametrize("loss", FORGETFUL.values(), ids=FORGETFUL.keys())
@pytest.mark.parametrize("size", [4, None])
def test_a_loss_that_is_never_returned_is_missed(loss: Any, size: int | None) -> None:
    model, _, rows = network()
    with pytest.raises(wb.LossError, match=r"None for every micro-batch.*lacks a return"):
        wb.backward(model, loss, rows, size)
    assert all(parameter.grad is None for parameter in model.parameters())


def sometimes(model: nn.Module, rows: Rows) -> Any:
    values = squares(model, rows)
    if not bool((rows[:, 0] > 9).any()):
        return None
    return values


def seldom(model: nn.Module, rows: Rows) -> Any:
    values = squares(model, rows)
    if bool((rows[:, 0] > 9).any()):
        return values


@pytest.mark.parametrize("loss", [sometimes, seldom, lambda model, rows: None])
def test_a_window_with_nothing_to_learn_from_is_none(loss: Any) -> None:
    model, _, rows = network()
    assert float(wb.backward(model, loss, rows, 4).loss) == 0.0
    rows[5, 0] = 10.0
    result = wb.backward(model, loss, rows, 4)
    assert result.micro_batches == 3


# Terms that are not the same in every micro-batch


def test_a_value_that_exists_once_must_be_the_same_everywhere() -> None:
    model, _, rows = network()
    with pytest.raises(wb.LossError, match=r"(?s)wb\.once.*differs between micro-batches.*wb\.from_mean"):
        wb.backward(model, once_of, rows, 4)
    assert all(parameter.grad is None for parameter in model.parameters())


def once_of(model: nn.Module, rows: Rows) -> Any:
    return wb.once(squares(model, rows).mean())


def test_a_value_of_rows_that_counts_once_would_be_that_of_the_first() -> None:
    model, _, rows = network()
    squares(model, rows[:4]).mean().backward()
    assert_differs(model, whole_batch(model, lambda model, rows: squares(model, rows).mean(), rows), by=0.1)


def test_a_value_of_the_weights_counts_once() -> None:
    def decayed(model: nn.Module, rows: Rows) -> Any:
        return wb.mean(squares(model, rows)) + 0.1 * wb.once(model[0].weight.square().sum())  # type: ignore[index,operator]

    def meant(model: nn.Module, rows: Rows) -> Tensor:
        return squares(model, rows).mean() + 0.1 * model[0].weight.square().sum()  # type: ignore[index,operator,no-any-return]

    model, _, rows = network()
    wb.backward(model, decayed, rows, 5)
    assert_same_gradient(model, whole_batch(model, meant, rows))


def first_or_half_of_the_second(model: nn.Module, rows: Rows) -> Any:
    values = wb.mean(squares(model, rows))
    return values if float(rows[0, 0]) > 0 else 0.5 * values


def total_or_mean(model: nn.Module, rows: Rows) -> Any:
    return wb.total(squares(model, rows)) if float(rows[0, 0]) > 0 else wb.mean(squares(model, rows))


@pytest.mark.parametrize("loss", [first_or_half_of_the_second, total_or_mean])
def test_a_term_without_a_name_that_becomes_another_has_to_be_named(loss: Any) -> None:
    model, _, rows = network()
    rows[0, 0], rows[4, 0], rows[8, 0] = 1.0, -1.0, 1.0
    with pytest.raises(wb.LossError, match=r"without a name.*'ce': a, 'aux': 0\.1 \* b"):
        wb.backward(model, loss, rows, 4)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_two_kinds_of_micro_batches_have_terms_of_their_own_once_they_are_named() -> None:
    def named(model: nn.Module, rows: Rows) -> Any:
        values = wb.mean(squares(model, rows))
        return {"a": values} if len(rows) > 2 else {"b": 0.5 * values}

    model, _, rows = network()
    window = [rows[:5], rows[5:7], rows[7:10], rows[10:]]
    wb.backward(model, named, wb.Window(window))

    def meant(model: nn.Module, window: Any) -> Tensor:
        a, b = torch.cat([window[0], window[2]]), torch.cat([window[1], window[3]])
        return squares(model, a).mean() + 0.5 * squares(model, b).mean()

    reference = whole_batch(model, meant, window)
    assert_same_gradient(model, reference)
    twin = network()[0]
    for micro_batch in window:
        ((1.0 if len(micro_batch) > 2 else 0.5) * squares(twin, micro_batch).sum() / 12).backward()
    assert_differs(twin, reference, by=0.1)


# What stands in the loss function's place


def test_a_decorator_takes_what_it_takes_and_not_what_it_wraps() -> None:
    model, _, rows = network()
    plain = functools.wraps(lambda rows: None)(lambda net, rows: squares(net, rows))
    assert wb.backward(model, plain, rows, 4).micro_batches == 3


def test_an_average_that_follows_the_model_is_told_where_it_belongs() -> None:
    class Follows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own, self.mean = nn.Linear(3, 1).double(), nn.Linear(3, 1).double()

        def forward(self, rows: Rows) -> Tensor:
            with torch.no_grad():
                self.mean.weight.lerp_(self.own.weight, 0.1)
            return self.own(rows) - self.mean(rows)

    with pytest.raises(wb.LossError, match=r"has changed 1 parameters.*follows the model.*after_step="):
        wb.backward(Follows(), squares, network()[2], 4)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (nn.CrossEntropyLoss(), r"CrossEntropyLoss\(\), which takes outputs and targets"),
        (nn.MSELoss, "the class MSELoss"),
        (F.cross_entropy, "cross_entropy, which takes outputs and targets"),
        (3, "int 3"),
        (None, "NoneType None"),
        (torch.tensor(0.5, requires_grad=True), "a loss that has been computed already"),
        ([torch.ones(2)], "list"),
        ({"x": 1}, "dict"),
        (lambda rows: rows.sum(1), "called with model and micro-batch: too many positional arguments"),
        (lambda model, x, y: model(x), "called with model and micro-batch: missing a required argument: 'y'"),
    ],
    ids=[
        *("a criterion", "a class", "a functional", "a number", "nothing", "a loss", "a window", "a batch"),
        *("a function of a batch", "a function of fields"),
    ],
)
def test_what_is_no_loss_function_says_what_to_pass(given: Any, found: str) -> None:
    model, _, rows = network()
    with pytest.raises(TypeError, match=rf"loss_fn is .*{found}.*def loss_fn\(model, batch\): return"):
        wb.backward(model, given, rows, 4)


@pytest.mark.parametrize("late", [False, True], ids=["mode before the forward", "mode after the forward"])
def test_modes_that_a_loss_function_turns_are_put_back_and_named_where_they_matter(late: bool) -> None:
    modes: list[bool] = []

    def loss_fn(model: nn.Module, rows: Any) -> Any:
        modes.append(model.training)
        if not late:
            model.eval()
        values = model(rows).square().mean(1)
        model.eval()
        return values

    model, rows = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3)), torch.randn(8, 5)
    if late:
        with pytest.raises(wb.InexactError, match=r"'training' \(value\).*the next one depends on it"):
            wb.backward(model, loss_fn, rows, 4)
        assert model.training and all(module.training for module in model)
        return
    assert wb.backward(model, loss_fn, rows, 4).verified.startswith("verified")
    assert modes == [True, False]  # of the window alone: what is tried beforehand leaves no trace
    model.train()
    assert wb.check(model, loss_fn, rows, 4).ok and model.training
