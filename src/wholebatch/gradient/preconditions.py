"""What micro-batches of a batch cannot give exactly, refused before anything runs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from wholebatch.batch.window import MicroBatch
from wholebatch.errors import InexactError, SyncError
from wholebatch.model.inspection import ModelInfo, uses_batch_statistics
from wholebatch.model.state import State
from wholebatch.options import Options

POWER_ITERATION = ("_u", "_v", "weight_u", "weight_v")
"""What torch's two spectral normalisations call their vectors."""


def refuse_inexact(
    model_info: ModelInfo, micro_batches: Sequence[MicroBatch], options: Options, splits: bool = False
) -> None:
    """Raise if running these micro-batches one after another would not give the gradient of the batch.

    Args:
        model_info: of the model.
        micro_batches: of the batch.
        options: as the user chose them.
        splits: whether a single micro-batch, too, may be split on the way.

    Raises:
        InexactError: for BatchNorm layers that use batch statistics, unless a way to run them was chosen, and for
            parameters that are updated or read by a hook before the window ends.
    """
    if len(micro_batches) < 2 and not splits:
        return
    _refuse_hooks(model_info)
    if options.get("batch_norm") is None:
        _refuse_batch_norm(model_info, micro_batches)


def refuse_moved(start: State, micro_batches: int) -> None:
    """Raise if a forward has moved buffers of real numbers since a snapshot, and put them back.

    Raises:
        InexactError: naming the first.
    """
    moved = start.moved()
    if not moved:
        return
    start.restore()
    raise InexactError(
        f"A forward moves {len(moved)} buffers of the model (first: {moved[0]!r}), which then follow each of "
        f"{micro_batches} "
        f"micro-batches instead of the batch, and what is computed from them too. {_mend(moved[0])} To let them follow "
        'each micro-batch all the same, as in a plain loop, choose batch_norm="micro", which is for all values that '
        "move with a forward."
    )


def _mend(buffer: str) -> str:
    """Say how a buffer of this name moves once a batch."""
    if buffer.rpartition(".")[2] in POWER_ITERATION:
        return (
            "Spectral normalisation steps its power iteration with each forward: take the step once, by reading the "
            "layer's weight before the window, and put layer.parametrizations into eval mode meanwhile."
        )
    return (
        "Put the module that owns them into eval mode, or read them only, and move them once, after the step "
        "(wb.Step(..., after_step=[...]))."
    )


def refuse_foreign(leaves: Sequence[Tensor]) -> None:
    """Raise if parameters are among leaves whose gradients no rank would exchange.

    Raises:
        SyncError: with their number and the first one's shape.
    """
    foreign = [leaf for leaf in leaves if isinstance(leaf, nn.Parameter)]
    if foreign:
        raise SyncError(
            f"The loss reaches {len(foreign)} parameters outside of the wrapped model (first: shape "
            f"{tuple(foreign[0].shape)}), whose gradients no rank would exchange. Make them part of the module that "
            "DistributedDataParallel wraps or fully_shard shards."
        )


def _refuse_batch_norm(model_info: ModelInfo, micro_batches: Sequence[MicroBatch]) -> None:
    layers = [layer for layer in (*model_info.modules, *model_info.outside) if uses_batch_statistics(layer)]
    if not layers:
        return
    rows = [micro_batch.rows for micro_batch in micro_batches]
    raise InexactError(
        f"{len(layers)} BatchNorm layer{'s' * (len(layers) > 1)} using batch statistics (first: "
        f"{model_info.path(layers[0])!r}) would normalise each micro-batch of {max(rows)} alone, not the batch of "
        f'{sum(rows)}. Choose batch_norm="exact" (statistics of the whole batch), "pooled" (running statistics alone) '
        'or "micro" (as usual), or put the layers into eval mode. Where one layer of the whole batch fits into memory, '
        "one micro-batch with offload=True is exact too, and faster than micro-batches."
    )


def _refuse_hooks(model_info: ModelInfo) -> None:
    hooked = [p for p in model_info.parameters if getattr(p, "_post_accumulate_grad_hooks", None)]
    if not hooked:
        return
    name = next(name for name, parameter in model_info.model.named_parameters() if parameter is hooked[0])
    raise InexactError(
        f"Parameter {name!r} has a hook that runs after each accumulation, as optimizers in the backward pass do: it "
        "would see the gradient of one micro-batch, not of the batch. Remove the hook (it is the handle returned by "
        "register_post_accumulate_grad_hook) and step after wb.backward, or use wb.Step."
    )
