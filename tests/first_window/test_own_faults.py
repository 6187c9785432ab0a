"""What fails in this library while it tries the user's code is told as its own fault, not taken for the user's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholebatch as wb
from wholebatch.errors import OwnFault, own_faults_apart
from wholebatch.first_window import levels


def noisy(model: Any, rows: Tensor) -> Tensor:
    return model(rows + torch.randn_like(rows)).square()


@pytest.mark.faulty
def test_a_fault_of_ours_is_told_by_the_proof_and_the_window_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(levels, "STEPS", ())  # so that a line of ours divides by zero
    model, rows = nn.Linear(3, 1), torch.randn(8, 3)
    with caplog.at_level(logging.ERROR, "wholebatch"):
        said = wb.backward(model, noisy, rows, 4).verified
    assert said.startswith("not verified: wholebatch itself failed in first_window/levels.py, line "), said
    assert "ZeroDivisionError" in said and "please report" in said
    assert model.weight.grad is not None
    assert [record.levelname for record in caplog.records] == ["ERROR"] and caplog.records[0].exc_info


@pytest.mark.faulty
def test_a_fault_of_ours_leaves_a_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "STEPS", ())
    model, rows = nn.Linear(3, 1), torch.randn(8, 3)
    with pytest.raises(OwnFault, match=r"levels\.py"):
        wb.check(model, noisy, rows, 4)
    assert model.weight.grad is None


def typed(model: Any, rows: Tensor) -> Tensor:
    return model(rows).square() if len(rows) > 2 else model("one row")  # torch makes a TypeError of it


def asked(model: Any, rows: Tensor) -> Any:
    return model(rows).square() if len(rows) > 2 else {}["nothing"]


def misused(model: Any, rows: Tensor) -> Any:
    values = model(rows).square()
    return values if len(rows) > 2 else wb.losses.causal_lm("logits", rows.long())  # the library is called wrongly


def sized(model: Any, rows: Tensor) -> Any:
    return model(rows).square().sum(1 if len(rows) > 2 else 7)  # an operator that watches pass on


@pytest.mark.parametrize("loss_fn", [typed, asked, misused, sized])
def test_an_error_of_the_users_code_is_none_of_ours(loss_fn: Callable[[Any, Any], Any]) -> None:
    said = wb.backward(nn.Linear(3, 1), loss_fn, torch.randn(16, 3), 8).verified
    assert "itself failed" not in said and said.startswith(("verified on 8 rows", "not verified: 8 rows could not")), (
        said
    )


def test_what_we_raise_on_purpose_and_what_torch_raises_of_numbers_stay_what_they_are() -> None:
    with pytest.raises(wb.LossError), own_faults_apart():
        wb.backward(nn.Linear(3, 1), lambda model, rows: model(rows).mean(), torch.randn(8, 3), 4)
    with pytest.raises(RuntimeError), own_faults_apart():
        torch.ones(2) @ torch.ones(3)
