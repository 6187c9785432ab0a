"""What every benchmark needs: a clock for wall and process time, quartiles, results that say where they come from."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Seconds:
    """How long something took: on the wall, and of this process's CPU time (which other processes disturb less)."""

    wall: float
    cpu: float


class Clock:
    """Measure the block: ``with Clock() as clock: ...; clock.seconds``."""

    def __enter__(self) -> Clock:
        self._start = (time.perf_counter(), time.process_time())
        return self

    def __exit__(self, *_: object) -> None:
        wall, cpu = self._start
        self.seconds = Seconds(time.perf_counter() - wall, time.process_time() - cpu)


def quartiles(values: Iterable[float]) -> dict[str, float]:
    """Return the median and both quartiles; of a single value, that value three times."""
    values = list(values)
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {"median": significant(middle), "low": significant(low), "high": significant(high)}


def significant(value: float) -> float:
    """Round to four significant digits."""
    return float(f"{value:.4g}")


def hold_memory() -> None:
    """Let the C library of Linux keep what is freed, for the rest of the process.

    Where two ways take turns in one process, it is chance which of them has to fetch from the system what the other has
    given back, and that costs up to a tenth of a step.
    """
    if sys.platform == "linux":
        c_library = ctypes.CDLL(None)
        for parameter, value in ((-1, -1), (-4, 0)):  # M_TRIM_THRESHOLD: never; M_MMAP_MAX: no blocks of their own
            c_library.mallopt(parameter, value)


def machine() -> dict[str, object]:
    """Describe the machine, without naming it."""
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
    }


def cpu_model() -> str:
    """Return the processor's name as the system knows it."""
    listed = Path("/proc/cpuinfo")
    lines = listed.read_text().splitlines() if listed.exists() else []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def save(name: str, settings: dict[str, object], rows: list[dict[str, object]], folder: Path = RESULTS) -> Path:
    """Write the result of one benchmark, to be read by ``tables.py``."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    content = {"benchmark": name, "machine": machine(), "settings": settings, "rows": rows}
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    return path
