"""Labels that are numbers of classes: of any integer type, in the shape of the predictions, shifted or not."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from wholebatch.errors import LossError


def as_classes(labels: Tensor) -> Tensor:
    """Return labels as torch's own indices: bytes would be read as a mask, and could not hold -100."""
    if labels.dtype is torch.int64:
        return labels
    if labels.is_floating_point() or labels.is_complex():
        raise LossError(f"labels are {labels.dtype}, but here they are the numbers of classes. Pass labels.long().")
    return labels.long()


def same_shape(logits: torch.Size, labels: torch.Size) -> None:
    """Raise unless there is one label for each prediction."""
    if logits != labels:
        raise LossError(
            f"labels of shape {tuple(labels)} do not fit logits, which have one prediction for each of "
            f"{tuple(logits)}. Give every prediction a label; ignore_index where it does not count."
        )


def shifted(labels: Tensor | None, shift_labels: Tensor | None, ignore_index: int, name: str) -> tuple[Tensor, Tensor]:
    """Return the labels that were given, and the one that each position is to predict."""
    if labels is not None and shift_labels is None:
        return labels, F.pad(as_classes(labels), (0, 1), value=ignore_index)[..., 1:]
    if shift_labels is not None and labels is None:
        return shift_labels, shift_labels
    raise LossError(f"{name} takes labels= (it shifts them) or shift_labels= (shifted already): exactly one.")


def known(classes: Tensor | None, number: int, ignore_index: int) -> None:
    """Raise if a label that counts, and lies on the host, is no class; None is not looked at."""
    wrong = [] if classes is None else sorted(set(classes[(classes < 0) | (classes >= number)].tolist()))
    if wrong:
        named = ", ".join(map(str, wrong[:8]))
        raise LossError(
            f"labels hold {named}, but logits have {number} classes, 0 to {number - 1}, and the label that does not "
            f"count is {ignore_index}. If it is another one, say so: ignore_index={wrong[0]}."
        )
