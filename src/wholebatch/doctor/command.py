"""`wholebatch doctor`: run somebody's training script for a few steps, watched, and say what is wrong with its sums."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import runpy
import shutil
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from wholebatch.doctor.processes import common_folder, launched, load, save
from wholebatch.doctor.report import Report, report_on
from wholebatch.doctor.watch import Seen, watch
from wholebatch.site import site_of

USAGE = "wholebatch doctor [--steps N] [--html FILE] [--json] [--reference MODULE:FUNCTION] SCRIPT|-m MODULE [-- ARGS]"
PATIENCE_SECONDS = 60.0


def main(argv: list[str] | None = None) -> int:
    """Run the command with its arguments; returns 0 when clean, 1 with findings, 2 when it could not look."""
    options = parser().parse_args(sys.argv[1:] if argv is None else argv)
    if options.script is None and options.module is None:
        print(f"usage: {USAGE}\nName a script, or a module with -m.", file=sys.stderr)
        return 2
    if options.module is None and not Path(options.script).is_file():
        print(f"There is no file {options.script!r} to run. Name a script, or a module with -m.", file=sys.stderr)
        return 2
    report = run(options)
    if report is None:
        return 0
    show(report, options)
    return report.status


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's own options; the script's come after it."""
    own = argparse.ArgumentParser(prog="wholebatch doctor", usage=USAGE, description=__doc__, allow_abbrev=False)
    own.add_argument("--steps", type=int, default=3, help="optimizer steps to watch; 0 watches to the script's end")
    own.add_argument("--html", metavar="FILE", help="write the report as a page with pictures")
    own.add_argument("--json", action="store_true", help="print the report as JSON")
    own.add_argument(
        "--reference", metavar="MODULE:FUNCTION", help="a loss function to measure the first window against"
    )
    own.add_argument("-m", dest="module", metavar="MODULE", help="run a module instead of a script")
    own.add_argument("script", nargs="?", help="the training script")
    own.add_argument("args", nargs=argparse.REMAINDER, help="the script's own arguments")
    return own


def run(options: argparse.Namespace) -> Report | None:
    """Run the script watched; return the report on the rank that tells it, None on the others."""
    rank, world = launched()
    folder = common_folder() if world > 1 else None
    with watch(options.steps, named(options.reference)) as seen, Script(seen, options):
        start(options)
    if folder is None:
        return seen.report()
    save(seen.trace, folder)
    if rank > 0:
        return None
    traces = load(folder, world, PATIENCE_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)
    return report_on(traces)


def named(reference: str | None) -> Any:
    """Return the function that MODULE:FUNCTION names; the current folder's modules are found too."""
    if reference is None:
        return None
    module, _, function = reference.partition(":")
    if not function:
        raise SystemExit(f"--reference {reference}: name a function as MODULE:FUNCTION.")
    sys.path.insert(0, str(Path.cwd()))
    return getattr(importlib.import_module(module), function)


def start(options: argparse.Namespace) -> None:
    """Run the script or module as Python would, with its own arguments."""
    given = [options.script, *options.args] if options.module is not None and options.script else options.args
    given = given[1:] if given[:1] == ["--"] else given
    kept = list(sys.argv), list(sys.path)
    try:
        if options.module is not None:
            sys.argv = [options.module, *given]
            runpy.run_module(options.module, run_name="__main__", alter_sys=True)
        else:
            sys.argv = [options.script, *given]
            sys.path.insert(0, str(Path(options.script).resolve().parent))
            runpy.run_path(options.script, run_name="__main__")
    finally:
        sys.argv, sys.path[:] = kept


class Script(contextlib.AbstractContextManager["Script"]):
    """Takes the script's own end: an exit is its end, an error is noted as it is and goes no further."""

    def __init__(self, seen: Seen, options: argparse.Namespace) -> None:
        self.trace = seen.trace
        self.name = options.module or options.script

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if isinstance(error, SystemExit):
            code = error.code
            if code not in (None, 0):
                self.trace.error = f"{self.name} ended with exit status {code}"
            return True
        if not isinstance(error, (Exception, KeyboardInterrupt)):
            return False
        while traceback is not None and traceback.tb_next is not None:
            traceback = traceback.tb_next
        self.trace.error_site = site_of(traceback.tb_frame if traceback is not None else None)
        place = f"{self.trace.error_site}: " if self.trace.error_site is not None else ""
        self.trace.error = f"{place}{type(error).__name__}: {error}"
        return True


def show(report: Report, options: argparse.Namespace) -> None:
    """Print the report and write its page."""
    print(json.dumps(report.as_dict(), indent=1, default=str) if options.json else report.text())
    if options.html:
        from wholebatch.doctor.html import page

        Path(options.html).write_text(page(report), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
