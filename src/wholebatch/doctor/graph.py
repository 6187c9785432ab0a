"""Read off the autograd graph what a loss divides by: its terms, their factors and their items.

Only the few nodes between the scalar and its reductions are visited. `grad_fn`, `next_functions` and the saved
values of nodes are torch's public way to look at a graph ("Autograd mechanics", torch 2.6 and later).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from wholebatch.doctor.trace import TracedTerm

MOST_TERMS = 64
# Reductions that carry their kind with them: 0 none, 1 mean, 2 sum (torch._C reduction enumeration, `nn.functional`).
KINDS = {0: "none", 1: "mean", 2: "sum"}
# Nodes that hand a scalar, or all entries of a tensor, through without changing what is summed.
THROUGH = (
    "ToCopy", "View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Clone", "Alias", "Expand", "Transpose",
    "T", "Permute", "Neg", "NanToNum", "Slice", "Contiguous", "CopyBackwards", "_DDPSink", "Index",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Visit:
    """A node on the way down, what it is multiplied by, and where it hangs."""

    node: Any
    factors: tuple[float, ...]
    path: str


def terms_of(loss: Tensor) -> tuple[TracedTerm, ...]:
    """Return the summands of a scalar loss, each with its reduction, factor and items.

    Costs a few microseconds a node; reading a divisor that lives on a device waits for it.
    """
    if loss.grad_fn is None or loss.numel() != 1 or torch._C._len_torch_dispatch_stack() > 0:
        return ()  # under a dispatch mode torch cannot read the numbers that nodes have saved
    found: list[TracedTerm] = []
    waiting = [Visit(loss.grad_fn, (), "")]
    while waiting and len(found) < MOST_TERMS:
        visit = waiting.pop()
        below = list(descend(visit))
        if below:
            waiting.extend(reversed(below))
        else:
            found.append(term_at(visit))
    return tuple(found)


def base(node: Any) -> str:
    """Return a node's name without its ending: "DivBackward0" gives "Div"."""
    name: str = node.name().rsplit("::", 1)[-1]
    return name.split("Backward")[0] if name != "CopyBackwards" else name


def saved(node: Any, name: str) -> Any:
    """Return what a node saved under `name`, None where it saved nothing or has been freed."""
    try:
        return getattr(node, f"_saved_{name}", None)
    except RuntimeError:  # the graph of an earlier backward is gone
        return None


def children(node: Any) -> list[Any]:
    """Return the nodes below, without the places of constants."""
    return [below for below, _ in node.next_functions if below is not None]


def number(value: Any) -> float | None:
    """Return a Python number or a one-element tensor as a float, None for anything else."""
    if isinstance(value, Tensor):
        return float(value.item()) if value.numel() == 1 else None
    return float(value) if isinstance(value, (int, float)) else None


def descend(visit: Visit) -> Iterator[Visit]:
    """Yield the scalar nodes below, with the factor each gains; nothing when `visit` is at a reduction."""
    step = STEPS.get(base(visit.node))
    if step is not None:
        yield from step(visit)
    elif base(visit.node) in THROUGH and len(children(visit.node)) == 1:
        yield Visit(children(visit.node)[0], visit.factors, visit.path)


def through_add(visit: Visit) -> Iterator[Visit]:
    """Go on in every summand."""
    sign = -1.0 if base(visit.node) == "Sub" else 1.0
    alpha = number(saved(visit.node, "alpha")) or 1.0
    for place, (below, _) in enumerate(visit.node.next_functions):
        if below is not None:
            factors = visit.factors if place == 0 or sign * alpha == 1.0 else (*visit.factors, sign * alpha)
            yield Visit(below, factors, f"{visit.path}{place}")


def through_product(visit: Visit) -> Iterator[Visit]:
    """Go on in the factor that has a gradient, when the other is a number."""
    divides = base(visit.node) == "Div"
    for place, other in ((0, "other"), (1, "self")):
        below = visit.node.next_functions[place][0] if place < len(visit.node.next_functions) else None
        value = number(saved(visit.node, other))
        if below is None or value is None or (divides and (place == 1 or value == 0.0)):
            continue
        factors = (*visit.factors, 1.0 / value if divides else value)
        yield Visit(below, factors, f"{visit.path}*" if place else visit.path)


def through_stack(visit: Visit) -> Iterator[Visit]:
    """Go on in the scalars that were stacked before they were summed or averaged."""
    below = children(visit.node)
    if base(visit.node) not in ("Sum", "Mean") or len(below) != 1 or base(below[0]) not in ("Stack", "Cat"):
        return
    scalars = children(below[0])
    sizes = saved(visit.node, "self_sym_sizes")
    if sizes is None or math.prod(sizes) != len(scalars):
        return
    factors = visit.factors if base(visit.node) == "Sum" else (*visit.factors, 1.0 / len(scalars))
    for place, scalar in enumerate(scalars):
        yield Visit(scalar, factors, f"{visit.path}[{place}]")


STEPS: dict[str, Callable[[Visit], Iterator[Visit]]] = {
    "Add": through_add,
    "Sub": through_add,
    "Mul": through_product,
    "Div": through_product,
    "Sum": through_stack,
    "Mean": through_stack,
}


def term_at(visit: Visit) -> TracedTerm:
    """Describe the reduction at which the way down ended."""
    kind, items, total = reduction_at(visit.node)
    factors = (*visit.factors, *inner_factors(visit.node))
    # A sum that is divided by its own items is a mean, however it was written.
    for place, factor in enumerate(factors):
        if kind == "sum" and items >= 1 and abs(factor * items - 1.0) < 1e-6:
            kind, factors = "mean", factors[:place] + factors[place + 1 :]
            break
    name = base(visit.node)
    return TracedTerm(
        visit.path, name, kind, math.prod(factors), factors, items, total, paired(visit.node), constant(visit.node)
    )


def constant(node: Any) -> float | None:
    """Return the one number that a loss compares all its entries with, None where it is not one, or no number."""
    target = saved(node, "target")
    if not isinstance(target, Tensor) or not target.is_floating_point() or target.numel() < 2 or target.is_meta:
        return None
    first = target.reshape(-1)[0]
    return float(first) if bool((target == first).all()) else None


def inner_factors(node: Any) -> tuple[float, ...]:
    """Return the numbers that all entries below a sum or mean are multiplied by: ``(losses / k).sum()``."""
    factors: list[float] = []
    below = children(node) if base(node) in ("Sum", "Mean") else []
    while len(below) == 1:
        factor = factor_at(below[0])
        if factor is None and base(below[0]) not in THROUGH:
            break
        factors += [] if factor is None else [factor]
        below = children(below[0])
    return tuple(factors)


def factor_at(node: Any) -> float | None:
    """Return the number that a product or quotient multiplies by; None where it is no number."""
    value = number(saved(node, "other")) if base(node) in ("Mul", "Div") and node.next_functions[0][0] else None
    if value is None or base(node) == "Mul":
        return value
    return 1.0 / value if value else None


def reduction_at(node: Any) -> tuple[str, float, float]:
    """Return kind, items and entries of the reduction at `node`."""
    name = base(node)
    if name in ("Mean", "Sum"):
        sizes = saved(node, "self_sym_sizes")
        total = float(math.prod(sizes)) if sizes is not None else 0.0
        items = weight_of(children(node)[0], total) if name == "Sum" and children(node) else total
        return (name.lower(), items, total) if items >= 0 else ("opaque", 0.0, 0.0)
    kind = KINDS.get(saved(node, "reduction"), "none")
    if kind == "none":
        return "opaque", 0.0, 0.0
    if name.startswith("NllLoss"):
        weight, target = number(saved(node, "total_weight")), saved(node, "target")
        return (
            (kind, weight, float(target.numel())) if weight is not None and target is not None else ("opaque", 0.0, 0.0)
        )
    size = entries(node)
    return (kind, size, size) if size else ("opaque", 0.0, 0.0)


def entries(node: Any) -> float:
    """Return the number of entries of what an elementwise loss compared."""
    for name in ("self", "target"):
        value = saved(node, name)
        if isinstance(value, Tensor):
            return float(value.numel())
    return 0.0


def weight_of(node: Any, total: float) -> float:
    """Return the weight that a sum over `total` entries adds up: a mask's sum, labels that are not ignored, or all.

    A factor with negative entries is no weight (a surrogate loss): -1.
    """
    while (base(node) in THROUGH or factor_at(node) is not None) and len(children(node)) == 1:
        node = children(node)[0]
    if base(node) == "Mul":
        for name in ("other", "self"):
            value = saved(node, name)
            if isinstance(value, Tensor) and value.numel() == total and not value.requires_grad:
                return float(value.sum().item()) if bool((value >= 0).all()) else -1.0
    if base(node).startswith("NllLoss") and KINDS.get(saved(node, "reduction")) == "none":
        return counted(node)
    return total


def counted(node: Any) -> float:
    """Return the weight of the labels that a cross entropy without reduction does not ignore."""
    target, weight = saved(node, "target"), saved(node, "weight")
    if target is None:
        return -1.0
    ignored = saved(node, "ignore_index")
    ignored = ignored - 2**64 if ignored >= 2**63 else ignored  # saved as an unsigned number
    kept = target[target != ignored]
    return float(kept.numel() if weight is None else weight[kept].sum().item())


def paired(node: Any) -> bool:
    """Tell whether each row's class is the row's own number, out of as many classes as rows (or twice as many)."""
    if not base(node).startswith("NllLoss"):
        return False
    scores, target = saved(node, "self"), saved(node, "target")
    if scores is None or target is None or scores.dim() != 2 or target.dim() != 1 or target.numel() < 2:
        return False
    rows, classes = scores.shape
    own = torch.arange(rows, device=target.device)
    return bool(classes in (rows, 2 * rows) and (target == own).all())
