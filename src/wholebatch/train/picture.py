"""The pictures of a plan, memory and time against the size of a micro-batch, and of a choice of batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wholebatch.planning.planner import Choice, Plan
from wholebatch.train.errors import ConfigError
from wholebatch.train.extras import require

COLOURS = {"smaller micro-batches": "#1f77b4", "checkpointing": "#d95f02", "offload": "#2ca02c"}


def draw(plan: Plan, path: Path) -> None:
    """Draw a plan into a file whose ending names the format.

    Raises:
        ConfigError: if matplotlib is missing, or the file cannot be written.
    """
    figures = require("matplotlib.figure", "plot", "A picture (--plot)")
    figure = figures.Figure(figsize=(8, 7), layout="constrained")
    memory, time = figure.subplots(2, 1, sharex=True)
    _draw_memory(memory, plan)
    _draw_time(time, plan)
    figure.suptitle(f"A batch of {plan.rows:,} rows in micro-batches")
    _save(figure, path)


def _draw_memory(axes: Any, plan: Plan) -> None:
    """What is always there, what one micro-batch of each size adds, and where the cap cuts it off."""
    fixed = sum(plan.parts.values())
    top = 1.8 * plan.memory if plan.memory is not None else math.inf
    for way in plan.measured:
        sizes = [choice.micro_batch_size for choice in plan.curves if choice.way == way.way]
        colour = COLOURS[way.way]
        axes.plot(sizes, [_mebi(fixed + way.micro_batch_bytes(size)) for size in sizes], color=colour, label=way.way)
        seen = [(held, fixed + size) for held, size in zip(way.held, way.bytes, strict=True) if fixed + size <= top]
        axes.plot([held for held, _ in seen], [_mebi(size) for _, size in seen], "o", color=colour)
    axes.plot([], [], "o", color="black", label="measured")
    axes.axhspan(0, _mebi(fixed), color="0.85", label="weights, gradients, optimizer, inputs")
    if plan.memory is not None:
        axes.axhline(_mebi(plan.memory), color="black", linestyle="--", label=f"the cap, {_mebi(plan.memory):,.0f} MiB")
        axes.set_ylim(top=_mebi(top))
    axes.set_ylim(bottom=0)
    axes.set_ylabel("memory of a step, MiB")
    axes.legend(loc="upper left", framealpha=1)


def _draw_time(axes: Any, plan: Plan) -> None:
    """The modelled time of a step in micro-batches of each size, thin where they do not fit."""
    for way in plan.measured:
        curve = [choice for choice in plan.curves if choice.way == way.way]
        chosen = next((choice for choice in plan.choices if choice.way == way.way), None)
        most = 0 if chosen is None else chosen.micro_batch_size
        fits = [choice for choice in curve if choice.micro_batch_size <= most]
        colour = COLOURS[way.way]
        axes.plot(*_times(curve), color=colour, linewidth=0.8, linestyle=":")
        axes.plot(*_times([*fits, *([chosen] if chosen else [])]), color=colour)
        if chosen is not None:
            text = f"{chosen.way}: {chosen.micro_batches} micro-batches, {chosen.seconds:.3g} s"
            axes.plot(*_times([chosen]), "o", color=colour, label=text)
    axes.set_ylabel("time of a step, s")
    axes.set_xlabel(f"{plan.unit} in a micro-batch at most")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, place: f"{value:,.0f}")
    axes.set_ylim(bottom=0)
    axes.legend(loc="lower left", title="the largest micro-batch that fits")


def _times(choices: Sequence[Choice]) -> tuple[list[int], list[float]]:
    return [choice.micro_batch_size for choice in choices], [choice.seconds for choice in choices]


def _mebi(size: float) -> float:
    return size / 2**20


def draw_batches(noise: Sequence[tuple[int, int, float]], branches: Sequence[tuple[int, float]], path: Path) -> None:
    """Draw the noise of a run beside its batch, and the losses of branches against theirs.

    Args:
        noise: step, rows of its batch and noise scale.
        branches: rows of a batch, and the loss that it came to.
        path: the file, whose ending names the format.

    Raises:
        ConfigError: if matplotlib is missing, or the file cannot be written.
    """
    figures = require("matplotlib.figure", "plot", "A picture (--plot)")
    figure = figures.Figure(figsize=(8, 3.5 * (bool(noise) + bool(branches))), layout="constrained")
    panels = list(figure.subplots(bool(noise) + bool(branches), 1, squeeze=False)[:, 0])
    if noise:
        axes = panels.pop(0)
        axes.plot(
            [step for step, _, _ in noise], [scale for _, _, scale in noise], color="#1f77b4", label="noise scale"
        )
        axes.step(
            [step for step, _, _ in noise], [rows for _, rows, _ in noise], color="0.4", label="batch", where="post"
        )
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(lambda value, place: f"{value:,.3g}")
        axes.set_xlabel("step")
        axes.set_ylabel("rows")
        axes.legend()
    if branches:
        axes = panels.pop(0)
        axes.plot([batch for batch, _ in branches], [loss for _, loss in branches], "o-", color="#d95f02")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, place: f"{value:,.0f}")
        axes.set_xlabel("rows of a batch, each branch over the same rows")
        axes.set_ylabel("loss afterwards")
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"The picture {path} cannot be written: {error}. Name a .png, .svg or .pdf.") from None
