"""The field's rules for the size of a batch: what they promise, and what a shorter reading of them gives."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import wholebatch as wb

BATCHES = (1, 3, 8, 16, 24, 48, 64, 100, 128)


def nominal(batch: int, **settings: int) -> wb.NominalBatch:
    return wb.NominalBatch(nbs=64, batch=batch, micro_batches=200, epochs=2, warmup_epochs=0, **settings)


@pytest.mark.parametrize("batch", BATCHES)
def test_the_nominal_batch_rounds_and_scales_the_decay(batch: int) -> None:
    """ultralytics/yolov5#1630: batch 24 and batch 64 are not the same run, and the weight decay says so."""
    accumulate = max(1, round(64 / batch))
    policy = nominal(batch)
    assert (policy.accumulate, policy.decay_scale) == (accumulate, batch * accumulate / 64)


def test_flooring_and_an_unscaled_decay_are_another_policy() -> None:
    """The twin."""
    floored = {batch: (max(1, 64 // batch), 1.0) for batch in BATCHES}
    assert floored != {batch: (nominal(batch).accumulate, nominal(batch).decay_scale) for batch in BATCHES}
    assert floored[24] == (2, 1.0)
    assert (nominal(24).accumulate, nominal(24).decay_scale) == (3, 1.125)


@pytest.mark.parametrize("batch", BATCHES)
def test_no_row_is_lost_at_the_end_of_the_run(batch: int) -> None:
    assert sum(nominal(batch).sizes()) == 400


def test_the_windows_of_the_policy_train_like_whole_batches() -> None:
    """Rounded windows, the last one short: each is one exact batch."""
    torch.manual_seed(59)
    model, rows = nn.Linear(3, 1).double(), list(torch.randn(10, 2, 3).double())
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    policy = wb.NominalBatch(nbs=8, batch=2, micro_batches=10, epochs=1, warmup_epochs=0)
    step = wb.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, x: m(x).square())
    sizes = [step(window).micro_batches for _, window in policy.windows(rows)]
    assert sizes == policy.sizes() == [4, 4, 2]

    expected = nn.Linear(3, 1).double()
    expected.load_state_dict(start)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for window in (rows[:4], rows[4:8], rows[8:]):
        optimizer.zero_grad()
        expected(torch.cat(window)).square().mean().backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter, expected.get_parameter(name), rtol=1e-12, atol=0)


def test_the_learning_rate_follows_the_batch_by_either_rule() -> None:
    assert wb.scale_lr(0.1, batch=8192, base_batch=256) == pytest.approx(3.2)
    assert wb.scale_lr(0.1, batch=8192, base_batch=256, rule="sqrt") == pytest.approx(0.1 * 32**0.5)
    settings = wb.scale_adam(1e-3, batch=1024, base_batch=256, betas=(0.9, 0.999), eps=1e-8)
    assert settings["lr"] == pytest.approx(2e-3)
    assert settings["betas"] == pytest.approx((0.6, 0.996))
    assert settings["eps"] == pytest.approx(5e-9)


def test_a_batch_too_large_for_the_rule_is_refused() -> None:
    with pytest.raises(ValueError, match="beta"):
        wb.scale_adam(1e-3, batch=4096, base_batch=256, betas=(0.9, 0.999))
