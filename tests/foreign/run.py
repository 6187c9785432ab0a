"""Run a framework's own tests twice, as they come and with its trainer made exact, and print what differs.

    python tests/foreign/run.py lightning PATH [--only loops trainer/optimization] [--limit 600]

PATH is a checkout of the framework, at the version that is installed; nothing is fetched. Each difference is looked up
in the list of those that are meant (`lightning.txt`: the end of a test's name and the reason, a line each); the exit
code is 1 if one is not in it.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

HERE = Path(__file__).parent
FOLDERS = {"lightning": "tests/tests_pytorch"}
DEFAULTS = {
    "lightning": ("loops", "trainer", "callbacks", "tuner", "core", "models/test_hooks.py"),
}


def outcomes(framework: str, tests: Path, only: Sequence[str], exact: bool, seconds: float) -> dict[str, str]:
    """Run the tests, and return how each ended: passed, skipped, or the first line of its error."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        plugin = ["-p", f"{framework}_exact"] if exact else []
        command = [
            sys.executable,
            "-m",
            "pytest",
            *only,
            "-q",
            "-p",
            "no:cacheprovider",
            f"--junitxml={report}",
            *plugin,
        ]
        source = [str(HERE), str(HERE.parents[1] / "src"), str(tests.parent), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(source), "CUDA_VISIBLE_DEVICES": ""}
        print(f"{framework}, {'exact' if exact else 'as it comes'}: {' '.join(only)}", flush=True)
        subprocess.run(command, cwd=tests, env=environment, timeout=seconds, check=False, stdout=subprocess.DEVNULL)
        if not report.exists():
            raise SystemExit(f"pytest wrote no report. Try it: (cd {tests}; {' '.join(command[1:])})")
        return {f"{case.get('classname')}::{case.get('name')}": _ended(case) for case in _cases(report)}


def _cases(report: Path) -> Sequence[ElementTree.Element]:
    return list(ElementTree.parse(report).iter("testcase"))


def _ended(case: ElementTree.Element) -> str:
    for kind in ("failure", "error"):
        found = case.find(kind)
        if found is not None:
            return f"{kind}: {(found.get('message') or '').splitlines()[0] if found.get('message') else ''}"
    return "passed" if case.find("skipped") is None else "skipped"


def meant(framework: str) -> dict[str, str]:
    """Return the differences that are meant: patterns of names, and why."""
    lines = (HERE / f"{framework}.txt").read_text().splitlines() if (HERE / f"{framework}.txt").exists() else []
    pairs = [line.split("  # ", 1) for line in lines if line.strip() and not line.startswith("#")]
    return {pattern.strip(): reason.strip() for pattern, reason in pairs}


def reason_for(name: str, reasons: Mapping[str, str]) -> str | None:
    """Return why this test is meant to end otherwise, if it is."""
    return next((reason for pattern, reason in reasons.items() if fnmatch.fnmatch(name, f"*{pattern}")), None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("framework", choices=sorted(FOLDERS))
    parser.add_argument("path", type=Path, help="a checkout of the framework")
    parser.add_argument("--only", nargs="+", help="folders and files of its tests")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds for each of the two runs")
    options = parser.parse_args()
    tests = options.path.resolve() / FOLDERS[options.framework]
    if not tests.is_dir():
        raise SystemExit(f"{tests} is no folder, so {options.path} is no checkout of {options.framework}.")
    only = options.only or DEFAULTS[options.framework]
    missing = [each for each in only if not (tests / each).exists()]
    if missing:
        raise SystemExit(f"{', '.join(missing)}: not in {tests}.")
    stock, ours = (outcomes(options.framework, tests, only, exact, options.limit) for exact in (False, True))
    reasons, unmeant = meant(options.framework), 0
    differing = sorted(
        name for name in stock if ours.get(name) != stock[name] and "passed" in (stock[name], ours.get(name))
    )
    for name in differing:
        reason = reason_for(name, reasons)
        unmeant += reason is None
        ends = f"    as it comes: {stock[name]}\n    exact: {ours.get(name, 'not run')}"
        print(f"{name}\n{ends}\n    {reason or 'NOT MEANT'}")
    passed = sum(end == "passed" for end in stock.values())
    print(f"{len(stock)} tests, {passed} pass as they come; {len(differing)} differ, {unmeant} of them not as meant")
    return 1 if unmeant else 0


if __name__ == "__main__":
    sys.exit(main())
