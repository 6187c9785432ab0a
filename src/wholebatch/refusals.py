"""What pieces of a batch cannot give exactly, refused before anything runs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from wholebatch.errors import InexactError
from wholebatch.options import Options
from wholebatch.window import Piece


def refuse_inexact(model: nn.Module, pieces: Sequence[Piece], options: Options, splits: bool = False) -> None:
    """Raise if running these pieces one after another would not give the gradient of the batch.

    Args:
        splits: whether a single piece, too, may be split on the way.

    Raises:
        InexactError: for BatchNorm layers that use batch statistics, unless ``batch_norm="micro"`` was chosen, and
            for parameters that are updated or read by a hook before the window ends.
    """
    if len(pieces) < 2 and not splits:
        return
    _refuse_hooks(model)
    if options.get("batch_norm") is None:
        _refuse_batch_norm(model, pieces)


def batch_norms(model: nn.Module) -> dict[str, nn.Module]:
    """Find the BatchNorm layers that normalise with statistics of the batch at hand, by name."""
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and (layer.training or layer.running_mean is None)
    }


def _refuse_batch_norm(model: nn.Module, pieces: Sequence[Piece]) -> None:
    layers = batch_norms(model)
    if not layers:
        return
    rows = [piece.rows for piece in pieces]
    raise InexactError(
        f"{len(layers)} BatchNorm layer{'s' * (len(layers) > 1)} using batch statistics (first: {next(iter(layers))!r}) "
        f"would normalise each micro-batch of {max(rows)} alone, not the batch of {sum(rows)}. Choose "
        'batch_norm="exact" (statistics of the whole batch), "pooled" (running statistics alone) or "micro" (as usual), or '
        "put the layers into eval mode. Where one layer of the whole batch fits into memory, one piece with offload=True "
        "is exact too, and faster than pieces."

    )


def _refuse_hooks(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise InexactError(
                f"Parameter {name!r} has a hook that runs after each accumulation, as optimizers in the backward pass "
                "do: it would see the gradient of one micro-batch, not of the batch. Remove the hook (it is the handle "
                "returned by register_post_accumulate_grad_hook) and step after wb.backward, or use wb.Step."
            )
