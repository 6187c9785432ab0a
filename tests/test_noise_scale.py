"""The noise scale of a gradient: held against the gradients of single rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from tests.distributed.launcher import Ranks
from tests.oracle import assert_same_gradient, whole_batch

POPULATION, BATCH, WINDOWS, WIDTH, LONGEST = 600, 64, 200, 6, 12

TOKENS = wb.Tokens(96, length=("x", "y"))

Batch = dict[str, Tensor]


def model_and_rows() -> tuple[nn.Linear, Batch]:
    """Return a linear model and rows of uneven length whose targets grow with it."""
    torch.manual_seed(0)
    x = torch.randn(POPULATION, LONGEST, WIDTH, dtype=torch.float64)
    lengths = torch.randint(1, LONGEST + 1, (POPULATION,))
    mask = torch.arange(LONGEST) < lengths[:, None]
    y = x.sum(-1) + 0.2 * lengths[:, None] + 2 * torch.randn(POPULATION, LONGEST, dtype=torch.float64)
    return nn.Linear(WIDTH, 1).double(), {"x": x, "y": y, "attention_mask": mask}


def errors(model: nn.Module, batch: Batch) -> Tensor:
    predicted: Tensor = model(batch["x"]).squeeze(-1)
    return (predicted - batch["y"]).square()


def token_mean(model: nn.Module, batch: Batch) -> Any:
    return wb.mean(errors(model, batch), batch["attention_mask"])


def row_mean(model: nn.Module, batch: Batch) -> Any:
    return errors(model, batch).mean(1)


def first_of_each(model: nn.Module, batch: Batch) -> Any:
    return wb.mean(errors(model, batch)[:, 0])


def both(model: nn.Module, batch: Batch) -> Any:
    return {"tokens": token_mean(model, batch), "rows": 0.5 * first_of_each(model, batch)}


def total(model: nn.Module, batch: Batch) -> Any:
    return wb.total(errors(model, batch).mean(1))


@dataclass(frozen=True)
class Truth:
    """What the noise is, from the gradient of every single row.

    Attributes:
        rows: the variance that one row adds over the squared length of the gradient.
        items: the same for one item.
    """

    rows: float
    items: float


def truth(model: nn.Module, rows: Batch, loss_fn: Callable[..., Any]) -> Truth:
    """Take each term's sum of every row alone, and how far it is from what its items would bring on average."""
    scattered: Tensor | float = 0.0
    gradient: Tensor | float = 0.0
    items = 0.0
    for weight, term in _terms(loss_fn):
        sums, counts = _by_row(model, rows, term)
        mean = sums.sum(0) / counts.sum()
        scattered = scattered + weight * (sums - counts[:, None] * mean) / counts.mean()
        gradient, items = gradient + weight * mean, float(counts.mean())
    assert isinstance(scattered, Tensor) and isinstance(gradient, Tensor)
    scale = float(scattered.square().sum(1).mean() / gradient.square().sum())
    return Truth(scale, scale * items)


def _terms(loss_fn: Callable[..., Any]) -> list[tuple[float, Callable[..., Any]]]:
    return [(1.0, token_mean), (0.5, first_of_each)] if loss_fn is both else [(1.0, loss_fn)]


def _by_row(model: nn.Module, rows: Batch, term: Callable[..., Any]) -> tuple[Tensor, Tensor]:
    """Return the gradient of each row's own sum, and its items."""
    sums, counts = [], []
    for row in range(POPULATION):
        one = {name: part[row : row + 1] for name, part in rows.items()}
        answer = term(model, one)
        answer = answer if isinstance(answer, wb.LossSum) else wb.mean(answer)
        found = torch.autograd.grad(answer.total, list(model.parameters()))
        sums.append(torch.cat([part.flatten() for part in found]))
        counts.append(float(answer.count))
    return torch.stack(sums), torch.tensor(counts, dtype=torch.float64)


def measured(model: nn.Module, rows: Batch, loss_fn: Callable[..., Any], size: Any, **options: Any) -> wb.NoiseEstimate:
    """Measure windows whose rows are drawn from all."""
    noise = wb.NoiseScale(every=1, windows=WINDOWS)
    draws = torch.Generator().manual_seed(1)
    for _ in range(WINDOWS):
        index = torch.randint(0, POPULATION, (BATCH - 3,), generator=draws)
        model.zero_grad()
        wb.backward(model, loss_fn, {n: part[index] for n, part in rows.items()}, size, noise_scale=noise, **options)
    return noise.estimate()


@pytest.mark.parametrize("loss_fn", [row_mean, token_mean, both], ids=["rows", "tokens", "two denominators"])
def test_the_estimate_is_that_of_single_rows(loss_fn: Callable[..., Any]) -> None:
    model, rows = model_and_rows()
    found, expected = measured(model, rows, loss_fn, 8), truth(model, rows, loss_fn)
    assert found.windows == WINDOWS
    assert found.rows == pytest.approx(expected.rows, rel=0.1)
    assert abs(found.rows - expected.rows) < 4 * found.rows_error
    if loss_fn is both:
        assert math.isnan(found.items)
    else:
        assert found.items == pytest.approx(expected.items, rel=0.1)


def test_micro_batches_taken_for_equal_miss_it() -> None:
    """The twin: the mean of every micro-batch by itself, as loops that accumulate divide."""
    model, rows = model_and_rows()
    shares, wholes = 0.0, 0.0
    draws = torch.Generator().manual_seed(1)
    for _ in range(WINDOWS):
        index = torch.randint(0, POPULATION, (BATCH,), generator=draws)
        index = index[rows["attention_mask"][index].sum(1).argsort()]
        gradients = []
        for part in index.split(8):
            answer = token_mean(model, {name: each[part] for name, each in rows.items()})
            found = torch.autograd.grad(answer.value, list(model.parameters()))
            gradients.append(torch.cat([each.flatten() for each in found]))
        shares += float(torch.stack(gradients).square().sum(1).mean())
        wholes += float(torch.stack(gradients).mean(0).square().sum())
    variance = (shares - wholes) / (1 / 8 - 1 / BATCH)
    square = (BATCH * wholes - 8 * shares) / (BATCH - 8)
    expected = truth(model, rows, token_mean).rows
    assert variance / square != pytest.approx(expected, rel=0.1)


def test_a_sum_is_measured_too() -> None:
    model, rows = model_and_rows()
    assert measured(model, rows, total, 8).rows == pytest.approx(truth(model, rows, row_mean).rows, rel=0.1)


def test_rows_sorted_by_length_are_cut_at_random_where_they_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = model_and_rows()
    expected = truth(model, rows, token_mean).rows
    assert measured(model, rows, token_mean, TOKENS).rows == pytest.approx(expected, rel=0.1)
    monkeypatch.setattr("wholebatch.gradient.setup.at_random", lambda micro_batches, *rest: micro_batches)
    assert measured(model, rows, token_mean, TOKENS).rows != pytest.approx(expected, rel=0.2)


@pytest.mark.parametrize("size", [8, TOKENS, wb.Auto(8)], ids=["rows", "tokens", "auto"])
def test_the_gradient_is_the_same(size: Any) -> None:
    model, rows = model_and_rows()
    plain = whole_batch(model, lambda m, b: errors(m, b)[b["attention_mask"]].mean(), rows)
    noise = wb.NoiseScale(every=1)
    wb.backward(model, token_mean, rows, size, noise_scale=noise)
    assert_same_gradient(model, plain)
    assert noise.measured == 1


def test_a_scaler_and_wider_sums_leave_it_the_same() -> None:
    model, rows = model_and_rows()
    expected = truth(model, rows, token_mean).rows
    narrow = {name: part if part.dtype is torch.bool else part.bfloat16() for name, part in rows.items()}
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    found = measured(model.bfloat16(), narrow, token_mean, 8, scaler=scaler, accumulate_in=torch.float32)
    assert found.rows == pytest.approx(expected, rel=0.1)
    own = measured(model.double(), rows, token_mean, 8)
    assert found.square == pytest.approx(own.square, rel=0.05)  # without the scale


def test_a_window_that_began_anew_is_measured_once() -> None:
    """Terms with unlike denominators are counted first: what was noted until then is forgotten."""
    model, rows = model_and_rows()
    noise = wb.NoiseScale(every=1)
    wb.backward(model, both, rows, 100, noise_scale=noise)
    assert [each.micro_batches for each in noise._found or (noise.estimate() and noise._found)] == [6.0]


class FailsOnce(nn.Linear):
    """Runs out of memory on the first micro-batch of more than 4 rows."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 4:
            raise torch.OutOfMemoryError("out of memory")
        return super().forward(x)


def test_a_micro_batch_that_memory_has_split_counts_as_its_parts() -> None:
    _, rows = model_and_rows()
    model, noise = FailsOnce(WIDTH, 1).double(), wb.NoiseScale(every=1)
    batch = {name: part[:16] for name, part in rows.items()}
    wb.backward(model, token_mean, batch, wb.Auto(8), noise_scale=noise)
    assert noise.measured == 1
    assert [(each.micro_batches, each.rows) for each in noise._found] == [(4.0, 16.0)]


def test_only_every_nth_window_is_measured_and_hooks_go() -> None:
    model, rows = model_and_rows()
    noise = wb.NoiseScale(every=3)
    for _ in range(7):
        wb.backward(model, row_mean, rows, 100, noise_scale=noise)
    assert noise.measured == 2
    assert not any(parameter._backward_hooks for parameter in model.parameters())


def with_a_regulariser(model: nn.Module, batch: Batch) -> Any:
    return token_mean(model, batch) + wb.once(0.1 * model.weight.square().sum())


class Normalised(nn.Module):
    """Normalises over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(LONGEST), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.norm(x))
        return found


def in_checkpoints(model: nn.Module, batch: Batch) -> Any:
    """Use the model in two reentrant checkpoints, each of which brings its part of the gradient."""
    x = batch["x"].clone().requires_grad_()
    twice = sum(torch.utils.checkpoint.checkpoint(model, x, use_reentrant=True) for _ in range(2))
    return (twice.squeeze(-1) - batch["y"]).square().mean(1)


REFUSED: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any], dict[str, Any], str]] = {
    "once": (lambda: nn.Linear(WIDTH, 1), with_a_regulariser, {}, "wb.once"),
    "BatchNorm": (Normalised, row_mean, {"batch_norm": "exact"}, "BatchNorm"),
    "checkpoints": (lambda: nn.Linear(WIDTH, 1), in_checkpoints, {"verify": "never"}, "use_reentrant=True"),
    "one micro-batch": (lambda: nn.Linear(WIDTH, 1), row_mean, {"micro_batch_size": None}, "micro_batch_size"),
    "infinite": (lambda: nn.Linear(WIDTH, 1), lambda m, b: row_mean(m, b) * math.inf, {"verify": "never"}, "finite"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_sample_of_the_noise_is_not_measured_and_said(case: str) -> None:
    build, loss_fn, options, words = REFUSED[case]
    noise = wb.NoiseScale(every=1)
    wb.backward(
        build().double(), loss_fn, model_and_rows()[1], **{"micro_batch_size": 100, **options}, noise_scale=noise
    )
    found = noise.estimate()
    assert not found.windows and math.isnan(found.rows)
    assert found.reason is not None and words in found.reason
    assert found.reason in str(found)


def test_a_loss_over_all_rows_refuses_it() -> None:
    model, rows = model_and_rows()
    with pytest.raises(TypeError, match="noise_scale="):
        wb.coupled_backward(model, lambda m, b: m(b["x"]), lambda x: x.mean(), rows, 8, noise_scale=wb.NoiseScale())


@pytest.mark.parametrize("wrong", [True, 16, "noise"])
def test_what_is_no_noise_scale_is_refused(wrong: Any) -> None:
    model, rows = model_and_rows()
    with pytest.raises(TypeError, match=r"noise_scale=wb\.NoiseScale\(\)"):
        wb.backward(model, row_mean, rows, 8, noise_scale=wrong)


def test_a_step_carries_it_in_its_state() -> None:
    def build() -> tuple[wb.Step, Batch]:
        model, rows = model_and_rows()
        sgd = torch.optim.SGD(model.parameters(), lr=0.0)
        return wb.Step(model, sgd, row_mean, 100, noise_scale=wb.NoiseScale(every=2)), rows

    step, rows = build()
    for _ in range(5):
        step(rows)
    resumed, _ = build()
    resumed.load_state_dict(step.state_dict())
    assert step.noise_scale is not None and resumed.noise_scale is not None
    resumed(rows)
    step(rows)
    assert resumed.noise_scale.estimate() == step.noise_scale.estimate()
    assert resumed.noise_scale.estimate().windows == 3


@pytest.mark.parametrize(
    "state", [{}, {"version": 2, "seen": 0, "found": []}, {"version": 1, "seen": 0, "found": [["x"]]}]
)
def test_what_is_no_state_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"NoiseScale"):
        wb.NoiseScale().load_state_dict(state)


def on_ranks(sync: str, shard: bool, silent: int | None = None) -> wb.NoiseEstimate:
    """Measure windows of which rank 0 has a third; on one rank nobody may measure."""
    from torch.distributed.fsdp import fully_shard

    model, rows = model_and_rows()
    wrapped = fully_shard(model) if shard else DistributedDataParallel(model)
    rank = dist.get_rank()
    noise = None if rank == silent else wb.NoiseScale(every=1, windows=WINDOWS)
    draws = torch.Generator().manual_seed(1)
    for _ in range(WINDOWS if silent is None else 1):
        index = torch.randint(0, POPULATION, (BATCH,), generator=draws).split([24, 40])[rank]
        wrapped.zero_grad()
        batch = {name: part[index] for name, part in rows.items()}
        wb.backward(wrapped, token_mean, batch, 8, sync=sync, noise_scale=noise)
    return wb.NoiseScale().estimate() if noise is None else noise.estimate()


@pytest.mark.distributed
@pytest.mark.parametrize("shard", [False, True], ids=["replicated", "sharded"])
@pytest.mark.parametrize("sync", ["last", "every"])
def test_ranks_measure_together(two_ranks: Ranks, sync: str, shard: bool) -> None:
    expected = truth(*model_and_rows(), token_mean).rows
    first, second = two_ranks.run(on_ranks, sync, shard)
    assert first == second or (math.isnan(first.rows) and first.reason == second.reason)
    if shard and sync == "every":
        assert first.reason is not None and 'sync="last"' in first.reason
    else:
        assert first.rows == pytest.approx(expected, rel=0.1)


@pytest.mark.distributed
def test_a_rank_that_measures_nothing_is_noticed(two_ranks: Ranks) -> None:
    found = two_ranks.run(on_ranks, "last", False, 1)[0]
    assert found.reason is not None and "another rank" in found.reason


def test_hooks_of_others_see_true_shares_beside_it() -> None:
    model, rows = model_and_rows()
    items = float(rows["attention_mask"].sum())
    expected = []
    for part in torch.arange(POPULATION).split(100):
        answer = token_mean(model, {name: each[part] for name, each in rows.items()})
        expected.append(float(torch.autograd.grad(answer.total / items, model.weight)[0].square().sum()))
    seen: list[float] = []
    model.weight.register_hook(lambda gradient: seen.append(float(gradient.square().sum())))
    wb.backward(model, token_mean, rows, 100, noise_scale=wb.NoiseScale(every=1), verify="never")
    assert seen == pytest.approx(expected, rel=1e-9)
