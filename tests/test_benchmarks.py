"""The benchmarks run, their tables are the README's, and what they claim about exactness is measured again."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"


def bench(name: str, *arguments: str) -> str:
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *arguments]
    run = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


def rows_of(folder: Path, name: str) -> list[dict]:
    return json.loads((folder / f"{name}.json").read_text())["rows"]


def test_the_tables_of_the_readme_are_those_of_the_results() -> None:
    bench("tables", "--check")


def test_every_table_of_the_readme_has_been_measured() -> None:
    tables = re.findall(r"<!-- table: (\w+) -->", (ROOT / "README.md").read_text())
    assert set(tables) <= {path.stem for path in (BENCHMARKS / "results").glob("*.json")}


def test_the_exactness_in_the_readme_is_what_is_measured_here(tmp_path: Path) -> None:
    bench("exactness", "--seeds", "2", "--out", str(tmp_path))
    here, kept = rows_of(tmp_path, "exactness"), rows_of(BENCHMARKS / "results", "exactness")
    assert [row["situation"] for row in here] == [row["situation"] for row in kept]
    assert all(row["wholebatch"]["largest"] <= 2e-6 for row in here + kept)
    assert all(row["usual"] is None or row["usual"]["median"] > 0.05 for row in here + kept)


def test_the_overhead_is_measured_for_three_models(tmp_path: Path) -> None:
    bench("overhead", "--seconds", "0.2", "--out", str(tmp_path))
    rows = rows_of(tmp_path, "overhead")
    assert len(rows) == 3
    assert all(0.2 < row["cpu_ratio"]["median"] < 5 for row in rows)  # a few steps only: the order of magnitude


def test_the_ways_to_run_uneven_rows_train_the_same_parameters(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    small = "--batches 2 --rounds 1 --batch 8 --pieces 4 --longest 48 --hidden 16 --layers 1 --threads 1"
    bench("variable_length", *small.split(), "--corpus", "log-normal", "--out", str(tmp_path))
    rows = {row["name"]: row for row in rows_of(tmp_path, "variable_length")}
    assert rows["no padding at all (the limit)"]["padding"] == 0
    assert rows["wholebatch"]["padding"] <= rows["fixed pieces, loader order"]["padding"]
    assert rows["wholebatch"]["largest_piece"] <= 2 * 48
    assert all(row["parameters_apart"] < 1e-3 for row in rows.values() if row["parameters_apart"] is not None)


def test_no_result_names_a_machine() -> None:
    described = {"cpu", "cores", "threads", "gpu", "torch", "python", "system"}
    for path in (BENCHMARKS / "results").glob("*.json"):
        assert set(json.loads(path.read_text())["machine"]) == described
