"""Pipelines of torch: the whole batch's gradient on every stage, whatever the schedule, the rows and the steps."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

import wholebatch as wb
from tests.distributed.collectives import Collectives
from tests.distributed.launcher import Ranks
from tests.distributed.problems import PROBLEMS, SHARES, model_and_rows, own_mean, share_of
from tests.distributed.test_sharded import outcome, reference
from tests.oracle import Gradients, assert_differs, assert_same_gradient, gradients_of, whole_batch

SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}
SIZES = {"one step, filled up": (4, 3), "several steps": (2, 2), "one row each": (12, 1), "large": (2, 16)}
"""How many micro-batches in flight, of how many rows: eleven rows fill none of them."""

pytestmark = pytest.mark.distributed


class Loss:
    """A problem's loss, given logits instead of a model."""

    def __init__(self, problem: str) -> None:
        self.problem = problem

    def __call__(self, found: torch.Tensor, targets: torch.Tensor) -> Any:
        return PROBLEMS[self.problem].ours(lambda words: found, (None, targets))


def stages_of(model: nn.Sequential, parts: int, group: Any = None) -> tuple[list[PipelineStage], list[nn.Module]]:
    """Cut the model for this rank: one of two stages, or two of four in turns."""
    group = group or dist.group.WORLD
    cut = [model[:2], model[2:]] if parts == 2 else [model[:1], model[1:2], model[2:3], model[3:]]
    mine = range(dist.get_rank(group), parts, dist.get_world_size(group))
    return [PipelineStage(cut[i], i, parts, torch.device("cpu"), group=group) for i in mine], [cut[i] for i in mine]


def gradients_by_name(parts: list[nn.Module]) -> Gradients:
    """Return gradients under their names in the undivided model, which slices keep."""
    return {name: grad for part in parts for name, grad in gradients_of(part).items()}


def pipeline_of(schedule: str, problem: str, size: tuple[int, int], dtype: torch.dtype, **settings: Any) -> Any:
    model, rows = model_and_rows(dtype)
    stages, parts = stages_of(model, 4 if schedule == "interleaved" else 2, settings.pop("group", None))
    taken = stages if schedule == "interleaved" else stages[0]
    pipeline = wb.Pipeline(
        SCHEDULES[schedule], taken, Loss(problem), micro_batches=size[0], micro_batch_size=size[1], **settings
    )
    return pipeline, rows, parts


def windows(schedule: str, problem: str, size: tuple[int, int], dtype: torch.dtype = torch.float64) -> Any:
    """Run two windows, the second adding to the first."""
    pipeline, (words, targets), parts = pipeline_of(schedule, problem, size, dtype)
    items = count_items if problem == "two denominators" else None
    found = []
    for _ in range(2):
        result = pipeline.backward(words, targets, items=items)
        found.append((gradients_by_name(parts), result))
    return found


def count_items(targets: torch.Tensor) -> list[float]:
    return [float((targets >= 0).sum()), float(targets.numel())]


def only(names: Gradients, plain: Any) -> Gradients:
    return {name: plain.gradients[name] for name in names}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("size", SIZES)
def test_every_stage_has_its_part_of_the_whole_batch_s_gradient(two_ranks: Ranks, schedule: str, size: str) -> None:
    plain = reference("token mean")
    ranks = two_ranks.run(windows, schedule, "token mean", SIZES[size])
    assert {name for (gradients, _), _ in ranks for name in gradients} == set(plain.gradients)
    for (first, result), (second, _) in ranks:
        assert_same_gradient(first, only(first, plain))
        assert_same_gradient({name: grad / 2 for name, grad in second.items()}, only(second, plain))
        assert float(result.loss) == pytest.approx(float(plain.loss), rel=1e-12)
        assert (result.rows, result.micro_batches % SIZES[size][0]) == (11, 0)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_every_loss_gives_it(two_ranks: Ranks, problem: str) -> None:
    plain = reference(problem)
    for (gradients, result), _ in two_ranks.run(windows, "1F1B", problem, (3, 2)):
        assert_same_gradient(gradients, only(gradients, plain))
        assert float(result.loss) == pytest.approx(float(plain.loss), rel=1e-12)


def test_single_precision_gives_it(two_ranks: Ranks) -> None:
    plain = reference("token mean", torch.float32)
    for (gradients, _), _ in two_ranks.run(windows, "1F1B", "token mean", (3, 2), torch.float32):
        assert_same_gradient(gradients, only(gradients, plain))


@pytest.mark.parametrize("steps", [1, 2])
def test_the_schedule_s_own_scaling_of_means_misses_it(two_ranks: Ranks, steps: int) -> None:
    plain = reference("token mean")
    for gradients in two_ranks.run(usual_pipeline, steps):
        assert_differs(gradients, only(gradients, plain), by=0.05)


def usual_pipeline(steps: int) -> Gradients:
    model, (words, targets) = model_and_rows()
    (stage,), parts = stages_of(model, 2)

    def loss(found: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return own_mean(lambda words: found, (None, targets))

    schedule = Schedule1F1B(stage, 2, loss_fn=loss)
    for words_, targets_ in zip(words[:8].chunk(steps), targets[:8].chunk(steps), strict=True):
        schedule.step(*([words_] if stage.is_first else []), **({"target": targets_} if stage.is_last else {}))
    return gradients_by_name(parts)


# Two by two


def replicated(share: str, problem: str) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipe"))
    pipeline, rows, parts = pipeline_of(
        "1F1B", problem, (2, 2), torch.float64, group=mesh["pipe"].get_group(), data_parallel=mesh["data"].get_group()
    )
    words, targets = share_of(rows, share, mesh["data"].get_local_rank())
    for _ in range(2):
        pipeline.backward(words, targets)
        norm = pipeline.clip(1e9)
        for parameter in pipeline.parameters:
            parameter.grad = None
    with Collectives() as seen:
        result = pipeline.backward(words, targets)
    numbers = sum(parameter.numel() for parameter in pipeline.parameters)
    return gradients_by_name(parts), result, norm, seen.count("allreduce", numbers)


@pytest.mark.parametrize("share", ["uneven", "no rows on rank 0"])
@pytest.mark.parametrize("problem", ["token mean", "None where nothing is", "total"])
def test_replicas_of_a_pipeline_share_one_batch(four_ranks: Ranks, share: str, problem: str) -> None:
    plain = reference(problem)
    expected = torch.stack([grad.norm() for grad in plain.gradients.values()]).norm()
    for gradients, result, norm, reductions in four_ranks.run(replicated, share, problem):
        assert_same_gradient(gradients, only(gradients, plain))
        assert float(result.loss) == pytest.approx(float(plain.loss), rel=1e-12)
        assert norm == pytest.approx(float(expected), rel=1e-12)
        assert reductions == 1
        assert result.rows in SHARES[share]


# Shapes, clipping, and what goes wrong


def test_narrower_windows_are_filled_up_to_one_length(two_ranks: Ranks) -> None:
    model, (words, targets) = model_and_rows()
    for width, ranks in zip((4, 3, 2), zip(*two_ranks.run(narrow), strict=True), strict=True):
        plain = whole_batch(model, PROBLEMS["token mean"].plain, (words[:, :width], targets[:, :width]))
        for gradients in ranks:
            assert_same_gradient(gradients, only(gradients, plain))


def narrow() -> list[Gradients]:
    pipeline, (words, targets), parts = pipeline_of("1F1B", "token mean", (3, 2), torch.float64, length=4)
    found = []
    for width in (4, 3, 2):
        pipeline.backward((words[:, :width],), targets[:, :width])
        found.append(gradients_by_name(parts))
        for parameter in pipeline.parameters:
            parameter.grad = None
    return found


def test_clipping_is_by_the_norm_of_all_stages(two_ranks: Ranks) -> None:
    plain = reference("token mean")
    whole = float(torch.stack([grad.norm() for grad in plain.gradients.values()]).norm())
    for gradients, norm in two_ranks.run(clipped, whole / 4):
        assert norm == pytest.approx(whole, rel=1e-12)
        quarter = {name: grad / 4 for name, grad in only(gradients, plain).items()}
        assert_same_gradient(gradients, quarter, tol=1e-4)  # the clip adds 1e-6 to the norm, as torch's does


def clipped(limit: float) -> Any:
    pipeline, (words, targets), parts = pipeline_of("GPipe", "token mean", (4, 3), torch.float64)
    pipeline.backward(words, targets)
    norm = pipeline.clip(limit)
    return gradients_by_name(parts), norm


def test_a_scaler_multiplies_the_losses(two_ranks: Ranks) -> None:
    plain = reference("token mean")
    for gradients in two_ranks.run(scaled):
        assert_same_gradient({name: grad / 2.0**10 for name, grad in gradients.items()}, only(gradients, plain))


def scaled() -> Gradients:
    pipeline, (words, targets), parts = pipeline_of("1F1B", "token mean", (3, 2), torch.float64)
    pipeline.backward(words, targets, scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10))
    return gradients_by_name(parts)


@pytest.mark.parametrize("kind", ["the loss fails", "two denominators", "a mean without items", "rows disagree"])
def test_an_error_on_one_stage_ends_the_window_on_all(two_ranks: Ranks, kind: str) -> None:
    for (name, text), seconds in two_ranks.run(failing, kind):
        expected = {
            "the loss fails": "the loss of the last stage",
            "two denominators": "items=",
            "rows disagree": "rows",
        }
        assert name in ("SyncError", "LossError", "ZeroDivisionError", "SplitError")
        assert expected.get(kind, "without dimensions") in text
        assert seconds < 10


def failing(kind: str) -> Any:
    pipeline, (words, targets), _ = pipeline_of("1F1B", "two denominators", (3, 2), torch.float64)
    calls: list[int] = []

    def loss(found: torch.Tensor, targets: torch.Tensor) -> Any:
        calls.append(1)
        if kind == "the loss fails" and len(calls) == 5:
            raise ZeroDivisionError("the loss of the last stage")
        return own_mean(lambda words: found, (None, targets)) if kind == "a mean without items" else found.sum((1, 2))

    if kind != "two denominators":
        pipeline._losses._loss_fn = loss
    if kind == "rows disagree" and dist.get_rank() == 1:
        targets = targets[:5]
    began = time.monotonic()
    return outcome(pipeline.backward, words, targets), time.monotonic() - began


def test_a_wrapped_stage_is_refused(two_ranks: Ranks) -> None:
    for name, text in two_ranks.run(outcome, wrapped):
        assert name == "SyncError"
        assert "data_parallel=" in text


def wrapped() -> None:
    stage = PipelineStage(nn.parallel.DistributedDataParallel(nn.Linear(2, 1)), dist.get_rank(), 2, torch.device("cpu"))
    wb.Pipeline(ScheduleGPipe, stage, Loss("total"), micro_batches=2, micro_batch_size=1)
