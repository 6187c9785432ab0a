"""A window whose pieces do not meet: a loss function runs on each by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from wholebatch.batch import move
from wholebatch.memory import offloaded
from wholebatch.survey import Survey
from wholebatch.sync import Ranks
from wholebatch.window import Piece


class PlainWindow:
    """Runs a loss function on every piece of a window by itself: nothing has to be done before or after.

    Attributes:
        meets: whether rows of different pieces meet, so that the other steps do something.

    Args:
        survey: of the model.
        loss_fn: called with the model and a micro-batch on the model's device.
        ranks: whose forward this is.
        offload: whether what autograd saves waits in host memory.
    """

    meets = False

    def __init__(self, survey: Survey, loss_fn: Callable[[Any, Any], Any], ranks: Ranks, offload: bool = False) -> None:
        self.survey, self.model, self.device = survey, survey.model, survey.device
        self.loss_fn, self.ranks, self.offload = loss_fn, ranks, offload

    def forward(self, pieces: Sequence[Piece]) -> None:
        """Do what has to be done for all pieces before the first loss."""

    def loss(self, piece: Piece) -> Any:
        """Run the loss function of a piece."""
        with self.ranks.local(), offloaded(self.model, self.offload):
            return self.loss_fn(self.model, move(piece.load(), self.device))

    def restart(self) -> None:
        """Forget the gradients of the losses, before these are run again."""

    def rewind(self) -> None:
        """Find the buffers again that :meth:`forward` found."""

    def backward(self) -> None:
        """Go on backward from where the losses' own backward ended."""

    def commit(self) -> None:
        """Write what the model keeps of the window."""
