"""How a window runs: how many passes, what it touches, what it leaves when it fails, what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import wholebatch as wb
from tests.oracle import assert_differs, assert_same_gradient, gradients_of, whole_batch
from wholebatch.gradient.separable import accumulate
from wholebatch.model.gradients import GradientAccumulator

ROWS = torch.randn(11, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
MASK = torch.arange(11) % 3 != 0


class Counted(nn.Module):
    """A model that counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.inner = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        out: Tensor = self.inner(x)
        return out


def one(model: nn.Module, batch: tuple[Tensor, Tensor]) -> wb.LossSum:
    return wb.mean(model(batch[0]).square().mean(1), batch[1])


def two(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Any:
    out = model(batch[0])
    return wb.mean(out.square().mean(1), batch[1]) + 0.5 * wb.mean(out.abs().mean(1))


def whole_one(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return model(batch[0]).square().mean(1)[batch[1]].mean()


def whole_two(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return whole_one(model, batch) + 0.5 * model(batch[0]).abs().mean()


def items_of_two(batch: tuple[Tensor, Tensor]) -> list[Any]:
    return [batch[1].sum(), len(batch[0])]


def test_one_denominator_takes_one_forward_a_micro_batch() -> None:
    model = Counted()
    wb.backward(model, one, (ROWS, MASK), 3)
    assert model.forwards == 4


def test_several_denominators_take_a_counting_pass() -> None:
    model = Counted()
    wb.backward(model, two, (ROWS, MASK), 3)
    assert model.forwards == 1 + 4 + 4


def test_stated_items_or_a_single_micro_batch_spare_the_counting_pass() -> None:
    stated, single = Counted(), Counted()
    wb.backward(stated, two, (ROWS, MASK), 3, items=items_of_two)
    wb.backward(single, two, (ROWS, MASK))
    assert (stated.forwards, single.forwards) == (4, 1)
    for model in (stated, single):
        assert_same_gradient(model, whole_batch(model, whole_two, (ROWS, MASK)))


@pytest.mark.parametrize(
    "items",
    [
        items_of_two,
        lambda batch: {"masked": batch[1].sum(), "all": len(batch[0])},
        lambda batch: {"all": len(batch[0]), "masked": int(batch[1].sum())},
    ],
    ids=["in order", "by name", "in another order by name"],
)
def test_items_are_stated_in_order_or_by_name(items: Any) -> None:
    model = Counted()

    def named(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
        masked, every = two(model, batch).parts
        return {"masked": masked, "all": every}

    wb.backward(model, named, (ROWS, MASK), 4, items=items)
    assert_same_gradient(model, whole_batch(model, whole_two, (ROWS, MASK)))


@pytest.mark.parametrize(
    ("items", "error", "words"),
    [
        (lambda batch: [len(batch[0]), len(batch[0])], wb.InexactError, "11 items for the term 0"),
        (lambda batch: [len(batch[0])], wb.LossError, "1 counts"),
        (lambda batch: {"ce": 3, "aux": 4}, wb.LossError, "'ce', 'aux'"),
        (lambda batch: "many", wb.LossError, "items= must return a number"),
    ],
    ids=["wrong", "too few", "other names", "no numbers"],
)
def test_wrong_items_are_refused_and_nothing_is_left(items: Any, error: type[Exception], words: str) -> None:
    model = Counted()
    with pytest.raises(error, match=words):
        wb.backward(model, two, (ROWS, MASK), 3, items=items)
    assert all(p.grad is None for p in model.parameters())


def test_terms_that_share_a_denominator_by_chance_are_told_apart_later() -> None:
    """The shapes of the two terms agree in the first micro-batch only."""
    model = Counted()
    window = wb.Window([(ROWS[:4], 4), (ROWS[4:], 2)])

    def loss(model: nn.Module, batch: tuple[Tensor, int]) -> Any:
        out = model(batch[0])[:, 0]
        return wb.mean(out.square()) + wb.mean(out[: batch[1]].abs())

    wb.backward(model, loss, window)
    kept = torch.cat([ROWS[:4], ROWS[4:6]])

    def whole(model: nn.Module, batch: Any) -> Tensor:
        return model(ROWS)[:, 0].square().mean() + model(kept)[:, 0].abs().mean()

    assert_same_gradient(model, whole_batch(model, whole, None))


def test_a_term_may_be_missing_from_some_micro_batches() -> None:
    model = Counted()

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
        out = model(batch[0]).square().mean(1)
        return {"all": out} | ({"masked": wb.mean(out, batch[1])} if bool(batch[1].all()) else {})

    parts = [(ROWS[:4], MASK[:4]), (ROWS[4:6], MASK[4:6]), (ROWS[6:], MASK[6:])]
    result = wb.backward(model, loss, wb.Window(parts))
    assert isinstance(result.items, dict)
    assert {name: float(count) for name, count in result.items.items()} == {"all": 11, "masked": 2}

    def whole(model: nn.Module, batch: Any) -> Tensor:
        return model(ROWS).square().mean() + model(ROWS[4:6]).square().mean()

    assert_same_gradient(model, whole_batch(model, whole, None))


def test_each_micro_batch_says_its_rows_and_items() -> None:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Any] | None:
        out = model(batch[0]).square().mean(1)
        masked = {"masked": wb.mean(out, batch[1])} if bool(batch[1][0]) else {}
        return {"all": out} | masked if len(out) == 4 else None

    sizes = wb.backward(Counted(), loss, (ROWS[:10], MASK[:10]), 4, verify="never").sizes
    assert [list(size.index) for size in sizes[1:]] == [[4, 5, 6, 7], [8, 9]]
    assert [size.rows for size in sizes] == [4, 4, 2]
    items = [{str(name): float(count) for name, count in dict(size.items).items()} for size in sizes]
    assert items == [{"all": 4, "masked": 0}, {"all": 4, "masked": 3}, {"all": 0, "masked": 0}]

    lengths = [5, 1, 4, 2, 3]
    tokens = wb.Tokens(6, length=int)
    step = wb.Step(
        model := nn.Linear(1, 1), torch.optim.SGD(model.parameters(), 0.1), by_length, tokens, collate=padded
    )
    sizes = step(lengths).sizes
    assert sorted(row for size in sizes for row in size.index) == [0, 1, 2, 3, 4]
    assert [float(size.items[0]) for size in sizes] == [sum(lengths[row] for row in size.index) for size in sizes]


def padded(lengths: list[int]) -> Tensor:
    return torch.tensor([[float(place < length) for place in range(max(lengths))] for length in lengths])


def by_length(model: nn.Module, mask: Tensor) -> wb.LossSum:
    return wb.mean(model(mask[..., None]).squeeze(-1).square(), mask)


def test_an_unnamed_sum_keeps_its_number_of_terms() -> None:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Any:
        return two(model, batch) if bool(batch[1][0]) else one(model, batch)

    with pytest.raises(wb.LossError, match=r"one term.*a sum of 2 terms.*Name them"):
        wb.backward(Counted(), loss, (ROWS, MASK), 4)


def test_parameters_outside_of_the_model_are_mended_too() -> None:
    model, scale = Counted(), nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    scale.grad = torch.tensor(1.0, dtype=torch.float64)
    wb.backward(model, lambda model, rows: model(rows).square() * scale, ROWS, 3)
    expected = model(ROWS).square().mean()
    torch.testing.assert_close(scale.grad, 1.0 + expected.detach())


def test_a_value_that_exists_once_counts_once() -> None:
    model = Counted()

    def decay(model: nn.Module) -> Tensor:
        return torch.stack([p.square().sum() for p in model.parameters()]).sum()

    def loss(model: nn.Module, rows: Tensor) -> Any:
        return wb.mean(model(rows).square()) + 0.1 * wb.once(decay(model))

    def with_total(model: nn.Module, rows: Tensor) -> Any:
        return wb.mean(model(rows).square()) + 0.1 * wb.total(decay(model))

    reference = whole_batch(model, lambda m, rows: m(rows).square().mean() + 0.1 * decay(m), ROWS)
    wb.backward(model, loss, ROWS, 3)
    assert_same_gradient(model, reference)
    model.zero_grad()
    wb.backward(model, with_total, ROWS, 3, verify="never")
    assert_differs(model, reference)


def test_complex_parameters_are_served() -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 3, dtype=torch.complex128)
    rows = torch.complex(ROWS, ROWS.flip(0))
    reference = whole_batch(model, lambda m, x: m(x).abs().square().mean(), rows)
    wb.backward(model, lambda m, x: m(x).abs().square(), rows, 3)
    assert_same_gradient(model, reference)


def test_an_error_leaves_gradients_as_before() -> None:
    model, calls = Counted(), []
    wb.backward(model, one, (ROWS, MASK), 3)
    before, held = gradients_of(model), [p.grad for p in model.parameters()]

    def broken(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Any:
        calls.append(batch)
        return one(model, batch) if len(calls) < 3 else batch[0].sum()

    with pytest.raises(wb.LossError, match="without dimensions"):
        wb.backward(model, broken, (ROWS, MASK), 3)
    assert_same_gradient(model, before)
    assert all(p.grad is grad for p, grad in zip(model.parameters(), held, strict=True))


def test_gradients_that_were_there_stay_the_same_tensor() -> None:
    model = Counted()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    held = [p.grad for p in model.parameters()]
    wb.backward(model, one, (ROWS, MASK), 3)
    assert all(p.grad is grad for p, grad in zip(model.parameters(), held, strict=True))
    assert_same_gradient(model, whole_batch(model, whole_one, (ROWS, MASK)))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"colate": list}, TypeError, "Did you mean 'collate'"),
        ({"sync": "first"}, ValueError, "'last', 'every'"),
        ({"batch_norm": "exactly"}, ValueError, "'exact', .*'pooled', 'micro'"),
        ({"micro_batch_size": 0}, ValueError, "at least 1"),
        ({"micro_batch_size": 2.5}, TypeError, "whole number"),
    ],
)
def test_a_wrong_option_is_refused(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        wb.backward(Counted(), one, (ROWS, MASK), **arguments)


def test_a_model_that_is_none_is_refused() -> None:
    with pytest.raises(TypeError, match=r"model is function.*torch\.nn\.Module"):
        wb.backward(one, one, (ROWS, MASK), 3)  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["no_grad", "frozen", "constant"])
def test_a_loss_that_nothing_can_learn_from_is_refused(how: str) -> None:
    model = Counted().requires_grad_(how != "frozen")

    def loss(model: nn.Module, rows: Tensor) -> Tensor:
        return rows.square() if how == "constant" else model(rows)

    with torch.set_grad_enabled(how != "no_grad"), pytest.raises(wb.LossError, match="does not depend on any"):
        wb.backward(model, loss, ROWS, 3)
    assert all(p.grad is None for p in model.parameters())


def test_a_micro_batch_that_is_constant_counts_in_the_denominator() -> None:
    model = Counted()

    def loss(model: nn.Module, rows: Tensor) -> Tensor:
        return torch.zeros(len(rows), dtype=torch.float64) if len(rows) == 2 else model(rows).square().mean(1)

    wb.backward(model, loss, wb.Window([ROWS[:2], ROWS[2:6], ROWS[6:]]))
    assert_same_gradient(model, whole_batch(model, lambda m, x: m(x[2:]).square().mean(1).sum() / 11, ROWS))


def test_a_loss_function_that_goes_backward_itself_is_refused() -> None:
    model = Counted()
    with pytest.raises(wb.LossError, match="calls backward"):
        wb.backward(model, lambda model, rows: model(rows).mean().backward(), ROWS, 3)
    assert all(p.grad is None for p in model.parameters())


def test_a_metric_without_denominator_is_a_sum_however_it_is_cut() -> None:
    def loss(model: nn.Module, rows: Tensor) -> Any:
        return model(rows).square(), {"rows": wb.total(torch.ones(len(rows)))}

    assert [float(wb.backward(Counted(), loss, ROWS, n).metrics["rows"]) for n in (1, 4, 11)] == [11.0] * 3


class Head(nn.Module):
    """Holds a BatchNorm where torch does not see it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 3).double()
        self.extra = [nn.BatchNorm1d(3).double()]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.extra[0](self.inner(x))
        return out


def test_batch_norm_outside_of_the_model_is_refused_too() -> None:
    head = nn.BatchNorm1d(3).double()
    with pytest.raises(wb.InexactError, match="BatchNorm1d outside of the model"):
        wb.backward(Counted(), lambda model, rows: head(model(rows)).square(), ROWS, 3)
    with pytest.raises(wb.InexactError, match="BatchNorm1d outside of the model"):
        wb.backward(Head(), lambda model, rows: model(rows).square(), ROWS, 3)


def test_a_graph_shared_between_micro_batches_is_named() -> None:
    model = Counted()
    features = model.inner[0](ROWS)
    with pytest.raises(wb.LossError, match="share a graph"):
        wb.backward(model, lambda model, x: model.inner[2](x).square(), features, 3)
    assert all(p.grad is None for p in model.parameters())


def test_weights_that_are_no_number_are_no_crash() -> None:
    model = Counted()
    result = wb.backward(model, lambda m, x: wb.mean(m(x).mean(1), torch.full((len(x),), float("nan"))), ROWS, 3)
    assert torch.isnan(result.loss)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"items": 4}, "items=4"),
        ({"accumulate_in": "float32"}, "torch.float32"),
        ({"accumulate_in": torch.int32}, "torch.float32"),
        ({"offload": "yes"}, "True or False"),
    ],
)
def test_an_option_of_a_wrong_type_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        wb.backward(Counted(), one, (ROWS, MASK), 3, **arguments)


class Reads(TorchDispatchMode):
    """Counts how often a number is read from a tensor, which on a device would mean to wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("loss", [one, two], ids=["one denominator", "several"])
def test_no_number_is_read_from_the_device(loss: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts are kept as tensors here, as they are on a device; on the CPU they are read at once, which is free."""
    kept = staticmethod(lambda count: count.reshape(()) if isinstance(count, Tensor) else float(count))
    monkeypatch.setattr("wholebatch.loss.terms.plain_count", kept)
    model = Counted()
    with Reads() as reads:
        pending = accumulate(model, loss, (ROWS, MASK), 3, GradientAccumulator(), verify="never")
        result = pending.finish()
    assert reads.count == 0
    assert isinstance(pending.alive, Tensor)
    whole = whole_one if loss is one else whole_two
    assert_same_gradient(model, whole_batch(model, whole, (ROWS, MASK)))
    torch.testing.assert_close(result.loss, whole(model, (ROWS, MASK)).detach())


def test_no_items_at_all_write_zeros_even_where_counts_stay_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = staticmethod(lambda count: count.reshape(()) if isinstance(count, Tensor) else float(count))
    monkeypatch.setattr("wholebatch.loss.terms.plain_count", kept)
    model = Counted()

    def poisoned(model: nn.Module, batch: tuple[Tensor, Tensor]) -> wb.LossSum:
        return wb.mean(model(batch[0]).mean(1) * float("nan"), batch[1].double())

    result = wb.backward(model, poisoned, (ROWS, torch.zeros(11)), 3)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    assert float(result.items[0]) == 0.0  # type: ignore[index]
