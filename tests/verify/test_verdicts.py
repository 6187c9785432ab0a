"""`wb.check` says *exact* of what it has seen, *not exact* with the true cause, and *not shown* of the rest."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import wholebatch as wb
from tests.oracle import assert_differs, assert_same_gradient, whole_batch
from wholebatch.verify.copies import copied, tensors_in
from wholebatch.verify.reference import whole_gradient

ROWS = 13


def labelled(width: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, width), torch.randint(0, 3, (ROWS,))


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def rules(report: wb.Check) -> list[str]:
    return [finding.rule for finding in report.findings]


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.layer(x.view(len(x), -1, 8)).mean(1))
        return out


class LowRank(nn.Module):
    """A layer with a low-rank adapter at its start: what is drawn is hidden by zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.a, self.b = nn.Linear(8, 3).requires_grad_(False), nn.Linear(8, 2), nn.Linear(2, 3, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.b(self.a(F.dropout(x, 0.2, self.training)))
        return out


def recurrent() -> nn.Module:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells, self.out = nn.LSTM(8, 5, 2, batch_first=True, dropout=0.4), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.out(self.cells(x.view(len(x), -1, 8))[0][:, -1])
            return out

    return Net()


@pytest.mark.parametrize("make", [Encoder, LowRank, recurrent], ids=["encoder", "low rank", "LSTM"])
def test_dropout_is_no_false_alarm_and_hides_no_fault(make: Callable[[], nn.Module]) -> None:
    batch = labelled()
    report = wb.check(make(), cross_entropy, batch, 5)
    assert report.verdict == "exact", str(report)
    assert "with their draws" in report.notes[1].lower()
    assert not wb.find_coupling(make(), cross_entropy, batch)
    means = wb.check(make(), lambda m, b: wb.from_mean(cross_entropy(m, b).mean(), items=1), batch, 5)
    assert means.verdict == "not exact"
    assert rules(means) == ["items-do-not-add-up"]


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm1d(64)
        self.drop, self.out = nn.Dropout(0.5), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(self.drop(self.norm(self.first(x)).relu().flatten(1)))
        out: Tensor = self.out(self.drop(hidden))
        return out


def test_exact_batch_norm_beside_dropout_is_exact_and_micro_is_not() -> None:
    model, batch = Images(), (torch.randn(ROWS, 3, 6, 6), torch.randint(0, 3, (ROWS,)))
    before = copy.deepcopy(model.state_dict())
    assert wb.check(model, cross_entropy, batch, 5, batch_norm="exact").verdict == "exact"
    assert wb.check(model, cross_entropy, batch, 5, batch_norm="micro").verdict == "not exact"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def tokens(model: nn.Module, labels: Tensor) -> Any:
    logits = model(labels.clamp(min=0))[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


def sentences() -> Tensor:
    labels = torch.randint(0, 7, (ROWS, 8), generator=torch.Generator().manual_seed(3))
    labels[torch.arange(8) > (torch.arange(ROWS) % 6 + 2)[:, None]] = -100
    return labels


@pytest.mark.parametrize("drop", [0.0, 0.2])
def test_labels_counted_before_the_shift_are_a_miscount(drop: float) -> None:
    model = nn.Sequential(nn.Embedding(7, 4), nn.Dropout(drop), nn.Linear(4, 7))
    after = wb.check(model, lambda m, b: wb.from_mean(tokens(m, b), items=(b[:, 1:] != -100).sum()), sentences(), 5)
    before = wb.check(model, lambda m, b: wb.from_mean(tokens(m, b), items=(b != -100).sum()), sentences(), 5)
    assert after.verdict == "exact", str(after)
    assert rules(before) == ["items-do-not-add-up"]
    assert "before the shift" in before.findings[0].what


def test_a_function_of_the_mean_is_no_miscount() -> None:
    report = wb.check(nn.Linear(8, 3), lambda m, b: wb.from_mean(cross_entropy(m, b).mean().sqrt(), 1), labelled(), 5)
    assert report.verdict == "not exact"
    rooted = wb.check(
        nn.Linear(8, 3), lambda m, b: wb.from_mean(cross_entropy(m, b).mean().sqrt(), len(b[1])), labelled(), 5
    )
    assert rules(rooted) == ["rows-meet"]


@pytest.mark.parametrize("drop", [0.0, 0.3])
def test_padding_that_counts_is_found_beside_dropout(drop: float) -> None:
    ids = sentences().clamp(min=0)
    batch = {"ids": ids * (sentences() != -100), "mask": sentences() != -100}
    model = nn.Sequential(nn.Embedding(7, 4), nn.Dropout(drop), nn.Linear(4, 3))
    size = wb.Tokens(24, mask="mask")
    masked = wb.check(model, lambda m, b: wb.mean(m(b["ids"]).square().sum(-1), b["mask"]), batch, size)
    assert masked.verdict == "exact", str(masked)
    assert rules(wb.check(model, lambda m, b: m(b["ids"]).square().sum(-1), batch, size)) == ["padding-counts"]


def test_items_are_compared_even_where_the_gradient_agrees() -> None:
    inputs, targets = labelled()
    batch = inputs[:12], targets[:12]
    report = wb.check(nn.Linear(8, 3), lambda m, b: wb.from_mean(cross_entropy(m, b).mean(), items=1), batch, 4)
    assert report.error <= report.tolerance
    assert rules(report) == ["items-do-not-add-up"]


def test_steps_inside_the_backward_are_found_and_undone() -> None:
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(*_: Any) -> None:
        optimizer.step()
        optimizer.zero_grad()

    kept = []
    for parameter in model.parameters():
        kept.append(parameter.expand_as(parameter).grad_fn.next_functions[0][0])  # type: ignore[union-attr]
        kept[-1].register_hook(step)
    before = copy.deepcopy(model.state_dict())
    try:
        report = wb.check(model, cross_entropy, labelled(), 5)
        assert rules(report) == ["steps-inside-the-window"]
        assert "SGD" in report.findings[0].what
    except wb.InexactError as refused:
        assert "hook" in str(refused)  # refused by `backward` itself, before anything is compared
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not optimizer.state


@pytest.mark.parametrize("way", ["optimizer", "model", "closure"])
def test_a_loss_function_that_clears_gradients_is_never_exact(way: str) -> None:
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def clearing(given: nn.Module, batch: Any) -> Tensor:
        {"optimizer": optimizer, "model": given, "closure": model}[way].zero_grad()
        return cross_entropy(given, batch)

    try:
        assert wb.check(model, clearing, labelled(), 5).verdict == "not exact"
    except wb.LossError as refused:
        assert "zero_grad" in str(refused)
    assert wb.check(model, cross_entropy, labelled(), 5).verdict == "exact"


def test_a_reentrant_checkpoint_that_loses_gradients_is_found() -> None:
    class Frozen(nn.Module):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.below, self.block, self.out = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8), nn.Linear(8, 3)
            self.reentrant = reentrant

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.out(checkpoint(self.block, self.below(x), use_reentrant=self.reentrant))
            return out

    lost = wb.check(Frozen(True), cross_entropy, labelled(), 5)
    assert rules(lost) == ["gradient-lost-in-checkpoint"]
    assert lost.without_gradient == ("block.weight", "block.bias")
    assert wb.check(Frozen(False), cross_entropy, labelled(), 5).verdict == "exact"


def test_parameters_that_nothing_uses_are_named_and_no_fault() -> None:
    class Spare(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 3)
            self.unused = nn.Linear(2, 2)

    report = wb.check(Spare(), cross_entropy, labelled(), 5)
    assert report.verdict == "exact"
    assert report.without_gradient == ("unused.weight", "unused.bias")
    assert "unused.weight" in report.notes[0]


def test_the_callers_batch_is_looked_at_and_put_back() -> None:
    inputs, targets = labelled()
    before = inputs.clone()

    def writing(model: nn.Module, batch: Any) -> Tensor:
        batch[0].mul_(1.5)
        return cross_entropy(model, batch)

    report = wb.check(nn.Linear(8, 3), writing, (inputs, targets), 5)
    assert "batch-written-to" in rules(report)
    assert torch.equal(inputs, before)


def test_a_state_that_a_forward_carries_on_is_found_and_put_back() -> None:
    class Normalised(nn.Linear):
        scale = 10.0

        def forward(self, x: Tensor) -> Tensor:
            self.scale = 0.9 * self.scale + 0.1 * len(x)
            return super().forward(x) / self.scale

    model = Normalised(8, 3)
    try:
        report = wb.check(model, cross_entropy, labelled(), 5)
        assert rules(report) == ["answers-differ"]
        assert "scale" in report.findings[0].what
    except wb.InexactError as refused:
        assert "scale" in str(refused)
    assert model.scale == 10.0


def test_draws_that_nobody_can_hold_still_are_not_shown() -> None:
    def noisy(model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model, (batch[0] + random.random(), batch[1]))

    report = wb.check(nn.Linear(8, 3), noisy, labelled(), 5)
    assert report.verdict == "not shown"
    assert "random" in report.not_shown[0]
    with pytest.raises(wb.InexactError, match="not shown"):
        wb.check(nn.Linear(8, 3), noisy, labelled(), 5, strict=True)
    by_torch = wb.check(
        nn.Linear(8, 3), lambda m, b: cross_entropy(m, (b[0] + torch.randn_like(b[0]), b[1])), labelled(), 5
    )
    assert by_torch.verdict == "exact"


def test_a_gradient_that_is_rounding_alone_shows_nothing() -> None:
    report = wb.check(nn.Linear(8, 3), lambda m, b: wb.total(m(b[0]).softmax(1)), labelled(), 5)
    assert report.verdict == "not shown"
    assert rules(report) == ["nothing-to-compare"]


def test_what_fails_in_micro_batches_alone_is_a_finding_and_what_fails_whole_is_the_users_error() -> None:
    def pairs(model: nn.Module, batch: Any) -> Any:
        first, second = model(batch[0])[:12].view(12, 3).chunk(2)
        return wb.mean((first - second).square())

    report = wb.check(nn.Linear(8, 3), pairs, labelled(), 5)
    assert rules(report) == ["fails-in-pieces"]
    with pytest.raises(RuntimeError, match="shape"):
        wb.check(nn.Linear(8, 4), pairs, labelled(), 5)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_is_checked(backend: str) -> None:
    report = wb.check(torch.compile(Encoder(), backend=backend), cross_entropy, labelled(), 5)
    assert report.verdict == "exact", str(report)


def test_a_loss_function_that_reaches_the_model_by_another_name_is_read_in_place() -> None:
    model = nn.Linear(8, 3)
    report = wb.check(model, lambda _, batch: cross_entropy(model, batch), labelled(), 5)
    assert report.verdict == "exact"
    assert "another name" in report.notes[0]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_criterion_that_nobody_widened_is_read_in_double_precision() -> None:
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]), reduction="none")
    report = wb.check(nn.Linear(8, 3), lambda m, b: criterion(m(b[0]), b[1]), labelled(), 5)
    assert report.verdict == "exact"
    assert not any("float32" in note for note in report.notes)


class Own:
    """A batch of a class that nothing is known of."""

    __slots__ = ("x", "y")

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y


class Answering(dict):  # type: ignore[type-arg]
    """A dict that answers for every attribute."""

    __getattr__ = dict.__getitem__


def test_the_whole_batch_is_copied_by_its_own_class() -> None:
    batch = Own(*labelled())
    twin = copied(batch, torch.float64)
    assert type(twin) is Own
    assert twin.x.dtype == torch.float64
    assert torch.equal(twin.x.float(), batch.x)
    assert [tensor is batch.x for tensor in tensors_in(batch)] == [True, False]
    answer = whole_gradient(nn.Linear(8, 3), lambda m, b: cross_entropy(m, (b.x, b.y)), batch)
    assert answer.micro_batches == 1


def test_a_number_of_all_rows_that_goes_along_is_a_miscount() -> None:
    inputs, targets = labelled()
    mask = torch.arange(ROWS) % 3 > 0
    batch = Answering(x=inputs, y=targets, mask=mask, kept=int(mask.sum()))

    def loss_fn(model: nn.Module, batch: Any) -> Any:
        return wb.LossSum((cross_entropy(model, (batch.x, batch.y)) * batch.mask).sum(), batch.kept)

    report = wb.check(nn.Linear(8, 3), loss_fn, batch, 5)
    assert rules(report) == ["items-do-not-add-up"]


def test_a_window_is_joined_by_other_code_and_rows_that_meet_across_it_are_found() -> None:
    inputs, targets = labelled()
    window = wb.Window([{"x": inputs[:5], "y": targets[:5]}, {"x": inputs[5:], "y": targets[5:]}])

    def centred(model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model, (batch["x"] - batch["x"].mean(0), batch["y"]))

    assert rules(wb.check(nn.Linear(8, 3), centred, window)) == ["rows-meet"]
    assert wb.check(nn.Linear(8, 3), lambda m, b: cross_entropy(m, (b["x"], b["y"])), window).verdict == "exact"


def test_a_loss_that_differentiates_inside_is_looked_at_for_coupling() -> None:
    def weighted(model: Any, batch: Any) -> Tensor:
        losses = cross_entropy(model, batch)
        norm = torch.autograd.grad(losses.mean(), model.weight, retain_graph=True)[0].norm()
        return losses * norm.detach()

    assert wb.find_coupling(nn.Linear(8, 3), weighted, labelled()).loss > 0


def test_a_model_in_which_nothing_normalises_needs_no_graph_under_exact_batch_norm() -> None:
    class Branching(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out = F.dropout(super().forward(x), 0.2, self.training)
            return out if float(out.detach().sum()) > -1e9 else -out

    assert wb.check(Branching(8, 3), cross_entropy, labelled(), 5, batch_norm="exact").verdict == "exact"

    class Hidden(Branching):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.batch_norm(x, None, None, None, None, True, 0.1, 1e-5, False))

    with pytest.raises(wb.InexactError):
        wb.backward(Hidden(8, 3), cross_entropy, labelled(), 5, batch_norm="exact")


def test_the_first_window_and_a_check_name_a_cause_in_the_same_words() -> None:
    model, rows = nn.Linear(3, 2).double(), torch.randn(13, 3, dtype=torch.float64)

    def miscounted(model: nn.Module, x: Tensor) -> wb.LossSum:
        return wb.from_mean(model(x).square().mean(), items=1)

    with pytest.raises(wb.InexactError) as refused:
        wb.backward(model, miscounted, rows, 5)
    report = wb.check(model, miscounted, rows, 5)
    assert [finding.rule for finding in report.findings] == ["items-do-not-add-up"]
    assert report.findings[0].why in str(refused.value)


class Mixed(nn.Module):
    """A body in one precision, a head in another."""

    def __init__(self, body: torch.dtype, head: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body, self.head = nn.Linear(6, 8).to(body), nn.Linear(8, 3).to(head)

    def forward(self, x: Tensor) -> Tensor:
        said = torch.tanh(self.body(x.to(self.body.weight.dtype)))
        return self.head(said.to(self.head.weight.dtype)).to(self.body.weight.dtype)


@pytest.mark.parametrize(
    ("body", "head"),
    [(torch.float32, torch.bfloat16), (torch.float64, torch.float32)],
    ids=["half in single", "single in double"],
)
def test_a_model_of_two_precisions_rounds_as_the_lower_one_and_a_fault_still_shows(
    body: torch.dtype, head: torch.dtype
) -> None:
    batch = torch.randn(12, 6, generator=torch.Generator().manual_seed(4))
    right = wb.check(Mixed(body, head), lambda model, x: model(x).square().mean(1), batch, 5)
    assert right.verdict == "exact", str(right)
    wrong = wb.check(
        Mixed(body, head), lambda model, x: wb.from_mean(model(x).square().mean(), items=1), batch, 5, verify="never"
    )
    assert wrong.verdict == "not exact"


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.out = nn.GRU(5, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.cells(x)[0])


def each_step(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten(), reduction="none")


@pytest.mark.parametrize("steps", [7, 12])
def test_rows_behind_time_are_named(steps: int) -> None:
    """In a check and in a first window; turned around, they are right."""
    torch.manual_seed(0)
    model = Recurrent().double()
    batch = {"x": torch.randn(steps, 12, 5, dtype=torch.float64), "y": torch.randint(0, 3, (steps, 12))}
    found = wb.check(model, each_step, batch, 4)
    assert [finding.rule for finding in found.findings] == ["time-cut-through"]
    with pytest.raises(wb.InexactError, match=r"8 on the second one.*transpose\(0, 1\)"):
        wb.backward(model, each_step, batch, 4)
    reference = whole_batch(model, lambda m, b: each_step(m, b).mean(), batch)
    wb.backward(model, each_step, batch, 4, verify="never")
    assert_differs(model, reference)
    model.zero_grad()
    turned = {name: value.transpose(0, 1) for name, value in batch.items()}
    wb.backward(model, lambda m, b: each_step(m, {n: v.transpose(0, 1) for n, v in b.items()}), turned, 4)
    assert_same_gradient(model, reference)
