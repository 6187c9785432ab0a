"""The first window proves itself: what does not add up is refused before anything is stepped, what does is let pass."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import assert_differs, assert_same_gradient, gradients_of, whole_batch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import wholebatch as wb
from wholebatch.errors import InexactError, WholeBatchError

D = torch.float64


def linear() -> nn.Module:
    return nn.Linear(5, 3).double()


def rows(n: int = 24) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(n, 5, dtype=D), "y": torch.randint(0, 3, (n,))}


def losses(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


# Right loops: model, loss function, batch, options.


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
        self.inputs, self.head = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.inputs(x).unsqueeze(1)).squeeze(1))


class Counting(nn.Module):
    """Counts its calls, for a log."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls, self.seen = linear(), 0, []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(float(x.detach().sum()))
        return self.layer(x)


def with_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 3)).double()


def noisy(model: Any, batch: Any) -> Tensor:
    x = batch["x"]
    times = torch.randint(0, 9, (len(x), 1))
    return (model(x + torch.randn_like(x) * times)[:, 0] - 1).square()


def uneven(model: Any, batch: Any) -> wb.LossSum:
    return wb.mean(losses(model, batch), batch["y"] > 0)


def several(model: Any, batch: Any) -> Any:
    weight = next(model.parameters())
    return {"ce": losses(model, batch), "l2": 0.1 * wb.once(weight.square().sum()), "all": wb.total(model(batch["x"]))}


RIGHT: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Any], Any], dict[str, Any]]] = {
    "one loss a row": (linear, losses, {}),
    "a mask": (linear, uneven, {}),
    "several terms": (linear, several, {}),
    "dropout": (lambda: nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.5), nn.Linear(6, 3)).double(), losses, {}),
    "attention with dropout": (lambda: Encoder().double(), losses, {}),
    "noise and time steps": (linear, noisy, {}),
    "float32": (lambda: nn.Linear(5, 3), lambda m, b: F.cross_entropy(m(b["x"].float()), b["y"], reduction="none"), {}),
    "bfloat16": (
        lambda: nn.Linear(5, 3).bfloat16(),
        lambda m, b: F.cross_entropy(m(b["x"].bfloat16()).float(), b["y"], reduction="none"),
        {},
    ),
    "exact BatchNorm": (with_norm, losses, {"batch_norm": "exact"}),
    "calls that are counted": (Counting, losses, {}),
    "a mean with its items": (linear, lambda m, b: wb.from_mean(losses(m, b).mean(), items=len(b["y"])), {}),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_loop_is_verified_and_left_as_it_was(name: str) -> None:
    make, loss_fn, options = RIGHT[name]
    model, batch = make(), rows()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    torch.manual_seed(5)
    result = wb.backward(model, loss_fn, batch, 8, **options)
    assert result.verified.startswith("verified on 8 rows"), result.verified
    unproven = make()
    unproven.load_state_dict(before)
    torch.manual_seed(5)
    plain = wb.backward(unproven, loss_fn, batch, 8, verify="never", **options)
    assert plain.verified == 'not verified: verify="never"'
    torch.testing.assert_close(result.loss, plain.loss, rtol=0, atol=0)
    for (key, one), two in zip(model.named_parameters(), unproven.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad), key  # to the last bit: the same draws, the same order
    for key, value in model.state_dict().items():
        assert torch.equal(value, unproven.state_dict()[key]), key


# Wrong loops, each with words of its refusal. In all of them the window itself sees nothing.


def hidden_norm() -> nn.Module:
    class Hidden(nn.Module):
        norm = staticmethod(nn.BatchNorm1d(6).double())

        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(5, 6).double(), nn.Linear(6, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.last(type(self).norm(self.first(x)))

    return Hidden()


def normalised(model: Any, batch: Any) -> Tensor:
    advantage = batch["x"][:, 0]
    return losses(model, batch) * (advantage - advantage.mean()) / advantage.std(unbiased=False).clamp(min=1e-3)


class Moving:
    """Divides by an average that moves with every call."""

    def __init__(self) -> None:
        self.average = 1.0

    def __call__(self, model: Any, batch: Any) -> Tensor:
        values = losses(model, batch)
        self.average = 0.9 * self.average + 0.1 * float(values.detach().mean())
        return values / self.average


class PutIn(torch.autograd.Function):
    """Adds a gradient that no loss shows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, auxiliary: Tensor) -> Tensor:
        ctx.save_for_backward(auxiliary)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.ones_like(ctx.saved_tensors[0])


def test_advantages_that_add_up_to_zero_are_rows_that_meet_and_no_hook() -> None:
    model, batch = linear(), {**rows(12), "advantage": torch.randn(12, dtype=D)}
    before = losses(model, batch).detach()

    def surrogate(model: Any, batch: Any) -> Tensor:
        advantage = batch["advantage"]
        advantage = advantage - advantage.mean()
        advantage = advantage / (advantage.norm() + 1e-8)
        return -(batch["before"] - losses(model, batch)).exp() * advantage

    batch["before"] = before  # the ratio is 1 wherever the policy has not moved yet, so every loss is 0
    reference = whole_batch(model, lambda model, batch: surrogate(model, batch).mean(), batch)
    with pytest.raises(InexactError, match=r"(?s)gradient does not.*Rows meet .*Or else: A hook"):
        wb.backward(model, surrogate, batch, 4)
    model.zero_grad()
    wb.backward(model, surrogate, batch, 4, verify="never")
    assert_differs(model, reference)


def put_in(model: Any, batch: Any) -> Tensor:
    out = model(batch["x"])
    return F.cross_entropy(PutIn.apply(out, out.square().mean()), batch["y"], reduction="none")


def clipped() -> nn.Module:
    model = linear()
    model.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return model


def tracked_elsewhere() -> Callable[[Any, Any], Tensor]:
    count = 0

    def loss_fn(model: Any, batch: Any) -> Tensor:
        nonlocal count
        count += 1
        return losses(model, batch) / count

    return loss_fn


def mixed_up(model: Any, batch: Any) -> Tensor:
    x, other = batch["x"], torch.randperm(len(batch["x"]))
    return F.cross_entropy(model(0.7 * x + 0.3 * x[other]), batch["y"], reduction="none")


WRONG: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Any], Any], str]] = {
    "mean of means": (linear, lambda m, b: wb.from_mean(losses(m, b).mean(), items=1), "have to add up over rows"),
    "items before the mask": (
        linear,
        lambda m, b: wb.from_mean(losses(m, b)[b["y"] > 0].mean(), items=len(b["y"])),
        "not the sum of their parts",
    ),
    "normalised inside": (linear, normalised, "coupled_backward"),
    "in-batch negatives": (
        linear,
        lambda m, b: F.cross_entropy(m(b["x"]) @ b["x"][:, :3].T, torch.arange(len(b["x"])), reduction="none"),
        "coupled_backward",
    ),
    "an average that moves": (linear, Moving(), "average"),
    "a count in a closure": (linear, tracked_elsewhere(), "count|state"),
    "BatchNorm that nobody registered": (hidden_norm, losses, "BatchNorm"),
    "a gradient put in": (linear, put_in, "backward of its own"),
    "a hook that clips": (clipped, losses, "max_grad_norm"),
    "rows mixed up": (linear, mixed_up, "Rows meet"),
    "the size of a mean": (
        linear,
        lambda m, b: wb.from_mean((m(b["x"])[:, 0] - b["x"][:, 1]).mean().abs(), items=len(b["x"])),
        "Rows meet",
    ),
    "a mean as a sum": (linear, lambda m, b: wb.total(losses(m, b).mean()), r"mean over n items is wb\.from_mean"),
    "mean of means under dropout": (
        lambda: nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.5), nn.Linear(6, 3)).double(),
        lambda m, b: wb.from_mean(losses(m, b).mean(), items=1),
        "have to add up over rows",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_loop_is_refused_before_it_has_left_anything(name: str) -> None:
    make, loss_fn, words = WRONG[name]
    model, batch = make(), rows(20)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    held = {key: torch.ones_like(p) for key, p in model.named_parameters()}
    for key, parameter in model.named_parameters():
        parameter.grad = held[key]
    with pytest.raises(WholeBatchError, match=words):
        wb.backward(model, loss_fn, batch, 8)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(p.grad is held[key] and bool((p.grad == 1).all()) for key, p in model.named_parameters())


TWINS = {
    "mean of means": (WRONG["mean of means"][1], lambda m, b: losses(m, b).mean()),
    "normalised inside": (normalised, lambda m, b: normalised(m, b).mean()),
    "in-batch negatives": (WRONG["in-batch negatives"][1], lambda m, b: WRONG["in-batch negatives"][1](m, b).mean()),
}


@pytest.mark.parametrize("name", TWINS)
def test_without_the_proof_the_gradient_is_another(name: str) -> None:
    loss_fn, plain = TWINS[name]
    model, batch = linear(), rows(20)
    batch["y"][:6] = 0
    reference = whole_batch(model, plain, batch)
    wb.backward(model, lambda m, b: loss_fn(m, b), batch, 16, verify="never")
    assert_differs(model, reference)


@pytest.mark.filterwarnings("ignore:std")
def test_rows_whose_deviation_needs_two_of_them_are_tried_in_halves() -> None:
    def normalised_by_two(model: Any, batch: Any) -> Tensor:
        advantage = batch["x"][:, 0]
        return losses(model, batch) * (advantage - advantage.mean()) / advantage.std()

    with pytest.raises(WholeBatchError, match=r"in two parts|parts \(2 \+ 2\)"):
        wb.backward(linear(), normalised_by_two, rows(), 4)


def test_a_step_inside_the_backward_is_refused_and_undone() -> None:
    model = linear()
    node = model.weight.expand_as(model.weight).grad_fn.next_functions[0][0]
    handle = node.register_hook(lambda *_: (model.weight.data.sub_(0.1), None)[1])
    before = model.weight.detach().clone()
    with pytest.raises(WholeBatchError, match="steps inside"):
        wb.backward(model, losses, rows(), 8)
    handle.remove()
    assert torch.equal(model.weight, before)


# Ready-made windows: rows lie as the loader lays them.


def window_of(batch: dict[str, Tensor], size: int) -> wb.Window:
    return wb.Window(
        [{key: value[i : i + size] for key, value in batch.items()} for i in range(0, len(batch["y"]), size)]
    )


def test_a_window_of_a_loader_is_tried_too() -> None:
    result = wb.backward(linear(), losses, window_of(rows(), 8))
    assert result.verified.startswith("verified on 8 rows")
    with pytest.raises(WholeBatchError, match="add up"):
        wb.backward(linear(), lambda m, b: wb.from_mean(losses(m, b).mean(), items=1), window_of(rows(), 8))


def test_pairs_in_halves_of_a_ready_made_micro_batch_pass() -> None:
    def ranked(model: Any, x: Tensor) -> Tensor:
        better, worse = model(x)[:, 0].chunk(2)
        return -F.logsigmoid(better - worse)

    torch.manual_seed(0)
    window = wb.Window([torch.randn(12, 5, dtype=D) for _ in range(3)])
    assert "pairs in halves" in wb.backward(linear(), lambda m, b: wb.mean(ranked(m, b)), window).verified


def test_time_on_the_first_dimension_of_a_ready_made_micro_batch_passes() -> None:
    torch.manual_seed(0)
    recurrent = nn.LSTM(5, 3).double()
    window = wb.Window([torch.randn(7, 4, 5, dtype=D) for _ in range(3)])

    def last(model: Any, x: Tensor) -> wb.LossSum:
        return wb.mean(model(x)[0].square())

    assert "second dimension" in wb.backward(recurrent, last, window).verified


def test_groups_of_rows_pass_where_the_size_keeps_them_whole() -> None:
    def grouped(model: Any, x: Tensor) -> Tensor:
        scores = model(x)[:, 0].view(-1, 4)
        return (scores - scores.mean(1, keepdim=True)).square().flatten()

    torch.manual_seed(0)
    batch = torch.randn(16, 5, dtype=D)
    assert "two micro-batches" in wb.backward(linear(), grouped, batch, 4).verified
    with pytest.raises((WholeBatchError, RuntimeError)):
        wb.backward(linear(), grouped, batch, 6)


def around_its_centre(model: Any, batch: Any) -> Tensor:
    """Each row beside the mean of those of its class."""
    said, (_, place) = model(batch["x"]), batch["y"].unique(return_inverse=True)
    members = F.one_hot(place).to(said.dtype)
    return (said - (members @ (members.T @ said / members.sum(0)[:, None]))).square().sum(1)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 6])
def test_rows_of_a_class_that_lie_side_by_side_are_tried_side_by_side(size: int) -> None:
    model, batch = linear(), rows(16)
    batch["y"] = torch.arange(16) // 4
    with pytest.raises(WholeBatchError, match="Rows meet"):
        wb.backward(model, around_its_centre, batch, size)
    assert "two micro-batches" in wb.backward(linear(), around_its_centre, batch, 4).verified
    reference = whole_batch(model, lambda m, b: around_its_centre(m, b).mean(), batch)
    wb.backward(model, around_its_centre, batch, size, verify="never")
    assert_differs(model, reference)


@pytest.mark.parametrize("begin", [0, 1])
def test_a_pair_that_lies_across_two_micro_batches_of_two_is_found(begin: int) -> None:
    model, batch = linear(), rows(16)
    batch["y"] = (torch.arange(16) + begin) // 2
    if begin == 0:
        assert "two micro-batches" in wb.backward(model, around_its_centre, batch, 2).verified
        return
    with pytest.raises(WholeBatchError, match="Rows meet"):
        wb.backward(model, around_its_centre, batch, 2)
    reference = whole_batch(model, lambda m, b: around_its_centre(m, b).mean(), batch)
    wb.backward(model, around_its_centre, batch, 2, verify="never")
    assert_differs(model, reference)


class Clipped(torch.autograd.Function):
    """Clips what comes back, as recurrent networks do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-0.01, 0.01)


def hooked(x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return x


@pytest.mark.parametrize("clip", [Clipped.apply, hooked], ids=["a backward of its own", "a hook on the graph"])
def test_what_clips_each_row_needs_the_number_of_items_beforehand(clip: Callable[[Tensor], Tensor]) -> None:
    def loss_fn(model: Any, batch: Any) -> Tensor:
        return F.cross_entropy(clip(model(batch["x"])), batch["y"], reduction="none")

    model, batch = linear(), rows(21)
    with pytest.raises(WholeBatchError, match=r"half as large.*items=lambda"):
        wb.backward(model, loss_fn, batch, 4)
    reference = whole_batch(model, lambda m, b: loss_fn(m, b).mean(), batch)
    wb.backward(model, loss_fn, batch, 4, items=lambda micro_batch: len(micro_batch["y"]))
    assert_same_gradient(model, reference)
    model.zero_grad()
    wb.backward(model, loss_fn, batch, 4, verify="never")
    assert_differs(model, reference)


def tokens_as_rows(model: Any, batch: Any) -> wb.LossSum:
    """A mean over the labels that count, stated as one over rows."""
    each = model(batch["x"]).square()[..., 0]
    return wb.from_mean((each * batch["mask"]).sum() / batch["mask"].sum(), items=len(batch["x"]))


def labelled(labels: Sequence[int]) -> dict[str, Tensor]:
    mask = torch.arange(6) < torch.tensor(labels)[:, None]
    return {"x": torch.randn(len(labels), 6, 5, dtype=D), "mask": mask}


ALIKE: dict[str, tuple[Callable[[], Any], int | None]] = {
    "alike in neighbouring micro-batches": (lambda: labelled([2] * 8 + [6] * 8), 4),
    "alike in both halves": (lambda: wb.Window([labelled([6, 6, 2, 2]), labelled([1, 3, 1, 5])]), None),
    "single rows": (lambda: labelled([2, 2, 2, 6, 6, 5]), 1),
}


@pytest.mark.parametrize("name", ALIKE)
def test_rows_that_add_up_only_because_they_are_alike_prove_nothing(name: str) -> None:
    make, size = ALIKE[name]
    torch.manual_seed(0)
    batch, model = make(), linear()
    with pytest.raises(InexactError, match=r"items=n\) with that number"):
        wb.backward(model, tokens_as_rows, batch, size)
    wb.backward(model, tokens_as_rows, batch, size, verify="never")
    parts = list(batch) if isinstance(batch, wb.Window) else [batch]
    whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    assert_differs(model, whole_batch(model, lambda m, b: tokens_as_rows(m, b).value, whole))


class Grown(nn.Module):
    """Makes its last layer in the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 5, dtype=D), None

    def forward(self, x: Tensor) -> Any:
        if self.last is None:
            self.last = linear()
        return self.last(self.first(x))


def test_a_layer_that_the_first_forward_makes_is_there_after_one_forward_before() -> None:
    torch.manual_seed(0)
    model = Grown()
    with pytest.raises(InexactError, match="one forward before the window"):
        wb.backward(model, losses, rows(20), 8)
    model(rows(20)["x"])
    assert wb.backward(model, losses, rows(20), 8).verified.startswith("verified")
    assert_same_gradient(model, whole_batch(model, lambda m, b: losses(m, b).mean(), rows(20)))


# What can't be tried is said, and noted once.


def test_parameters_that_the_first_forward_makes_are_drawn_as_ever() -> None:
    def lazy() -> nn.Module:
        return nn.Sequential(nn.LazyLinear(8, dtype=D), nn.Tanh(), nn.Linear(8, 3, dtype=D))

    torch.manual_seed(0)
    model, plain = lazy(), lazy()
    plain[2].load_state_dict(model[2].state_dict())
    torch.manual_seed(3)
    assert "next window" in wb.backward(model, losses, rows(20), 8).verified
    torch.manual_seed(3)
    plain(rows(20)["x"])
    assert torch.equal(model[0].weight, plain[0].weight) and model[0].weight.unique().numel() > 8
    assert wb.backward(model, losses, rows(20), 8).verified.startswith("verified")
    with pytest.raises(ValueError, match=r"Run one forward before"):
        wb.check(lazy(), losses, rows(20), 8)


def test_what_cannot_be_tried_is_said_and_noted_once(caplog: pytest.LogCaptureFixture) -> None:
    model = linear()
    window = wb.Window([{"x": torch.randn(1, 2 + n, 5, dtype=D)} for n in range(3)])  # rows that can't be joined
    with caplog.at_level(logging.WARNING, "wholebatch"):
        results = [wb.backward(model, lambda m, b: m(b["x"]).square().sum((1, 2)), window) for _ in range(2)]
    assert {result.verified for result in results} == {
        "not verified: no micro-batch has two rows that can be told apart"
    }
    assert [record.name for record in caplog.records] == ["wholebatch"]


def test_numpy_noise_is_said_to_be_unproven() -> None:
    numpy = pytest.importorskip("numpy")

    def noised(model: Any, batch: Any) -> Tensor:
        return (model(batch["x"]) + torch.from_numpy(numpy.random.randn(3, len(batch["x"])).T)).square().sum(1)

    assert "NumPy" in wb.backward(linear(), noised, rows(), 8).verified


def test_one_micro_batch_proves_nothing_and_needs_to_prove_nothing() -> None:
    assert "nothing is cut" in wb.backward(linear(), WRONG["normalised inside"][1], rows(), 24).verified


def test_a_proof_holds_for_the_windows_after_it(capsys: pytest.CaptureFixture[str]) -> None:
    model = linear()

    def sizes() -> list[int]:
        return [int(line) for line in capsys.readouterr().out.split()]

    def once() -> Any:
        criterion = nn.CrossEntropyLoss(reduction="none")

        def loss_fn(model: Any, batch: Any) -> Tensor:
            print(len(batch["y"]))  # a list would be put back
            return criterion(model(batch["x"]), batch["y"])

        return loss_fn

    wb.backward(model, once(), rows(), 8)
    assert sorted(sizes()[:3]) == [2, 6, 8]
    said = wb.backward(model, once(), rows(), 8).verified
    assert sizes() == [8, 8, 8] and said.startswith("verified")
    wb.backward(model, once(), rows(), 8, verify="always")
    assert len(sizes()) == 9


def test_another_criterion_is_proven_anew() -> None:
    def make(scale: Callable[[Tensor], Tensor]) -> Any:
        return lambda model, batch: scale(losses(model, batch))

    model = linear()
    assert wb.backward(model, make(lambda values: values), rows(), 8).verified.startswith("verified")
    with pytest.raises(WholeBatchError):
        wb.backward(model, make(lambda values: values / values.detach().mean()), rows(), 8)


def test_labels_that_are_ignored_for_the_first_time_are_looked_at_again() -> None:
    def halves(model: Any, batch: Any) -> wb.LossSum:
        return wb.from_mean(F.cross_entropy(model(batch["x"]), batch["y"]), items=len(batch["y"]))

    model, batch = linear(), rows()
    assert wb.backward(model, halves, batch, 8).verified.startswith("verified")
    batch["y"][[1, 2, 3, 9, 17]] = -100
    with pytest.raises(WholeBatchError, match=r"items|sum of their parts"):
        wb.backward(model, halves, batch, 8)


def masked_as_rows(model: Any, batch: Any) -> wb.LossSum:
    each = model(batch["x"]).square()[..., 0]
    return wb.from_mean((each * batch["mask"]).sum() / batch["mask"].sum(), items=len(batch["x"]))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, D], ids=str)
def test_a_mask_that_leaves_something_out_for_the_first_time_is_looked_at_again(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = linear()
    full, some = ({**each, "mask": each["mask"].to(dtype)} for each in (labelled([6] * 8), labelled([1, 4, 2] * 4)))
    assert wb.backward(model, masked_as_rows, full, 4).verified.startswith("verified")
    with pytest.raises(InexactError, match="with that number"):
        wb.backward(model, masked_as_rows, some, 4)
    wb.backward(model, masked_as_rows, some, 4, verify="never")
    assert_differs(model, whole_batch(model, lambda m, b: masked_as_rows(m, b).value, some))


class Switched(nn.Module):
    """Centres its answers by the rows it is given, if that is switched on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.centres = linear(), False

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out - out.mean(0) if self.centres else out


PHASES = {"warm": True}


def phased(model: Any, batch: Any) -> Tensor:
    values = losses(model, batch)
    return values if PHASES["warm"] else values * values.detach().mean()


def test_a_switch_of_the_model_that_is_turned_is_looked_at_again() -> None:
    model = Switched()
    assert wb.backward(model, losses, rows(20), 8).verified.startswith("verified")
    model.centres = True
    with pytest.raises(InexactError, match="Rows meet"):
        wb.backward(model, losses, rows(20), 8)


def test_a_switch_of_the_loss_function_that_is_turned_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = linear()
    assert wb.backward(model, phased, rows(20), 8).verified.startswith("verified")
    monkeypatch.setitem(PHASES, "warm", False)
    with pytest.raises(InexactError, match="Rows meet"):
        wb.backward(model, phased, rows(20), 8)
    wb.backward(model, phased, rows(20), 8, verify="never")
    assert_differs(model, whole_batch(model, lambda m, b: phased(m, b).mean(), rows(20)))


# Losses over all rows: each row has to be encoded by itself.


def spread(z: Tensor) -> Tensor:
    return torch.pdist(z).mean()


def test_an_encoder_of_single_rows_is_verified() -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.5), nn.Linear(6, 3)).double()
    result = wb.coupled_backward(model, lambda m, b: m(b["x"]), spread, rows(), 8)
    assert result.verified.startswith("verified on 8 rows")


def test_an_encoder_in_which_rows_meet_is_refused() -> None:
    def centred(model: Any, batch: Any) -> Tensor:
        z = model(batch["x"])
        return z - z.mean(0)

    with pytest.raises(WholeBatchError, match="Rows meet"):
        wb.coupled_backward(linear(), centred, spread, rows(20), 8)


# Parameters that nothing reaches.


class Spare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = linear(), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def test_parameters_without_gradient_are_named() -> None:
    model = Spare()
    result = wb.backward(model, losses, rows(), 8)
    assert result.without_gradient == ("spare.weight", "spare.bias")
    assert wb.backward(linear(), losses, rows(), 8).without_gradient == ()


def test_step_warns_once_of_parameters_without_gradient() -> None:
    model = Spare()
    step = wb.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), losses, micro_batch_size=8)
    with pytest.warns(UserWarning, match=r"2 parameters.*spare\.weight"):
        step(rows())
    assert step(rows()).without_gradient == ("spare.weight", "spare.bias")


class Checkpointed(nn.Module):
    def __init__(self, keeps: bool, reentrant: bool, chance: float = 0.5) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6).double()
        self.block = nn.Sequential(nn.Linear(6, 6), nn.Dropout(chance), nn.Linear(6, 3)).double()
        self.keeps, self.reentrant = keeps, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, self.first(x), use_reentrant=self.reentrant, preserve_rng_state=self.keeps)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_that_draws_anew_gives_the_gradient_of_no_loss(reentrant: bool) -> None:
    """Not even the whole batch's: its gradient is not the one of the dropout that its loss was made with."""
    batch = rows()
    with pytest.raises(InexactError, match=r"checkpoint runs again.*preserve_rng_state=False"):
        wb.backward(Checkpointed(False, reentrant), losses, batch, 4)
    found = wb.check(Checkpointed(False, reentrant), losses, batch, 4)
    assert found.verdict == "not exact" and found.findings[0].rule == "checkpoint-draws-anew"
    kept, anew = Checkpointed(True, reentrant), Checkpointed(False, reentrant)
    anew.load_state_dict(kept.state_dict())
    for model in (kept, anew):
        torch.manual_seed(0)
        losses(model, batch).mean().backward()
    assert_differs(anew, gradients_of(kept))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_that_draws_the_same_or_nothing_is_right(reentrant: bool) -> None:
    for model in (Checkpointed(True, reentrant), Checkpointed(False, reentrant, chance=0.0).eval()):
        assert wb.backward(model, losses, rows(), 4).verified.startswith("verified")
        assert wb.check(model, losses, rows(), 4).verdict == "exact"


def deviating(model: Any, batch: Any) -> Tensor:
    """A log of the standard deviation, which torch warns of for one row alone."""
    values = losses(model, batch)
    values.detach().std()
    return values


@pytest.mark.parametrize("action", ["error", "always"])
def test_what_only_a_trial_warns_of_is_not_heard(action: Any) -> None:
    model = linear()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter(action)
        assert wb.backward(model, deviating, rows(8), 4).verified.startswith("verified on 4 rows")
        assert not heard
        warnings.simplefilter("always")
        deviating(model, rows(1))
    assert "degrees of freedom" in str(heard[0].message)


def test_a_part_without_items_whose_loss_is_no_zero_is_told() -> None:
    """Its mean is over ``max(n, 1)``, so that it says something of what is not counted."""

    def floored(model: Any, batch: Any) -> wb.LossSum:
        values, count = losses(model, batch), (batch["y"] == 1).sum()
        return wb.from_mean(values.sum() / count.clamp(min=1), items=count)

    model, batch = linear(), rows(12)
    batch["y"] = torch.arange(12) // 5  # the first five and the last two have none
    with pytest.raises(InexactError, match=r"states 0 items.*wb\.LossSum\(total, n\)"):
        wb.backward(model, floored, batch, 4)
    reference = whole_batch(model, lambda m, b: losses(m, b).sum() / (b["y"] == 1).sum(), batch)
    wb.backward(model, floored, batch, 4, verify="never")
    assert_differs(model, reference)
    model.zero_grad()
    wb.backward(model, lambda m, b: wb.LossSum(losses(m, b).sum(), (b["y"] == 1).sum()), batch, 4)
    assert_same_gradient(model, reference)
