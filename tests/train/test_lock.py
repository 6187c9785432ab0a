"""A run folder has one writer: a second one is told who the first is, and a dead one holds nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from wholebatch.train import Config, RunError
from wholebatch.train.folder import RunFolder
from wholebatch.train.lock import LOCK, is_locked, locked
from wholebatch.train.signals import Request

HOLDER = """
import sys
from pathlib import Path
from wholebatch.train.lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> subprocess.Popen[str]:
    """Another process that writes a run in this folder."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_a_folder_that_another_process_writes_is_refused_with_its_number_host_and_time(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    said = rf"is being written by process {holder.pid} on .* since \d{{4}}-.*\. Wait for it, or choose another --out"
    try:
        assert is_locked(tmp_path)
        with ExitStack() as held, pytest.raises(RunError, match=said):
            RunFolder.claim(tmp_path, held)
        with ExitStack() as held, pytest.raises(RunError, match=said):
            RunFolder.create(tmp_path, Config(), held)
    finally:
        end(holder)


def test_a_writer_that_was_killed_holds_nothing(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    end(holder)
    assert (tmp_path / LOCK).exists() and not is_locked(tmp_path)
    with locked(tmp_path), pytest.raises(RunError, match=f"process {os.getpid()} on"), locked(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_its_holder_took_away_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between opening the file and locking it, its holder may have ended and removed it."""
    real, moments = os.open, iter([True])

    def late(path: Path, *arguments: int) -> int:
        handle = real(path, *arguments)
        if next(moments, False):
            path.unlink()
        return handle

    monkeypatch.setattr(os, "open", late)
    with locked(tmp_path):
        assert is_locked(tmp_path)


def test_runs_that_begin_in_the_same_second_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both look before either has made its folder: what was free when one looked is taken when it is made."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda form, *moment: "now")
    real = Path.mkdir

    def between(path: Path, *arguments: object, **options: object) -> None:
        monkeypatch.setattr(Path, "mkdir", real)
        if path.name == "now":
            real(path)
        else:
            monkeypatch.setattr(Path, "mkdir", between)
        real(path, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "mkdir", between)
    with ExitStack() as held:
        assert RunFolder.create(None, Config(), held).path == Path("runs/now-2")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="only where processes fork")
def test_two_processes_that_ask_at_once_get_two_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program = (
        "from contextlib import ExitStack; from wholebatch.train import Config; "
        "from wholebatch.train.folder import RunFolder; import sys; sys.stdin.readline(); "
        "print(*[RunFolder.create(None, Config(), ExitStack()).path for _ in range(20)])"
    )
    command, pipe = [sys.executable, "-c", program], subprocess.PIPE
    processes = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(2)]
    names = [name for process in processes for name in process.communicate("\n", timeout=60)[0].split()]
    assert len(names) == len(set(names)) == 40


def test_what_a_killed_writer_left_half_written_is_taken_away(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    (tmp_path / "metrics.jsonl.123.part").write_text("half")
    with ExitStack() as held:
        RunFolder.claim(tmp_path, held)
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize("started_by_torchrun", [True, False])
def test_a_process_whose_torchrun_has_died_is_asked_to_end(
    monkeypatch: pytest.MonkeyPatch, started_by_torchrun: bool
) -> None:
    """Without torchrun a parent may well end first: a shell that started the run in the background."""
    if started_by_torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    else:
        monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    request = Request()
    assert not request.asked
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert request.asked is request.orphaned is started_by_torchrun


def test_a_signal_asks_for_an_end_too() -> None:
    with Request() as request:
        os.kill(os.getpid(), signal.SIGTERM)
    assert request.asked and not request.orphaned
