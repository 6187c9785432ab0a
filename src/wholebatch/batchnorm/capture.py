"""One call of a model as a graph of torch operations, or the reason why there is none.

``torch.export`` runs the module's own Python once with tensors that hold no data. What it cannot see is looked for
here, because a graph that differs from the model would be wrong in silence: hooks, tensors kept on modules, draws
from Python's or NumPy's generators, autograd functions with a backward of their own. At last the graph and the
module are run side by side on one micro-batch, and outputs and gradients must agree.
"""

from __future__ import annotations

import logging
import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from io import StringIO
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from wholebatch.batchnorm.model_call import ModelCall
from wholebatch.batchnorm.operations import AnySize
from wholebatch.errors import InexactError
from wholebatch.model.gradient_hooks import KINDS
from wholebatch.model.state import State


class CaptureError(InexactError):
    """The model cannot be captured as a graph, so it cannot be run in stages."""


@dataclass(frozen=True)
class Captured:
    """A call as a graph.

    Attributes:
        graph_module: the graph, with the submodules that its nodes call.
        bound: for each placeholder that is a parameter, a buffer or a constant, where it is found: ("model", name)
            or ("constant", name).
        inputs: the other placeholders, in the order of the call's leaves.
        constants: tensors that the model's code made itself.
        averaging: running means of BatchNorm layers with ``momentum=None``, with the name of their count of batches.
        answer: how the model's answer is built from the graph's outputs.
    """

    graph_module: fx.GraphModule
    bound: dict[str, tuple[str, str]]
    inputs: tuple[str, ...]
    constants: dict[str, Tensor]
    averaging: dict[str, str]
    answer: pytree.TreeSpec


def capture(model: nn.Module, call: ModelCall, free: dict[tuple[int, int], str] | None = None) -> Captured:
    """Capture a call as a graph.

    Args:
        model: the module itself, not a wrapper.
        call: the arguments that the graph is made for.
        free: dimensions that may have other sizes in other calls, by leaf and dimension, each with the name of its
            size; dimensions of one name have one size. All others are fixed.

    Raises:
        CaptureError: with the reason.
    """
    _refuse_hooks(model)
    cumulative, before = _cumulative(model), _attributes(model)
    state, draws = State(model), _draws()
    kept: list[str] = []
    try:
        with _quiet(), _fixed_momentum(model, cumulative), AnySize(marking=True):
            exported = _export(model, call, free or {})
    except (RuntimeError, ValueError, TypeError, AttributeError, AssertionError, LookupError) as error:
        raise CaptureError(_reason(error)) from error
    finally:
        drew = draws != _draws()
        state.restore()
        kept += _restore_attributes(model, before)
    if kept:
        raise CaptureError(
            f"The model keeps tensors with a graph on itself during forward ({kept[0]!r}), where a loss function could "
            "take them from; the whole batch has no such moment. Return them from forward."
        )
    if drew:
        raise CaptureError("The model draws from Python's or NumPy's random state, which a graph fixes once for all.")
    return _captured(exported, cumulative)


def _export(model: nn.Module, call: ModelCall, free: dict[tuple[int, int], str]) -> torch.export.ExportedProgram:
    shapes: Any = None
    if free:
        dims = {name: torch.export.Dim(name) for name in free.values()}
        leaves, spec = pytree.tree_flatten((call.args, call.kwargs))
        by_leaf: list[dict[int, Any] | None] = [{} if isinstance(leaf, Tensor) else None for leaf in leaves]
        for (leaf, dim), name in free.items():
            by_leaf[leaf] = {**(by_leaf[leaf] or {}), dim: dims[name]}
        shapes = pytree.tree_unflatten(by_leaf, spec)
    return torch.export.export(_AsTwoTrees(model), (call.args, call.kwargs), dynamic_shapes=shapes, strict=False)


class _AsTwoTrees(nn.Module):
    """Takes the arguments as two nests, so that leaves keep their order whatever forward's signature is."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, args: Any, kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


def _captured(exported: torch.export.ExportedProgram, cumulative: dict[str, str]) -> Captured:
    bound, inputs = {}, []
    for spec in exported.graph_signature.input_specs:
        name, target, kind = spec.arg.name, str(spec.target).removeprefix("model."), spec.kind.name
        if kind == "USER_INPUT":
            inputs.append(name)
        elif kind in ("PARAMETER", "BUFFER"):
            bound[name] = ("model", target)
        elif kind == "CONSTANT_TENSOR":
            bound[name] = ("constant", str(spec.target))
        else:
            raise CaptureError(f"The captured graph takes {name!r}, a {kind.lower()}, which stages cannot hold.")
    constants = {name: value for name, value in exported.constants.items() if isinstance(value, Tensor)}
    answer = exported.call_spec.out_spec
    assert answer is not None  # every exported program has one
    return Captured(exported.graph_module, bound, tuple(inputs), constants, cumulative, answer)


_PURE_HOOKS = ("torch.nn.utils.",)
"""Hooks that compute weights (spectral norm, weight norm, pruning): the graph holds what they do."""


def _refuse_hooks(model: nn.Module) -> None:
    hooked = [
        f"{name or type(model).__name__} ({getattr(hook, '__qualname__', type(hook).__qualname__)})"
        for name, module in model.named_modules()
        for kind in KINDS
        for hook in getattr(module, kind).values()
        if not (getattr(hook, "__module__", None) or type(hook).__module__).startswith(_PURE_HOOKS)
    ]
    if hooked:
        raise CaptureError(
            f"{len(hooked)} hooks on modules would be lost in a captured graph (first: {hooked[0]}). Remove them "
            '(each was returned by a register_..._hook call), or choose batch_norm="exact-lock-step".'
        )


def _cumulative(model: nn.Module) -> dict[str, str]:
    """Find the running means that average over all windows, and the counter each uses."""
    return {
        f"{name}.running_mean".lstrip("."): f"{name}.num_batches_tracked".lstrip(".")
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        and module.momentum is None
        and module.track_running_stats
    }


@contextmanager
def _fixed_momentum(model: nn.Module, cumulative: dict[str, str]) -> Iterator[None]:
    """Give ``momentum=None`` a number for a while: the true one is read off a tensor, which no graph can do."""
    modules: list[Any] = [model.get_submodule(name.rpartition(".")[0]) for name in cumulative]
    try:
        for module in modules:
            module.momentum = 0.0
        yield
    finally:
        for module in modules:
            module.momentum = None


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what torch.export warns, logs and prints about a model that it cannot capture out of the user's terminal."""
    silenced = logging.root.manager.disable
    with warnings.catch_warnings(), redirect_stderr(StringIO()):
        warnings.simplefilter("ignore")
        logging.disable(logging.ERROR)
        try:
            yield
        finally:
            logging.disable(silenced)


def _draws() -> tuple[Any, Any]:
    """The state of the generators that a graph knows nothing of."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else repr(numpy.random.get_state())


def _attributes(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Note what stands on every module besides its tensors and parts, lists by their members."""
    own = ("_parameters", "_buffers", "_modules")
    return {
        name: {
            key: (value, list(value) if isinstance(value, list) else None)
            for key, value in vars(module).items()
            if key not in own
        }
        for name, module in model.named_modules()
    }


def _restore_attributes(model: nn.Module, before: dict[str, dict[str, Any]]) -> list[str]:
    """Take back what forward put on modules; return the names of tensors with a graph among it."""
    kept = []
    for name, attributes in _attributes(model).items():
        module = model.get_submodule(name)
        for key, (value, _) in attributes.items():
            leaves = pytree.tree_leaves(value)
            if any(isinstance(leaf, FakeTensor) and leaf.grad_fn is not None for leaf in leaves):
                kept.append(f"{name}.{key}".lstrip("."))
            if key not in before[name]:
                delattr(module, key)
                continue
            old, members = before[name][key]
            if old is not value:
                setattr(module, key, old)
            if members is not None:
                old[:] = members  # torch 2.6 leaves tensors without data in the lists of recurrent layers
    return kept


def _reason(error: BaseException) -> str:
    text = str(error).strip().split("\n")[0]
    return (
        f"torch.export cannot make a graph of this model: {type(error).__name__}: {text} Stages need one; "
        'batch_norm="exact-lock-step" runs the model\'s own code, with the graphs of all micro-batches in memory.'
    )
