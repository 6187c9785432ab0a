"""A window before it runs: one set-up for losses of separate rows and of all rows at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.amp import GradScaler

from wholebatch.batch.sizes import Auto, Size
from wholebatch.batch.window import MicroBatch, at_random, micro_batches_of
from wholebatch.gradient.preconditions import refuse_inexact
from wholebatch.loss.earlier import settle_earlier
from wholebatch.model.gradients import GradientAccumulator
from wholebatch.model.inspection import ModelInfo
from wholebatch.model.references import reach_of
from wholebatch.options import Options, checked_scaler
from wholebatch.ranks.agreement import Ranks
from wholebatch.ranks.reduction import ranks_of


@dataclass(frozen=True)
class Setup:
    """Who takes part in a window, and how it was asked for.

    Attributes:
        model_info: of the model and of what the user's functions name besides.
        ranks: over which gradients travel.
        options: as they were given, checked.
        scaler: whose scale losses are multiplied with.
        auto: the size, where memory decides it.
    """

    model_info: ModelInfo
    ranks: Ranks
    options: Options
    scaler: GradScaler | None
    auto: Auto | None

    def cut(self, batch: Any, size: Size, splits: bool = False) -> list[MicroBatch]:
        """Say how the batch is cut.

        Args:
            size: of a micro-batch at most.
            splits: whether micro-batches may be cut further while they run.

        Raises:
            InexactError: if the gradient of the batch cannot come of these micro-batches.
            LossError: if a device says by now that an earlier window was wrong.
        """
        settle_earlier(self.model_info.model)
        whole, collate = self.options.get("whole", ()), self.options.get("collate")
        micro_batches = micro_batches_of(batch, size, whole=whole, collate=collate)
        noise = self.options.get("noise_scale")
        if noise is not None and noise.due:
            micro_batches = at_random(micro_batches, size, noise.seen)
        refuse_inexact(self.model_info, micro_batches, self.options, splits)
        return micro_batches

    def begin(self, gradients: GradientAccumulator, also: Iterable[Tensor]) -> None:
        """Set apart what ``.grad`` holds, so that the window can be taken back."""
        wide = self.options.get("accumulate_in") or self.ranks.accumulate_in
        gradients.begin(self.model_info.parameters, also, self.ranks.views, wide)


def refuse_no_model(model: Any) -> None:
    """Raise a TypeError for what is no module."""
    if not isinstance(model, nn.Module):
        several = isinstance(model, (list, tuple)) and any(isinstance(each, nn.Module) for each in model)
        instead = (
            "Give several in one, nn.ModuleList(models) or nn.ModuleDict(...): loss_fn gets the same to index."
            if several
            else "Where parameters are in a function or in tensors of its own, give a module that holds them, "
            "nn.ParameterList(tensors), and let loss_fn do the rest."
        )
        raise TypeError(
            f"model is {type(model).__name__}; pass the torch.nn.Module whose gradient is wanted. {instead}"
        )


def set_up(
    model: nn.Module,
    functions: Sequence[Callable[..., Any]],
    size: Size,
    options: Options,
    scaler: GradScaler | None,
) -> Setup:
    """Look a model and the user's functions through, and find the ranks.

    Args:
        functions: the loss function, or encoders and the loss of what they encode.
        options: checked.

    Raises:
        SyncError: for a wrapper that is not supported.
    """
    reaches = [reach_of(function) for function in functions]
    modules = [module for reach in reaches for module in reach.modules]
    model_info = ModelInfo(model, modules, [leaf for reach in reaches for leaf in reach.leaves])
    ranks = ranks_of(model_info, options.get("sync", "last"))
    return Setup(model_info, ranks, options, checked_scaler(scaler), size if isinstance(size, Auto) else None)
