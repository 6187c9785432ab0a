"""A run folder has one writer: a lock that the kernel releases when the process that holds it ends, however it ends."""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from wholebatch.train.errors import RunError

LOCK = "lock"
"""The file in the run folder; it is there while a run is written, and after a kill until the run has gone on."""

_HELD = (errno.EAGAIN, errno.EACCES, errno.EDEADLK)
_BEHIND = 1 << 30
"""Windows keeps others from reading what is locked, so a byte far behind the holder's words is."""

if sys.platform == "win32":
    import msvcrt

    def _take(handle: int) -> None:
        os.lseek(handle, _BEHIND, os.SEEK_SET)
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)

else:
    import fcntl

    def _take(handle: int) -> None:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Be the one process that writes a run folder.

    Args:
        folder: must be there.

    Raises:
        RunError: if another process is writing it, with what is known of that process; or if it cannot be locked.
    """
    path = folder / LOCK
    try:
        handle = _held(path)
    except OSError as error:
        if error.errno in _HELD:
            raise RunError(
                f"Run folder {folder} is being written by {_holder(path)}. Wait for it, or choose another --out."
            ) from None
        raise RunError(
            f"Run folder {folder} cannot be locked: {error.strerror}. Without a lock two runs could write it at once. "
            "Choose a folder that can be written, on a file system with locks: --out FOLDER."
        ) from None
    try:
        yield
    finally:
        # Gone before it is released: who opened the file meanwhile finds it gone, and opens a new one.
        with suppress(OSError):
            path.unlink()
        os.close(handle)


def is_locked(folder: Path) -> bool:
    """Tell whether a process writes this folder now."""
    if not (folder / LOCK).exists():
        return False
    try:
        with locked(folder):
            return False
    except RunError:
        return True


def _held(path: Path) -> int:
    """Open and lock the file, and write into it who holds it."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _take(handle)
            if _is_at(handle, path):
                os.ftruncate(handle, 0)
                os.lseek(handle, 0, os.SEEK_SET)
                os.write(handle, json.dumps([os.getpid(), socket.gethostname(), time.time()]).encode())
                return handle
        except OSError:
            os.close(handle)
            raise
        os.close(handle)  # its holder ended, and took the file away, between the two lines above


def _is_at(handle: int, path: Path) -> bool:
    """Tell whether an open file is still the one of this name."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _holder(path: Path) -> str:
    """Say who holds a lock, as far as its file tells."""
    try:
        process, host, since = json.loads(path.read_text(encoding="utf-8"))
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(since))
    except (OSError, ValueError, TypeError, OverflowError):  # it has just ended, or has just begun to write this
        return "another process"
    return f"process {process} on {host} since {began}"
