"""Losses over all rows in two passes: what is kept, what is counted once, and what is refused."""

from __future__ import annotations

import copy
import random
from collections import deque
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import wholebatch as wb
from tests.oracle import assert_differs, assert_same_gradient, gradients_of, whole_batch


class Net(nn.Module):
    """Two towers, one of them normalised and with dropout, and a temperature."""

    def __init__(self, norm: bool = False, drop: float = 0.0) -> None:
        super().__init__()
        middle = nn.BatchNorm1d(6) if norm else nn.Identity()
        self.left = nn.Sequential(nn.Linear(4, 6), middle, nn.Tanh(), nn.Dropout(drop), nn.Linear(6, 3))
        self.right = nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.encoded = 0

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.encoded += 1
        return self.left(left), self.right(right)


def net(**options: Any) -> Net:
    torch.manual_seed(1)
    return Net(**options).double()


def rows(count: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(2)
    return torch.randn(count, 4).double(), torch.randn(count, 5).double()


def encode(model: nn.Module, pair: Any) -> Any:
    return model(*pair)


TOWERS = [lambda model, pair: model.left(pair[0]), lambda model, pair: model.right(pair[1])]


def contrast(model: nn.Module) -> Any:
    def loss(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        similar = model.scale.exp() * F.normalize(left, dim=1) @ F.normalize(right, dim=1).T
        return F.cross_entropy(similar, torch.arange(len(left)))

    return loss


def meant(model: nn.Module, pair: Any) -> torch.Tensor:
    return contrast(model)(*model(*pair))


@pytest.mark.parametrize("encoder", [encode, TOWERS], ids=["one function", "one a tower"])
@pytest.mark.parametrize("size", [1, 4, 10])
def test_towers_may_be_encoded_together_or_one_after_another(encoder: Any, size: int) -> None:
    model, pair = net(), rows()
    result = wb.coupled_backward(model, encoder, contrast(model), pair, micro_batch_size=size)
    reference = whole_batch(net(), meant, pair)
    assert_same_gradient(model, reference)
    assert result.loss.item() == pytest.approx(reference.loss.item(), rel=1e-12)
    assert (result.rows, result.micro_batches) == (10, -(-10 // size))
    assert sum(each.rows for each in result.sizes) == 10 and result.sizes[0].items == ()


@pytest.mark.parametrize(("size", "passes"), [(10, 1), (5, 3), (3, 7)])
def test_the_last_micro_batch_is_encoded_once_and_every_other_twice(size: int, passes: int) -> None:
    model = net()
    wb.coupled_backward(model, encode, contrast(model), rows(), micro_batch_size=size)
    assert model.encoded == passes


@pytest.mark.parametrize("size", [1, 4, 10])
def test_batch_norm_in_the_encoder_sees_the_whole_batch_too(size: int) -> None:
    model, pair = net(norm=True), rows()
    reference = whole_batch(net(norm=True), meant, pair)
    wb.coupled_backward(model, encode, contrast(model), pair, micro_batch_size=size, batch_norm="exact")
    assert_same_gradient(model, reference)
    for name, buffer in reference.model.named_buffers():
        assert torch.allclose(model.get_buffer(name), buffer, rtol=1e-12), name


class Shared(nn.Module):
    """One encoder with BatchNorm for both sides, called for each: two updates of its statistics a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x)
        return out


def distance(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return torch.cdist(left, right).logsumexp(1).mean()


def test_one_normalised_encoder_for_two_sides_keeps_the_statistics_of_each() -> None:
    torch.manual_seed(3)
    model = Shared().double()
    pair = torch.randn(9, 4).double(), torch.randn(9, 4).double() * 3 + 1
    reference = whole_batch(model, lambda m, pair: distance(m(pair[0]), m(pair[1])), pair)
    towers = [lambda m, pair: m(pair[0]), lambda m, pair: m(pair[1])]
    wb.coupled_backward(model, towers, distance, pair, micro_batch_size=4, batch_norm="exact")
    assert_same_gradient(model, reference)
    for name, buffer in reference.model.named_buffers():
        assert torch.allclose(model.get_buffer(name), buffer, rtol=1e-12), name
    assert model.body[1].num_batches_tracked == 2


class Placed(nn.Module):
    """Reads positions from a buffer, as language models do, so that its graph holds that buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.place, self.out = nn.Embedding(4, 3), nn.Linear(3, 2)
        self.register_buffer("positions", torch.arange(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(torch.tanh(self.place(self.positions) + x[:, :, None])).mean(1)
        return out


def test_buffers_that_a_graph_holds_are_not_written_into() -> None:
    model, pair = Placed().double(), (torch.randn(9, 4).double(), torch.randn(9, 4).double())
    reference = whole_batch(model, lambda m, pair: distance(m(pair[0]), m(pair[1])), pair)
    towers = [lambda m, pair: m(pair[0]), lambda m, pair: m(pair[1])]
    wb.coupled_backward(model, towers, distance, pair, micro_batch_size=4)
    assert_same_gradient(model, reference)


def test_batch_norm_in_the_encoder_needs_a_choice() -> None:
    model = net(norm=True)
    with pytest.raises(wb.InexactError, match=r"BatchNorm.*left"):
        wb.coupled_backward(model, encode, contrast(model), rows(), micro_batch_size=4)


@pytest.mark.parametrize("choice", ["micro", "pooled"])
def test_buffers_are_updated_by_the_first_pass_alone(choice: Any) -> None:
    model, plain, pair = net(norm=True, drop=0.3), net(norm=True, drop=0.3), rows()
    wb.coupled_backward(model, encode, contrast(model), pair, micro_batch_size=4, batch_norm=choice)
    for micro_batch in zip(*(side.split(4) for side in pair), strict=True):
        plain(*micro_batch)
    counted = {"micro": 3, "pooled": 1}[choice]
    assert model.left[1].num_batches_tracked == counted
    if choice == "micro":
        assert torch.equal(model.left[1].running_mean, plain.left[1].running_mean)


def test_draws_of_every_kind_are_repeated() -> None:
    model, pair = net(drop=0.5), rows()

    def noisy(model: nn.Module, pair: Any) -> Any:
        left, right = model(pair[0] + torch.randn_like(pair[0]), pair[1] * (1 + random.random()))
        said.append((left.detach().clone(), right.detach().clone()))
        return left, right

    said: list[Any] = []
    wb.coupled_backward(model, noisy, contrast(model), pair, micro_batch_size=4)
    first, again = said[:2], said[3:]
    for one, two in zip(first, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_draws_that_nobody_can_repeat_are_refused() -> None:
    model, generator = net(), torch.Generator().manual_seed(0)

    def noisy(model: nn.Module, pair: Any) -> Any:
        return model(pair[0] + torch.randn(pair[0].shape, generator=generator, dtype=torch.float64), pair[1])

    with pytest.raises(wb.InexactError, match="a second time says something else"):
        wb.coupled_backward(model, noisy, contrast(model), rows(), micro_batch_size=4)
    assert set(gradients_of(model).values()) == {None}


def test_rows_put_in_order_of_length_meet_the_loss_in_the_batch_s_order() -> None:
    torch.manual_seed(5)
    model = nn.Linear(3, 2).double()
    lengths = [5, 1, 4, 2, 7, 3]
    samples = [torch.randn(length, 3).double() for length in lengths]
    weights = torch.arange(1.0, 7.0).double()

    def encode_rows(model: nn.Module, micro_batch: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([model(sample).mean(0) for sample in micro_batch])

    def ordered(encoded: torch.Tensor) -> torch.Tensor:
        return (encoded.sum(1) * weights).sum().square()

    size = wb.Tokens(9, length=len)
    reference = whole_batch(model, lambda m, samples: ordered(encode_rows(m, samples)), samples)
    result = wb.coupled_backward(model, encode_rows, ordered, samples, micro_batch_size=size, collate=list)
    assert result.micro_batches > 1
    assert_same_gradient(model, reference)


def test_a_scaler_scales_and_bf16_sums_may_be_wider() -> None:
    model, pair = net().float(), tuple(side.float() for side in rows())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    wb.coupled_backward(model, encode, contrast(model), pair, micro_batch_size=3, scaler=scaler)
    reference = whole_batch(net(), meant, rows())
    scaled = {name: 1024 * gradient for name, gradient in reference.gradients.items() if gradient is not None}
    assert_same_gradient(model, scaled, tol=2e-6)

    def loss(encoded: torch.Tensor) -> torch.Tensor:
        return encoded.to(torch.promote_types(encoded.dtype, torch.float32)).square().mean().sqrt()

    errors = []
    for wide in (None, torch.float32):
        half = nn.Linear(4, 3, bias=False).to(torch.bfloat16)
        torch.manual_seed(0)
        half.weight.data.normal_()
        many = torch.randn(256, 4)
        wb.coupled_backward(
            half, lambda m, x: m(x), loss, many.to(torch.bfloat16), micro_batch_size=1, accumulate_in=wide
        )
        truth = whole_batch(half, lambda m, x: loss(m(x)), many.to(torch.bfloat16).double())
        expected = truth.gradients["weight"]
        assert expected is not None and half.weight.grad is not None
        errors.append(float((half.weight.grad.double() - expected).norm() / expected.norm()))
    assert errors[1] < 0.5 * errors[0]


def test_terms_and_metrics_come_back() -> None:
    model, pair = net(), rows()

    def loss(left: torch.Tensor, right: torch.Tensor) -> Any:
        distance = (left - right).square().sum(1)
        terms = {"near": wb.mean(distance, distance > 1), "spread": 0.1 * wb.total(left.var(0))}
        return terms, {"right": (distance < 2).float()}

    result = wb.coupled_backward(model, encode, loss, pair, micro_batch_size=3)

    def whole(model: nn.Module, pair: Any) -> torch.Tensor:
        left, right = model(*pair)
        distance = (left - right).square().sum(1)
        return distance[distance > 1].mean() + 0.1 * left.var(0).sum()

    reference = whole_batch(net(), whole, pair)
    assert_same_gradient(model, reference)
    assert set(result.terms) == {"near", "spread"} and set(result.metrics) == {"right"}
    assert result.loss.item() == pytest.approx(reference.loss.item(), rel=1e-12)


def test_a_failure_leaves_gradients_as_they_were() -> None:
    model = net()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)

    def fails(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("mine")

    with pytest.raises(ArithmeticError, match="mine"):
        wb.coupled_backward(model, encode, fails, rows(), micro_batch_size=4)
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters() if p.grad is not None)


def test_a_failure_takes_back_what_parameters_outside_of_the_model_were_given() -> None:
    model, head, calls = net(), nn.Linear(4, 4).double(), []
    head.weight.grad = torch.ones_like(head.weight)

    def fails_late(model: nn.Module, pair: Any) -> Any:
        calls.append(len(pair[0]))
        if len(calls) == 5:  # three micro-batches, the last of them and the first have gone backward
            raise ArithmeticError("mine")
        return model(head(pair[0]), pair[1])

    with pytest.raises(ArithmeticError, match="mine"):
        wb.coupled_backward(model, fails_late, contrast(model), rows(), micro_batch_size=4)
    assert torch.equal(head.weight.grad, torch.ones_like(head.weight))
    assert head.bias.grad is None
    assert set(gradients_of(model).values()) == {None}


def test_parameters_that_only_the_graph_names_are_taken_back_too() -> None:
    model, hidden = net(), deque([nn.Parameter(torch.ones(4).double())])  # nobody looks for parameters in there
    calls: list[int] = []

    def fails_late(model: nn.Module, pair: Any) -> Any:
        calls.append(len(pair[0]))
        if len(calls) == 5:
            raise ArithmeticError("mine")
        return model(pair[0] * hidden[0], pair[1])

    with pytest.raises(ArithmeticError, match="mine"):
        wb.coupled_backward(model, fails_late, contrast(model), rows(), micro_batch_size=4)
    assert hidden[0].grad is None


def weightless(left: torch.Tensor, right: torch.Tensor) -> Any:
    return wb.mean((left - right).square().sum(1), torch.zeros(len(left)))


def test_a_loss_without_items_gives_zeros_and_no_step() -> None:
    model = net()
    result = wb.coupled_backward(model, encode, weightless, rows(), micro_batch_size=4)
    assert (result.loss.item(), [float(count) for count in result.items]) == (0.0, [0.0])
    for name, gradient in gradients_of(model).items():
        assert gradient is None or not gradient.any(), name
    before = copy.deepcopy(model.state_dict())
    sgd = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.1)
    result = wb.Step(model, sgd, wb.CoupledLoss(encode, weightless), micro_batch_size=4)(rows())
    assert not result.stepped and "no items" in str(result.reason)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_no_items_are_zeros_even_where_the_loss_is_no_number() -> None:
    model = net()

    def undefined(left: torch.Tensor, right: torch.Tensor) -> Any:
        return wb.LossSum((left - right).sum() * float("nan"), 0)

    wb.coupled_backward(model, encode, undefined, rows(), micro_batch_size=4)
    assert all(gradient is None or not gradient.any() for gradient in gradients_of(model).values())


@pytest.mark.parametrize("options", [{"items": len}, {"sync": "every"}], ids=str)
def test_options_without_a_meaning_for_all_rows_are_refused_before_anything_runs(options: Any) -> None:
    model, calls = net(), []

    def noted(model: nn.Module, pair: Any) -> Any:
        calls.append(pair)
        return model(*pair)

    with pytest.raises((TypeError, ValueError), match=f"Leave {next(iter(options))}= out"):
        wb.coupled_backward(model, noted, contrast(model), rows(), micro_batch_size=4, **options)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises((TypeError, ValueError), match=f"Leave {next(iter(options))}= out"):
        wb.Step(model, sgd, wb.CoupledLoss(noted, contrast(model)), micro_batch_size=4, **options)
    assert not calls
    wb.coupled_backward(model, noted, contrast(model), rows(), micro_batch_size=4, items=None, sync="last")


@pytest.mark.parametrize(
    ("encoder", "loss", "reason"),
    [
        (encode, lambda left, right: torch.ones(()), "does not depend on any parameter"),
        (encode, lambda left, right: left.detach().sum(), "does not depend on any parameter"),
        (lambda m, pair: [out.detach() for out in m(*pair)], lambda left, right: left.sum(), "No gradient has arrived"),
    ],
    ids=["a constant", "detached rows", "a detached encoder"],
)
def test_a_loss_that_no_parameter_can_change_is_refused(encoder: Any, loss: Any, reason: str) -> None:
    model = net()
    with pytest.raises(wb.LossError, match=reason):
        wb.coupled_backward(model, encoder, loss, rows(), micro_batch_size=4)
    assert set(gradients_of(model).values()) == {None}


@pytest.mark.parametrize("size", [4, None])
def test_gradients_that_are_switched_off_are_named_as_the_cause(size: int | None) -> None:
    model = net()
    with torch.no_grad(), pytest.raises(wb.LossError, match=r"disabled here: torch\.no_grad"):
        wb.coupled_backward(model, encode, contrast(model), rows(), micro_batch_size=size)


def test_one_function_where_two_are_called_is_refused() -> None:
    with pytest.raises(TypeError, match=r"loss_fn is Tensor; .*encode\(model, micro_batch\).*loss_fn\(encoded\)"):
        wb.coupled_backward(nn.Linear(3, 2), lambda m, x: m(x).square().mean(1), torch.zeros(4, 3), 2)  # type: ignore[arg-type]


def test_a_batch_without_rows_is_refused() -> None:
    model = net()
    with pytest.raises(wb.SplitError, match="The batch has no rows"):
        wb.coupled_backward(model, encode, contrast(model), rows(0), micro_batch_size=4)


def test_pooled_statistics_count_every_row_once_though_micro_batches_are_encoded_twice() -> None:
    model, pair = net(norm=True), rows()
    whole = net(norm=True)
    whole(*pair)
    wb.coupled_backward(model, encode, contrast(model), pair, micro_batch_size=4, batch_norm="pooled")
    for name, buffer in whole.named_buffers():
        assert torch.allclose(model.get_buffer(name), buffer, rtol=1e-12), name


def test_forms_that_change_between_micro_batches_are_refused() -> None:
    def changing(model: nn.Module, pair: Any) -> Any:
        left, right = model(*pair)
        return (left, right) if len(left) == 4 else {"left": left, "right": right}

    model = net()
    with pytest.raises(wb.LossError, match="Return one form"):
        wb.coupled_backward(model, changing, contrast(model), rows(), micro_batch_size=4)


@pytest.mark.parametrize(
    ("encoder", "reason"),
    [
        (lambda m, pair: m(*pair)[0].mean(), r"rows on its first dimension"),
        (lambda m, pair: {"a": m(*pair)[0], "b": 3}, r"encode returned int"),
        (lambda m, pair: (), r"returned"),
    ],
    ids=["one number", "no tensor", "nothing"],
)
def test_what_encode_may_not_return_is_refused_with_its_shape(encoder: Any, reason: str) -> None:
    model = net()
    with pytest.raises(wb.LossError, match=reason):
        wb.coupled_backward(model, encoder, lambda *encoded: encoded[0].sum(), rows(), micro_batch_size=4)


OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory.")


def short_of_memory(limit: int, error: BaseException = OUT_OF_MEMORY) -> Any:
    """Encode at most so many rows at a time with a graph, as if more did not fit."""

    def encode_some(model: nn.Module, pair: Any) -> Any:
        if len(pair[0]) > limit:
            raise error
        return model(*pair)

    return encode_some


@pytest.mark.parametrize("error", [OUT_OF_MEMORY, MemoryError()], ids=repr)
def test_auto_begins_anew_in_smaller_micro_batches_when_memory_runs_out(error: BaseException) -> None:
    model, pair, size = net(norm=True, drop=0.0), rows(), wb.Auto(8)
    reference = whole_batch(net(norm=True), meant, pair)
    result = wb.coupled_backward(
        model, short_of_memory(3, error), contrast(model), pair, micro_batch_size=size, batch_norm="exact"
    )
    assert_same_gradient(model, reference)
    assert (result.micro_batches, size.size) == (5, 2)
    assert model.left[1].num_batches_tracked == 1


def test_auto_ends_where_one_row_does_not_fit() -> None:
    model = net()
    with pytest.raises(wb.OutOfMemoryError, match=r"Micro-batches of 1 do not fit"):
        wb.coupled_backward(model, short_of_memory(0), contrast(model), rows(), micro_batch_size=wb.Auto(4))
    assert set(gradients_of(model).values()) == {None}


def test_steps_on_a_loss_over_all_rows_train_as_on_the_whole_batch() -> None:
    model, whole, pair = net(), net(), rows()
    ours, theirs = (torch.optim.Adam(each.parameters(), lr=0.01) for each in (model, whole))
    step = wb.Step(model, ours, wb.CoupledLoss(TOWERS, contrast(model)), micro_batch_size=3, max_grad_norm=0.5)
    for _ in range(4):
        result = step(pair)
        theirs.zero_grad()
        loss = meant(whole, pair)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        theirs.step()
        assert result.stepped and result.grad_norm == pytest.approx(norm.item(), rel=1e-10)
        assert result.loss.item() == pytest.approx(loss.item(), rel=1e-10)
    for a, b in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)


def test_the_usual_mean_of_the_micro_batches_losses_is_another_gradient() -> None:
    model, pair = net(), rows()
    naive = copy.deepcopy(model)
    for micro_batch in zip(*(side.split(5) for side in pair), strict=True):
        (meant(naive, micro_batch) / 2).backward()
    assert_differs(naive, whole_batch(model, meant, pair), by=0.05)


def two_views(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return model(batch[:, 0]), model(batch[:, 1])


def nt_xent(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    both = F.normalize(torch.cat([first, second]), dim=1)
    similar = (both @ both.T).masked_fill(torch.eye(len(both), dtype=torch.bool), -1e9)
    return F.cross_entropy(similar, torch.arange(len(both)).roll(len(first)))


@pytest.mark.parametrize("size", [1, 2, 4, pytest.param(wb.Tokens(24, length=lambda row: 6), id="tokens")])
def test_views_one_behind_the_other_are_refused_and_side_by_side_they_are_exact(size: Any) -> None:
    """Stacked views of several micro-batches would come as v1 v2 v1 v2, and be read as v1 v1 v2 v2."""
    torch.manual_seed(3)
    model, views = nn.Linear(4, 3).double(), torch.randn(7, 2, 4).double()
    samples, collate = list(views), torch.stack
    reference = whole_batch(model, lambda model, batch: nt_xent(*two_views(model, batch)), views)

    def stacked(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return torch.cat(two_views(model, batch))

    def halves(z: torch.Tensor) -> torch.Tensor:
        return nt_xent(*z.chunk(2))

    with pytest.raises(wb.LossError, match=r"encode returned \(\d+, 3\) for a micro-batch .*\(z1, z2\).*torch\.stack"):
        wb.coupled_backward(model, stacked, halves, samples, size, collate=collate)
    assert set(gradients_of(model).values()) == {None}

    for encode_views, loss in (
        (two_views, nt_xent),
        (lambda model, batch: torch.stack(two_views(model, batch), 1), lambda z: nt_xent(*z.unbind(1))),
    ):
        model.zero_grad()
        wb.coupled_backward(model, encode_views, loss, samples, size, collate=collate)
        assert_same_gradient(model, reference)

    model.zero_grad()
    halves(torch.cat([stacked(model, part) for part in views.split(2)])).backward()
    assert_differs(model, reference)


def test_views_one_behind_the_other_are_right_in_one_micro_batch() -> None:
    torch.manual_seed(4)
    model, views = nn.Linear(4, 3).double(), torch.randn(5, 2, 4).double()
    reference = whole_batch(model, lambda model, batch: nt_xent(*two_views(model, batch)), views)
    wb.coupled_backward(
        model, lambda model, batch: torch.cat(two_views(model, batch)), lambda z: nt_xent(*z.chunk(2)), views
    )
    assert_same_gradient(model, reference)


def test_half_as_many_entries_as_rows_are_refused() -> None:
    def difference(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        return torch.sub(*model(rows).chunk(2))

    with pytest.raises(wb.LossError, match=r"\(2, 1\) for a micro-batch of 4 rows.*\(rows, 2, ...\)"):
        wb.coupled_backward(nn.Linear(3, 1), difference, lambda z: -F.logsigmoid(z).mean(), torch.randn(8, 3), 4)
