"""The clinic: loops as people write them. Right ones stay without a finding, each planted fault is named first."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from wholebatch.doctor.command import main

CLINIC = Path(__file__).parents[1] / "clinic"
RIGHT = sorted((CLINIC / "right").glob("*.py"))
FAULTS = sorted((CLINIC / "faults").glob("*.py"))
FRAMEWORKS = ("accelerate", "lightning", "transformers")

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # the scripts are other people's
    pytest.mark.timeout(120),
]


def cases(paths: list[Path]) -> list[Any]:
    return [
        pytest.param(path, id=path.stem, marks=[pytest.mark.distributed] if "spawn(" in path.read_text() else [])
        for path in paths
    ]


def examine(path: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    for framework in FRAMEWORKS:
        if re.search(rf"^(import|from) {framework}\b", path.read_text(), re.MULTILINE):
            pytest.importorskip(framework)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = main(["--steps", "0", "--json", *flags, str(path)])
    text = printed.getvalue()
    return status, json.loads(text[text.index('{\n "ok"') :])


@pytest.mark.parametrize("path", cases(RIGHT))
def test_a_right_loop_has_no_finding(path: Path) -> None:
    status, report = examine(path)
    assert [finding["rule"] for finding in report["findings"]] == []
    assert status == 0
    assert report["steps"] >= 2


@pytest.mark.parametrize("path", cases(FAULTS))
def test_the_planted_fault_is_the_first_finding(path: Path) -> None:
    status, report = examine(path)
    planted = re.search(r"Planted: ([\w-]+)", path.read_text())
    assert planted is not None
    assert report["findings"][0]["rule"] == planted[1]
    assert status == 1
    first = report["findings"][0]
    assert Path(first["site"]["file"]) == path
    assert first["change"]["out"]
    assert first["change"]["into"]
    assert first["change"]["out"] != first["change"]["into"]


def test_the_clinic_is_as_large_as_promised() -> None:
    assert len(RIGHT) + len(FAULTS) >= 25
    assert len(RIGHT) >= 13


@pytest.mark.parametrize(
    ("name", "figure"),
    [
        ("not_divided", "gradient 4 x too large, cosine 1.000"),
        ("trainer_mean", "gradient 4 x too large, cosine 1.000"),
        ("lightning_short", "gradient 4 x too small, cosine 1.000"),
        ("short_last_window", "gradient 4 x too small, cosine 1.000"),
        ("epoch_leak", "gradient 1.67 x too large, cosine 1.000"),
        ("cached_temperature", "gradient 4 x too large for 1 parameter, cosine 1.000"),
    ],
)
def test_the_size_of_a_fault_is_told(name: str, figure: str) -> None:
    _, report = examine(CLINIC / "faults" / f"{name}.py")
    assert figure in report["findings"][0]["amount"]


def test_the_first_steps_are_enough_for_most_faults() -> None:
    status = main(["--steps", "1", "--json", str(CLINIC / "faults" / "not_divided.py")])
    assert status == 1


@pytest.mark.parametrize("name", ["not_divided", "clip_scaled", "no_zero_grad", "short_last_window"])
def test_the_change_that_is_shown_mends_the_loop(name: str, tmp_path: Path) -> None:
    path = CLINIC / "faults" / f"{name}.py"
    _, report = examine(path)
    change = report["findings"][0]["change"]
    assert path.read_text().count(change["out"]) == 1
    mended = path.read_text().replace(change["out"], change["into"])
    mended = mended.replace("micro_batches_in_this_window", "min(k, len(loader) - i // k * k)")
    again = tmp_path / path.name
    again.write_text(mended)
    status, report = examine(again)
    assert report["findings"] == []
    assert status == 0
