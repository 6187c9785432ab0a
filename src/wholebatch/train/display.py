"""What a run shows: the same lines everywhere, and on a terminal a progress bar below them."""

from __future__ import annotations

import sys
import time
from typing import Any, Protocol, TextIO

SHORTEST_PAUSE = 2.0
LINES = 20
"""A run shows about this many steps, however long it takes, and never two within the shortest pause."""


class Display(Protocol):
    """Where a run says what it does."""

    def note(self, label: str, text: str) -> None:
        """Show one fact."""

    def step(self, record: dict[str, Any]) -> None:
        """Show one step, if it is time to."""

    def close(self) -> None:
        """Leave the screen as it should stay."""


class Plain:
    """Lines of text, for files and pipes.

    Args:
        stream: where they go.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stdout
        self.started: float | None = None
        self.shown = 0.0

    def note(self, label: str, text: str) -> None:
        """Write one fact; further lines of its text are set below the first.

        A model that has just begun to learn writes any byte: what would command the terminal is shown as a dot.
        """
        first, *more = "".join(sign if sign.isprintable() or sign == "\n" else "·" for sign in text).split("\n")
        self.write("\n".join([f"{label:<12}{first}", *(f"{'':<12}{line}" for line in more)]))

    def step(self, record: dict[str, Any]) -> None:
        """Write one step, if it is the first, the last, or the last one shown was some time ago."""
        now = time.monotonic()
        if self.started is None:
            self.started = now
            self.write(header(record["unit"]))
        elif record["left"] and now - self.shown < max(SHORTEST_PAUSE, (now - self.started) / LINES):
            return
        self.shown = now
        self.write(row(record))

    def close(self) -> None:
        """Nothing is left open."""

    def write(self, text: str) -> None:
        """Write and flush, so that a pipe shows it at once."""
        print(text, file=self.stream, flush=True)


class Terminal(Plain):
    """The same lines above a progress bar that follows every step."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        super().__init__()
        self.console = Console(highlight=False)
        columns = (BarColumn(None), TextColumn("{task.description}"))
        self.progress = Progress(*columns, console=self.console, transient=True, auto_refresh=False)
        self.bar = self.progress.add_task("", visible=False)

    def step(self, record: dict[str, Any]) -> None:
        """Move the bar, and now and then leave a line."""
        self.progress.start()  # with the first step, so that no empty bar stands under the notes
        super().step(record)
        now = f"step {record['step']} of {record['steps']}   loss {record['loss']:.4f}   {clock(record['left'])} left"
        self.progress.update(
            self.bar, completed=record["step"], total=record["steps"], description=now, visible=True, refresh=True
        )

    def close(self) -> None:
        """Take the bar away; the lines stay."""
        self.progress.stop()

    def write(self, text: str) -> None:
        """Write above the bar."""
        self.console.print(text, markup=False, emoji=False, soft_wrap=True)


def choose() -> Display:
    """Return what suits where the output goes."""
    return Terminal() if sys.stdout.isatty() else Plain()


def header(unit: str) -> str:
    """Return what stands above the steps.

    Args:
        unit: what is counted in a second: tokens or rows.
    """
    return (
        f"{'step':>11}{'loss':>9}{'lr':>10}{'grad norm':>11}{'micro-batches':>15}{'padding':>9}{unit + '/s':>10}"
        f"{'memory':>10}{'left':>9}"
    )


def row(record: dict[str, Any]) -> str:
    """Return one step as a line under its header."""
    if not record["stepped"]:
        return f"{_place(record):>11}  not stepped: {record['reason']}"
    return (
        f"{_place(record):>11}{record['loss']:>9.4f}{record['lr']:>10.2e}{record['grad_norm']:>11.3g}"
        f"{micro_batches(record['pieces']):>15}{record['padding']:>9.1%}{record['tokens_per_second']:>10,.0f}"
        f"{size(record['peak_memory_bytes']):>10}{clock(record['left']):>9}{retried(record['retries'])}"
    )


def micro_batches(rows: list[int]) -> str:
    """Return "16 x 4" for sixteen micro-batches of four rows, "9 x 2-31" where they differ."""
    extent = f"{min(rows)}" if min(rows) == max(rows) else f"{min(rows)}-{max(rows)}"
    return f"{len(rows)} x {extent}"


def retried(retries: int) -> str:
    """Return how many micro-batches ran out of memory and came again in parts, if any did."""
    return f"  ({retries} out of memory, split)" if retries else ""


def size(number: int) -> str:
    """Return bytes as "812 MiB" or "1.4 GiB"."""
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.0f} MiB"


def clock(seconds: float) -> str:
    """Return seconds as "0:07" or "2:03:15"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _place(record: dict[str, Any]) -> str:
    return f"{record['step']}/{record['steps']}"
