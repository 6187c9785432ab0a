"""A program held against the module that it was captured from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from wholebatch.batchnorm.capture import CaptureError
from wholebatch.batchnorm.model_call import ModelCall
from wholebatch.batchnorm.operations import AnySize, Operation
from wholebatch.batchnorm.partition import Program
from wholebatch.first_window.norms import NormWatch
from wholebatch.model.comparison import distance
from wholebatch.model.reached import leaves_of
from wholebatch.model.state import State

TOLERANCE = 1e-3
"""Far above rounding and far below what a lost hook or a lost backward would cost."""


@dataclass(frozen=True)
class _Alone:
    """A coupling for a micro-batch that is taken for the whole batch."""

    operation: Operation

    def apply(self, x: Tensor, *operands: Any) -> Tensor:
        return self.operation.alone(x, *operands)


def compare(model: nn.Module, call: ModelCall, program: Program) -> dict[str, int]:
    """Run the module and its program on the same micro-batch and refuse the program unless both say the same.

    Leaves gradients, buffers and random state as they are.

    Returns:
        The bytes of every value that crosses a cut.

    Raises:
        CaptureError: if an output or a gradient differs.
    """
    state = State(model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    with call.ambient(), torch.enable_grad():
        with AnySize(marking=False), NormWatch() as norms:
            answered = pytree.tree_leaves(model(*call.args, **call.kwargs))
        _refuse_unregistered(model, call, answered, norms)
        expected = _probe(answered, parameters)
        state.restore()
        results, sizes = _uncut(model, call, program)
        found = _probe(results, parameters)
        state.restore()
    for kind, ours, theirs in zip(("output", "gradient"), found, expected, strict=True):
        difference = distance(ours, theirs)
        if not difference <= TOLERANCE:
            raise CaptureError(
                f"The captured graph's {kind} is {difference:.3g} away from the model's own, relatively. Custom "
                "autograd functions, backward hooks and Python side effects are lost in a graph; "
                'batch_norm="exact-lock-step" keeps them.'
            )
    return sizes


def _refuse_unregistered(model: nn.Module, call: ModelCall, answered: Sequence[Any], norms: NormWatch) -> None:
    """Raise for parameters and statistics that the model uses but does not hold: a graph takes them for constants."""
    buffers = {id(buffer) for buffer in model.buffers()}
    hidden = [place for place, mean in norms.seen if mean is not None and id(mean) not in buffers]
    own = {id(tensor) for tensor in (*model.parameters(), *call.leaves)}
    outputs = [leaf for leaf in answered if isinstance(leaf, Tensor)]
    # Some models let their own inputs, or views of them, require a gradient, for the sake of checkpoints.
    given = {leaf.untyped_storage().data_ptr() for leaf in call.leaves if isinstance(leaf, Tensor)}
    reached = [leaf for leaf in leaves_of(outputs) if id(leaf) not in own]
    strange = [leaf for leaf in reached if leaf.untyped_storage().data_ptr() not in given]
    hidden += [f"A parameter of shape {tuple(leaf.shape)}" for leaf in strange]
    if hidden:
        raise CaptureError(
            f"{hidden[0]} is used by the model but not registered in it, so that a captured graph would never move it. "
            "Make its owner an attribute of a module, or an entry of nn.ModuleList or nn.ModuleDict."
        )


def _uncut(model: nn.Module, call: ModelCall, program: Program) -> tuple[list[Any], dict[str, int]]:
    values: dict[str, Any] = program.arguments(call.leaves)
    values |= {f"meeting_{i}": _Alone(coupling.operation) for i, coupling in enumerate(program.couplings)}
    results: tuple[Any, ...] = ()
    for stage in program.stages:
        leaves = [program.bound(model, n) if n in program.captured.bound else values[n] for n in stage.inputs]
        results = stage.run(*leaves)
        values.update(zip(stage.outputs, results, strict=True))
    sizes = {name: value.nbytes for name in program.births if isinstance(value := values[name], Tensor)}
    return list(results[: program.results]), sizes


def _probe(outputs: Sequence[Any], parameters: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Take the outputs and, for fixed weights of them, the gradients."""
    tensors = [leaf for leaf in outputs if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    told = [tensor for tensor in tensors if tensor.requires_grad]
    if not told or not parameters:
        return [tensor.detach() for tensor in tensors], []
    seeds = [torch.linspace(-1, 1, t.numel(), device=t.device).cos().to(t.dtype).view(t.shape) for t in told]
    grads = torch.autograd.grad(told, parameters, seeds, allow_unused=True)
    return [tensor.detach() for tensor in tensors], [
        torch.zeros_like(p) if cast("Tensor | None", grad) is None else grad
        for p, grad in zip(parameters, grads, strict=True)
    ]
