"""What torch and the user's code warn of when rows are tried that nobody asked for: not the user's business."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def quietly() -> Iterator[None]:
    """Run without warnings, and without making them errors; what is warned of once alone is left for the window.

    The standard deviation of one row, a reduction over nothing: a trial's rows are fewer than the user's.
    """
    always = torch.is_warn_always_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.set_warn_always(True)  # so that torch's own marks of what it has warned of once stay as they are
        try:
            yield
        finally:
            torch.set_warn_always(always)
