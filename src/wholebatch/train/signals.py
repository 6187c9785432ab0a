"""Ctrl-C, SIGTERM and the death of torchrun ask a run to end after its step; a second Ctrl-C ends it at once."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Request:
    """Notes, while entered, that the user or the machine asked for an end.

    Make it as early as possible: who started this process is known only while that process lives.

    Attributes:
        signal: the number of the signal that asked; None so far.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        # A shell may end before its background jobs do; torchrun never ends before its workers unless it was killed.
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Request:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def orphaned(self) -> bool:
        """Whether torchrun started this process, and has died."""
        return self._launcher is not None and os.getppid() != self._launcher

    @property
    def asked(self) -> bool:
        """Whether the run should end."""
        return self.signal is not None or self.orphaned

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt  # asked twice: the user does not want to wait for the step
        self.signal = number
