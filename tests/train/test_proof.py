"""The proof is computed: it tells an exact gradient from one that is not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import wholebatch as wb
from tests.oracle import whole_batch
from wholebatch.train import Config, proof
from wholebatch.train.proof import prove
from wholebatch.train.text import Text


@pytest.fixture
def task(tmp_path: Path) -> Text:
    data = tmp_path / "rows.txt"
    data.write_text("\n".join("ab" * (1 + i * i % 17) + str(i) for i in range(40)))
    return Text(Config(data=data, width=8, layers=1, heads=2, max_tokens=96, held_out=0.5))


def usual_error_by_hand(task: Text, micro_batches: Sequence[list[Any]]) -> float:
    """What the usual loop gives on these micro-batches, against the tests' own oracle."""

    def mean(model: Any, batch: dict[str, Tensor]) -> Tensor:
        logits, labels = model(batch["tokens"])[:, :-1], batch["labels"][:, 1:]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    rows = [row for micro_batch in micro_batches for row in micro_batch]
    reference = whole_batch(task.model, mean, task.collate(rows)).gradients
    task.model.zero_grad()
    for micro_batch in micro_batches:
        torch.autograd.backward(mean(task.model, task.collate(micro_batch)) / len(micro_batches))
    off = sum(float((p.grad - reference[name]).square().sum()) for name, p in task.model.named_parameters())
    norm = sum(float(grad.square().sum()) for grad in reference.values() if grad is not None)
    return math.sqrt(off / norm)


def test_our_gradient_is_exact_and_that_of_the_usual_loop_is_off_by_what_the_oracle_says(task: Text) -> None:
    batch = task.held[:12]
    found = prove(task, task.model, batch)
    assert found.error < 2e-6
    assert isinstance(task.size, wb.Tokens)
    micro_batches = [
        [batch[row] for row in micro_batch] for micro_batch in task.size.plan([len(row.tokens) for row in batch])
    ]
    assert found.micro_batches == len(micro_batches) > 1
    assert found.usual == pytest.approx(usual_error_by_hand(task, micro_batches), rel=1e-3)
    assert found.usual > 0.01


def test_a_gradient_that_is_off_is_found_out(task: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    real = wb.backward

    def off_by_a_thousandth(model: Any, *arguments: Any, **options: Any) -> Any:
        result = real(model, *arguments, **options)
        for parameter in model.parameters():
            parameter.grad *= 1.001
        return result

    monkeypatch.setattr(proof.wb, "backward", off_by_a_thousandth)
    assert prove(task, task.model, task.held[:12]).error == pytest.approx(1e-3, rel=1e-2)


def test_the_model_is_left_as_it_is(task: Text) -> None:
    task.model.train()
    marked = next(task.model.parameters())
    marked.grad = torch.ones_like(marked)
    before = {name: tensor.clone() for name, tensor in task.model.state_dict().items()}
    prove(task, task.model, task.held[:12])
    assert task.model.training and torch.equal(marked.grad, torch.ones_like(marked))
    assert all(torch.equal(before[name], tensor) for name, tensor in task.model.state_dict().items())


def test_a_batch_that_would_be_one_micro_batch_is_cut_so_that_there_is_something_to_prove(task: Text) -> None:
    task.size = wb.Tokens(100_000, length=lambda row: len(row.tokens), overhead=1e6)
    assert prove(task, task.model, task.held[:12]).micro_batches == 4


def test_long_rows_are_cut_so_that_the_whole_batch_fits(task: Text) -> None:
    long = [task.held[0]._replace(tokens=torch.zeros(900, dtype=torch.long))] * 64
    assert sum(len(row.tokens) for row in task.shortened(long)) <= 16384


def test_the_errors_are_said_in_one_line(task: Text) -> None:
    assert str(proof.Proof(rows=64, micro_batches=9, error=1.3e-7, usual=0.2454)) == (
        "gradient error 1e-07 (the usual loop: 0.25)"
    )
