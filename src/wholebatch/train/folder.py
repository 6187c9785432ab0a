"""The folder of a run: config.yaml, metrics.jsonl, checkpoint/, and at the end summary.json."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from wholebatch.train import config as settings
from wholebatch.train.config import Config
from wholebatch.train.errors import RunError, remedy
from wholebatch.train.lock import locked

CONFIG, METRICS, SUMMARY = "config.yaml", "metrics.jsonl", "summary.json"


class RunFolder:
    """Where a run leaves what it did.

    Args:
        path: the folder; made when something is written.
        writes: whether this process writes; one of several does.
    """

    def __init__(self, path: Path, writes: bool = True) -> None:
        self.path, self.writes = path, writes
        self._metrics = path / METRICS

    @classmethod
    def create(cls, path: Path | None, config: Config, held: ExitStack) -> RunFolder:
        """Begin a new run, under `runs` if no path is named, and write its config.

        Args:
            path: the folder; made if it is not there.
            config: settled.
            held: keeps the folder locked until it is closed.

        Raises:
            RunError: if the folder holds a run already, is written by another process, or cannot be written.
        """
        folder = cls(_made(path))
        held.enter_context(locked(folder.path))
        if (folder.path / CONFIG).exists():
            raise RunError(
                f"{path} holds a run already. Go on with it: wholebatch train --resume {path}; or name another folder: "
                "--out FOLDER."
            )
        folder._write(CONFIG, settings.dump(config))
        return folder

    @classmethod
    def claim(cls, path: Path, held: ExitStack) -> None:
        """Lock a run that was begun, and take away what a killed writer left half-written.

        Raises:
            RunError: if there is none, it has ended, or another process is writing it.
        """
        cls.reopen(path)
        held.enter_context(locked(path))
        cls.reopen(path)  # who held the lock a moment ago may have ended the run
        for part in path.glob("*.part"):
            part.unlink(missing_ok=True)

    @classmethod
    def reopen(cls, path: Path, writes: bool = True) -> tuple[RunFolder, Config]:
        """Find a run that was begun, and its config.

        Raises:
            RunError: if there is none, or it has ended.
        """
        if path.is_file():
            raise RunError(f"{path} is a file. --resume takes the folder of a run.")
        if not (path / CONFIG).is_file():
            raise RunError(f"{path} holds no run: {CONFIG} is missing. Begin one with: wholebatch train --out {path}.")
        if (path / SUMMARY).exists():
            raise RunError(f"The run in {path} has ended: {SUMMARY} is there. Begin another one.")
        return cls(path, writes), settings.load(path / CONFIG)

    def append(self, record: dict[str, Any]) -> None:
        """Add one line to the metrics.

        Raises:
            RunError: if it cannot be written, as on a full disk; what was written before stays.
        """
        if not self.writes:
            return
        try:
            # Opened and closed a step: what a killed run wrote is then in the system's hands, not in a buffer of ours.
            with self._metrics.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise self._unwritable(METRICS, error) from error

    def last_step(self) -> int:
        """Return the last step that the metrics tell of; 0 if none."""
        return max((record["step"] for record in self.records()), default=0)

    def rewind(self, step: int) -> int:
        """Drop the metrics of later steps, and of a line that was cut off, since these steps will be taken again.

        Returns:
            Of how many of the steps until then nothing is told, because their lines are damaged or gone.
        """
        kept = [record for record in self.records() if record["step"] <= step]
        self._write(METRICS, "".join(f"{json.dumps(record)}\n" for record in kept))
        return step - len({record["step"] for record in kept})

    def summarise(self, summary: dict[str, Any]) -> None:
        """Write the summary, which ends the run."""
        self._write(SUMMARY, json.dumps(summary, indent=1, ensure_ascii=False) + "\n")

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield what each step told, past lines that are damaged."""
        try:
            lines = self._metrics.read_bytes().split(b"\n")
        except FileNotFoundError:
            return
        except OSError as error:
            raise RunError(f"{self._metrics} cannot be read: {error.strerror}.") from None
        for line in lines:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):  # the line that was being written when the run was killed
                continue
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                yield record

    def _write(self, name: str, text: str) -> None:
        """Write a file whole, or leave it as it was."""
        if not self.writes:
            return
        part = self.path / f"{name}.{os.getpid()}.part"
        try:
            with part.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            part.replace(self.path / name)
        except OSError as error:
            refusal = self._unwritable(name, error)
            with suppress(OSError):
                part.unlink()
            raise refusal from error

    def _unwritable(self, name: str, error: OSError) -> RunError:
        return RunError(
            f"{self.path / name} could not be written: {error.strerror}. What was saved before is untouched. "
            f"{remedy(error, self.path)}, then go on with: wholebatch train --resume {self.path}."
        )


def _made(path: Path | None) -> Path:
    """Make the folder that was named, or one under `runs` that no other run has."""
    try:
        if path is None:
            return _unused(Path("runs") / time.strftime("%Y%m%d-%H%M%S"))
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise RunError(f"{path or 'runs'} is a file. Name a folder for the run: --out FOLDER.") from None
    except OSError as error:
        named = (path or Path("runs")) / CONFIG
        raise RunError(f"{named} could not be written: {error.strerror}. Name another folder: --out FOLDER.") from None
    return path


def _unused(path: Path) -> Path:
    """Make a folder of this path, or of the first of path-2, path-3, ... that is free."""
    path.parent.mkdir(parents=True, exist_ok=True)
    number, free = 1, path
    while True:
        try:
            free.mkdir()  # fails where it is there, so two runs that begin in one second never share a folder
            return free
        except FileExistsError:
            number += 1
            free = path.with_name(f"{path.name}-{number}")
