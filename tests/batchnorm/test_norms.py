"""Running statistics that count every row once."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import update_bn

import wholebatch as wb
from wholebatch.batchnorm.moments import Moments, merged, moments_of
from wholebatch.norms import Pooled


def layers(**options: object) -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5, **options)).double()  # type: ignore[arg-type]


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    ours, theirs = ours.detach(), theirs.detach()
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


@pytest.mark.parametrize("momentum", [0.1, 0.7, None])
def test_pooled_statistics_are_those_of_one_forward_over_all_rows_at_the_first_layer(momentum: float | None) -> None:
    model, x = layers(momentum=momentum), torch.randn(11, 3).double() * 3 + 7
    model(torch.randn(6, 3).double())
    whole, naive = copy.deepcopy(model), copy.deepcopy(model)
    whole(x)
    with Pooled(model.modules()):
        for micro_batch in x.split(4):
            model(micro_batch)
    for micro_batch in x.split(4):
        naive(micro_batch)
    for name in ("running_mean", "running_var"):
        assert relative(getattr(model[1], name), getattr(whole[1], name)) < 1e-12
        assert relative(getattr(naive[1], name), getattr(whole[1], name)) > 1e-3
    assert model[1].num_batches_tracked == whole[1].num_batches_tracked == 2


def test_results_in_the_block_are_those_of_the_micro_batches() -> None:
    model, x = layers(), torch.randn(8, 3).double()
    expected = copy.deepcopy(model)(x[:3])
    with Pooled(model.modules()):
        assert torch.equal(model(x[:3]), expected)


def test_nothing_is_updated_when_the_block_fails() -> None:
    model = layers()
    with pytest.raises(ZeroDivisionError), Pooled(model.modules()):
        model(torch.randn(4, 3).double())
        raise ZeroDivisionError
    assert torch.equal(model[1].running_mean, torch.zeros(5))


def test_layers_that_keep_or_use_no_statistics_of_the_batch_are_left_alone() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False), nn.BatchNorm1d(3).eval()).double()
    before = copy.deepcopy(model.state_dict())
    with Pooled(model.modules()):
        model(torch.randn(4, 3).double())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_recalibration_counts_every_row_once_however_uneven_the_batches() -> None:
    x = torch.cat([torch.randn(3, 3).double(), torch.randn(20, 3).double() * 4 + 5])
    batches = [x[:3], x[3:]]
    model, averaged = nn.BatchNorm1d(3).double().eval(), nn.BatchNorm1d(3).double()
    wb.norms.recalibrate(model, batches)
    update_bn(batches, averaged)
    assert relative(model.running_mean, x.mean(0)) < 1e-12
    assert relative(model.running_var, x.var(0)) < 1e-12
    assert relative(averaged.running_var, x.var(0)) > 0.1
    assert not model.training


def test_recalibration_calls_the_model_as_it_is_told() -> None:
    model, x = layers(), torch.randn(9, 3).double()
    model.append(nn.Dropout(0.5))
    wb.norms.recalibrate(model, [{"x": x[:4]}, {"x": x[4:]}], lambda model, batch: model(batch["x"]))
    assert relative(model[1].running_mean, model[0](x).mean(0)) < 1e-12
    assert model[1].training and model[2].training


@pytest.mark.parametrize(("ratio", "bar"), [(10, 1e-6), (1e3, 1e-5), (1e4, 1e-3)])
def test_merging_does_not_lose_a_small_variance_beside_a_large_mean(ratio: float, bar: float) -> None:
    x = torch.randn(4096, 2) + ratio
    ours = merged([moments_of(micro_batch) for micro_batch in x.split(100)])
    assert relative(ours.variance, x.double().var(0, correction=0)) < bar
    squares = x.square().mean(0) - x.mean(0).square()
    assert relative(squares, x.double().var(0, correction=0)) > 8 * bar or ratio < 1e3


def test_a_micro_batch_without_rows_adds_nothing() -> None:
    some = moments_of(torch.randn(5, 3).double())
    none = Moments(0.0, torch.zeros(3).double(), torch.zeros(3).double())
    for ours, theirs in zip(merged([none, some]), some, strict=True):
        assert torch.allclose(torch.as_tensor(ours), torch.as_tensor(theirs), rtol=1e-14)


def test_layers_have_counted_nothing_if_a_window_is_broken_off() -> None:
    model = torch.nn.BatchNorm1d(2)
    with pytest.raises(ZeroDivisionError), Pooled(model.modules()):
        model(torch.randn(4, 2))
        1 / 0  # noqa: B018
    assert model.num_batches_tracked == 0


def test_a_layer_outside_of_the_model_counts_one_window_too() -> None:
    teacher, model, rows = torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3), torch.randn(8, 3)
    loss = lambda model, x: (model(x) - teacher(x).detach()).square().mean(1)  # noqa: E731
    wb.backward(model, loss, rows, 2, batch_norm="pooled")
    assert teacher.num_batches_tracked == 1
