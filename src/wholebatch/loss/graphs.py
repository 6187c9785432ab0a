"""What the graph below a term says about its values: which operation made them, and from how many rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from wholebatch.loss.terms import LossSum

FAR = 64
"""How many nodes are looked at: what makes the values of a loss stands near its end."""

UNTOUCHED = ("TBackward0", "ToCopyBackward0")
"""What may stand between a parameter and the operation that uses it."""

LINEAR = {"View", "ToCopy", "Mul", "Div", "Add", "Sub", "Neg", "Squeeze", "Alias"}
"""What may stand between the means that a loss is made of and the loss."""

FEW = 16
"""How many nodes are looked at for these means."""

CROSS_ENTROPIES = ("NllLossBackward0", "NllLoss2DBackward0")

MEETING = {
    *("Topk", "Sort", "Kthvalue", "Median", "Mean", "Sum", "Prod", "Var", "Std", "VarMean", "StdMean", "Logsumexp"),
    *("LinalgVectorNorm", "Norm", "Amax", "Amin", "Max", "Min", "Mm", "Bmm", "Pdist", "T", "Transpose", "Permute"),
}
"""Operations after which a first dimension that was not there before is made of what stood in several rows."""


def values_come_by_rows(term: LossSum) -> bool:
    """Tell whether a term's values still have, place by place, the rows that a layer with parameters worked on.

    Values of some number of classes or features come out of an operation that has met all rows: a mean, a variance, a
    product, the hardest of all. Values of some number of rows have that number as their first dimension all the way.
    """
    return any(len(shape) > 1 and _uses_parameters(node) for node, shape in _of_as_many_rows(term))


def values_are_chosen(term: LossSum) -> bool:
    """Tell whether a mask has chosen the rows of a term's values, so that any number of them is right."""
    return any(_chooses(node) for node, _ in _of_as_many_rows(term))


def values_are_made_of_many_rows(term: LossSum) -> bool:
    """Tell whether the operation that gave a term's values their number did so by joining, ordering or turning rows.

    Joining tokens to one long dimension, stacking views and choosing by a mask are none of these.
    """
    return any(_kind(node) in MEETING and not _goes_on(node, shape) for node, shape in _of_as_many_rows(term))


def ignored_targets(term: LossSum) -> Iterator[Tensor]:
    """Yield, for every cross entropy that made a term's values, whether one of its targets is ignored.

    Torch gives 0 for an ignored target when it does not reduce, and a plain mean counts these zeros in. What has been
    summed, chosen or joined since is another number of values, and is left alone.
    """
    size = int(term.count) if isinstance(term.count, float) else -1
    nodes = _before_the_sum(term)
    if len(nodes) == 1 and nodes[0].name() in CROSS_ENTROPIES:  # mostly so, and every micro-batch is looked at
        found: Iterator[Node] = iter(nodes)
    else:
        walk = _walk(term, lambda node, shape: math.prod(shape) == size and _kind(node) not in MEETING)
        found = (node for node, _ in walk if node.name() in CROSS_ENTROPIES)
    for node in found:
        saved: Any = node  # autograd hands out what a node has saved, under names that no type knows
        target, ignored = saved._saved_target, saved._saved_ignore_index
        if saved._saved_reduction == 0 and target.numel() == size:
            yield target.eq(ignored - 2**64 if ignored >= 2**63 else ignored).any()


def mean_divisors(term: LossSum) -> Iterator[Tensor]:
    """Yield what each cross entropy in a ready-made mean has divided by: its targets that count, or their weights."""
    nodes = [] if term.total.grad_fn is None else [term.total.grad_fn]
    for node in nodes:  # which grows meanwhile
        saved: Any = node
        if node.name() in CROSS_ENTROPIES:
            if saved._saved_reduction == 1:
                yield saved._saved_total_weight
        elif _kind(node) in LINEAR and len(nodes) < FEW:
            nodes += [following for following, _ in node.next_functions if following is not None]


def values_summed(term: LossSum) -> int:
    """Count the values that a term's total is the sum of; 0 if it was made in another way."""
    shapes = [_shape(node) for node in _before_the_sum(term)]
    return math.prod(shapes[0]) if shapes and shapes[0] is not None else 0


def _of_as_many_rows(term: LossSum) -> Iterator[tuple[Node, torch.Size]]:
    rows = term.source[0] if isinstance(term.source, torch.Size) and term.source else -1
    return _walk(term, lambda node, shape: len(shape) > 0 and shape[0] == rows)


def _walk(term: LossSum, follows: Callable[[Node, torch.Size], bool]) -> Iterator[tuple[Node, torch.Size]]:
    """Yield the nodes below a term's sum whose results have a fitting shape, as long as they follow one another."""
    nodes = _before_the_sum(term)
    seen = set(nodes)
    for node in nodes:  # which grows meanwhile
        shape = _shape(node)
        if shape is None or not follows(node, shape):
            continue
        yield node, shape
        new = [following for following, _ in node.next_functions if following is not None and following not in seen]
        if len(seen) < FAR:
            seen.update(new)
            nodes += new


def _before_the_sum(term: LossSum) -> list[Node]:
    """List what was summed to make a term's total; nothing if it was made in another way."""
    end = term.total.grad_fn
    while end is not None and _kind(end) in ("View", "ToCopy"):  # a sum that was given by hand, or a half's
        end = end.next_functions[0][0]
    return [] if end is None or _kind(end) != "Sum" else [node for node, _ in end.next_functions if node is not None]


def _kind(node: Node) -> str:
    return node.name().rstrip("0123456789").removesuffix("Backward")


def _goes_on(node: Node, shape: torch.Size) -> bool:
    """Whether an operation has kept its first dimension from something before it, or from a parameter."""
    before = [_shape(following) for following, _ in node.next_functions if following is not None]
    return _uses_parameters(node) or any(each is not None and each[:1] == shape[:1] for each in before)


def _shape(node: Node) -> torch.Size | None:
    """The shape of what an operation returned; None where torch does not say."""
    results = getattr(node, "_input_metadata", None)
    return results[0].shape if results else None


def _uses_parameters(node: Node) -> bool:
    return any(_is_parameter(following) for following, _ in node.next_functions)


def _is_parameter(node: Node | None) -> bool:
    while node is not None and node.name() in UNTOUCHED:
        node = node.next_functions[0][0]
    return node is not None and "AccumulateGrad" in node.name()


def _chooses(node: Node) -> bool:
    if node.name() == "MaskedSelectBackward0":
        return True
    indices = getattr(node, "_saved_indices", ()) if node.name() == "IndexBackward0" else ()
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)
