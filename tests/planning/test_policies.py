"""Learning rates, averages and the nominal batch: reference values, and what the original was seen to do."""

from __future__ import annotations

import csv
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from wholebatch.batch.window import windows
from wholebatch.policies import NominalBatch, ramp, scale_adam, scale_ema, scale_lr, warm_up

DATA = Path(__file__).parents[1] / "data"
Rows = list[dict[str, str]]


def scenarios() -> list[Any]:
    """Every run that was recorded, by version and scenario."""
    found = []
    for name in ("nominal_trace.csv", "nominal_trace_8.3.0.csv"):
        with (DATA / name).open() as file:
            rows = list(csv.DictReader(file))
        for scenario, group in itertools.groupby(rows, key=lambda row: row["scenario"]):
            group = list(group)
            found.append(pytest.param(group, id=f"{group[0]['version']}-{scenario}"))
    return found


def nominal_of(rows: Rows, **changes: Any) -> NominalBatch:
    row = rows[0]
    settings: dict[str, Any] = {
        "nbs": int(row["nbs"]),
        "batch": int(row["batch"]),
        "micro_batches": int(row["nb"]),
        "epochs": int(row["epochs"]),
        "warmup_epochs": float(row["warmup_epochs"]),
        "flavour": row["version"][:3],
        "flush": "never",
    }
    return NominalBatch(**settings | changes)


@pytest.mark.parametrize("rows", scenarios())
def test_every_recorded_iteration_is_reproduced(rows: Rows) -> None:
    nominal = nominal_of(rows)
    trace = list(nominal.trace())
    assert len(trace) == len(rows)
    micro_batches, images, steps = 0, 0, 0
    for iteration, row in zip(trace, rows, strict=True):
        micro_batches, images, steps = micro_batches + 1, images + int(row["images"]), steps + iteration.steps
        assert (iteration.index, iteration.epoch) == (int(row["ni"]), int(row["epoch"]))
        assert iteration.accumulate == int(row["accumulate"])
        assert iteration.since == int(row["last_opt_step_before"])
        assert iteration.steps == bool(int(row["stepped"]))
        assert (micro_batches, images) == (int(row["window_micro_batches"]), int(row["window_images"]))
        assert steps == int(row["ema_updates"])
        if iteration.steps:
            micro_batches, images = 0, 0


@pytest.mark.parametrize("rows", scenarios())
def test_every_recorded_setting_is_reproduced(rows: Rows) -> None:
    nominal = nominal_of(rows)
    factor = 3 if rows[0]["optimizer"] == "MuSGD" else 1  # its matrix group trains at three times the rate
    for row in rows:
        index, epoch = int(row["ni"]), int(row["epoch"])
        rate = 0.01 * (max(1 - epoch / nominal.epochs, 0) * 0.99 + 0.01)
        assert nominal.warm(index, 0.0, rate * factor) == pytest.approx(float(row["lr_weight"]), rel=1e-12)
        assert nominal.warm(index, 0.8, 0.937) == pytest.approx(float(row["momentum"]), rel=1e-12)
        assert nominal.warm(index, 0.1, rate * factor) == pytest.approx(float(row["lr_bias"]), rel=1e-12)
        assert 5e-4 * nominal.decay_scale == pytest.approx(float(row["weight_decay"]), rel=1e-12)


def test_the_two_flavours_differ() -> None:
    current, legacy = (NominalBatch(16, 4, micro_batches=16, epochs=2, flavour=flavour) for flavour in ("8.4", "8.3"))
    assert (len(current.sizes()), len(legacy.sizes())) == (12, 25)
    assert (current.warmup_iterations, legacy.warmup_iterations) == (16, 100)


@pytest.mark.parametrize("rows", scenarios())
def test_a_flushed_run_loses_nothing(rows: Rows) -> None:
    kept, flushed = nominal_of(rows).sizes(), nominal_of(rows, flush="end").sizes()
    assert sum(flushed) == len(rows)
    left = len(rows) - sum(kept)
    assert flushed == ([*kept, left] if left else kept)


def test_the_original_loses_fifteen_of_sixteen_micro_batches_where_the_flush_keeps_them() -> None:
    shape: dict[str, Any] = {"micro_batches": 16, "epochs": 1, "flavour": "8.3"}
    assert NominalBatch(1024, 4, flush="never", **shape).sizes() == [1]
    assert NominalBatch(1024, 4, **shape).sizes() == [1, 15]
    assert "the last 15 micro-batches are dropped" in NominalBatch(1024, 4, flush="never", **shape).report()


def test_the_windows_of_a_run_are_the_steps_of_its_trace() -> None:
    loader = [torch.full((4,), i) for i in range(17)]
    nominal = NominalBatch(16, 4, micro_batches=17, epochs=3)
    seen = list(nominal.windows(loader))
    assert [len(window) for _, window in seen] == nominal.sizes()
    assert [boundary.index for boundary, _ in seen] == [i.index for i in nominal.trace() if i.steps]
    assert [int(micro_batch[0]) for _, window in seen for micro_batch in window] == [*range(17)] * 3


def test_windows_cross_epochs_and_the_unflushed_end_is_dropped() -> None:
    loader = [torch.full((4,), i) for i in range(17)]
    shape: dict[str, Any] = {"micro_batches": 17, "epochs": 3, "warmup_epochs": 0}
    dropped = list(NominalBatch(16, 4, flush="never", **shape).windows(loader))
    flushed = list(NominalBatch(16, 4, **shape).windows(loader))
    assert [len(window) for _, window in dropped] == [4] * 12
    assert [len(window) for _, window in flushed] == [4] * 12 + [3]
    assert [int(micro_batch[0]) for micro_batch in dropped[4][1]] == [16, 0, 1, 2]


@pytest.mark.parametrize(
    ("nbs", "batch", "words"),
    [
        (64, 16, "nbs 64 at 16 rows a micro-batch: 4 a step, 64 rows; weight decay x1"),
        (16, 6, "3 a step, 18 rows; not 16: rounded from 2.667"),
        (10, 4, "2 a step, 8 rows; not 10: rounded from 2.5"),
        (16, 32, "1 a step, 32 rows; not 16: rounded from 0.5"),
    ],
)
def test_rounding_away_from_the_nominal_batch_is_reported(nbs: int, batch: int, words: str) -> None:
    assert words in NominalBatch(nbs, batch, micro_batches=100, epochs=2).report()


@pytest.mark.parametrize(
    "wrong", [{"nbs": 0}, {"batch": 0}, {"micro_batches": 0}, {"epochs": 0}, {"flavour": "9"}, {"flush": "epoch"}]
)
def test_a_run_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        NominalBatch(**{"nbs": 64, "batch": 16, "micro_batches": 10, "epochs": 1} | wrong)


@pytest.mark.parametrize(
    ("batch", "rule", "expected"),
    [
        (512, "linear", 0.2),
        (1024, "linear", 0.4),
        (8192, "linear", 3.2),
        (32, "linear", 0.0125),
        (8192, "sqrt", 0.565685),
    ],
)
def test_the_learning_rate_follows_the_batch(batch: int, rule: Any, expected: float) -> None:
    assert scale_lr(0.1, batch, 256, rule) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("ratio", "lr", "betas", "eps"),
    [(4, 2e-3, (0.6, 0.996), 5e-9), (0.25, 5e-4, (0.975, 0.99975), 2e-8), (1, 1e-3, (0.9, 0.999), 1e-8)],
)
def test_adam_follows_the_batch(ratio: float, lr: float, betas: tuple[float, float], eps: float) -> None:
    settings = scale_adam(1e-3, int(1024 * ratio), 1024)
    assert settings["lr"] == pytest.approx(lr)
    assert settings["betas"] == pytest.approx(betas)
    assert settings["eps"] == pytest.approx(eps)
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], **settings)


def test_adam_is_not_scaled_beyond_the_rule() -> None:
    assert scale_adam(1e-3, 2560, 256)["betas"][0] == pytest.approx(0, abs=1e-12)
    with pytest.raises(ValueError, match=r"holds up to 10 times.*scale_lr"):
        scale_adam(1e-3, 256 * 11, 256)


def test_an_average_remembers_as_many_rows_as_before() -> None:
    assert scale_ema(0.9999, 256, 64) == pytest.approx(0.99960006, abs=1e-8)


def test_a_batch_of_nothing_has_no_ratio() -> None:
    with pytest.raises(ValueError, match="batch=0"):
        scale_lr(0.1, 0, 256)
    with pytest.raises(ValueError, match="rule='cube'"):
        scale_lr(0.1, 512, 256, rule="cube")  # type: ignore[arg-type]


def test_the_gradual_warm_up_of_the_large_batch() -> None:
    line = [warm_up(step, 780, start=0.1, end=3.2) for step in range(800)]
    assert line[0] == 0.1 and line[780] == line[799] == 3.2
    assert all(b - a == pytest.approx(3.974e-3, rel=1e-4) for a, b in itertools.pairwise(line[:781]))


def test_a_ramp_of_the_batch_size_loses_no_row() -> None:
    loader = [torch.full((2,), i) for i in range(23)]
    seen = list(windows(loader, ramp({0: 1, 3: 4, 5: 8})))
    assert [len(window) for window in seen] == [1, 1, 1, 4, 4, 8, 4]
    assert [int(micro_batch[0]) for window in seen for micro_batch in window] == [*range(23)]


def test_a_ramp_goes_on_where_the_last_epoch_ended() -> None:
    stages = {0: 1, 3: 4}
    assert [ramp(stages, done=2)(step) for step in range(3)] == [1, 4, 4]
    with pytest.raises(ValueError, match="step 0"):
        ramp({5: 2})
    with pytest.raises(ValueError, match="at least one"):
        ramp({0: 0})


@pytest.mark.parametrize("count", [8, 12], ids=["fewer", "more"])
def test_a_loader_of_another_length_is_refused_and_not_cut_short(count: int) -> None:
    nominal = NominalBatch(nbs=64, batch=16, micro_batches=10, epochs=2, warmup_epochs=0)
    with pytest.raises(ValueError, match="the schedule was made for 10"):
        list(nominal.windows(range(count)))


def test_an_iterator_that_is_used_up_after_one_epoch_is_refused() -> None:
    nominal = NominalBatch(nbs=64, batch=16, micro_batches=8, epochs=3, warmup_epochs=0)
    with pytest.raises(ValueError, match="Epoch 1 has 0 micro-batches"):
        list(nominal.windows(iter(range(8))))
