"""Write the README's tables from the results in ``results/``, between the markers that name them.

Call: ``python benchmarks/tables.py`` writes, ``--check`` only says whether the README is up to date.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from record import RESULTS

README = Path(__file__).parents[1] / "README.md"
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
Result = dict[str, Any]


def exactness(result: Result) -> list[str]:
    lines = ["| situation | the usual loop | wholebatch |", "|---|---|---|"]
    for row in result["rows"]:
        usual = f"{row['usual']['median']:.2g}" if row["usual"] else "NaN"
        lines.append(f"| {row['situation']} | {usual} | {row['wholebatch']['largest']:.0e} |")
    seeds = result["settings"]["seeds"]
    return [
        *lines,
        "",
        f"{seeds} seeds each: the median of the usual loop, the largest of wholebatch (`benchmarks/exactness.py`).",
    ]


def overhead(result: Result) -> list[str]:
    lines = ["| model | parameters | by hand | wholebatch / by hand, median (quartiles) |", "|---|---|---|---|"]
    for row in result["rows"]:
        ratio = row["ratio"]
        spread = f"{ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})"
        lines.append(f"| {row['model']} | {row['parameters']:,} | {row['milliseconds']:.3g} ms | {spread} |")
    return [*lines, "", f"{measured_on(result)}, pairs of steps in turn (`benchmarks/overhead.py`)."]


def variable_length(result: Result) -> list[str]:
    corpora = list(dict.fromkeys(row["corpus"] for row in result["rows"]))
    heads = [f"{corpus}: {what}" for corpus in corpora for what in ("padding", "tokens/s", "wholebatch is")]
    lines = ["| | " + " | ".join(heads) + " |", "|---" * (1 + len(heads)) + "|"]
    for name in dict.fromkeys(row["name"] for row in result["rows"]):
        rows = (row for row in result["rows"] if row["name"] == name)
        lines.append(f"| {name} | " + " | ".join(cell for row in rows for cell in cells(row)) + " |")
    s = result["settings"]
    size = f"Llama with {s['parameters'] / 1e6:.1f} M parameters"
    setting = f"{size}, batch {s['batch']}, at most {s['cap']:,} padded tokens a piece"
    return [
        *lines,
        "",
        f"{setting}; {measured_on(result)}, transformers {s['transformers']} (`benchmarks/variable_length.py`).",
    ]


def transformers_sweep(result: Result) -> list[str]:
    lines = [
        "| model classes for | trained | off under the Trainer | exact under `exact(Trainer)` | refused by name |",
        "|---|---|---|---|---|",
    ]
    names = {"causal": "causal language", "masked": "masked language", "seq2seq": "sequence to sequence"}
    for row in result["settings"]["summary"]:
        kind = names.get(row["map"], f"{row['map']} classification")
        lines.append(f"| {kind} | {row['trained']} | {row['trainer_off']} | {row['exact']} | {row['refused']} |")
    setting = f"Tiny configurations, transformers {result['settings']['transformers']}"
    off = "off: by more than 0.1 %, mostly by the number of pieces"
    near = "exact: within 2e-6, or three times float32's own error in one piece"
    refused = "refused: layers whose state follows each piece, until you choose `batch_norm=`"
    return [*lines, "", f"{setting}; {off}; {near}; {refused} (`benchmarks/transformers_sweep.py`)."]


def cells(row: Result) -> tuple[str, str, str]:
    """Padding, real tokens a second, and the factor of wholebatch."""
    factor = "" if row["name"] == "wholebatch" else f"{row['wholebatch_is']['median']:.2f} x"
    return f"{row['padding']:.0%}", f"{row['tokens_per_second']['median']:,.0f}", factor


def measured_on(result: Result) -> str:
    machine = result["machine"]
    device = machine["gpu"] or f"{machine['cpu']}, {machine['threads']} thread{'s' * (machine['threads'] > 1)}"
    return f"{device}, torch {machine['torch'].split('+')[0]}"


TABLES: dict[str, Callable[[Result], list[str]]] = {
    "exactness": exactness,
    "overhead": overhead,
    "transformers_sweep": transformers_sweep,
    "variable_length": variable_length,
}


def filled(text: str, results: Path = RESULTS) -> str:
    """Return the text with a fresh table between each pair of markers; what was never measured is left as it is."""

    def table(found: re.Match[str]) -> str:
        path = results / f"{found[2]}.json"
        if not path.exists():
            return found[0]
        result = json.loads(path.read_text())
        return "\n".join([found[1], *TABLES[found[2]](result), "", found[3]])

    return MARKED.sub(table, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    before = README.read_text()
    after = filled(before)
    if options.check:
        sys.exit(
            before != after and "README.md: its tables are not those of benchmarks/results; run benchmarks/tables.py"
        )
    README.write_text(after)


if __name__ == "__main__":
    main()
