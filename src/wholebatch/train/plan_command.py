"""`wholebatch plan`: what a step will take, told before it is taken.

Where rows of a micro-batch are named and no memory is, arithmetic alone answers. Else the model that `wholebatch
train` would train runs a few micro-batches of its first batch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import torch

import wholebatch as wb
from wholebatch.amounts import bytes_in, in_bytes
from wholebatch.planning.arrangement import Arrangement
from wholebatch.planning.planner import Measured, Plan
from wholebatch.train.config import Config, schedule_of
from wholebatch.train.errors import ConfigError
from wholebatch.train.machine import device_named, in_words
from wholebatch.train.order import Order
from wholebatch.train.run import TASKS
from wholebatch.train.translate import spoken, translate

FLAGS = {"smaller micro-batches": "", "checkpointing": " --checkpoint", "offload": " --offload"}
"""What to add to `wholebatch train` for each way of running."""


@dataclass(frozen=True)
class Question(Config):
    """What will a step take? Asked with the settings of `wholebatch train`.

    With rows of a micro-batch and no memory, arithmetic answers at once: micro-batches, remainder, the same in other
    tools' words. With --memory, or without a micro-batch, the model runs a few micro-batches and the answer is the
    largest that fits.
    """

    ranks: int = 1
    """How many processes share the batch."""
    json: bool = False
    """Print JSON alone."""
    plot: Path | None = None
    """Draw memory and time against the size of a micro-batch into this file, such as plan.png."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ranks < 1:
            raise ConfigError(f"ranks is {self.ranks}; it must be at least 1.")
        if self.base_batch is not None and self.lr is None:
            raise ConfigError(f"base_batch is {self.base_batch}, but no lr says what was found there. Give --lr too.")
        if self.resume is not None:
            raise ConfigError(f"A plan is made before a run, but resume is {self.resume}. Give its config.yaml.")


@dataclass
class Advice:
    """What is told: facts, a table, and the same as plain values.

    Attributes:
        facts: pairs of a label and a text.
        heads, rows: the table; the first column stands to the left, all others to the right.
        after: facts below the table.
        values: all of it for `--json`.
        plan: what was measured, if anything was.
    """

    facts: list[tuple[str, str]]
    heads: Sequence[str] = ()
    rows: list[Sequence[str]] = field(default_factory=list)
    after: list[tuple[str, str]] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    plan: Plan | None = None


def advise(question: Question, stream: TextIO | None = None) -> None:
    """Answer on a stream, and draw if a picture is asked for.

    Raises:
        ConfigError: for settings that contradict each other, or a picture of nothing.
        OutOfMemoryError: if not even one row fits into the memory.
    """
    stream = stream or sys.stdout
    answer = answer_to(question)
    if question.plot is not None:
        if answer.plan is None:
            raise ConfigError("plot draws what was measured, but arithmetic alone answers this. Give --memory too.")
        from wholebatch.train.picture import draw

        draw(answer.plan, question.plot)
        answer.after.append(("picture", str(question.plot)))
    show(answer, stream, question.json)


def answer_to(question: Question) -> Advice:
    """Answer by arithmetic if it can, else by measuring."""
    settled = translate(question, question.ranks)
    rows = settled.micro_batch_size
    batch = schedule_of(settled).largest
    if question.memory is None and rows != "auto":
        answer = _by_arithmetic(Arrangement(batch, rows, question.ranks))
    else:
        answer = _by_measuring(settled, Arrangement(batch, ranks=question.ranks))
    words = spoken(replace(question, scale_lr=None, base_batch=None, nominal_batch=None))
    if words:
        answer.facts[0] = (answer.facts[0][0], f"{answer.facts[0][1]} (from {words})")
    _add_rates(answer, question, batch)
    return answer


def show(answer: Advice, stream: TextIO, as_json: bool = False) -> None:
    """Print an answer: JSON, a table for a terminal, or plain lines."""
    if as_json:
        print(json.dumps(answer.values, indent=1), file=stream)
        return
    _tell(answer.facts, stream)
    if answer.rows:
        _lay_out(answer, stream)
    _tell(answer.after, stream)


def _by_arithmetic(cut: Arrangement) -> Advice:
    words = cut.in_other_words()
    rows = [(tool, ", ".join(f"{name} {value}" for name, value in said.items())) for tool, said in words.items()]
    values = {**cut.as_dict(), "said": str(cut)}
    answer = Advice([("batch", str(cut))], ("elsewhere", "the same batch"), [*rows], values=values)
    if not words:
        could = " or ".join(map(str, cut.nearest()))
        answer.after.append(
            ("elsewhere", f"other tools count micro-batches of equal size: they could only say {could}")
        )
    return answer


def _by_measuring(settled: Config, batch: Arrangement) -> Advice:
    task = TASKS[settled.task](settled)
    if isinstance(task.objective(), wb.CoupledLoss):
        raise ConfigError(
            f"The task {settled.task} takes its loss over all rows at once, and runs its micro-batches twice: "
            f"micro-batches alone do "
            "not tell what that takes. Give micro_batch_size, and leave memory out, for the arithmetic."
        )
    device = device_named(settled.device)
    model = task.model.to(device).train()
    first = Order(len(task.train), batch.batch_size, settled.seed).batch(0)
    share = [task.train[row] for row in first[: batch.shares[0]]]
    size = task.whole(len(share))
    tokens = size if isinstance(size, wb.Tokens) else None
    memory = None if settled.memory is None else bytes_in(settled.memory)
    found = wb.plan(model, task.loss, share, memory, tokens=tokens, collate=task.collate)
    use = _flags(found)
    return Advice(
        [
            (
                "batch",
                batch.shared_out if batch.ranks == 1 else f"{batch.shared_out}; planned for the {len(share)} of one",
            ),
            ("model", f"{task.network}, on {in_words(device)}"),
            ("memory", _memory(found)),
        ],
        ("way", "largest micro-batch", "micro-batches", "activations", "a step"),
        [_row(way, found) for way in found.measured],
        [("fastest", found.reason), ("use", f"wholebatch train {use}"), *_unweighed(found, device)],
        {"batch_size": batch.batch_size, "ranks": batch.ranks, **found.as_dict(), "use": use},
        found,
    )


def _memory(found: Plan) -> str:
    parts = ", ".join(f"{name} {in_bytes(size)}" for name, size in found.parts.items())
    if found.memory is None:
        return f"{parts}; no cap on activations: --memory gives one"
    free = in_bytes(found.memory - sum(found.parts.values()))
    return f"{in_bytes(found.memory)} = {parts}, and {free} for activations"


def _row(way: Measured, found: Plan) -> Sequence[str]:
    choice = next((choice for choice in found.choices if choice.way == way.way), None)
    if choice is None:
        least = next(choice for choice in found.curves if choice.way == way.way)
        return way.way, "none fits", "", f"{in_bytes(least.activations)} at least", ""
    micro_batch = f"{choice.micro_batch_size:,} {found.unit}"
    return way.way, micro_batch, f"{choice.micro_batches:,}", in_bytes(choice.activations), f"{choice.seconds:.3g} s"


def _flags(found: Plan) -> str:
    size = "--max-tokens" if found.unit == "tokens" else "--micro-batch-size"
    return f"{size} {found.best.micro_batch_size}{FLAGS[found.best.way]}"


def _unweighed(found: Plan, device: torch.device) -> list[tuple[str, str]]:
    """Say why a way was left out."""
    ways = {way.way for way in found.measured}
    reasons = {
        "checkpointing": "the model has no blocks that would keep less",
        "offload": f"the model is on the {device.type}, so all that is saved is on the host already",
    }
    return [(way, f"not weighed: {reason}") for way, reason in reasons.items() if way not in ways]


def _add_rates(answer: Advice, question: Question, batch: int) -> None:
    if question.lr is None or question.base_batch is None:
        return
    rates = Arrangement(batch).rates(question.lr, question.base_batch)
    said = f"{rates['linear']:.4g} by the linear rule, {rates['sqrt']:.4g} by the square root"
    answer.facts.append(("lr", f"{question.lr:g} at a batch of {question.base_batch} is {said}"))
    answer.values["lr"] = {"at": question.base_batch, "was": question.lr, **rates}


def _tell(facts: Sequence[tuple[str, str]], stream: TextIO) -> None:
    for label, text in facts:
        print(f"{label:<14}{text}", file=stream)


def _lay_out(answer: Advice, stream: TextIO) -> None:
    """Print the table: with lines and colours on a terminal, as plain columns elsewhere."""
    if stream.isatty():
        from rich.console import Console
        from rich.table import Table

        table = Table(*answer.heads)
        for column in table.columns[1:]:
            column.justify = "right" if len(answer.heads) > 2 else "left"
        for row in answer.rows:
            table.add_row(*row)
        Console(file=stream).print(table)
        return
    print(file=stream)
    for row in (answer.heads, *answer.rows):
        first, *rest = row
        joined = "".join(f"{text:>17}" for text in rest) if len(answer.heads) > 2 else rest[0]
        print(f"{first:<14}{joined}".rstrip(), file=stream)
    print(file=stream)
