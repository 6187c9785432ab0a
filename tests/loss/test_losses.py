"""The ready-made losses: labels of every type, another label that does not count, weights and smoothing as in torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wholebatch as wb
from tests.oracle import assert_differs, assert_same_gradient, gradients_of, whole_batch
from wholebatch.errors import LossError

TYPES = (torch.int64, torch.int32, torch.int16, torch.uint8)


def rows(classes: int = 3, ignored: int | None = None) -> tuple[Tensor, Tensor]:
    torch.manual_seed(921)
    labels = torch.randint(0, classes, (10,))
    if ignored is not None:
        labels[[0, 1, 4]] = ignored
    return torch.randn(10, 4).double(), labels


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ignored", [None, 255, 1])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_labels_of_every_type_are_numbers_of_classes(
    dtype: torch.dtype, ignored: int | None, weighted: bool, smoothing: float
) -> None:
    model = nn.Linear(4, 3).double()
    x, labels = rows(ignored=ignored)
    options: dict[str, Any] = {
        "weight": torch.tensor([1.0, 2.0, 9.0]).double() if weighted else None,
        "ignore_index": -100 if ignored is None else ignored,
        "label_smoothing": smoothing,
    }

    def loss(model: nn.Module, batch: Any) -> wb.LossSum:
        return wb.losses.cross_entropy(model(batch[0]), batch[1], **options)

    reference = whole_batch(
        model, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], **options), (x, labels)
    )
    wb.backward(model, loss, (x, labels.to(dtype)), micro_batch_size=2)
    assert_same_gradient(model, reference)


def test_two_classes_may_be_true_and_false() -> None:
    model, weight = nn.Linear(4, 2).double(), torch.tensor([1.0, 9.0]).double()
    x, labels = rows(classes=2)
    reference = whole_batch(model, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], weight), (x, labels))
    for dtype in (torch.bool, torch.uint8):
        model.zero_grad()
        wb.backward(
            model, lambda model, b: wb.losses.cross_entropy(model(b[0]), b[1], weight), (x, labels.to(dtype)), 2
        )
        assert_same_gradient(model, reference)

    model.zero_grad()
    for start in range(0, 10, 2):
        part, bytes_ = x[start : start + 2], labels[start : start + 2].byte()
        total = F.cross_entropy(model(part), bytes_.long(), weight, reduction="sum")
        chosen = weight[[row for row in (0, 1) if bytes_[row]]].sum()  # what a byte mask picks out of the weights
        (total / (chosen + 1e-9)).backward()
    assert_differs(model, reference)


def token_losses() -> dict[str, Any]:
    return {
        "causal": (wb.losses.causal_lm, lambda z, y, **more: F.cross_entropy(z[:, :-1].mT, y[:, 1:], **more)),
        "masked": (wb.losses.masked_lm, lambda z, y, **more: F.cross_entropy(z.mT, y, **more)),
        "tokens": (wb.losses.token_classification, lambda z, y, **more: F.cross_entropy(z.mT, y, **more)),
    }


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize("ignored", [255, 0])
@pytest.mark.parametrize("name", token_losses())
def test_tokens_may_be_ignored_by_any_label_and_smoothed(name: str, ignored: int, dtype: torch.dtype) -> None:
    ours, plain = token_losses()[name]
    torch.manual_seed(922)
    model, ids, labels = nn.Embedding(9, 7).double(), torch.randint(0, 9, (6, 5)), torch.randint(1, 7, (6, 5))
    labels[torch.rand(6, 5) < 0.4] = ignored
    labels[0] = ignored  # so that micro-batches differ in what counts
    more = {"ignore_index": ignored, "label_smoothing": 0.1}
    reference = whole_batch(model, lambda model, batch: plain(model(batch[0]), batch[1], **more), (ids, labels))
    wb.backward(model, lambda model, b: ours(model(b[0]), b[1], **more), (ids, labels.to(dtype)), 2)
    assert_same_gradient(model, reference)

    model.zero_grad()
    for start in range(0, 6, 2):
        part = slice(start, start + 2)
        (plain(model(ids[part]), labels[part], **more) / 3).backward()
    assert_differs(model, reference)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(6,), (6, 2)], ids=str)
def test_a_label_that_is_no_class_is_named_with_the_argument_that_ignores_it(
    shape: tuple[int, ...], weighted: bool
) -> None:
    labels = torch.ones(shape, dtype=torch.long)
    labels[3:] = 255
    model, weight = nn.Linear(4, 3), torch.ones(3) if weighted else None

    def loss(model: nn.Module, batch: Any) -> wb.LossSum:
        logits = model(batch[0])
        logits = logits if batch[1].dim() == 1 else logits[..., None].expand(-1, -1, 2)
        return wb.losses.cross_entropy(logits, batch[1], weight)

    with pytest.raises(LossError, match=r"labels hold 255, but logits have 3 classes, 0 to 2, .*ignore_index=255"):
        wb.backward(model, loss, (torch.randn(6, 4), labels), 2)
    assert set(gradients_of(model).values()) == {None}


def test_labels_that_are_no_whole_numbers_are_refused() -> None:
    with pytest.raises(LossError, match=r"labels are torch.float32.*labels.long\(\)"):
        wb.losses.masked_lm(torch.zeros(1, 2, 3), torch.zeros(1, 2))


@pytest.mark.parametrize("fault", ["ignored", "once", None])
def test_what_only_a_device_knows_is_said_at_the_next_window_before_anything_runs(
    fault: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def loss_fn(model: nn.Module, batch: Any) -> Any:
        calls.append(len(batch["x"]))
        extra = wb.once(batch["x"].sum() if fault == "once" else model.weight.square().sum())
        return wb.mean(F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")) + 0.1 * extra

    labels = torch.tensor([0, 1, 2, -100 if fault == "ignored" else 0, 1, 2])
    model, batch = nn.Linear(4, 3), {"x": torch.randn(6, 4), "y": labels}
    if fault is not None:  # what is on the host is refused at once
        with pytest.raises(wb.LossError):
            wb.backward(model, loss_fn, batch, 2, verify="never")
    monkeypatch.setattr("wholebatch.loss.flags.is_on_host", lambda flag: False)
    wb.backward(model, loss_fn, batch, 2, verify="never")
    calls.clear()
    before = model.weight.grad.clone()
    if fault is None:
        wb.backward(model, loss_fn, batch, 2, verify="never")
        return
    with pytest.raises(wb.LossError, match="In the window before this one"):
        wb.backward(model, loss_fn, batch, 2, verify="never")
    assert calls == [] and torch.equal(model.weight.grad, before)
    step = wb.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, micro_batch_size=2, verify="never")
    weight = model.weight.detach().clone()
    with pytest.raises(
        wb.LossError, match="once" if fault == "once" else "ignored targets"
    ) as caught:  # before it steps
        step(batch)
    assert "window before" not in str(caught.value) and torch.equal(model.weight, weight)


def test_a_device_that_is_behind_is_asked_and_waited_for_two_windows_later(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []

    class Behind:
        def __init__(self, device: torch.device) -> None: ...

        def record(self) -> None: ...

        def query(self) -> bool:
            return False

        def synchronize(self) -> None:
            waited.append("waited")

    def loss_fn(model: nn.Module, batch: Any) -> Any:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    monkeypatch.setattr("wholebatch.loss.flags.is_on_host", lambda flag: False)
    monkeypatch.setattr("wholebatch.loss.earlier.WITH_EVENTS", ("cpu",))
    monkeypatch.setattr(torch, "Event", Behind)
    model, rows = nn.Linear(4, 3), torch.randn(6, 4)
    for labels in ([0, 1, 2, -100, 1, 2], [0, 1, 2, 0, 1, 2]):
        wb.backward(model, loss_fn, (rows, torch.tensor(labels)), 2, verify="never")
    assert waited == []
    with pytest.raises(wb.LossError, match=r"In the window 2 before this one, .* ignored targets"):
        wb.backward(model, loss_fn, (rows, torch.tensor([0, 1, 2, 0, 1, 2])), 2, verify="never")
    assert waited == ["waited"]
    wb.backward(model, loss_fn, (rows, torch.tensor([0, 1, 2, 0, 1, 2])), 2, verify="never")
