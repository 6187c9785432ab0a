"""Encode micro-batches twice: without graph, and once more backward, with the same draws and buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from wholebatch.batch.tree import rows_of
from wholebatch.batch.window import MicroBatch
from wholebatch.batchnorm import window_for
from wholebatch.errors import InexactError, LossError, SplitError
from wholebatch.loss.terms import LossSum, total
from wholebatch.model.inspection import ModelInfo
from wholebatch.model.state import State
from wholebatch.options import Options
from wholebatch.ranks.agreement import Ranks

Encode: TypeAlias = "Callable[[Any, Any], Any]"


@dataclass
class EncodedMicroBatch:
    """One micro-batch in the hands of one encoder: what it was before, and what it said."""

    encoder: EncoderPass
    micro_batch: MicroBatch
    state: State
    said: list[Tensor]
    form: pytree.TreeSpec
    graph: bool
    drew: bool = False
    """Whether random numbers were drawn; only then is the random state set back, which all threads share."""

    def again(self) -> list[Tensor]:
        """Return what it said with its graph: kept, or from a second run with the same draws."""
        if self.graph:
            return self.said
        self.state.restore_buffers()
        if self.drew:
            self.state.restore_random()
        repeated, form = self.encoder.encode(self.micro_batch)
        if form != self.form or any(not _close(a, b) for a, b in zip(repeated, self.said, strict=True)):
            raise InexactError(
                "A micro-batch that was encoded a second time says something else, so its gradient would be that of "
                "other values. Draw random numbers from torch, random or numpy.random's global state, which are set "
                "back, and keep nothing on the model between calls."
            )
        return repeated


class EncoderPass:
    """One of the user's functions, over all micro-batches of the window."""

    def __init__(
        self,
        model_info: ModelInfo,
        function: Encode,
        micro_batches: Sequence[MicroBatch],
        options: Options,
        ranks: Ranks,
    ) -> None:
        self.model_info = model_info
        self.micro_batches = micro_batches
        self.window = window_for(model_info, function, micro_batches, options, ranks)

    def turns(self, keep_last: bool) -> list[EncodedMicroBatch]:
        """Encode every micro-batch without graph, the last one perhaps with it."""
        self.window.forward(self.micro_batches)
        turns: list[EncodedMicroBatch] = []
        changing = not self.window.meets
        for micro_batch in self.micro_batches:
            graph = keep_last and micro_batch is self.micro_batches[-1]
            state, versions = State(self.model_info, buffers=changing), _versions(self.model_info)
            with torch.set_grad_enabled(graph and torch.is_grad_enabled()):
                turns.append(EncodedMicroBatch(self, micro_batch, state, *self.encode(micro_batch), graph))
            turns[-1].drew = state.drew()
            changing = changing and versions != _versions(self.model_info)  # most models leave their buffers alone
            if turns[-1].form != turns[0].form:
                raise LossError(
                    f"encode returned {turns[-1].form} for one micro-batch and {turns[0].form} for another. Return "
                    "one form."
                )
        self.window.commit()
        return turns

    def encode(self, micro_batch: MicroBatch) -> tuple[list[Tensor], pytree.TreeSpec]:
        """Call the user's function, check what it says, and take it apart."""
        said = self.window.loss(micro_batch)
        leaves, form = pytree.tree_flatten(said)
        if not leaves:
            raise LossError(f"encode returned {said!r}, which holds no tensor. Return what the loss is taken of.")
        for leaf in leaves:
            if not isinstance(leaf, Tensor) or leaf.dim() == 0 or leaf.shape[0] != leaves[0].shape[0]:
                shape = tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__
                raise LossError(
                    f"encode returned {shape} beside {tuple(leaves[0].shape)}: each tensor has the rows on its "
                    "first dimension. Leave out what is not one value a row."
                )
        if len(self.micro_batches) > 1 and micro_batch.counted and leaves[0].shape[0] != micro_batch.rows:
            _refuse_other_rows(leaves[0], micro_batch.rows)
        return leaves, form


def _refuse_other_rows(said: Tensor, rows: int) -> None:
    """Raise for what cannot be put together as the whole batch would have it: views one behind the other, halves."""
    raise LossError(
        f"encode returned {tuple(said.shape)} for a micro-batch of {rows} rows. Micro-batches are put together row by "
        "row, so views that lie one behind the other, or the halves of pairs, would be mixed with those of other "
        "micro-batches. Return one entry a row: views as a tuple (z1, z2) or as torch.stack([z1, z2], 1), pairs as one "
        "row (rows, 2, ...), tokens as (rows, length, ...), and let loss_fn join them."
    )


def summed(encoders: Sequence[Encode]) -> Callable[[Any, Any], LossSum | None]:
    """Make a loss of what encoders return that is a sum over rows exactly if each row is encoded by itself."""

    def sums(model: Any, micro_batch: Any) -> LossSum | None:
        said = [leaf for encode in encoders for leaf in pytree.tree_leaves(encode(model, micro_batch))]
        floats = [leaf for leaf in said if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim()]
        if not floats:
            return None  # the window will say what is wrong with it
        _refuse_multiples(floats[0], micro_batch)
        return total(torch.stack([(leaf * _unlike(leaf) + leaf.square()).sum() for leaf in floats]))  # not linear

    return sums


def _refuse_multiples(said: Tensor, micro_batch: Any) -> None:
    """Raise if it is some times the rows, or a part of them; samples in a list or packed are left to the window."""
    try:
        rows = 1 if isinstance(micro_batch, list) else rows_of(micro_batch)
    except SplitError:
        return
    more, fewer = max(rows, len(said)), max(1, min(rows, len(said)))
    if rows > 1 and more != fewer and more % fewer == 0:
        _refuse_other_rows(said, rows)


def _unlike(leaf: Tensor) -> Tensor:
    """Numbers for the places of a row, the same for every row."""
    places = torch.arange(leaf[:1].numel(), dtype=leaf.dtype, device=leaf.device)
    return (0.5 + torch.cos(places)).view(leaf.shape[1:])


def _close(a: Tensor, b: Tensor) -> bool:
    """Tell whether two runs agree but for rounding."""
    if a.shape != b.shape or not a.is_floating_point():
        return a.shape == b.shape and torch.equal(a, b)
    tolerance = max(1e-3, 4 * torch.finfo(a.dtype).eps)
    apart = torch.linalg.vector_norm((a - b).detach().float())
    return bool(apart <= tolerance * torch.linalg.vector_norm(b.detach().float())) or not bool(torch.isfinite(apart))


def _versions(model_info: ModelInfo) -> list[tuple[int, int]]:
    """Numbers that change whenever a buffer is written into, or another put in its place."""
    buffers = (owned.module._buffers.get(owned.name) for owned in model_info.buffers)
    return [(id(buffer), buffer._version) for buffer in buffers if buffer is not None]
