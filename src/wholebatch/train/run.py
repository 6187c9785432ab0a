"""One run from beginning to end: prepare, measure, step, save, measure again, prove."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from signal import SIGTERM
from typing import Any

import torch
from torch import nn

import wholebatch as wb
from wholebatch.batch.dealing import seed_of
from wholebatch.planning.arrangement import counted
from wholebatch.train import checkpoint, display, translate
from wholebatch.train.checkpoint import Checkpoint
from wholebatch.train.classify import Classify
from wholebatch.train.config import Config, absolute, dump, plain
from wholebatch.train.contrast import Contrast
from wholebatch.train.display import Display
from wholebatch.train.errors import ConfigError, RunError
from wholebatch.train.folder import RunFolder
from wholebatch.train.machine import in_words, peak_memory_bytes
from wholebatch.train.order import Order
from wholebatch.train.processes import Processes, display_of, gathered, interrupted_run
from wholebatch.train.proof import Proof, prove
from wholebatch.train.signals import Request
from wholebatch.train.task import Task
from wholebatch.train.text import Text
from wholebatch.train.trainer import Trainer

EXACT = 1e-5
"""A gradient in float32 that is off by less is off by rounding alone."""

TASKS: Mapping[str, Callable[[Config], Task]] = {"text": Text, "classify": Classify, "contrastive": Contrast}


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        folder: of the run.
        summary: what `summary.json` holds; None if the run was stopped before its end.
        signal: the number of the signal that stopped it; None if it came to its end.
    """

    folder: Path
    summary: dict[str, Any] | None = None
    signal: int | None = None


def train(config: Config, shown: Display | None = None) -> Outcome:
    """Train as a config says, in a run folder of its own, or go on with the run in `config.resume`.

    Sets torch's random state from the seed. SIGINT and SIGTERM end the run after the step it is in, with a
    checkpoint; a run that was ended or killed goes on to the very same weights.

    Args:
        config: see `Config`.
        shown: where to say what happens; by default the terminal.

    Raises:
        ConfigError: for settings that contradict each other or cannot be met.
        DataError: for data that cannot be used.
        RunError: for a run folder that cannot be used, or a step that cannot be taken.
    """
    shown, request = shown or display.choose(), Request()
    with gathered(config.parallel, config.device) as team, ExitStack() as held:
        held.callback(shown.close)
        run = _opened(config, display_of(team, shown), team, held)
        with request:
            run.learn(request)
        return run.stopped(request) if run.ends(request) else run.finish()


class Run:
    """A run in progress.

    Args:
        config: settled.
        learner: takes the steps.
        folder: keeps what they did.
        shown: says it.
    """

    def __init__(self, config: Config, learner: Trainer, folder: RunFolder, shown: Display) -> None:
        self.config, self.learner, self.folder, self.shown = config, learner, folder, shown
        self.team = learner.team
        self.before: dict[str, float] = {}
        self.seconds = 0.0
        self.data = learner.task.fingerprint()

    def measure_first(self) -> None:
        """Measure the held-out rows before the first step."""
        self.before = self.learner.measure()
        self._tell_measure("before", self.before)

    def restore(self, saved: Checkpoint) -> None:
        """Go on from a checkpoint.

        Raises:
            RunError: if it belongs to another run, or to other data.
        """
        there, here = saved.config, plain(self.config)
        differing = [key for key in there.keys() | here.keys() if there.get(key) != here.get(key)]
        if differing:
            key = min(differing)
            raise RunError(
                f"{saved.folder} belongs to another run: {key} is {there.get(key)!r} there and {here.get(key)!r} here."
            )
        if saved.data != self.data:
            raise RunError(
                f"{saved.folder} was trained on other rows than {self.learner.task.origin}. Bring the data back as it "
                "was, or start a new run."
            )
        state = saved.restore(None if self.team.in_shards else self.learner.model)
        if self.team.in_shards:
            from wholebatch.train import shards  # loads torch's distributed checkpoints, which few runs need

            saved.compare(checkpoint.SHARDS, shards.read(saved.folder, self.learner.model, self.learner.optimizer))
        try:
            self.learner.load_state_dict(state["learner"])
            self.before, self.seconds = state["before"], state["seconds"]
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise RunError(f"{saved.folder} holds a state that does not fit this run: {error!r}") from error
        saved.compare(checkpoint.STATE, self.learner.taken)

    def learn(self, request: Request) -> None:
        """Take the steps that are left, until the last or until an end is asked for."""
        self.learner.model.train()
        begun, first = time.monotonic() - self.seconds, self.learner.taken
        started = time.monotonic()
        while self.learner.taken < self.learner.steps and not self.ends(request):
            record = self.learner.advance()
            self.seconds = time.monotonic() - begun
            self.folder.append(record)
            left = self.learner.steps - self.learner.taken
            pace = (time.monotonic() - started) / (self.learner.taken - first)
            self.shown.step(
                {**record, "steps": self.learner.steps, "left": left * pace, "unit": self.learner.task.unit}
            )
            if left == 0 or self.learner.taken % self.config.save_every == 0:
                self.save()

    def ends(self, request: Request) -> bool:
        """Tell whether any process was asked to end."""
        return self.team.total(float(request.asked)) != [0.0]

    def save(self) -> None:
        """Write a checkpoint of the state after the last step."""
        state = {"learner": self.learner.state_dict(), "before": self.before, "seconds": self.seconds}
        about = {"step": self.learner.taken, "config": plain(self.config), "data": self.data}
        whole = None if self.team.in_shards else self.learner.model
        if self.team.sharded and not self.team.first:
            with suppress(OSError):  # all processes fail together, and the first one says it
                self._write_shards(None)
        # Nobody goes on before all is on disk, and all end if it could not be written.
        self.team.by_first(lambda: checkpoint.save(self.folder.path, whole, state, about, self._export))

    def _export(self, folder: Path) -> None:
        """Write what stands beside the state, by the first process; the others bring their shards."""
        if self.team.in_shards:
            self._write_shards(folder)
        self.learner.task.export(folder)

    def _write_shards(self, folder: Path | None) -> None:
        from wholebatch.train import shards

        there = self.team.by_first(lambda: folder)  # known to the first process; the folder is there from now on
        if there is not None:
            shards.write(there, self.learner.model, self.learner.optimizer, self.learner.taken)

    def stopped(self, request: Request) -> Outcome:
        """Save, and say how to go on."""
        self.save()
        why = "since torchrun has died" if request.orphaned else "as asked"
        self.shown.note("stopped", f"after step {self.learner.taken} of {self.learner.steps}, {why}.")
        self.shown.note("go on", f"wholebatch train --resume {self.folder.path}")
        return Outcome(self.folder.path, signal=request.signal or SIGTERM)

    def finish(self) -> Outcome:
        """Measure again, show a sample, prove the gradient, and write the summary."""
        after = self.learner.measure()
        self._tell_measure("after", after)
        summary = self.team.by_first(lambda: self._ended(after))
        return Outcome(self.folder.path, summary)

    def _ended(self, after: dict[str, float]) -> dict[str, Any]:
        model = self.learner.plain  # current on the first process since it was measured
        model.eval()
        sample = self.learner.task.sample(model)
        if sample is not None:
            self.shown.note("sample", sample)
        if self.learner.noise.measured:
            self.shown.note("noise", str(self.learner.noise.estimate()))
        proof = self._prove(model) if self.config.proof else None
        summary = self._summary(after, sample, proof)
        self.folder.summarise(summary)
        self.shown.note("run", str(self.folder.path))
        return summary

    def _prove(self, model: nn.Module) -> Proof:
        batch = self.learner.task.held[: self.learner.order.schedule.largest]
        proof = prove(self.learner.task, model, batch, self.learner.size)
        how = (
            f"{proof.rows} held-out rows in {proof.micro_batches} micro-batches, against one backward of them "
            f"all in float64"
        )
        equal = (
            "\nAll micro-batches count the same here, so the usual loop is right too." if proof.usual < EXACT else ""
        )
        self.shown.note("proof", f"{proof}\n{how}{equal}")
        return proof

    def _summary(self, after: dict[str, float], sample: str | None, proof: Proof | None) -> dict[str, Any]:
        return {
            "steps": self.learner.taken,
            "rows": self.learner.rows,
            "seconds": round(self.seconds, 2),
            "held_out_before": self.before,
            "held_out_after": after,
            "sample": sample,
            "gradient_error": proof.error if proof else None,
            "usual_loop_error": proof.usual if proof else None,
            "proof": proof.record() if proof else None,
            "peak_memory_bytes": peak_memory_bytes(self.learner.device),
            "device": in_words(self.learner.device),
            "processes": self.team.world,
            "versions": {"wholebatch": wb.__version__, "torch": torch.__version__, "python": platform.python_version()},
        }

    def _tell_measure(self, when: str, measured: dict[str, float]) -> None:
        self.shown.note("held out", f"{self.learner.task.told(measured)} {when} training")


def _opened(config: Config, shown: Display, team: Processes, held: ExitStack) -> Run:
    if config.resume is not None:
        return _resume(config, config.resume, shown, team, held)
    path = team.by_first(
        lambda: interrupted_run(config.out, dump(absolute(replace(translate.translate(config), out=None))))
    )
    if path is None:
        return _begin(config, shown, team, held)
    return _resume(Config(resume=path), path, shown, team, held)


def _begin(config: Config, shown: Display, team: Processes, held: ExitStack) -> Run:
    # Everything that can be refused is refused before the folder is made, so that a mistake leaves nothing behind.
    settled = absolute(replace(translate.translate(config), out=None))
    learner = _learner(settled, team)
    path = team.by_first(lambda: RunFolder.create(config.out, settled, held).path)
    run = Run(settled, learner, RunFolder(path, team.first), shown)
    _introduce(run, translate.spoken(config))
    run.measure_first()
    return run


def _resume(config: Config, path: Path, shown: Display, team: Processes, held: ExitStack) -> Run:
    if config != Config(resume=path):
        changed = ", ".join(key for key in plain(config) if getattr(config, key) != getattr(Config(resume=path), key))
        raise ConfigError(f"A resumed run keeps its settings, but {changed} was given too. Leave it out.")
    team.by_first(lambda: _claimed(path, held))
    folder, settled = RunFolder.reopen(path, team.first)
    saved = checkpoint.read(path)
    # A run that took more steps than it saves after has had a checkpoint; without it, beginning anew would lose work.
    if saved is None and folder.last_step() > settled.save_every:
        steps = folder.last_step()
        raise RunError(
            f"{path} took {steps} steps, but has no checkpoint. Bring {path / 'checkpoint'} back, or begin anew."
        )
    run = Run(settled, _learner(settled, replace(team, parallel=settled.parallel)), folder, shown)
    _introduce(run, spoken="")
    if saved is None:
        folder.rewind(0)
        shown.note("resumed", "from the beginning: no checkpoint was written yet")
        run.measure_first()
        return run
    run.restore(saved)
    untold = folder.rewind(saved.step)
    team.by_first(lambda: checkpoint.tidy(path))
    shown.note("resumed", f"after step {saved.step} of {run.learner.steps}")
    if untold:
        shown.note("metrics", f"metrics.jsonl is damaged: it says nothing of {untold} of these {saved.step} steps")
    return run


def _claimed(path: Path, held: ExitStack) -> None:
    RunFolder.claim(path, held)
    checkpoint.recover(path)


def _learner(config: Config, team: Processes) -> Trainer:
    # Before the task, since the task draws the first weights.
    torch.manual_seed(config.seed)
    learner = Trainer(config, TASKS[config.task](config), team)
    if team.rank:  # the first process draws as one alone would
        torch.manual_seed(seed_of(config.seed, team.rank))
    return learner


def _introduce(run: Run, spoken: str) -> None:
    """Say what is about to be done, with the arithmetic of the batch."""
    task, order, steps = run.learner.task, run.learner.order, run.learner.steps
    run.shown.note("wholebatch", f"{wb.__version__} with torch {torch.__version__} on {in_words(run.learner.device)}")
    run.shown.note("data", task.origin)
    run.shown.note("model", task.network)
    size = run.learner.size
    rows, tokens = (size, None) if isinstance(size, int) else (None, size.budget)
    batch = _arithmetic(order.schedule, rows, tokens)
    if run.config.memory is not None:
        batch += f", smaller where {run.config.memory} would not do"
    run.shown.note("batch", f"{batch} (from {spoken})" if spoken else batch)
    if run.team.world > 1:
        run.shown.note(
            "ranks", f"{run.team.world} processes, {run.config.parallel}; each batch dealt out by its tokens"
        )
    run.shown.note("epoch", f"{order}; {steps:,} steps{_epochs(order, steps)}")
    run.shown.note("run", str(run.folder.path))


def _arithmetic(schedule: wb.BatchSchedule, rows: int | None, tokens: int | None) -> str:
    """Say how the batch is cut."""
    if schedule.settled and schedule.smallest == schedule.largest:
        return translate.arithmetic(schedule.largest, rows, tokens=tokens)
    of = counted(rows, "row") if rows is not None else f"{tokens} tokens"
    return f"{schedule}, in micro-batches of at most {of}"


def _epochs(order: Order, steps: int) -> str:
    """Say how many epochs so many steps are, where that is known."""
    return f" = {order.epochs_before(steps):.4g} epochs" if order.schedule.settled else ""
