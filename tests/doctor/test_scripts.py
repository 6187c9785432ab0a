"""Scripts that end, print, fork and move in ways of their own: the doctor tells it in words, with the right status."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from wholebatch.doctor import watch
from wholebatch.doctor.command import main

pytestmark = pytest.mark.timeout(120)

LOOP = """
import os, sys
import torch
import torch.nn.functional as F

torch.manual_seed(0)
model = torch.nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(32, 6), torch.randint(0, 3, (32,)))
loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers={workers})
if {guard}:
    {first}
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
    {last}
"""


@pytest.fixture
def script(tmp_path: Path):
    def write(first: str = "pass", last: str = "pass", workers: int = 0, guard: str = "True") -> str:
        path = tmp_path / "train.py"
        path.write_text(LOOP.format(first=first, last=last, workers=workers, guard=guard))
        return str(path)

    return write


@pytest.mark.parametrize(
    ("last", "told"),
    [
        ("raise RuntimeError('no more')", "train.py:19: RuntimeError: no more"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("sys.exit(7)", "ended with exit status 7"),
        ("sys.exit('no room left')", "ended with the words 'no room left'"),
        ("sys.exit()", "1 finding"),
        ("os.chdir('/')", "1 finding"),
        ("import io; sys.stdout = io.StringIO()", "1 finding"),
        ("sys.stdout.buffer.write(bytes(range(128, 256)))", "1 finding"),
        ("os.write(1, b'\\xff\\xfe\\x00')", "1 finding"),
    ],
)
def test_however_a_script_ends_and_prints_the_report_is_told_with_the_line_and_without_a_traceback(
    script,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
    last: str,
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--steps", "0", Path(script(last=last)).name]) == 1
    printed, errors = capfdbinary.readouterr()
    assert told.encode() in printed
    assert b"(loss / 2).backward()" in printed
    assert b"Traceback" not in printed + errors


def test_a_terminal_without_letters_gets_the_report_all_the_same(
    script, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", narrow)
    path = Path(script())
    path.write_text(path.read_text().replace("loss.backward()", "loss.backward()  # f\u00fcr die Gr\u00f6\u00dfe"))
    assert main(["--steps", "0", str(path)]) == 1
    assert b"loss.backward()  # f\\xfcr die Gr" in narrow.buffer.getvalue()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_forked_processes_end_by_themselves_and_the_report_is_told_once_even_on_a_closed_stdout(script) -> None:
    ends = ("sys.exit(3)", "os._exit(4)", "raise ValueError('child')")
    forks = "\n    ".join(f"if os.fork() == 0:\n        {end}\n    print('child', os.wait()[1] >> 8)" for end in ends)
    command = [
        sys.executable,
        "-m",
        "wholebatch",
        "doctor",
        "--steps",
        "0",
        script(first=forks, last="sys.stdout.close()"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("child")] == ["child 3", "child 4", "child 1"]
    assert done.stdout.count("wholebatch doctor:") == 1
    assert "1 finding" in done.stdout
    assert "Traceback" not in done.stderr


def test_a_loader_may_have_processes_of_its_own(script, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--steps", "0", script(workers=2)]) == 1
    printed = capfd.readouterr().out
    assert printed.count("wholebatch doctor:") == 1
    assert "gradient 2 x too large" in printed


def test_json_stands_alone_on_stdout(script, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--json", "--steps", "0", script(first="print('hello from the script')")]) == 1
    printed = capfd.readouterr()
    assert json.loads(printed.out)["status"] == 1
    assert "hello from the script" in printed.err


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--html", "nodir/x.html"], "there is no folder"),
        (["--html", "."], "there is no folder"),
        (["--reference", "foo:bar"], "--reference foo:bar can't be imported: ModuleNotFoundError"),
        (["--reference", "json:nothing"], "has no attribute 'nothing'"),
        (["--reference", "json:__name__"], "is str; name a function"),
        (["--reference", "json"], "name a function as MODULE:FUNCTION"),
        (["--steps", "-1"], "give the number of optimizer steps"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_could_only_fail_later_is_refused_before_the_script_runs(
    tmp_path: Path, flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = tmp_path / "ran"
    path = tmp_path / "train.py"
    path.write_text(f"open({str(ran)!r}, 'w').close()\n")
    kept = list(sys.path)
    assert main([*flags, str(path)]) == 2
    assert told in capsys.readouterr().err
    assert not ran.exists()
    assert sys.path == kept


def test_a_reference_that_fails_is_told_and_the_report_comes_without_it(
    script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken_reference.py").write_text("def loss_fn(model, batch):\n    raise KeyError('input_ids')\n")
    assert main(["--reference", "broken_reference:loss_fn", script()]) == 1
    printed = capsys.readouterr()
    assert "could not be measured against the reference: KeyError: 'input_ids'" in printed.out
    assert "loss-not-divided" in printed.out


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--lr", "3", "--steps", "9"], ["--lr", "3", "--steps", "9"]),
        (["--", "--lr", "3", "--steps", "9"], ["--lr", "3", "--steps", "9"]),
        (["train", "--", "more"], ["train", "--", "more"]),
    ],
)
@pytest.mark.parametrize("by_module", [False, True], ids=["script", "module"])
def test_what_stands_after_the_script_is_the_scripts_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str], told: list[str], by_module: bool
) -> None:
    path, heard = tmp_path / "echo_of_mine.py", tmp_path / "told"
    path.write_text(f"import sys, pathlib\npathlib.Path({str(heard)!r}).write_text(repr(sys.argv[1:]))\n")
    monkeypatch.chdir(tmp_path)
    main(["--steps", "2", *(["-m", "echo_of_mine"] if by_module else [str(path)]), *given])
    assert heard.read_text() == repr(told)


def test_a_flag_of_the_doctor_behind_the_script_is_named(script, capsys: pytest.CaptureFixture[str]) -> None:
    main([script(), "--steps", "9", "--json"])
    assert "--steps --json stands after" in capsys.readouterr().err
    main([script(), "--", "--steps", "9"])
    assert capsys.readouterr().err == ""


def test_a_warning_of_torch_names_the_users_line() -> None:
    shown: list[str] = []
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, kind, file, *rest: shown.append(file)
        with watch():
            model(torch.ones(2, 2)).mean().backward()
            schedule.step()
            torch.nn.utils.clip_grad_norm_((p for p in ()), 1.0)
    assert shown == [__file__, __file__]
