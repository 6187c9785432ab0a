"""What the doctor says: one finding, with its size, its place and the change that mends it."""

from __future__ import annotations

import dataclasses

from wholebatch.verify.source_line import Site


@dataclasses.dataclass(frozen=True)
class Change:
    """Two lines: one to take out and one to put in its place."""

    out: str
    into: str


@dataclasses.dataclass(frozen=True)
class Finding:
    """One fault of a loop.

    rule: its short name. harm: how far it moves the gradient or the training, for the order of the report.
    what: the fault in one sentence; amount: its size; why: where the reader wonders.
    error: that size as a number, where it was measured on gradients.
    """

    rule: str
    what: str
    amount: str
    harm: float
    site: Site | None
    change: Change
    why: str = ""
    error: float | None = None

    def line(self) -> str:
        """Return the finding as one line."""
        place = f" ({self.site})" if self.site is not None else ""
        return f"{self.rule}{place}: {self.what}: {self.amount}"
