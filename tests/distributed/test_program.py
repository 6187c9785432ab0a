"""The program under torchrun: the same run on one process, two and four, and after a worker was killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

SECONDS = 110

WORDS = ["the", "batch", "you", "meant", "on", "the", "memory", "you", "have", "is", "one", "gradient", "of", "all"]

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eighty lines of very uneven length, and the run of one process."""
    path = tmp_path_factory.mktemp("program")
    lines = (" ".join(WORDS[i % 5 : i % 5 + 1 + i % 9] * (1 + i % 3)) + f" {i}" for i in range(80))
    (path / "texts.txt").write_text("\n".join(lines))
    finished(start(path, "alone", processes=1))
    return path


def arguments(folder: Path, out: str, *more: str) -> list[str]:
    given = ["train", "--data", str(folder / "texts.txt"), "--out", str(folder / out), "--device", "cpu"]
    given += ["--width", "16", "--layers", "2", "--heads", "2", "--context", "64", "--warmup", "2"]
    return [*given, "--batch-size", "12", "--max-tokens", "200", "--steps", "20", "--save-every", "5", *more]


def start(folder: Path, out: str, processes: int, *more: str, restarts: int = 0) -> subprocess.Popen[str]:
    return launch(folder, arguments(folder, out, *more), processes, restarts)


def launch(folder: Path, given: list[str], processes: int, restarts: int = 0) -> subprocess.Popen[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    torchrun += ["--max-restarts", str(restarts)] if restarts else []
    command = [sys.executable, *(torchrun if processes > 1 else []), "-m", "wholebatch", *given]
    source = str(Path(__file__).parents[2] / "src")
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def finished(process: subprocess.Popen[str], status: int = 0) -> str:
    try:
        said, _ = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    assert process.returncode == status, said
    return said


def metrics(folder: Path, out: str) -> list[dict[str, Any]]:
    path = folder / out / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def assert_same_curve(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [record["step"] for record in found] == [record["step"] for record in expected]
    for ours, theirs in zip(found, expected, strict=True):
        for key in ("loss", "grad_norm", "lr"):
            assert ours[key] == pytest.approx(theirs[key], rel=2e-5), (key, ours["step"])
        assert (ours["rows"], ours["tokens"]) == (theirs["rows"], theirs["tokens"])


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("processes", [2, 4])
def test_more_processes_have_the_loss_curve_of_one(folder: Path, processes: int, parallel: str) -> None:
    out = f"{parallel}-{processes}"
    said = finished(start(folder, out, processes, "--parallel", parallel))
    assert_same_curve(metrics(folder, out), metrics(folder, "alone"))
    assert said.count("before training") == 1, "one process speaks for all"
    assert f"{processes} processes, {parallel}" in said
    summary = json.loads((folder / out / "summary.json").read_text())
    alone = json.loads((folder / "alone" / "summary.json").read_text())
    assert (summary["rows"], summary["processes"]) == (alone["rows"], processes)
    assert summary["held_out_after"] == pytest.approx(alone["held_out_after"], rel=1e-4)
    assert summary["gradient_error"] < 1e-5


def test_the_weights_of_replicas_are_those_of_one_process(folder: Path) -> None:
    if not (folder / "ddp-2").exists():
        finished(start(folder, "ddp-2", 2))
    ours, alone = (load_file(folder / out / "checkpoint" / "model.safetensors") for out in ("ddp-2", "alone"))
    for name, weight in alone.items():
        torch.testing.assert_close(ours[name], weight, rtol=1e-3, atol=1e-4)  # Adam divides by small numbers


@pytest.mark.parametrize(("parallel", "goes_on_with"), [("ddp", 1), ("fsdp", 1), ("fsdp", 4)])
def test_a_run_that_is_stopped_goes_on_with_another_number_of_processes(
    folder: Path, parallel: str, goes_on_with: int
) -> None:
    out = f"stopped-{parallel}-{goes_on_with}"
    process = start(folder, out, 2, "--parallel", parallel)
    await_step(folder, out, 6)
    worker_of(process).send_signal(signal.SIGTERM)
    process.communicate(timeout=SECONDS)
    taken = len(metrics(folder, out))
    assert 6 <= taken < 20
    finished(launch(folder, ["train", "--resume", str(folder / out)], goes_on_with))
    assert_same_curve(metrics(folder, out), metrics(folder, "alone"))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # said of reading shards in this one process
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_killed_worker_is_replaced_and_the_run_ends_as_if_nothing_had_happened(folder: Path, parallel: str) -> None:
    out = f"killed-{parallel}"
    process = start(folder, out, 2, "--parallel", parallel, restarts=2)
    await_step(folder, out, 7)
    worker_of(process).kill()
    said = finished(process)
    assert "resumed" in said
    assert_same_curve(metrics(folder, out), metrics(folder, "alone"))
    undisturbed = f"{parallel}-2"
    if not (folder / undisturbed).exists():
        finished(start(folder, undisturbed, 2, "--parallel", parallel))
    assert same_files(folder / out / "checkpoint", folder / undisturbed / "checkpoint", parallel)


def test_workers_whose_torchrun_was_killed_save_and_end_and_nobody_writes_beside_them(folder: Path) -> None:
    """Two writers of one folder would mix their checkpoints; what goes on must be what one run alone would do."""
    out, steps = "orphaned", ("--steps", "2000", "--save-every", "1")
    process = start(folder, out, 2, *steps)
    await_step(folder, out, 3)
    workers = workers_of(process)
    process.kill()
    process.wait()
    process.communicate(timeout=SECONDS)  # until the workers, too, have closed what they write to
    assert not any(is_running(worker) for worker in workers)
    taken = len(metrics(folder, out))
    assert 3 <= taken < 2000, "they end, and do not train on"
    assert not (folder / out / "lock").exists()
    described = json.loads((folder / out / "checkpoint" / "checkpoint.json").read_text())
    assert described["step"] == taken, "nothing is lost"


def same_files(ours: Path, theirs: Path, parallel: str) -> bool:
    if parallel == "ddp":
        first, second = (load_file(path / "model.safetensors") for path in (ours, theirs))
        return all(torch.equal(first[name], second[name]) for name in second)
    first, second = (loaded(path) for path in (ours, theirs))
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in second)


def loaded(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Read all weights of a sharded checkpoint in this one process."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    described = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    names = [name for name in described if name.startswith("model.")]
    weights = {name.removeprefix("model."): torch.empty(described[name].size) for name in names}
    load({"model": weights}, checkpoint_id=checkpoint, no_dist=True)
    return weights


def await_step(folder: Path, out: str, step: int) -> None:
    deadline = time.monotonic() + SECONDS
    while len(metrics(folder, out)) < step:
        assert time.monotonic() < deadline, "the run does not get on"
        time.sleep(0.01)


def worker_of(torchrun: subprocess.Popen[str]) -> Any:
    """Find the last worker that torchrun started."""
    return Worker(workers_of(torchrun)[-1])


def is_running(process: int) -> bool:
    """Tell whether a process runs; one that has ended but is still listed has no command line."""
    line = Path(f"/proc/{process}/cmdline")
    return line.exists() and line.read_bytes() != b""


def workers_of(torchrun: subprocess.Popen[str]) -> list[int]:
    """Find the processes that torchrun started."""
    tasks = Path(f"/proc/{torchrun.pid}/task").glob("*/children")
    children = sorted(int(child) for task in tasks for child in task.read_text().split())
    return [pid for pid in children if b"wholebatch" in Path(f"/proc/{pid}/cmdline").read_bytes()]


class Worker:
    """A process that is a child of another one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def send_signal(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)
