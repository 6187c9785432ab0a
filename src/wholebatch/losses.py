"""Ready-made losses that state their own denominator, thin over ``torch.nn.functional``."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from wholebatch.errors import LossError
from wholebatch.loss.labels import as_classes, known, same_shape, shifted
from wholebatch.loss.linear_head import causal_lm_head, linear_cross_entropy
from wholebatch.loss.terms import LossSum, floating

__all__ = [
    "causal_lm",
    "causal_lm_head",
    "cross_entropy",
    "linear_cross_entropy",
    "masked_lm",
    "token_classification",
]


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> LossSum:
    """Average the cross entropy over the labels that count in the whole batch.

    The denominator is that of ``torch.nn.functional.cross_entropy(..., reduction="mean")`` over the whole batch:
    labels other than ``ignore_index``, or the sum of their class weights. (``reduction="none"`` would average
    over ignored positions too.)

    Args:
        logits: (rows, classes, ...), classes on the second dimension as in torch.
        labels: (rows, ...) class indices, of any integer type or bool, or (rows, classes, ...) probabilities.
        weight: (classes,), a weight a class.
        ignore_index: the label that does not count.
        label_smoothing: as in torch, from 0 to 1.

    Raises:
        LossError: if logits have no class dimension, their shape does not fit the labels', or a label on the CPU is
            no class.

    Example:
        >>> import torch, wholebatch as wb
        >>> term = wb.losses.cross_entropy(torch.zeros(3, 4), torch.tensor([0, 2, -100]))
        >>> term.count, round(float(term.value), 4)
        (2.0, 1.3863)
    """
    logits = _precise(logits)
    if logits.dim() < 2:
        raise LossError(f"logits of shape {tuple(logits.shape)} have no class dimension: pass (rows, classes, ...).")
    weight = None if weight is None else weight.to(logits)
    if labels.is_floating_point():
        same_shape(logits.shape, labels.shape)
        rows = labels.numel() / labels.shape[1]
        total = F.cross_entropy(logits, labels, weight, reduction="sum", label_smoothing=label_smoothing)
        return LossSum(total, rows, kind="shape", source=tuple(labels.shape))
    same_shape(logits.shape[:1] + logits.shape[2:], labels.shape)
    classes = as_classes(labels)
    total = _sum(logits, classes, weight, ignore_index, label_smoothing)
    counted = classes != ignore_index
    count = counted.sum() if weight is None else (weight[torch.where(counted, classes, 0)] * counted).sum()
    return LossSum(total, count, kind="labels" if weight is None else "weighted labels", source=labels)


def causal_lm(
    logits: Tensor,
    labels: Tensor | None = None,
    *,
    shift_labels: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> LossSum:
    """Average next-token cross entropy over every supervised token of the whole batch.

    Token t is predicted from the logits at t - 1: labels are shifted here, once, and counted after the shift.

    Args:
        logits: (rows, length, vocabulary).
        labels: (rows, length), not shifted; ``ignore_index`` where nothing is to be learned.
        shift_labels: (rows, length), already shifted by the collate function; taken as they are.
        ignore_index: the label that does not count.
        label_smoothing: as in torch, from 0 to 1.

    Raises:
        LossError: unless exactly one of labels and shift_labels is given, or if shapes do not fit.

    Example:
        >>> import torch, wholebatch as wb
        >>> wb.losses.causal_lm(torch.zeros(1, 3, 5), torch.tensor([[1, 2, 3]])).count
        2.0
    """
    source, targets = shifted(labels, shift_labels, ignore_index, "causal_lm")
    term = _tokens(logits, targets, ignore_index, label_smoothing=label_smoothing)
    return LossSum(term.total, term.count, kind="shifted labels", source=source)


def masked_lm(logits: Tensor, labels: Tensor, ignore_index: int = -100, label_smoothing: float = 0.0) -> LossSum:
    """Average the cross entropy over the masked tokens of the whole batch.

    Args:
        logits: (rows, length, vocabulary).
        labels: (rows, length); ``ignore_index`` everywhere but at the tokens to be restored.
        ignore_index: the label that does not count.
        label_smoothing: as in torch, from 0 to 1.

    Raises:
        LossError: if the shapes do not fit.

    Example:
        >>> import torch, wholebatch as wb
        >>> wb.losses.masked_lm(torch.zeros(1, 3, 5), torch.tensor([[-100, 2, -100]])).count
        1.0
    """
    return _tokens(logits, labels, ignore_index, label_smoothing=label_smoothing)


def token_classification(
    logits: Tensor,
    labels: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> LossSum:
    """Average the cross entropy over the labelled tokens of the whole batch.

    Args:
        logits: (rows, length, classes).
        labels: (rows, length).
        weight: (classes,), a weight a class.
        ignore_index: the label that does not count.
        label_smoothing: as in torch, from 0 to 1.

    Raises:
        LossError: if the shapes do not fit.

    Example:
        >>> import torch, wholebatch as wb
        >>> wb.losses.token_classification(torch.zeros(2, 2, 3), torch.tensor([[0, 1], [2, -100]])).count
        3.0
    """
    return _tokens(logits, labels, ignore_index, weight, label_smoothing)


def _tokens(
    logits: Tensor, labels: Tensor, ignore_index: int, weight: Tensor | None = None, label_smoothing: float = 0.0
) -> LossSum:
    same_shape(logits.shape[:-1], labels.shape)
    flat = as_classes(labels).flatten().to(logits.device)
    term = cross_entropy(logits.flatten(0, -2), flat, weight, ignore_index, label_smoothing)
    return LossSum(term.total, term.count, kind=term.kind, source=labels)


def _sum(logits: Tensor, classes: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float) -> Tensor:
    """Add up the cross entropy over the labels that count."""
    try:
        return F.cross_entropy(
            logits, classes, weight, ignore_index=ignore_index, reduction="sum", label_smoothing=label_smoothing
        )
    except IndexError:
        known(classes[classes != ignore_index], logits.shape[1], ignore_index)
        raise


def _precise(logits: Tensor) -> Tensor:
    logits = floating(logits, "logits")
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
