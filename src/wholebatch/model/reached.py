"""What a backward would reach: the operations and the leaves of a graph that has not been gone back through yet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import Node

from wholebatch.model.inspection import ModelInfo

NEAR = 128
"""How many nodes of a graph its end has."""


MULTIPLIED = type((torch.zeros((), requires_grad=True) * 1).grad_fn)


Step: TypeAlias = "tuple[type[Node], type[Node]]"
"""The kind of an operation, and of one that it takes its values from."""


class Silenced(Node):
    """What multiplies with zero: what it takes its values from makes no difference while it does."""


def nodes_of(outputs: Iterable[Tensor], ends: list[Node] | None = None, steps: set[Step] | None = None) -> list[Node]:
    """List the nodes of the graph that a backward pass from these outputs would run through.

    Every micro-batch is walked through, and each question to a node takes a while: it is asked once.

    Args:
        ends: takes those behind which there are no others.
        steps: takes the kinds of those at the graph's end, each with that of one it takes its values from.
    """
    nodes = [node for node in (output.grad_fn for output in outputs) if node is not None]
    seen = set(nodes)
    made: set[Step] = set() if steps is None else steps
    for node in nodes:  # which grows meanwhile
        further = node.next_functions
        if not further and ends is not None:
            ends.append(node)
        near = steps is not None and len(nodes) < NEAR
        kind = Silenced if near and type(node) is MULTIPLIED and _by_zero(node) else type(node)
        for following, _ in further:
            if following is None:
                continue
            if near:
                made.add((kind, type(following)))
            if following not in seen:
                seen.add(following)
                nodes.append(following)
    return nodes


def _by_zero(node: Any) -> bool:
    """Tell whether something is multiplied with a number that is zero, such as a weight at the start of a warm-up."""
    # What a hook has packed is let be: to unpack it may mean to run a checkpoint again, or to fetch it from the host.
    # Before torch 2.9 a saved tensor does not tell, and none is looked at.
    names = [
        name for name in ("self", "other") if getattr(getattr(node, f"_raw_saved_{name}"), "unpack_hook", 0) is None
    ]
    saved = (getattr(node, f"_saved_{name}") for name in names)
    factors = (each for each in saved if type(each) is Tensor and not each.dim())
    # A mode below autograd is given a bare number for such a tensor, and may not know what to do with it; not here.
    return any(each.device.type == "cpu" and not each.tolist() for each in factors)


def leaves_of(outputs: Iterable[Tensor], steps: set[Step] | None = None) -> list[Tensor]:
    """List the leaf tensors that a backward pass from these outputs would reach."""
    ends: list[Node] = []
    nodes_of(outputs, ends, steps)
    leaves = (getattr(end, "variable", None) for end in ends)  # each question to a node takes a while
    return [leaf for leaf in leaves if leaf is not None]


def external_parameters(
    outputs: Sequence[Tensor], model_info: ModelInfo, steps: set[Step] | None = None
) -> list[Tensor]:
    """List the leaves outside of the model that a backward pass from these outputs would reach, or may.

    Args:
        steps: as :func:`nodes_of` takes it.
    """
    found = {id(leaf): leaf for leaf in leaves_of(outputs, steps) if id(leaf) not in model_info.own}
    if model_info.leaves and reentrant(outputs):
        # What a reentrant checkpoint reaches does not show in the graph: it may be whatever the loss function names.
        found.update((id(leaf), leaf) for leaf in model_info.leaves if id(leaf) not in model_info.own)
    if not found:
        return []
    # A sharded model has other parameters by now: those that its forward has gathered.
    gathered = {id(parameter) for parameter in model_info.model.parameters()}
    return [leaf for leaf in found.values() if id(leaf) not in gathered]


def reentrant(outputs: Iterable[Tensor]) -> bool:
    """Tell whether a backward from these outputs would run reentrant checkpoints, backwards of their own inside."""
    return any("CheckpointFunction" in node.name() for node in nodes_of(outputs))
