"""Rows that belong together: a size that cuts through a group is told so in our words, with the size that does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholebatch as wb
from tests.oracle import assert_differs, assert_same_gradient, whole_batch
from wholebatch.batch.groups import group_of

D = torch.float64


def policy() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(5, 1).double()


def answers() -> dict[str, Tensor]:
    """Six prompts with four answers each."""
    torch.manual_seed(1)
    return {"x": torch.randn(24, 5, dtype=D), "reward": torch.randn(24, dtype=D)}


def relative(model: Any, batch: Any, group: int = 4) -> Tensor:
    """As GRPO has it: each answer's reward beside those of the same prompt."""
    rewards = batch["reward"].view(-1, group)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    return -model(batch["x"])[:, 0] * advantages.flatten()


def joined(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_a_size_that_cuts_through_groups_is_told_in_our_words(size: int) -> None:
    with pytest.raises(wb.SplitError, match=r"groups of 4.*multiple of 4, such as micro_batch_size=4") as caught:
        wb.backward(policy(), relative, answers(), size)
    assert isinstance(caught.value.__cause__, RuntimeError)
    report = wb.check(policy(), relative, answers(), size)
    assert "groups of 4" in str(report) and f"(of {size} rows)" in str(report)


def test_samples_that_are_collated_belong_together_too() -> None:
    samples = [dict(zip(answers(), row, strict=True)) for row in zip(*answers().values(), strict=True)]
    with pytest.raises(wb.SplitError, match="groups of 4"):
        wb.backward(policy(), relative, samples, 3, collate=joined)
    assert "(of 3 samples)" in str(wb.check(policy(), relative, samples, 3, collate=joined))


def test_rows_taken_by_length_are_laid_on_one_row() -> None:
    batch = {**answers(), "ids": torch.zeros(24, 2), "mask": torch.ones(24, 2)}
    with pytest.raises(wb.SplitError, match=r"by their lengths here, so lay each group on one row"):
        wb.backward(policy(), relative, batch, wb.Tokens(6, mask="mask"))


def test_a_size_that_keeps_groups_together_is_exact() -> None:
    model, batch = policy(), answers()
    reference = whole_batch(model, lambda m, b: relative(m, b).mean(), batch)
    wb.backward(model, relative, batch, 8)
    assert_same_gradient(model, reference)
    model.zero_grad()
    wb.backward(model, lambda m, b: relative(m, b, group=2), batch, 2, verify="never")  # what fits, in place of groups
    assert_differs(model, reference)


def test_an_error_of_another_kind_is_left_alone() -> None:
    def too_few(model: Any, batch: Any) -> Tensor:
        if len(batch["x"]) < 5:
            raise ValueError("at least five rows")
        return model(batch["x"])[:, 0]

    with pytest.raises(ValueError, match="at least five rows"):
        wb.backward(policy(), too_few, answers(), 4)
    assert group_of(lambda index: len(index) >= 5, 24, 4) == 0
