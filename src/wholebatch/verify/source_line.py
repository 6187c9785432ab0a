"""Where the user's own code stands when something happens, and in whose loop."""

from __future__ import annotations

import dataclasses
import linecache
from pathlib import Path
from types import FrameType

from wholebatch.model.origin import OWN, library

FRAMEWORKS = ("wholebatch", "accelerate", "lightning", "pytorch_lightning", "transformers", "trl", "ultralytics")


@dataclasses.dataclass(frozen=True)
class Site:
    """A line of the user's program, and the framework whose loop called from there (None for a plain loop)."""

    file: str
    line: int
    function: str = ""
    framework: str | None = None

    @property
    def text(self) -> str:
        """The source of the line, without indentation; empty when the file cannot be read."""
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}"


def site_of(frame: FrameType | None) -> Site | None:
    """Return the nearest line of the user's own code at or above `frame`, with the framework in between.

    Frames of the doctor itself don't count as a framework.
    """
    framework = None
    while frame is not None:
        file = frame.f_code.co_filename
        package = library(file)
        if package is None:
            return Site(file, frame.f_lineno, frame.f_code.co_name, framework)
        if package in FRAMEWORKS and f"{OWN}/doctor" not in file:
            framework = package
        frame = frame.f_back
    return None
