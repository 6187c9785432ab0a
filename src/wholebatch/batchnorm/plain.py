"""A window whose micro-batches do not meet: a loss function runs on each by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from wholebatch.batch.tree import move
from wholebatch.batch.window import MicroBatch
from wholebatch.model.inspection import ModelInfo
from wholebatch.model.memory import offloaded
from wholebatch.ranks.agreement import Ranks


class PlainWindow:
    """Runs a loss function on every micro-batch of a window by itself: nothing has to be done before or after.

    Attributes:
        meets: whether rows of different micro-batches meet, so that the other steps do something.

    Args:
        model_info: of the model.
        loss_fn: called with the model and a micro-batch on the model's device.
        ranks: whose forward this is.
        offload: whether what autograd saves waits in host memory.
    """

    meets = False

    def __init__(
        self, model_info: ModelInfo, loss_fn: Callable[[Any, Any], Any], ranks: Ranks, offload: bool = False
    ) -> None:
        self.model_info, self.model, self.device = model_info, model_info.model, model_info.device
        self.loss_fn, self.ranks, self.offload = loss_fn, ranks, offload

    def forward(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Do what has to be done for all micro-batches before the first loss."""

    def loss(self, micro_batch: MicroBatch) -> Any:
        """Run the loss function of a micro-batch."""
        with self.ranks.local(), offloaded(self.model, self.offload):
            return self.loss_fn(self.model, move(micro_batch.load(), self.device))

    def restart(self) -> None:
        """Forget the gradients of the losses, before these are run again."""

    def rewind(self) -> None:
        """Find the buffers again that :meth:`forward` found."""

    def backward(self) -> None:
        """Go on backward from where the losses' own backward ended."""

    def commit(self) -> None:
        """Write what the model keeps of the window."""
