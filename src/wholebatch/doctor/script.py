"""Somebody's script inside this process: its start, its end, its output, and whatever it does to the process."""

from __future__ import annotations

import contextlib
import importlib
import os
import runpy
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from wholebatch.doctor.watch import Seen
from wholebatch.verify.source_line import site_of


class Refusal(Exception):
    """What was asked for can't be done; the message says what to write instead."""


class Caught(contextlib.AbstractContextManager["Caught"]):
    """Takes errors of other people's code, whatever they are, and tells them in words instead of a traceback."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.traceback: TracebackType | None = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        self.error, self.traceback = error, traceback
        return isinstance(error, (Exception, SystemExit, KeyboardInterrupt))

    def words(self) -> str:
        """Return the error in one line, without its place."""
        return f"{type(self.error).__name__}: {self.error}"


def function_named(reference: str | None, script: str | None) -> Any:
    """Return the function that MODULE:FUNCTION names; modules in the current folder and the script's are found too.

    Raises:
        Refusal: if there is none, before anything is run.
    """
    if reference is None:
        return None
    module, _, name = reference.partition(":")
    if not module or not name:
        raise Refusal(f"--reference {reference}: name a function as MODULE:FUNCTION.")
    kept = list(sys.path)
    sys.path[:0] = [str(Path.cwd()), *([str(Path(script).resolve().parent)] if script is not None else [])]
    with Caught() as caught:
        found = getattr(importlib.import_module(module), name)
    sys.path[:] = kept
    if caught.error is not None:
        raise Refusal(f"--reference {reference} can't be imported: {caught.words()}.")
    if not callable(found):
        raise Refusal(f"--reference {reference} is {type(found).__name__}; name a function of model and batch.")
    return found


def start(script: str | None, module: str | None, given: list[str]) -> None:
    """Run the script or module as Python would, with its own arguments."""
    kept = list(sys.argv), list(sys.path)
    try:
        if module is not None:
            sys.argv = [module, *given]
            sys.path.insert(0, str(Path.cwd()))
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        elif script is not None:
            sys.argv = [script, *given]
            sys.path.insert(0, str(Path(script).resolve().parent))
            runpy.run_path(str(Path(script).absolute()), run_name="__main__")  # it may go to another folder
    finally:
        sys.argv, sys.path[:] = kept


class Script(Caught):
    """Takes the script's own end: an exit is its end, an error is noted as it is and goes no further.

    A process that the script has forked ends here as it would without: the report is its parent's.
    """

    def __init__(self, seen: Seen, name: str) -> None:
        super().__init__()
        self.trace = seen.trace
        self.name = name
        self.process = os.getpid()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        taken = super().__exit__(kind, error, traceback)
        if os.getpid() != self.process:
            leave(error)
        if isinstance(error, SystemExit):
            if error.code not in (None, 0):
                said = f"exit status {error.code}" if isinstance(error.code, int) else f"the words {error.code!r}"
                self.trace.error = f"{self.name} ended with {said}"
        elif taken:
            self.note(traceback)
        return taken

    def note(self, traceback: TracebackType | None) -> None:
        """Write down the error and the user's line that it came from."""
        while traceback is not None and traceback.tb_next is not None:
            traceback = traceback.tb_next
        self.trace.error_site = site_of(traceback.tb_frame if traceback is not None else None)
        place = f"{self.trace.error_site}: " if self.trace.error_site is not None else ""
        self.trace.error = place + self.words()


def leave(error: BaseException | None) -> None:
    """End a forked process with the status that Python would give it."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if isinstance(error, SystemExit):
        os._exit(error.code if isinstance(error.code, int) else int(error.code is not None))
    os._exit(0 if error is None or not isinstance(error, Exception) else 1)


class Output(contextlib.AbstractContextManager["Output"]):
    """Keeps the place where the report goes, whatever the script does to its output, and its exit leaves it free.

    apart: what the script prints goes to stderr, so that stdout holds the report alone.
    """

    def __init__(self, apart: bool) -> None:
        self.apart = apart
        self.stream: TextIO = sys.stdout
        self.errors: TextIO = sys.stderr
        self.spare: int | None = None

    def __enter__(self) -> Output:
        with contextlib.suppress(OSError):
            self.spare = os.dup(1)
        if self.apart:
            sys.stdout = self.errors
        return self

    def __exit__(self, *error: object) -> None:
        sys.stdout, sys.stderr = self.stream, self.errors

    def show(self, text: str) -> None:
        """Print the report where the command was told to, in characters that can be printed there."""
        if self.stream.closed and self.spare is not None:
            self.stream = os.fdopen(self.spare, "w", encoding="utf-8")
            self.spare = None
        encoding = self.stream.encoding or "utf-8"
        print(text.encode(encoding, "backslashreplace").decode(encoding), file=self.stream, flush=True)
        if self.spare is not None:
            os.close(self.spare)
            self.spare = None
