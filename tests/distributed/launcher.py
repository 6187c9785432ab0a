"""Run a function on the ranks of a real gloo group, with a hard time-out, and bring back what each rank returned.

A rank that raises, dies or hangs ends the whole run within seconds: the error holds every rank's traceback, and of a
rank that hangs the stack where it stood. Processes are kept between runs (starting one costs seconds) and replaced
after a failure, because nobody knows what a broken group still has in flight.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import io
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

needs_shards = pytest.mark.skipif(torch.__version__ < "2.8", reason="fully_shard is served from torch 2.8 on")

START_SECONDS = 60.0
"""How long a process may take to import torch and to meet the others."""

GRACE_SECONDS = 3.0
"""How long the other ranks may take to end by themselves once one has failed."""


class RanksError(AssertionError):
    """A rank raised, died or hung; the message holds what each rank has to say."""


@dataclasses.dataclass
class Ranks:
    """A gloo group of `size` processes, started at the first `run` and used again by the next ones.

    >>> ranks = Ranks(2)
    >>> ranks.run(function, argument)        # [result of rank 0, result of rank 1]
    >>> ranks.close()
    """

    size: int = 2
    method: str = "spawn"
    """How processes are started: "forkserver" imports what is named in ``preload`` once for all of them."""
    preload: list[str] = dataclasses.field(default_factory=list)
    _processes: list[BaseProcess] = dataclasses.field(default_factory=list)
    _pipes: list[Connection] = dataclasses.field(default_factory=list)
    _folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: Callable[..., Any], *args: Any, seconds: float = 30.0) -> list[Any]:
        """Call `function(*args)` on every rank and return the results by rank.

        Args:
            function: defined at the top of a module; `torch.distributed` is initialised when it runs.
            args: anything that pickles; every rank gets its own copy.
            seconds: the hard limit for the slowest rank.

        Raises:
            RanksError: if a rank raised, died, or was not done in time.
        """
        if not self._processes:
            self._start()
        order = _packed((function, args, seconds))
        for pipe in self._pipes:
            pipe.send_bytes(order)
        try:
            return self._collect(seconds)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the processes, at once if they do not end by themselves."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(GRACE_SECONDS if process.is_alive() and sys.exc_info()[0] is None else 0.1)
            if process.is_alive():
                process.kill()
            process.join()
        self._processes, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        context: Any = multiprocessing.get_context(self.method)
        context.set_forkserver_preload(self.preload)
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, self.size, self._folder.name), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        try:
            self._collect(START_SECONDS)
        except BaseException:
            self.close()
            raise

    def _collect(self, seconds: float) -> list[Any]:
        deadline, answers = time.monotonic() + seconds, dict[int, Any]()
        failures: dict[int, str] = {}
        while len(answers) + len(failures) < self.size:
            left = deadline - time.monotonic()
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in answers and rank not in failures]
            ready = wait(waiting, timeout=max(left, 0.0))
            if not ready:
                return self._give_up(failures, answers, seconds)
            for pipe in ready:
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                done, value = _answer(self._pipes[rank], self._processes[rank])
                if done:
                    answers[rank] = value
                else:
                    failures[rank] = value
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if failures:
            self._give_up(failures, answers, seconds)
        return [answers[rank] for rank in range(self.size)]

    def _give_up(self, failures: dict[int, str], answers: dict[int, Any], seconds: float) -> list[Any]:
        says = []
        for rank in range(self.size):
            if rank in failures:
                says.append(f"rank {rank}:\n{failures[rank]}")
            elif rank in answers:
                says.append(f"rank {rank}: done")
            else:
                says.append(f"rank {rank}: not done, it stands here:\n{self._stack(rank)}")
        what = "failed" if failures else f"did not end within {seconds:g} seconds"
        raise RanksError(f"{self.size} ranks {what}\n" + "\n".join(says))

    def _stack(self, rank: int) -> str:
        assert self._folder is not None
        process, stack = self._processes[rank], _stack_file(self._folder.name, rank)
        if process.pid is not None and process.is_alive() and stack.exists():
            os.kill(process.pid, _DUMP)
            time.sleep(0.2)
        return stack.read_text() if stack.exists() else "it has not started"


def run_ranks(function: Callable[..., Any], *args: Any, world_size: int = 2, seconds: float = 30.0) -> list[Any]:
    """Call `function(*args)` on every rank of a fresh group, end it, and return the results by rank."""
    ranks = Ranks(world_size)
    try:
        return ranks.run(function, *args, seconds=seconds)
    finally:
        ranks.close()


def _serve(pipe: Connection, rank: int, size: int, folder: str) -> None:
    """Be one rank: meet the others, then answer orders until the pipe closes."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    with _stack_file(folder, rank).open("w") as stack:
        faulthandler.register(_DUMP, file=stack, all_threads=True)
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size)
        pipe.send_bytes(_packed((True, None)))
        while True:
            try:
                order = pipe.recv_bytes()
            except EOFError:
                break
            pipe.send_bytes(_obey(order))
    os._exit(0)  # a group with operations in flight must not keep the process


def _obey(order: bytes) -> bytes:
    try:
        function, args, _ = _unpacked(order)
        torch.manual_seed(0)
        return _packed((True, function(*args)))
    except Exception:  # whatever it is, the test must see it
        return _packed((False, traceback.format_exc()))


def _answer(pipe: Connection, process: BaseProcess) -> tuple[bool, Any]:
    try:
        done, value = _unpacked(pipe.recv_bytes())
        return bool(done), value
    except (EOFError, ConnectionResetError):
        process.join(GRACE_SECONDS)
        return False, f"the process died with exit code {process.exitcode}"


def _packed(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpacked(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def _stack_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"stack-{rank}"


_DUMP = 10  # SIGUSR1
