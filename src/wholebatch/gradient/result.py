"""What a window comes to: its result, and its gradients as long as one factor is missing."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor

from wholebatch.loss.counts import Count
from wholebatch.loss.flags import Flags
from wholebatch.loss.totals import Sizes
from wholebatch.model.gradients import GradientAccumulator
from wholebatch.model.inspection import ModelInfo


@dataclass(frozen=True)
class Result:
    """What a window's loss function said, over the whole batch on all ranks.

    Attributes:
        loss: the loss of the whole batch, one number.
        terms: each term's mean, without its weight: a tuple, or a dict if the loss function returned one.
        items: each term's denominator, in the same form.
        metrics: each metric's mean.
        micro_batches: how many micro-batches this rank ran.
        rows: how many rows this rank ran.
        sizes: the rows and items of each of them, in the order in which they ran; empty where a schedule of torch's own
            runs them, and without items where the loss is one of all rows.
        verified: what the first window has proven of windows like this one, or what could not be tried and why.
        ways: how less of a row was kept, where one row did not fit (`wholebatch.Auto`): "tiles", "checkpointing".
        without_gradient: names of the model's parameters that require a gradient and got none from this window.

    All tensors are detached, without dimensions, and still on the device: reading one waits for it.
    """

    loss: Tensor
    terms: tuple[Tensor, ...] | dict[str, Tensor]
    items: tuple[Tensor, ...] | dict[str, Tensor]
    metrics: dict[str, Tensor]
    micro_batches: int
    rows: int
    sizes: Sizes = field(default_factory=Sizes, kw_only=True)
    verified: str = field(default="", kw_only=True)
    without_gradient: tuple[str, ...] = field(default=(), kw_only=True)
    ways: tuple[str, ...] = field(default=(), kw_only=True)


@dataclass
class Pending:
    """A window whose gradients are still off by one common factor.

    ``finish`` brings them to the true denominator; a further factor, such as that of clipping, joins the same pass.
    """

    result: Result
    gradients: GradientAccumulator
    coefficient: Count
    alive: Count
    losses: list[list[Tensor]]
    flags: Flags

    def finish(self, factor: Count = 1.0) -> Result:
        """Multiply the window's sum and add it to what ``.grad`` held before; all of that may still be taken back."""
        self.merge(factor)
        self.gradients.round()
        return self.result

    def noted(self, model_info: ModelInfo, verified: str) -> Pending:
        """Say in the result what has been proven, and which of the model's parameters got no gradient."""
        missing = {id(p) for p in model_info.parameters if p.requires_grad and self.gradients.take(p) is None}
        names = [name for name, p in model_info.model.named_parameters() if id(p) in missing] if missing else []
        self.result = replace(self.result, verified=verified, without_gradient=tuple(names))
        return self

    def merge(self, factor: Count = 1.0) -> None:
        """Do all that ``finish`` does but the rounding of sums that are wider than their parameters."""
        if isinstance(self.alive, float) and not self.alive:
            self.gradients.zero()
        elif not _is_one(self.coefficient) or not _is_one(factor):
            self.gradients.scale(self.coefficient * factor)
        if isinstance(self.alive, Tensor):
            self.gradients.mask(self.alive)
        self.gradients.merge()
        self.coefficient = 1.0


def _is_one(factor: Count) -> bool:
    return isinstance(factor, float) and factor == 1.0
