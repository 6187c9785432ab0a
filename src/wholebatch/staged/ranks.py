"""With whom the statistics of a batch are shared."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from wholebatch.staged.operations import Operation, Statistic
from wholebatch.staged.program import Coupling


class Alone:
    """One process holds the whole batch."""

    def couplings(self, here: Sequence[Coupling]) -> Sequence[Coupling]:
        """Agree on where rows meet."""
        return here

    def merge(self, operation: Operation, parts: Sequence[Statistic]) -> Statistic:
        """Make the statistic of the whole batch."""
        return operation.merge(parts)

    def sum(self, gradient: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Add up what all pieces say about the statistic."""
        return gradient
