"""Where the user's own code stands when something happens, and in whose loop."""

from __future__ import annotations

import dataclasses
import functools
import linecache
import sysconfig
from pathlib import Path
from types import FrameType

FRAMEWORKS = ("wholebatch", "accelerate", "lightning", "pytorch_lightning", "transformers", "trl", "ultralytics")
OWN = str(Path(__file__).resolve().parent)


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


@functools.lru_cache(maxsize=1)
def libraries() -> tuple[str, ...]:
    """Return the folders whose files are not the user's: installed packages and the standard library."""
    paths = sysconfig.get_paths()
    return tuple(dict.fromkeys(paths[name] for name in ("purelib", "platlib", "stdlib", "platstdlib")))


@functools.lru_cache(maxsize=4096)
def library(file: str) -> str | None:
    """Return the package that `file` belongs to, "" for the standard library, None for the user's own code."""
    if file.startswith("<"):
        return ""
    if file.startswith(OWN):
        return "wholebatch"
    for folder in libraries():
        if file.startswith(folder):
            parts = Path(file).relative_to(folder).parts
            parts = parts[1:] if parts[0] in ("site-packages", "dist-packages") else parts
            return parts[0].removesuffix(".py") if parts else ""
    return None


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
