"""The folder of a run: config.yaml, metrics.jsonl, checkpoint/, and at the end summary.json."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from wholebatch.train import config as settings
from wholebatch.train.config import Config
from wholebatch.train.errors import RunError

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
    def create(cls, path: Path | None, config: Config) -> RunFolder:
        """Begin a new run, under `runs` if no path is named, and write its config.

        Raises:
            RunError: if the folder holds a run already, or cannot be written.
        """
        path = path or _unused(Path("runs") / time.strftime("%Y%m%d-%H%M%S"))
        if (path / CONFIG).exists():
            raise RunError(
                f"{path} holds a run already. Go on with it: wholebatch train --resume {path}; or name another folder: "
                "--out FOLDER."
            )
        folder = cls(path)
        folder._write(CONFIG, settings.dump(config))
        return folder

    @classmethod
    def reopen(cls, path: Path, writes: bool = True) -> tuple[RunFolder, Config]:
        """Find a run that was begun, and its config.

        Raises:
            RunError: if there is none, or it has ended.
        """
        if not (path / CONFIG).is_file():
            raise RunError(f"{path} holds no run: {CONFIG} is missing. Begin one with: wholebatch train --out {path}.")
        if (path / SUMMARY).exists():
            raise RunError(f"The run in {path} has ended: {SUMMARY} is there. Begin another one.")
        return cls(path, writes), settings.load(path / CONFIG)

    def append(self, record: dict[str, Any]) -> None:
        """Add one line to the metrics.

        Raises:
            RunError: if the disk is full; what was written before stays.
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
        return max((record["step"] for record in self._records()), default=0)

    def rewind(self, step: int) -> None:
        """Drop the metrics of later steps, and of a line that was cut off, since these steps will be taken again."""
        kept = [json.dumps(record) for record in self._records() if record["step"] <= step]
        self._write(METRICS, "".join(f"{line}\n" for line in kept))

    def summarise(self, summary: dict[str, Any]) -> None:
        """Write the summary, which ends the run."""
        self._write(SUMMARY, json.dumps(summary, indent=1, ensure_ascii=False) + "\n")

    def _records(self) -> list[dict[str, Any]]:
        if not self._metrics.exists():
            return []
        records = []
        for line in self._metrics.read_text(encoding="utf-8").split("\n"):
            try:
                records.append(json.loads(line))
            except ValueError:  # the line that was being written when the run was killed
                continue
        return records

    def _write(self, name: str, text: str) -> None:
        """Write a file whole, or leave it as it was."""
        if not self.writes:
            return
        part = self.path / f"{name}.part"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with part.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            part.replace(self.path / name)
        except OSError as error:
            with suppress(OSError):
                part.unlink()
            raise self._unwritable(name, error) from error

    def _unwritable(self, name: str, error: OSError) -> RunError:
        return RunError(
            f"{self.path / name} could not be written: {error.strerror}. What was saved before is untouched. "
            f"Make room, then go on with: wholebatch train --resume {self.path}."
        )


def _unused(path: Path) -> Path:
    """Return this path, or the first of path-2, path-3, ... that is free."""
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free
