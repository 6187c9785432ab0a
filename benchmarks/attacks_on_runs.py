"""Kill whole training runs, and the launchers of others, and hold what ``--resume`` ends with against undisturbed runs.

Each run is the program in a process of its own, forked from one that has imported torch already: a run then lasts
about a second, and kills fall into all of its phases. Weights, the optimizer's state and metrics must be the same bits.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

Trial = Callable[[], tuple[str, str]]

PATIENCE = 300.0
"""Seconds after which a run that has not ended counts as one that hangs."""

PRELOADED = ["wholebatch.cli", "wholebatch.train.run", "tyro", "torch._dynamo", "torch.distributed.fsdp", __name__]
"""What every run imports, and its parent has imported for it."""

TIMED = {"seconds", "tokens_per_second", "peak_memory_bytes"}
SETTINGS = "width: 8\nlayers: 1\nheads: 2\ncontext: 48\nbatch_size: 12\nmax_tokens: 200\nwarmup: 2\ndevice: cpu\n"
"""A model that is as small as it gets: what is attacked is the program around it."""


def killed(folder: Path, order: random.Random) -> Iterator[Trial]:
    """Yield trials, each of which kills one run once to three times at any moment, and resumes it."""
    folder = folder / "kills"
    settings = _settings(folder, steps=24, save_every=2)
    _ended(_begun(["--version"], folder))  # its parent imports what there is to import
    before = time.monotonic()
    status = _ended(_begun(["train", str(settings), "--out", str(folder / "calm")], folder))
    seconds = time.monotonic() - before
    assert status == 0, f"the undisturbed run ended with {status}: {(folder / 'said').read_text()[-2000:]}"
    calm = _left_by(folder / "calm")

    def trial() -> tuple[str, str]:
        run, kills = folder / "killed", []
        shutil.rmtree(run, ignore_errors=True)
        for _ in range(order.choice([1, 1, 2, 3])):
            process = _begun(_next_call(settings, run), folder)
            time.sleep(order.uniform(0.0, seconds))
            process.kill()
            process.join()
            kills.append(process.exitcode)
            if process.exitcode == 0:
                break  # it was done before
        status = 0 if (run / "summary.json").exists() else _ended(_begun(_next_call(settings, run), folder))
        return _verdict(status, calm, run, f"kills {kills}", folder)

    while True:
        yield trial


def orphaned(folder: Path, order: random.Random) -> Iterator[Trial]:
    """Yield trials, each of which kills the ``torchrun`` of a run on two processes, and resumes at once."""
    folder = folder / "orphans"
    settings = _settings(folder, steps=160, save_every=1)
    assert _launched(["train", str(settings), "--out", str(folder / "calm")], folder).wait(PATIENCE) == 0
    calm = _left_by(folder / "calm")

    def trial() -> tuple[str, str]:
        run = folder / "orphaned"
        shutil.rmtree(run, ignore_errors=True)
        launcher = _launched(["train", str(settings), "--out", str(run)], folder)
        _await(lambda: _steps(run) >= 3 + order.randrange(60))
        workers = _workers_of(launcher.pid)
        launcher.kill()
        launcher.wait()
        time.sleep(order.choice([0.0, 0.0, 0.5]))
        refused = 0
        while (status := _launched(["train", "--resume", str(run)], folder).wait(PATIENCE)) and refused < 5:
            refused += 1  # while the orphans end their step; a second call is what a user does
        left = [worker for worker in workers if not _await(lambda worker=worker: not _runs(worker), 20.0)]  # type: ignore[misc]
        for worker in left:
            os.kill(worker, signal.SIGKILL)
        how, what = _verdict(status, calm, run, f"{len(workers)} workers, refused {refused} times", folder)
        return ("wrong", f"orphans went on: {left}") if left else (how, what)

    while True:
        yield trial


def _verdict(status: int | None, calm: dict[str, Any], run: Path, about: str, folder: Path) -> tuple[str, str]:
    if status != 0:
        said = (folder / "said").read_text(errors="replace")[-600:]
        return "wrong", f"{about}: {'it hangs' if status is None else f'it ended with {status}'}: {said}"
    found = _left_by(run)
    differing = [name for name in calm.keys() | found.keys() if not _equal(calm.get(name), found.get(name))]
    return ("wrong", f"{about}: {sorted(differing)[:5]} differ") if differing else ("recovered", "")


def _settings(folder: Path, steps: int, save_every: int) -> Path:
    """Write a text of very uneven lines, and the settings of a run on it."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "the batch you meant on the memory you have is one gradient of all"
    (folder / "text.txt").write_text("\n".join(f"{text[: 3 + 7 * number % 60]} {number}" for number in range(40)))
    path = folder / "settings.yaml"
    path.write_text(f"{SETTINGS}data: {folder / 'text.txt'}\nsteps: {steps}\nsave_every: {save_every}\n")
    return path


def _next_call(settings: Path, run: Path) -> list[str]:
    """Say what a user would: go on with a run that has begun, or begin it."""
    return (
        ["train", "--resume", str(run)]
        if (run / "config.yaml").exists()
        else ["train", str(settings), "--out", str(run)]
    )


def _begun(arguments: list[str], folder: Path) -> BaseProcess:
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=_program, args=(arguments, folder / "said"))
    process.start()
    return process


def _program(arguments: list[str], said: Path) -> None:
    """Be the program."""
    from wholebatch import cli

    torch.set_num_threads(1)
    with said.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.exit(cli.main(arguments))


def _ended(process: BaseProcess) -> int | None:
    """Return the status of a process; None if it hangs."""
    process.join(PATIENCE)
    if process.exitcode is None:
        process.kill()
        process.join()
        return None
    return process.exitcode


def _launched(arguments: list[str], folder: Path) -> subprocess.Popen[bytes]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "wholebatch", *arguments]
    with (folder / "said").open("w") as said:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, stdout=said, stderr=said, env=environment, start_new_session=True)


def _workers_of(launcher: int) -> list[int]:
    children = Path(f"/proc/{launcher}/task").glob("*/children")
    return [int(child) for path in children for child in path.read_text().split()]


def _runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _steps(run: Path) -> int:
    try:
        return len((run / "metrics.jsonl").read_text().splitlines())
    except FileNotFoundError:
        return 0


def _await(happened: Callable[[], bool], seconds: float = PATIENCE) -> bool:
    end = time.monotonic() + seconds
    while not happened() and time.monotonic() < end:
        time.sleep(0.02)
    return happened()


def _left_by(run: Path) -> dict[str, Any]:
    """Return all that a run leaves, by name: files, metrics, weights, and the state of the optimizer."""
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    about = json.loads((run / "checkpoint" / "checkpoint.json").read_text())
    state = torch.load(run / "checkpoint" / "state.pt", weights_only=True)
    return {
        "files": sorted(path.name for path in run.iterdir()),
        **{f"metrics of step {m['step']}": {key: m[key] for key in m.keys() - TIMED} for m in metrics},
        "description": {key: about[key] for key in ("step", "config", "data")},
        **load_file(run / "checkpoint" / "model.safetensors"),
        **{f"state{place}": value for place, value in _flat(state) if place != "/seconds"},
    }


def _flat(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, (dict, list, tuple)):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _flat(each, f"{place}/{key}")
    else:
        yield place, value


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and one == other
