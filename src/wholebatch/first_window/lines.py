"""Which line of the user's own a call was made in."""

from __future__ import annotations

from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

from wholebatch.errors import PASSED_ON

TORCH = Path(torch.__file__).parent


class Line(NamedTuple):
    """A line of the user's own."""

    function: str
    filename: str
    number: int

    def __str__(self) -> str:
        return f"in {self.function}, {Path(self.filename).name}, line {self.number}"


def line_of(frame: FrameType | None) -> Line | None:
    """Name the first line that is not torch's own, nor of a watch that only passes on; None if there is none."""
    while frame is not None and (TORCH in Path(frame.f_code.co_filename).parents or frame.f_code.co_name in PASSED_ON):
        frame = frame.f_back
    return None if frame is None else Line(frame.f_code.co_name, frame.f_code.co_filename, frame.f_lineno)
