"""One run from beginning to end: prepare, measure, step, save, measure again, prove."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import wholebatch as wb
from wholebatch.train import checkpoint, display, words
from wholebatch.train.checkpoint import Checkpoint
from wholebatch.train.classify import Classify
from wholebatch.train.config import Config, absolute, plain
from wholebatch.train.display import Display
from wholebatch.train.errors import ConfigError, RunError
from wholebatch.train.folder import RunFolder
from wholebatch.train.learner import Learner
from wholebatch.train.machine import in_words, peak_memory_bytes
from wholebatch.train.proof import Proof, prove
from wholebatch.train.signals import Request
from wholebatch.train.task import Task
from wholebatch.train.text import Text

EXACT = 1e-5
"""A gradient in float32 that is off by less is off by rounding alone."""

TASKS: Mapping[str, Callable[[Config], Task]] = {"text": Text, "classify": Classify}


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
    _refuse_several_ranks()
    shown = shown or display.choose()
    try:
        run = _begin(config, shown) if config.resume is None else _resume(config, config.resume, shown)
        with Request() as request:
            run.learn(request)
        return run.stopped(request.signal) if request.signal is not None else run.finish()
    finally:
        shown.close()


class Run:
    """A run in progress.

    Args:
        config: settled.
        learner: takes the steps.
        folder: keeps what they did.
        shown: says it.
    """

    def __init__(self, config: Config, learner: Learner, folder: RunFolder, shown: Display) -> None:
        self.config, self.learner, self.folder, self.shown = config, learner, folder, shown
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
        state = saved.restore(self.learner.model)
        self.learner.load_state_dict(state["learner"])
        self.before, self.seconds = state["before"], state["seconds"]

    def learn(self, request: Request) -> None:
        """Take the steps that are left, until the last or until an end is asked for."""
        self.learner.model.train()
        begun, first = time.monotonic() - self.seconds, self.learner.taken
        started = time.monotonic()
        while self.learner.taken < self.learner.steps and request.signal is None:
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

    def save(self) -> None:
        """Write a checkpoint of the state after the last step."""
        state = {"learner": self.learner.state_dict(), "before": self.before, "seconds": self.seconds}
        about = {"step": self.learner.taken, "config": plain(self.config), "data": self.data}
        checkpoint.save(self.folder.path, self.learner.model, state, about, self.learner.task.export)

    def stopped(self, signal: int) -> Outcome:
        """Save, and say how to go on."""
        self.save()
        self.shown.note("stopped", f"after step {self.learner.taken} of {self.learner.steps}, as asked.")
        self.shown.note("go on", f"wholebatch train --resume {self.folder.path}")
        return Outcome(self.folder.path, signal=signal)

    def finish(self) -> Outcome:
        """Measure again, show a sample, prove the gradient, and write the summary."""
        after = self.learner.measure()
        self._tell_measure("after", after)
        self.learner.model.eval()
        sample = self.learner.task.sample(self.learner.model)
        if sample is not None:
            self.shown.note("sample", sample)
        proof = self._prove() if self.config.proof else None
        summary = self._summary(after, sample, proof)
        self.folder.summarise(summary)
        self.shown.note("run", str(self.folder.path))
        return Outcome(self.folder.path, summary)

    def _prove(self) -> Proof:
        batch = self.learner.task.held[: self.learner.order.batch_size]
        proof = prove(self.learner.task, self.learner.model, batch, self.learner.size)
        how = f"{proof.rows} held-out rows in {proof.pieces} pieces, against one backward of them all in float64"
        equal = "\nAll pieces count the same here, so the usual loop is right too." if proof.usual < EXACT else ""
        self.shown.note("proof", f"{proof}\n{how}{equal}")
        return proof

    def _summary(self, after: dict[str, float], sample: str | None, proof: Proof | None) -> dict[str, Any]:
        return {
            "steps": self.learner.taken,
            "rows": self.learner.step.rows,
            "seconds": round(self.seconds, 2),
            "held_out_before": self.before,
            "held_out_after": after,
            "sample": sample,
            "gradient_error": proof.error if proof else None,
            "usual_loop_error": proof.usual if proof else None,
            "proof": asdict(proof) if proof else None,
            "peak_memory_bytes": peak_memory_bytes(self.learner.device),
            "device": in_words(self.learner.device),
            "versions": {"wholebatch": wb.__version__, "torch": torch.__version__, "python": platform.python_version()},
        }

    def _tell_measure(self, when: str, measured: dict[str, float]) -> None:
        self.shown.note("held out", f"{self.learner.task.told(measured)} {when} training")


def _begin(config: Config, shown: Display) -> Run:
    # Everything that can be refused is refused before the folder is made, so that a mistake leaves nothing behind.
    settled = absolute(replace(words.translate(config), out=None))
    learner = _learner(settled)
    run = Run(settled, learner, RunFolder.create(config.out, settled), shown)
    _introduce(run, words.spoken(config))
    run.measure_first()
    return run


def _resume(config: Config, path: Path, shown: Display) -> Run:
    if config != Config(resume=path):
        changed = ", ".join(key for key in plain(config) if getattr(config, key) != getattr(Config(resume=path), key))
        raise ConfigError(f"A resumed run keeps its settings, but {changed} was given too. Leave it out.")
    folder, settled = RunFolder.reopen(path)
    saved = checkpoint.read(path)
    # A run that took more steps than it saves after has had a checkpoint; without it, beginning anew would lose work.
    if saved is None and folder.last_step() > settled.save_every:
        steps = folder.last_step()
        raise RunError(
            f"{path} took {steps} steps, but has no checkpoint. Bring {path / 'checkpoint'} back, or begin anew."
        )
    run = Run(settled, _learner(settled), folder, shown)
    _introduce(run, spoken="")
    if saved is None:
        folder.rewind(0)
        shown.note("resumed", "from the beginning: no checkpoint was written yet")
        run.measure_first()
        return run
    run.restore(saved)
    folder.rewind(saved.step)
    shown.note("resumed", f"after step {saved.step} of {run.learner.steps}")
    return run


def _learner(config: Config) -> Learner:
    # Before the task, since the task draws the first weights.
    torch.manual_seed(config.seed)
    return Learner(config, TASKS[config.task](config))


def _introduce(run: Run, spoken: str) -> None:
    """Say what is about to be done, with the arithmetic of the batch."""
    task, order, steps = run.learner.task, run.learner.order, run.learner.steps
    run.shown.note("wholebatch", f"{wb.__version__} with torch {torch.__version__} on {in_words(run.learner.device)}")
    run.shown.note("data", task.origin)
    run.shown.note("model", task.network)
    size = run.learner.size
    rows, tokens = (size, None) if isinstance(size, int) else (None, size.budget)
    batch = words.arithmetic(order.batch_size, rows, tokens=tokens)
    if run.config.memory is not None:
        batch += f", smaller where {run.config.memory} would not do"
    run.shown.note("batch", f"{batch} (from {spoken})" if spoken else batch)
    run.shown.note("epoch", f"{order}; {steps:,} steps = {steps / order.steps_per_epoch:.4g} epochs")
    run.shown.note("run", str(run.folder.path))


def _refuse_several_ranks() -> None:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        raise ConfigError(
            f"WORLD_SIZE is {world}, but wholebatch train runs in one process so far: leave torchrun out."
        )
