"""Measured against a reference: the cause that is named gives the very gradient that was measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wholebatch as wb
from wholebatch.doctor import watch
from wholebatch.doctor.hypotheses import Measurement

LENGTHS = ((7, 3), (2, 2), (9, 4), (3, 5))


def sentences() -> list[Tensor]:
    batches = []
    for lengths in LENGTHS:
        labels = torch.full((len(lengths), max(lengths)), -100)
        for row, length in zip(labels, lengths, strict=True):
            row[:length] = torch.randint(0, 11, (length,))
        batches.append(labels)
    return batches


def reference(model: nn.Module, labels: Tensor) -> Any:
    return wb.losses.causal_lm(model(labels.clamp(min=0)), labels)


class Loop:
    """One window of a language model; what it does to each micro-batch's summed loss is the fault."""

    def __init__(self, share: Callable[[Tensor, Tensor], Tensor], dropout: float = 0.0) -> None:
        self.share = share
        self.model = nn.Sequential(nn.Embedding(11, 6), nn.Dropout(dropout), nn.Tanh(), nn.Linear(6, 11))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.batches = sentences()

    def summed(self, labels: Tensor) -> Tensor:
        logits = self.model(labels.clamp(min=0))[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")

    def measured(self) -> Measurement:
        loader = torch.utils.data.DataLoader(self.batches, batch_size=None)
        with watch(reference=reference) as seen:
            for labels in loader:
                self.share(self.summed(labels), labels).backward()
                self.after_micro_batch()
            self.optimizer.step()
        report = seen.report()
        assert report.measurement is not None
        return report.measurement

    def after_micro_batch(self) -> None:
        """What else the loop does after each backward."""


def items(labels: Tensor) -> Tensor:
    return (labels[:, 1:] != -100).sum()


ALL = sum(length - 1 for pair in LENGTHS for length in pair)
ROWS = sum(len(pair) for pair in LENGTHS)

FAULTS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "added up": (lambda loss, labels: loss / items(labels), "loss-not-divided"),
    "averaged": (lambda loss, labels: loss / items(labels) / 4, "mean-of-means"),
    "divided by eight": (lambda loss, labels: loss / items(labels) / 8, "last-window-short"),
    "divided by two": (lambda loss, labels: loss / items(labels) / 2, "loss-not-divided"),
    "summed": (lambda loss, labels: loss, "sum-not-divided"),
    "labels before the shift": (lambda loss, labels: loss / (ALL + ROWS), "labels-counted-before-shift"),
}


@pytest.mark.parametrize(("share", "rule"), FAULTS.values(), ids=FAULTS)
def test_the_cause_is_named_and_explains_the_gradient(share: Callable[[Tensor, Tensor], Tensor], rule: str) -> None:
    measured = Loop(share).measured()
    assert not measured.ok
    assert measured.cause is not None
    assert measured.cause.rule == rule
    assert measured.residual < 1e-6
    assert measured.comparison.error > 0.01


def test_a_right_window_is_measured_right() -> None:
    measured = Loop(lambda loss, labels: loss / ALL).measured()
    assert measured.ok
    assert measured.cause is None
    assert measured.comparison.error < 1e-6


def test_clipping_each_micro_batch_is_told_by_its_gradient() -> None:
    class Clipping(Loop):
        def after_micro_batch(self) -> None:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.2)

    measured = Clipping(lambda loss, labels: loss / items(labels) / 4).measured()
    assert measured.cause is not None
    assert measured.cause.rule == "clip-per-piece"
    assert measured.residual < 1e-5


def test_clearing_each_micro_batch_is_told_by_its_gradient() -> None:
    class Clearing(Loop):
        place = 0

        def after_micro_batch(self) -> None:
            self.place += 1
            if self.place < len(self.batches):
                self.optimizer.zero_grad()

    measured = Clearing(lambda loss, labels: loss / items(labels) / 4).measured()
    assert measured.cause is not None
    assert measured.cause.rule == "zero-grad-per-piece"


def test_draws_are_replayed_so_that_dropout_is_no_error() -> None:
    right = Loop(lambda loss, labels: loss / ALL, dropout=0.5).measured()
    assert right.ok, right.comparison
    assert "draws random numbers" in right.notes[0]
    wrong = Loop(lambda loss, labels: loss / items(labels), dropout=0.5).measured()
    assert wrong.cause is not None
    assert wrong.cause.rule == "loss-not-divided"


def test_what_no_hypothesis_explains_is_not_explained() -> None:
    measured = Loop(lambda loss, labels: loss * loss.detach() / ALL).measured()
    assert not measured.ok
    assert measured.cause is None
    found = measured.finding()
    assert found is not None
    assert found.rule == "unexplained"
    assert "do not know" in found.what


def test_batch_norm_in_micro_batches_is_told_by_its_gradient() -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(24, 5), torch.randint(0, 3, (24,)))

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    with watch(reference=loss_fn) as seen:
        for x, y in torch.utils.data.DataLoader(data, batch_size=6):
            (F.cross_entropy(model(x), y) / 4).backward()
        optimizer.step()
    report = seen.report()
    assert report.measurement is not None
    assert report.measurement.cause is not None
    assert report.measurement.cause.rule == "rows-meet"
    assert [finding.rule for finding in report.findings] == ["batch-norm"]
    assert "measured against the reference" in report.findings[0].amount
    assert "module '1'" in report.measurement.cause.what


def test_rows_that_meet_in_a_module_without_a_known_name_are_told_with_its_place() -> None:
    class Centred(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0, keepdim=True)

    model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.0), Centred(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(24, 5), torch.randint(0, 3, (24,)))
    with watch(reference=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none")) as seen:
        for x, y in torch.utils.data.DataLoader(data, batch_size=6):
            (F.cross_entropy(model(x), y) / 4).backward()
        optimizer.step()
    found = seen.report().findings[0]
    assert found.rule == "rows-meet"
    assert "module '2'" in found.what
    assert "coupled_backward" in found.change.into


def test_parameters_of_the_loss_are_told_by_their_whole_factor() -> None:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = nn.Linear(6, 5)
            self.logit_scale = nn.Parameter(torch.tensor(1.0))

        def forward(self, rows: Tensor) -> Tensor:
            return F.normalize(self.tower(rows), dim=-1)

    def loss_of(model: nn.Module, a: Tensor) -> Tensor:
        return F.cross_entropy(model.logit_scale.exp() * a @ a.T, torch.arange(len(a)))

    model = Towers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = list(torch.utils.data.DataLoader(torch.randn(16, 6), batch_size=4))
    with torch.no_grad():
        cached = [model(rows) for rows in batches]
    with watch(reference=lambda model, rows: loss_of(model, model(rows))) as seen:
        for place, rows in enumerate(torch.utils.data.DataLoader(torch.cat(batches), batch_size=4)):
            features = [*cached[:place], model(rows), *cached[place + 1 :]]
            loss_of(model, torch.cat(features)).backward()
        optimizer.step()
    measured = seen.report().measurement
    assert measured is not None
    assert measured.cause is not None
    assert measured.cause.rule == "loss-parameters-counted-again"
    assert "logit_scale" in measured.cause.what
