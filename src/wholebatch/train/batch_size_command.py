"""`wholebatch batch-size RUN`: which batch a run should have had, from its noise or from branches of it.

The noise scale was measured while the run trained, and is read. On request the answer is measured directly: from the
run's checkpoint, the same rows are trained on in batches of several sizes, each with the learning rate that belongs to
it, and the losses afterwards are compared.

Source:
    McCandlish et al. 2018, arXiv 1812.06162 (the noise scale); Merrill et al. 2025, arXiv 2505.23971 (branches).
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TextIO

import torch
import tyro

import wholebatch as wb
from wholebatch.planning.arrangement import counted
from wholebatch.train import checkpoint, config
from wholebatch.train.checkpoint import Checkpoint
from wholebatch.train.config import DEFAULT_BATCH, Config
from wholebatch.train.errors import ConfigError, RunError
from wholebatch.train.folder import CONFIG, RunFolder
from wholebatch.train.plan_command import Advice, show
from wholebatch.train.run import TASKS
from wholebatch.train.trainer import Trainer

BRANCHES = "batch-size"
"""The folder, in that of a run, of what its branches came to."""

SHOWN = 8
"""How many measurements of the noise are shown."""

NEARLY = 0.01
"""How much more loss is no worse: less than a run with another seed differs by."""

LOSSES = ("loss", "bits_per_byte")
"""What tasks call a loss on the held-out rows."""

LAST = 4
"""Over the last of how many parts of a branch its loss is smoothed."""


@dataclass(frozen=True)
class Question:
    """Which batch should a run have? Reads the noise that it measured, or trains branches of it."""

    run: Annotated[Path, tyro.conf.Positional]
    """The folder of a run."""
    measure: bool = False
    """Train branches from the run's checkpoint: the same rows in batches of several sizes."""
    sizes: tuple[int, ...] = ()
    """The batches of the branches; left out: a quarter of the run's batch to four times that."""
    rows: int | None = None
    """How many rows each branch trains on; left out: 32 of the largest batches."""
    plot: Path | None = None
    """Draw the noise and the branches into this file, such as batch.png."""
    json: bool = False
    """Print JSON alone."""

    def __post_init__(self) -> None:
        if min(self.sizes, default=1) < 1 or (self.rows is not None and self.rows < 1):
            raise ConfigError(f"sizes are {list(self.sizes)} and rows {self.rows}; each must be 1 or more.")
        if not self.measure and (self.sizes or self.rows is not None):
            raise ConfigError("sizes and rows are those of branches, which are trained with --measure. Add it.")


@dataclass(frozen=True)
class Branch:
    """What the rows came to in batches of one size.

    Attributes:
        batch: rows of a step.
        steps: how many were taken.
        rows: how many rows were trained on.
        lr: the learning rate.
        loss: mean over the rows of the last quarter.
        held_out: what was measured on the held-out rows afterwards.
        began: the step of the run from which the branch began.
    """

    batch: int
    steps: int
    rows: int
    lr: float
    loss: float
    held_out: dict[str, float]
    began: int

    @property
    def judged(self) -> float:
        """The loss by which branches are compared: on the held-out rows, where the task measures one there."""
        return next((self.held_out[name] for name in LOSSES if name in self.held_out), self.loss)


def asked(arguments: Sequence[str]) -> Question:
    """Read a question from the command line."""
    return tyro.cli(Question, prog="wholebatch batch-size", args=arguments)


def advise(question: Question, stream: TextIO | None = None) -> None:
    """Answer on a stream, and draw if a picture is asked for.

    Raises:
        RunError: if there is no run, or nothing of it to go on from.
        ConfigError: for a picture of nothing.
    """
    settings = _settings_of(question.run)
    measured = [record for record in RunFolder(question.run).records() if record.get("noise_scale") is not None]
    branches = _branches(question, settings, stream or sys.stdout) if question.measure else []
    if question.plot is not None:
        if not measured and not branches:
            raise ConfigError("plot draws what was measured, and nothing was. Give --measure too.")
        from wholebatch.train.picture import draw_batches

        draw_batches(
            [(record["step"], record["rows"], record["noise_scale"]) for record in measured],
            [(branch.batch, branch.judged) for branch in branches],
            question.plot,
        )
    answer = _answer(question.run, measured, branches)
    if question.plot is not None:
        answer.after.append(("picture", str(question.plot)))
    show(answer, stream or sys.stdout, question.json)


def _settings_of(run: Path) -> Config:
    if not (run / CONFIG).is_file():
        raise RunError(f"{run} holds no run: {CONFIG} is missing. Name the folder of one, such as runs/NAME.")
    return config.load(run / CONFIG)


def _answer(run: Path, measured: Sequence[dict[str, Any]], branches: Sequence[Branch]) -> Advice:
    values: dict[str, Any] = {"noise": [_told(record) for record in measured], "branches": [*map(asdict, branches)]}
    answer = Advice([("run", str(run)), *_noise_facts(measured)], values=values)
    if branches:
        answer.heads = ("batch", "steps", "lr", "trained on", *branches[0].held_out)
        answer.rows = [_row(branch) for branch in branches]
        answer.after += _choice(branches, values)
    elif measured:
        answer.heads = ("step", "batch", "noise scale", "standard error")
        places = sorted({round(place * (len(measured) - 1) / (SHOWN - 1)) for place in range(SHOWN)})
        answer.rows = [_noise_row(measured[place]) for place in places]
        answer.after.append(("not known", "how the loss answers to other batches; --measure trains branches to see"))
    return answer


def _noise_facts(measured: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    if not measured:
        why = "the run has not come to its 16th step, took each batch in one micro-batch, or its loss joins rows"
        return [("noise", f"not measured: {why}")]
    last = measured[-1]
    scale, batch, error = last["noise_scale"], last["rows"], last.get("noise_scale_error")
    place = "well below it: a larger batch makes better steps, nearly in proportion"
    if batch > 2 * scale:
        place = "well above it: a smaller batch learns nearly as much in a step"
    elif batch > scale / 2:
        place = "near it: twice as many rows make a step that is less than 1.5 times as good"
    if error is None or error > scale / 2:
        place = "not to be judged yet: the noise is not known well enough"
    told = "" if error is None else f" +- {error:.3g}"
    return [
        ("noise", f"{scale:.4g}{told} rows at step {last['step']}"),
        ("batch", f"{counted(batch, 'row')} is {place}"),
    ]


def _noise_row(record: dict[str, Any]) -> list[str]:
    error = record.get("noise_scale_error")
    return [
        f"{record['step']:,}",
        f"{record['rows']:,}",
        f"{record['noise_scale']:.4g}",
        "" if error is None else f"{error:.3g}",
    ]


def _told(record: dict[str, Any]) -> dict[str, Any]:
    return {name: record.get(name) for name in ("step", "rows", "noise_scale", "noise_scale_error")}


def _row(branch: Branch) -> list[str]:
    held = [f"{value:.4g}" for value in branch.held_out.values()]
    return [f"{branch.batch:,}", f"{branch.steps:,}", f"{branch.lr:.3g}", f"{branch.loss:.4f}", *held]


def _choice(branches: Sequence[Branch], values: dict[str, Any]) -> list[tuple[str, str]]:
    """Name the largest batch that loses nothing against the best, on rows that no branch was trained on."""
    finite = [branch for branch in branches if math.isfinite(branch.judged)]
    if not finite:
        return [("choose", "none: no branch came to a finite loss; the lr of the run may be too large")]
    best = min(branch.judged for branch in finite)
    chosen = max((branch for branch in finite if branch.judged <= best * (1 + NEARLY)), key=lambda branch: branch.batch)
    values["choose"] = chosen.batch
    edge = ""
    if chosen.batch == max(branch.batch for branch in branches):
        edge = "; it is the largest that was tried, so a larger one may do as well: --sizes"
    return [
        ("choose", f"{chosen.batch:,}: the largest whose loss is within {NEARLY:.0%} of the least, held out{edge}"),
        (
            "not known",
            "whether another seed says the same, and what holds later, where larger batches serve",
        ),
    ]


def _branches(question: Question, settings: Config, stream: TextIO) -> list[Branch]:
    """Train each branch that has not been trained yet; a branch that was broken off begins anew."""
    saved = checkpoint.read(question.run)
    if saved is None:
        raise RunError(f"{question.run} has no checkpoint yet to take branches from. Let it go on until it has one.")
    if settings.parallel == "fsdp":
        raise RunError(
            f"{question.run} was saved in shards, which one process does not read. Take a run without --parallel fsdp."
        )
    rows_of_late = [each["rows"] for each in RunFolder(question.run).records() if each["step"] <= saved.step][-2:]
    # Of a batch that grows, the last that was full: an epoch's last may be short, and no two of these come together.
    now = settings.batch_size if isinstance(settings.batch_size, int) else max(rows_of_late, default=DEFAULT_BATCH)
    sizes = sorted(set(question.sizes or [max(1, now * times // 4) for times in (1, 2, 4, 8, 16)]))
    rows = question.rows or 32 * max(sizes)
    found = []
    for size in sizes:
        path = question.run / BRANCHES / f"step{saved.step}-batch{size}-rows{rows}.json"
        if not path.exists():
            if not question.json:
                print(f"{'branch':<14}batch {size:,}: {counted(rows, 'row')}", file=stream, flush=True)
            branch = _trained(settings, saved, size, now, rows)
            path.parent.mkdir(exist_ok=True)
            part = path.with_suffix(".part")
            part.write_text(json.dumps(asdict(branch), indent=1), encoding="utf-8")
            part.replace(path)
        found.append(Branch(**json.loads(path.read_text(encoding="utf-8"))))
    return found


def _trained(settings: Config, saved: Checkpoint, size: int, now: int, rows: int) -> Branch:
    """Go on from a checkpoint in batches of one size, in an order of rows that the run itself has not had."""
    torch.manual_seed(settings.seed)
    branch = replace(
        settings,
        batch_size=size,
        steps=2**31 - 1,
        schedule="constant",
        warmup=0,
        scale_lr=None,
        base_batch=None,
        nominal_batch=None,
        seed=settings.seed + 1,
    )
    learner = Trainer(branch, TASKS[settings.task](settings))
    state = saved.restore(learner.model)
    learner.optimizer.load_state_dict(state["learner"]["optimizer"])
    lr = wb.scale_lr(learner.optimizer.param_groups[0]["lr"], size, now, rule="sqrt")  # the optimizer is Adam's kin
    learner.schedule.base_lrs = [lr for _ in learner.optimizer.param_groups]
    for group in learner.optimizer.param_groups:
        group["lr"] = group["initial_lr"] = lr
    learner.model.train()
    told: list[tuple[int, float]] = []
    while learner.rows < rows:
        record = learner.advance()
        told.append((record["rows"], record["loss"]))
    return Branch(size, learner.taken, learner.rows, lr, _smoothed(told), learner.measure(), saved.step)


def _smoothed(told: Sequence[tuple[int, float]]) -> float:
    """Average the loss over the rows of the last quarter."""
    left = sum(rows for rows, _ in told) / LAST
    total = held = 0.0
    for rows, loss in reversed(told):
        if held >= left:
            break
        total, held = total + rows * loss, held + rows
    return total / held
