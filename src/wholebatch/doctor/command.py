"""`wholebatch doctor`: run somebody's training script for a few steps, watched, and say what is wrong with its sums."""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from wholebatch.doctor.processes import common_folder, launched, load, save
from wholebatch.doctor.report import Report, report_on
from wholebatch.doctor.script import Caught, Output, Refusal, Script, function_named, start
from wholebatch.doctor.watch import Seen, watch

USAGE = "wholebatch doctor [--steps N] [--html FILE] [--json] [--reference MODULE:FUNCTION] SCRIPT|-m MODULE [ARGS]"
PATIENCE_SECONDS = 60.0
VALUED = ("--steps", "--html", "--reference")
OWN = (*VALUED, "--json")


def main(argv: list[str] | None = None) -> int:
    """Run the command with its arguments; returns 0 when clean, 1 with findings, 2 when it could not look."""
    own, given = divided(sys.argv[1:] if argv is None else list(argv))
    options = parser().parse_args(own)
    try:
        check(options, given)
        folder = common_folder() if launched()[1] > 1 else None
        reference = function_named(options.reference, options.script)
    except (Refusal, PermissionError) as error:
        print(error, file=sys.stderr)
        return 2
    with Output(options.json) as output:
        report = run(options, given, reference, folder)
    if report is None:
        return 0
    output.show(json.dumps(report.as_dict(), indent=1, default=str) if options.json else report.text())
    try:
        write_page(report, options.html)
    except OSError as error:
        print(f"The page could not be written: {error}.", file=sys.stderr)
        return 2
    return report.status


def divided(argv: list[str]) -> tuple[list[str], list[str]]:
    """Divide a command line as Python does: what stands after the script or the module's name is the script's own."""
    at = 0
    while at < len(argv) and argv[at].startswith("-") and argv[at] not in ("-m", "--"):
        at += 2 if argv[at] in VALUED else 1
    at += 2 if argv[at : at + 1] == ["-m"] else 1
    return argv[:at], argv[at:]


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's own options; the script's come after it."""
    own = argparse.ArgumentParser(prog="wholebatch doctor", usage=USAGE, description=__doc__, allow_abbrev=False)
    own.add_argument("--steps", type=int, default=3, help="optimizer steps to watch; 0 watches to the script's end")
    own.add_argument("--html", type=Path, metavar="FILE", help="write the report as a page with pictures")
    own.add_argument("--json", action="store_true", help="print the report as JSON; the script prints to stderr")
    own.add_argument(
        "--reference", metavar="MODULE:FUNCTION", help="a loss function to measure the first window against"
    )
    own.add_argument("-m", dest="module", metavar="MODULE", help="run a module instead of a script")
    own.add_argument("script", nargs="?", help="the training script; its own arguments stand after it")
    return own


def check(options: argparse.Namespace, given: list[str]) -> None:
    """Refuse what could only fail after the script has run, and say where misplaced flags go.

    Raises:
        Refusal: with what is wrong and what to write instead.
    """
    if options.module is None and options.script is None:
        raise Refusal(f"usage: {USAGE}\nName a script, or a module with -m.")
    if options.module is None and not Path(options.script).is_file():
        raise Refusal(f"There is no file {options.script!r} to run. Name a script, or a module with -m.")
    if options.steps < 0:
        raise Refusal(f"--steps {options.steps}: give the number of optimizer steps to watch, 0 for all.")
    if options.html is not None:
        options.html = options.html.absolute()  # the script may go to another folder
        if options.html.is_dir() or not options.html.parent.is_dir():
            raise Refusal(f"--html {options.html}: there is no folder {options.html.parent} to write a file in.")
    misplaced = [flag for flag in given if flag.split("=")[0] in OWN]
    if misplaced and given[0] != "--":
        name = options.module or options.script
        print(
            f"{' '.join(misplaced)} stands after {name} and is given to it; flags of the doctor stand before it.",
            file=sys.stderr,
        )


def run(options: argparse.Namespace, given: list[str], reference: Any, folder: Path | None) -> Report | None:
    """Run the script watched; return the report on the rank that tells it, None on the others."""
    given = given[1:] if given[:1] == ["--"] else given
    with watch(options.steps, reference) as seen, Script(seen, options.module or options.script):
        start(options.script, options.module, given)
    if folder is None:
        return report_of(seen)
    with contextlib.ExitStack() as stack:
        if launched()[0] == 0:
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
        save(seen.trace, folder)
        if launched()[0] > 0:
            return None
        return report_on(load(folder, launched()[1], PATIENCE_SECONDS))


def report_of(seen: Seen) -> Report:
    """Return the report; where the reference fails, without its measurement and with the reason."""
    with Caught() as caught:
        return seen.report()
    seen.reference = None
    report = seen.report()
    report.notes.append(f"The first window could not be measured against the reference: {caught.words()}")
    return report


def write_page(report: Report, file: Path | None) -> None:
    """Write the report's page, where one is wanted."""
    if file is not None:
        from wholebatch.doctor.html import page

        file.write_text(page(report), encoding="utf-8", errors="backslashreplace")


if __name__ == "__main__":
    sys.exit(main())
