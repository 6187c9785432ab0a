"""The program as a user types it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from wholebatch import __version__
from wholebatch.cli import main

ROOT = Path(__file__).parents[1]

TINY = [
    "--width=8",
    "--layers=1",
    "--heads=2",
    "--batch-size=6",
    "--steps=2",
    "--warmup=1",
    "--device=cpu",
    "--held-out=.3",
]


WITH_NOTHING_ELSE = """
import re, sys
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, packages_distributions, requires

def name_of(requirement):
    return re.match(r"[A-Za-z0-9._-]+", requirement)[0].lower().replace("_", "-")

there, todo = {"wholebatch"}, sys.argv.pop(1).split()
while todo:
    name = todo.pop()
    if name not in there:
        there.add(name)
        try:
            todo += [name_of(each) for each in requires(name) or () if "extra ==" not in each]
        except PackageNotFoundError:
            pass  # required on another system

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        owners = owners_of.get(name.partition(".")[0], ())
        absent = owners and there.isdisjoint(name_of(owner) for owner in owners)
        return None if absent else super().find_spec(name, path, target)

owners_of = packages_distributions()
sys.meta_path = [Finder if finder is PathFinder else finder for finder in sys.meta_path]
from wholebatch.cli import main
sys.exit(main(sys.argv[1:]))
"""
"""Runs the program where nothing can be imported but some packages and what they require."""

ONLY_NUMPY_IS_MISSING = (
    "wholebatch: Training runs need numpy, which the library alone does without. Install what they need with: "
    'pip install "wholebatch[train]".\n'
)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text("\n".join("word " * (1 + i % 5) + str(i) for i in range(30)))
    return path


def test_the_version_and_the_commands_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"wholebatch {__version__}\n"
    assert main(["--help"]) == main([]) == 0
    assert "wholebatch train [CONFIG.yaml] [flags]" in capsys.readouterr().out


def test_the_environment_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    said = capsys.readouterr().out
    for word in (__version__, sys.executable, "torch", "devices", "threads"):
        assert word in said


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["trian"], "wholebatch: there is no command 'trian'. Did you mean 'train'? See: wholebatch --help\n"),
        (["fly"], "wholebatch: there is no command 'fly'. See: wholebatch --help\n"),
        (["env", "now"], "wholebatch: env takes no arguments, but got now.\n"),
    ],
    ids=str,
)
def test_an_unknown_command_names_the_nearest(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr() == ("", expected)


def test_a_run_is_trained_with_flags(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--data", str(texts), "--out", str(tmp_path / "run"), "--no-proof", *TINY]) == 0
    assert "2/2" in capsys.readouterr().out
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 2


def test_a_run_is_trained_with_a_file_and_flags_go_before_it(texts: Path, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"data: {texts}\nproof: false\nsteps: 1\nlr: 5e-3\nout: {tmp_path / 'run'}\n")
    assert main(["train", str(file), *TINY]) == 0
    record = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert (record["step"], record["lr"]) == (2, pytest.approx(0.1 * 5e-3 + 0.9 * 5e-3))


def test_a_configuration_that_was_written_starts_the_same_run(texts: Path, tmp_path: Path) -> None:
    flags = ["--data", str(texts), "--no-proof", *TINY]
    assert main(["train", "--out", str(tmp_path / "one"), *flags]) == 0
    assert main(["train", str(tmp_path / "one" / "config.yaml"), "--out", str(tmp_path / "two")]) == 0
    one, two = ((tmp_path / name / "checkpoint" / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two


def test_help_shows_every_flag_with_what_it_means(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", "--help"])
    assert ended.value.code == 0
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for flag in ("--batch-size", "--micro-batch-size", "--max-tokens", "--resume", "--gradient-accumulation-steps"):
        assert flag in said
    assert "The batch you mean: the rows of one optimizer step, over all ranks." in said


def test_a_misspelt_flag_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", "--batchsize", "4"])
    assert ended.value.code == 2
    assert "--batch-size" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--data", "missing.txt"], "missing.txt cannot be read: No such file or directory."),
        (["missing.yaml"], "The config missing.yaml cannot be read"),
        (["--resume", "missing"], "missing holds no run: config.yaml is missing."),
        (["--lr", "-1"], "lr is -1.0; it must be a positive number."),
        (["--resume", "missing", "--lr", "1"], "A resumed run keeps its settings, but lr was given too. Leave it out."),
        (["--device", "meta"], "device is 'meta', which cannot be used here: it has shapes and no numbers"),
        (["--seed", str(2**64)], f"seed is {2**64}; it must be of at most 64 bits"),
        (["--prompt", "\udcff"], "prompt is '\\udcff', which is no text in UTF-8"),
        (["--data", "x" * 300], "xxx: File name too long."),
        (["--resume", "x" * 300], "xxx: File name too long."),
        (["--batch-size", "10", "--gradient-accumulation-steps", "4"], "10 / 4 = 2.5. Choose batch_size 8 or 12"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_mistake_is_one_line_without_a_traceback(
    arguments: list[str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", *arguments]) == 1
    said = capsys.readouterr()
    assert said.err.startswith("wholebatch: ") and expected in said.err and said.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_a_folder_that_cannot_be_written_is_named(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--data", str(texts), "--out", str(texts / "run"), *TINY]) == 1
    assert "config.yaml could not be written: Not a directory" in capsys.readouterr().err


def test_a_file_in_the_place_of_a_folder_is_said(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--data", str(texts), "--out", str(texts), *TINY]) == 1
    assert f"{texts} is a file. Name a folder for the run: --out FOLDER." in capsys.readouterr().err
    assert main(["train", "--resume", str(texts)]) == 1
    assert f"{texts} is a file. --resume takes the folder of a run." in capsys.readouterr().err


def test_ctrl_c_ends_a_run_with_a_checkpoint_and_the_status_that_shells_expect(texts: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = ["--data", str(texts), "--out", str(run), *TINY, "--steps", "100000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "wholebatch", "train", *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not (run / "metrics.jsonl").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == ""
    assert f"wholebatch train --resume {run}" in out
    assert (run / "checkpoint" / "checkpoint.json").exists()


def test_the_module_is_the_program() -> None:
    command = [sys.executable, "-m", "wholebatch", "--version"]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout == (
        f"wholebatch {__version__}\n"
    )


def test_a_run_needs_all_that_is_installed_with_the_program_and_nothing_else(texts: Path, tmp_path: Path) -> None:
    project = (ROOT / "pyproject.toml").read_text()
    listed = re.findall(r"^(?:dependencies|train) = \[(.*?)\]$", project, re.MULTILINE | re.DOTALL)
    names = [name for each in listed for name in re.findall(r'"([\w-]+)', each)]

    def run(names: list[str], folder: str) -> subprocess.CompletedProcess[str]:
        flags = ["train", *TINY, f"--data={texts}", f"--out={tmp_path / folder}"]
        command = [sys.executable, "-c", WITH_NOTHING_ELSE, " ".join(names), *flags]
        return subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)

    without = run([name for name in names if name != "numpy"], "without")
    assert without.returncode == 1 and without.stderr.endswith(ONLY_NUMPY_IS_MISSING)
    done = run(names, "run")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "checkpoint" / "model.safetensors").is_file()
