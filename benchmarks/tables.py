"""Write the tables of the README and of docs/ from the results in ``results/``, between the markers that name them.

Call: ``python benchmarks/tables.py`` writes, ``--check`` only says whether the pages are up to date.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from record import RESULTS

ROOT = Path(__file__).parents[1]
MILLISECONDS = ("milliseconds", "extra_milliseconds")
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
    lines = ["| model | parameters | by hand | wholebatch / by hand, median (quartiles) | more |"]
    lines.append("|---" * 5 + "|")
    for row in result["rows"]:
        ratio = row["ratio"]
        spread = f"{ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})"
        by_hand, more = (
            f"{row[name]:,.0f} ms" if abs(row[name]) >= 100 else f"{row[name]:.3g} ms" for name in MILLISECONDS
        )
        lines.append(f"| {row['model']} | {row['parameters']:,} | {by_hand} | {spread} | {more} |")
    return [*lines, "", f"{measured_on(result)}, pairs of steps in turn (`benchmarks/overhead.py`)."]


def noise_overhead(result: Result) -> list[str]:
    lines = [
        "| model | a step | with its noise measured / without, median (quartiles) | CPU time |",
        "|---|---|---|---|",
    ]
    for row in result["rows"]:
        wall, cpu = (f"{r['median']:.3f} ({r['low']:.3f} to {r['high']:.3f})" for r in (row["ratio"], row["cpu_ratio"]))
        step = row["milliseconds"]
        lines.append(f"| {row['model']} | {step:{',.0f' if step >= 100 else '.3g'}} ms | {wall} | {cpu} |")
    every = result["settings"]["every"]
    how = f"Every {every}th window measured, in stretches of {every} steps in turn"
    return [*lines, "", f"{how}; {measured_on(result)} (`benchmarks/overhead.py --noise`)."]


def variable_length(result: Result) -> list[str]:
    corpora = list(dict.fromkeys(row["corpus"] for row in result["rows"]))
    heads = [f"{corpus}: {what}" for corpus in corpora for what in ("padding", "tokens/s", "wholebatch is")]
    lines = ["| | " + " | ".join(heads) + " |", "|---" * (1 + len(heads)) + "|"]
    for name in dict.fromkeys(row["name"] for row in result["rows"]):
        rows = (row for row in result["rows"] if row["name"] == name)
        lines.append(f"| {name} | " + " | ".join(cell for row in rows for cell in cells(row)) + " |")
    s = result["settings"]
    size = f"Llama with {s['parameters'] / 1e6:.1f} M parameters"
    setting = f"{size}, batch {s['batch']}, at most {s['cap']:,} padded tokens a micro-batch"
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
    off = "off: by more than 0.1 %, mostly by the number of micro-batches"
    near = "exact: within 2e-6, or three times float32's own error in one micro-batch"
    refused = "refused: layers whose state follows each micro-batch, until you choose `batch_norm=`"
    return [*lines, "", f"{setting}; {off}; {near}; {refused} (`benchmarks/transformers_sweep.py`)."]


def memory(result: Result) -> list[str]:
    lines = [
        "| way | micro-batches | saved at the peak | CPU time of a step | gradient error |",
        "|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        peak, error = f"{row['peak'] / 2**20:.0f} MiB", f"{row['gradient_error']:.0e}" if row["gradient_error"] else "0"
        lines.append(f"| {row['way']} | {row['pieces']} | {peak} | {row['cpu_ratio']['median']:.2f} | {error} |")
    s = result["settings"]
    size = f"A decoder with {s['parameters'] / 1e6:.1f} M parameters, {s['rows']} rows of {s['length']} tokens"
    cap = f"a cap of {s['cap'] / 2**20:.0f} MiB"
    return [*lines, "", f"{size}, {cap}; {measured_on(result)} (`benchmarks/memory.py`)."]


def long_rows(result: Result) -> list[str]:
    sizes = list(dict.fromkeys(row["vocabulary"] for row in result["rows"]))
    heads = [f"{size:,} words: {what}" for size in sizes for what in ("peak", "CPU time, median (quartiles)", "error")]
    lines = ["| way | " + " | ".join(heads) + " |", "|---" * (1 + len(heads)) + "|"]
    for way in dict.fromkeys(row["way"] for row in result["rows"]):
        cells = []
        for row in (row for row in result["rows"] if row["way"] == way):
            time = row["cpu_ratio"]
            cells.append(f"{row['peak'] / 2**20:,.0f} MiB, {row['peak_ratio']:.2f}")
            cells.append(f"{time['median']:.2f} ({time['low']:.2f} to {time['high']:.2f})")
            cells.append(f"{row['gradient_error']:.0e}")
        lines.append(f"| {way} | {' | '.join(cells)} |")
    s = result["settings"]
    size = f"Forward and backward of the head alone, one row of {s['tokens']:,} tokens, width {s['width']}, float32"
    against = "peak and time of all logits at once = 1; the error is the gradient's, against double precision"
    return [*lines, "", f"{size}; {against}; {measured_on(result)} (`benchmarks/long_rows.py`)."]


def longest_rows(result: Result) -> list[str]:
    lines = ["| way | longest row tried that fits | its peak |", "|---|---|---|"]
    for row in result["rows"]:
        longest = f"{row['tokens']:,} tokens, {row['ratio']:g} x"
        lines.append(f"| {row['way']} | {longest} | {row['peak'] / 2**20:,.0f} MiB |")
    s, most = result["settings"], max(row["ratio"] for row in result["rows"])
    size = f"A decoder of 4 blocks, {s['vocabulary']:,} words, width {s['width']}, a step of one row in the memory that"
    tried = f"a row of {s['tokens']} tokens takes with all logits; rows were doubled up to {most:g} times that"
    return [*lines, "", f"{size} {tried}; {measured_on(result)} (`benchmarks/long_rows.py --decoder`)."]


def recovery(result: Result) -> list[str]:
    lines = [
        "| window | in the forward | late in the backward | redone by hand | windows after it | gradient error |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        ratios = (row[f"{name}_cpu_ratio"]["median"] for name in ("at_once", "recovered", "redone", "after"))
        lines.append(f"| {row['window']} | {' | '.join(f'{r:.2f}' for r in ratios)} | {row['gradient_error']:.0e} |")
    return [*lines, "", f"CPU time, undisturbed = 1; {measured_on(result)} (`benchmarks/recovery.py`)."]


def batch_growth(result: Result) -> list[str]:
    lines = ["| batch | steps | bits per byte, held out | noise scale at the end, rows |", "|---|---|---|---|"]
    for row in result["rows"]:
        steps = ", ".join(f"{each:,}" for each in dict.fromkeys(row["steps"]))
        losses = ", ".join(f"{each:.3f}" for each in row["held_out"])
        noise = ", ".join("-" if each is None else f"{each:.0f}" for each in row["noise_scale"])
        lines.append(f"| {row['batch']} | {steps} | {losses} | {noise} |")
    s = result["settings"]
    size = f"The built-in language model ({s['model']}), {s['rows']:,} rows each, {s['seeds']} seeds"
    rates = f"AdamW at {s['lr']:g} for a batch of 16, others by the square root rule, constant"
    return [*lines, "", f"{size}; {rates}; {measured_on(result)} (`benchmarks/batch_growth.py`)."]


def attacks(result: Result) -> list[str]:
    lines = ["| attack | places | tried | went on | raised, nothing changed | group lost, said so | wrong |"]
    lines.append("|---" * 7 + "|")
    for row in result["rows"]:
        places = f"{row['places']:,}" if row["places"] else "any"
        tried = f"{places} | {row['trials']:,} | {row['recovered'] + row['came']:,} | {row['raised']:,}"
        lines.append(f"| {row['attack']} | {tried} | {row.get('lost', 0)} | {row['wrong']} |")
    return [*lines, "", f"{measured_on(result)}, places drawn at random (`benchmarks/attacks.py`)."]


def precision(result: Result) -> list[str]:
    lines = [
        "| micro-batches | bfloat16 `.grad` | float32, the sum | float32, rounded into `.grad` | CPU time |",
        "|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        errors = (row[name] for name in ("bfloat16", "float32, the sum", "float32, in .grad"))
        cells = " | ".join(f"{error:.1e}" for error in errors)
        lines.append(f"| {row['pieces']} | {cells} | {row['cpu_ratio']['median']:.2f} |")
    return [*lines, "", f"{measured_on(result)} (`benchmarks/precision.py`)."]


def coupled(result: Result) -> list[str]:
    images = [row for row in result["rows"] if row["part"] == "BatchNorm"]
    pairs = [row for row in result["rows"] if row["part"] != "BatchNorm"]
    lines = [
        "| BatchNorm in a ResNet-18 | gradient error | in float64 | CPU time | peak | besides, on the host |",
        "|---|---|---|---|---|---|",
    ]
    for row in images:
        what = f"{row['rows']} images of {row['side']} x {row['side']} by {row['micro_batch']}: {row['way']}"
        host = f"{row['host_mb']:.0f} MB" if row["host_mb"] else ""
        lines.append(f"| {what} | {' | '.join(coupled_cells(row))} | {host} |")
    lines += [
        "",
        "| in-batch negatives | gradient error | in float64 | CPU time | peak | with dropout, in float64 |",
        "|---|---|---|---|---|---|",
    ]
    for row in pairs:
        encoder = "MiniLM" if row["part"] == "MiniLM" else "random weights"
        what = f"{encoder}, {row['rows']} pairs by {row['micro_batch']}: {row['way']}"
        dropout = f"{row['error_dropout']:.0e}" if "error_dropout" in row else ""
        lines.append(f"| {what} | {' | '.join(coupled_cells(row))} | {dropout} |")
    base = "Time and peak: of the plain loop with BatchNorm, of the whole batch with in-batch negatives = 1"
    peer = f", sentence-transformers {name}" if (name := result["settings"].get("sentence-transformers")) else ""
    return [*lines, "", f"{base}; {measured_on(result)}{peer} (`benchmarks/coupled.py`)."]


def coupled_cells(row: Result) -> tuple[str, str, str, str]:
    """Both errors, the time with its quartiles, and the peak."""
    time = row["time_over"]
    spread = f"{time['median']:.2f} ({time['low']:.2f} to {time['high']:.2f})"
    return brief(row["error"]), brief(row["error64"]), spread, f"{row['peak_mb']:.0f} MB, {row['peak_over']:.2f}"


def brief(error: float) -> str:
    """Two digits of an error that is one, one of rounding."""
    return "0" if not error else f"{error:.2g}" if error > 1e-3 else f"{error:.0e}"


def ranks(result: Result) -> list[str]:
    lines = ["| | way | time of a step, median (quartiles) |", "|---|---|---|"]
    for row in result["rows"]:
        ratio = row["time_ratio"]
        spread = f"{ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})"
        way = f'`sync="{row["way"]}"`' if row["way"] in ("last", "every") else row["way"]
        lines.append(f"| {row['kind']} | {way} | {spread} |")
    s = result["settings"]
    size = f"{s['ranks']} processes, {s['parameters'] / 1e6:.1f} M parameters, {s['pieces']} micro-batches of "
    size += f"{s['rows_of_a_piece']} x {s['positions']} tokens on each"
    return [*lines, "", f"{size}; the first of each kind = 1; {measured_on(result)} (`benchmarks/ranks.py`)."]


def soak(result: Result) -> list[str]:
    (row,) = result["rows"]
    disturbed = (
        f"{row['steps']:,} steps, {row['rows']:,} rows; memory changed {row['changes_of_memory']:,} times and ran out"
    )
    micro_batches = f"in {row['pieces']['least']} to {row['pieces']['most']} micro-batches a step"
    found = f"{row['rows_lost_or_repeated']:.0f} rows lost or repeated, losses apart by at most {row['loss_apart']:.0e}"
    return [f"{disturbed} {row['out_of_memory']:,} times, {micro_batches}: {found} (float64, `benchmarks/soak.py`)."]


def trainers(result: Result) -> list[str]:
    lines = ["| set-up | off under the Trainer | `exact(Trainer)` |", "|---|---|---|"]
    for row in result["rows"]:
        ours = f"refused: {row['refused']}" if row["refused"] else f"{row['exact']:.0e}"
        lines.append(f"| {row['setup']} | {brief(row['stock'])} | {ours} |")
    versions = ", ".join(f"{name} {version}" for name, version in result["settings"].items())
    error = "The largest error of a step, relative to the norm of the whole batch's gradient"
    return [*lines, "", f"{error}; tiny models at their first steps, {versions} (`benchmarks/trainers.py`)."]


def watching(result: Result) -> list[str]:
    lines = ["| loop | CPU time, median (quartiles) |", "|---|---|"]
    for row in result["rows"]:
        ratio = row["cpu_ratio"]
        lines.append(f"| {row['loop']} | {ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f}) |")
    return [*lines, "", f"{measured_on(result)} (`benchmarks/watching.py`)."]


def cells(row: Result) -> tuple[str, str, str]:
    """Padding, real tokens a second, and the factor of wholebatch."""
    factor = "" if row["name"] == "wholebatch" else f"{row['wholebatch_is']['median']:.2f} x"
    return f"{row['padding']:.0%}", f"{row['tokens_per_second']['median']:,.0f}", factor


def measured_on(result: Result) -> str:
    machine = result["machine"]
    device = machine["gpu"] or f"{machine['cpu']}, {machine['threads']} thread{'s' * (machine['threads'] > 1)}"
    return f"{device}, torch {machine['torch'].split('+')[0]}"


TABLES: dict[str, Callable[[Result], list[str]]] = {
    "attacks": attacks,
    "batch_growth": batch_growth,
    "coupled": coupled,
    "exactness": exactness,
    "long_rows": long_rows,
    "longest_rows": longest_rows,
    "memory": memory,
    "noise_overhead": noise_overhead,
    "overhead": overhead,
    "precision": precision,
    "ranks": ranks,
    "recovery": recovery,
    "soak": soak,
    "trainers": trainers,
    "transformers_sweep": transformers_sweep,
    "variable_length": variable_length,
    "watching": watching,
}


def wrapped(said: str) -> list[str]:
    """Return a sentence in lines of the page's width; a line of a table as it is."""
    if said.startswith("|"):
        return [said]
    return textwrap.wrap(said, 120, break_long_words=False, break_on_hyphens=False) or [""]


def filled(text: str, results: Path = RESULTS) -> str:
    """Return the text with a fresh table between each pair of markers; what was never measured is left as it is."""

    def table(found: re.Match[str]) -> str:
        path = results / f"{found[2]}.json"
        if not path.exists():
            return found[0]
        result = json.loads(path.read_text())
        lines = [line for said in TABLES[found[2]](result) for line in wrapped(said)]
        return "\n".join([found[1], *lines, "", found[3]])

    return MARKED.sub(table, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    pages = {path: path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
    stale = {path: after for path, before in pages.items() if (after := filled(before)) != before}
    if options.check:
        names = ", ".join(path.name for path in stale)
        sys.exit(bool(stale) and f"{names}: tables are not those of benchmarks/results; run benchmarks/tables.py")
    for path, after in stale.items():
        path.write_text(after)


if __name__ == "__main__":
    main()
