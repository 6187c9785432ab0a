"""`wholebatch doctor`: what it prints, how it ends, and that no script of anybody's makes it stumble."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from wholebatch.cli import main as program
from wholebatch.doctor.command import main

CLINIC = Path(__file__).parents[1] / "clinic"
LOOP = """
import sys
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
k = 4
model = nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))
for i, (x, y) in enumerate(torch.utils.data.DataLoader(data, batch_size=4)):
    loss = F.cross_entropy(model(x), y){divided}
    loss.backward()
    if (i + 1) % k == 0:
        optimizer.step()
        optimizer.zero_grad()
    {then}
"""


@pytest.fixture
def script(tmp_path: Path):
    def write(divided: str = " / k", then: str = "pass", name: str = "train.py") -> str:
        path = tmp_path / name
        path.write_text(LOOP.format(divided=divided, then=then))
        return str(path)

    return write


def test_a_right_loop_ends_with_status_0(script, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([script()]) == 0
    assert "No fault was seen in 3 steps." in capsys.readouterr().out


def test_a_finding_ends_with_status_1_and_says_what_where_how_much_and_what_to_change(
    script, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([script(divided="")]) == 1
    printed = capsys.readouterr().out
    assert "1. loss-not-divided: the loss is not divided over the 4 micro-batches of the window" in printed
    assert "gradient 4 x too large, cosine 1.000" in printed
    assert "[train.py:14]" in printed
    assert "\n   - loss.backward()\n   + (loss / 4).backward()\n" in printed


def test_the_program_knows_the_command(script, capsys: pytest.CaptureFixture[str]) -> None:
    assert program(["doctor", "--steps", "1", script(divided="")]) == 1
    assert program(["doctor", "--steps", "1", script()]) == 0


@pytest.mark.parametrize("arguments", [[], ["nowhere.py"]])
def test_nothing_to_run_ends_with_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "Name a script" in capsys.readouterr().err


def test_a_script_without_a_step_ends_with_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "nothing.py"
    path.write_text("print('hello')\n")
    assert main([str(path)]) == 2
    assert "No optimizer step was seen" in capsys.readouterr().out


def test_a_broken_script_shows_its_own_error_and_what_was_seen_until_then(
    script, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--steps", "0", script(divided="", then="if i == 9: raise ValueError('out of luck')")]) == 1
    printed = capsys.readouterr()
    assert "train.py:18: ValueError: out of luck" in printed.out
    assert "loss-not-divided" in printed.out
    assert "Traceback" not in printed.out + printed.err


@pytest.mark.parametrize("body", ["raise KeyError('x')", "import nowhere_at_all", "1 +", "import sys; sys.exit(3)"])
def test_a_script_that_breaks_at_once_ends_with_status_2_and_without_a_traceback(
    tmp_path: Path, body: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "broken.py"
    path.write_text(body + "\n")
    assert main([str(path)]) == 2
    printed = capsys.readouterr()
    assert "The script ended by its own error" in printed.out
    assert "Traceback" not in printed.out + printed.err


def test_the_scripts_own_arguments_reach_it(tmp_path: Path) -> None:
    path, told = tmp_path / "echo.py", tmp_path / "told"
    path.write_text(f"import sys, pathlib\npathlib.Path({str(told)!r}).write_text(repr(sys.argv[1:]))\n")
    kept = list(sys.argv), list(sys.path)
    main([str(path), "--", "--lr", "3", "--steps", "9"])
    assert told.read_text() == "['--lr', '3', '--steps', '9']"
    assert (sys.argv, sys.path) == kept


def test_a_module_is_run_by_name(script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(divided="", name="a_loop_of_mine.py")
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["--steps", "2", "-m", "a_loop_of_mine"]) == 1


def test_json_holds_findings_windows_and_status(script, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json", "--steps", "2", script(divided="")]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["status"] == 1
    assert report["findings"][0]["rule"] == "loss-not-divided"
    assert report["findings"][0]["site"]["line"] == 14
    assert [len(window["pieces"]) for window in report["windows"]] == [4, 4]
    assert report["windows"][0]["pieces"][0] | {"loss": 0} == {"rows": 4, "items": [4.0], "factors": [1.0], "loss": 0}


REFERENCE = """
import torch.nn.functional as F


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def of_the_whole_batch(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])
"""


@pytest.mark.parametrize("function", ["loss_fn", "of_the_whole_batch"])
def test_a_reference_measures_the_first_window(
    script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], function: str
) -> None:
    (tmp_path / f"reference_{function}.py").write_text(REFERENCE)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["--reference", f"reference_{function}:{function}", script()]) == 0
    right = capsys.readouterr().out
    assert float(re.search(r"First window against the reference: gradient error ([\d.e-]+)", right)[1]) < 2e-6
    assert main(["--reference", f"reference_{function}:{function}", script(divided="")]) == 1
    wrong = capsys.readouterr().out
    assert "gradient 4 x too large, cosine 1.000 (measured against the reference; the cause explains it to" in wrong


def test_the_page_is_whole_and_loads_nothing(script, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    main(["--steps", "2", "--html", str(page), script(divided="", then="a = '<&>'")])
    text = page.read_text()
    assert text.count("<svg") == text.count("</svg>") == 2
    assert "http" not in text
    assert "<script" not in text
    assert "loss-not-divided" in text


@pytest.mark.timeout(90)
def test_a_browser_shows_the_page(script, tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("no chromium here")
    page, picture = tmp_path / "report.html", tmp_path / "report.png"
    main(["--steps", "2", "--html", str(page), script(divided="")])
    flags = [
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
        "--disable-background-networking", "--disable-component-update", f"--user-data-dir={tmp_path / 'profile'}",
        "--window-size=960,1000", f"--screenshot={picture}",
    ]  # fmt: skip
    done = subprocess.run([browser, *flags, page.as_uri()], capture_output=True, timeout=80, check=False)
    assert picture.exists(), done.stderr.decode()
    image = pytest.importorskip("PIL.Image").open(picture).convert("RGB")
    colours = {colour for _, colour in image.getcolors(1 << 20)}
    assert (59, 125, 216) in colours, "the micro-batches are drawn in blue"
    assert (207, 74, 60) in colours, "the finding is marked in red"
