"""Watch the processes that a loop starts or runs beside, and bring their traces together."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

from wholebatch.doctor.patching import PatchedCall, Wrapping
from wholebatch.doctor.trace import Trace
from wholebatch.doctor.trace_json import read, written


class WatchedProcess:
    """A function that runs watched in a process of its own, and leaves its trace in a folder."""

    def __init__(self, function: Callable[..., Any], folder: str, watch: Callable[[], Any]) -> None:
        self.function, self.folder, self.watch = function, folder, watch

    def __call__(self, *args: Any) -> None:
        """Run the function, watched; its own error stays its own."""
        with contextlib.ExitStack() as stack:
            seen = stack.enter_context(self.watch())
            stack.push(lambda *error: save(seen.trace, Path(self.folder)))
            self.function(*args)
            seen.trace.complete = True


def around_processes(folder: str, watch: Callable[[], Any], wrapping: Wrapping) -> None:
    """Let processes started by `torch.multiprocessing` watch themselves, each in the context that `watch` makes."""

    def start(call: PatchedCall) -> Any:
        call.exchange(0, "fn", WatchedProcess(call.given(0, "fn"), folder, watch))
        return call.run()

    wrapping.function(mp, "start_processes", start)


def save(trace: Trace, folder: Path) -> None:
    """Write a trace under its rank; whole or not at all."""
    torn = folder / f"{os.getpid()}.part"
    torn.write_text(written(trace), encoding="utf-8")
    torn.replace(folder / f"rank{trace.rank:05d}-{os.getpid()}.json")


def load(folder: Path, count: int = 0, patience: float = 0.0) -> list[Trace]:
    """Return the traces in a folder that saw something, waiting for `count` of them at most `patience` seconds."""
    until = time.monotonic() + patience
    while len(found := sorted(folder.glob("*.json"))) < count and time.monotonic() < until:
        time.sleep(0.1)
    traces = [read(path.read_text(encoding="utf-8")) for path in found]
    return [trace for trace in traces if trace.events]


def launched() -> tuple[int, int]:
    """Return rank and number of ranks as torchrun tells them; (0, 1) for a process of its own."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def common_folder() -> Path:
    """Return a folder that the ranks of one torchrun on this machine share, nobody else's to read or write in.

    Raises:
        PermissionError: if something else stands under its name: a link, or a folder that others may write in.
    """
    run = hashlib.sha256(os.environ.get("TORCHELASTIC_RUN_ID", "none").encode()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir()) / f"wholebatch-doctor-{os.getuid()}-{os.getppid()}-{run}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()  # of a link itself, not of what it leads to
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(
            f"{folder} is no folder of yours alone (owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}), so "
            "others could write what the ranks tell each other. Remove it, or set TMPDIR to a folder of your own."
        )
    return folder
