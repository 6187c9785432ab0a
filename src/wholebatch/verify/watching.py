"""What a loss function and a backward do besides: looked at while a window runs, and undone afterwards."""

from __future__ import annotations

import copy
import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from wholebatch.model.state import State
from wholebatch.verify.copies import copied

LossFunction = Callable[[Any, Any], Any]


class LossCall(NamedTuple):
    """One call of a loss function: the micro-batch as it was, and the random state that it began with."""

    micro_batch: Any
    start: State


class RecordedLoss:
    """A loss function that is looked at while it runs.

    Attributes:
        loss_fn: the user's own, where what it names is found as before.
        calls: what it was called with, in order.
        cleared: whether gradients that stood there were gone after a call.
        added: whether gradients came during a call, as of a backward inside.

    Args:
        loss_fn: as for `backward`.
        model: on whose devices draws are made.
        tensors: whose gradients are looked at.
    """

    def __init__(self, loss_fn: LossFunction, model: nn.Module, tensors: Iterable[Tensor]) -> None:
        self.loss_fn = loss_fn
        self._model = weakref.ref(model)
        self.calls: list[LossCall] = []
        self.cleared = self.added = False
        # Weak: what a loss function holds counts as what it names, and this is not the user's.
        self._tensors = [weakref.ref(tensor) for tensor in tensors]

    def __call__(self, model: Any, micro_batch: Any) -> Any:
        """Call the loss function, and compare the gradients before and after."""
        self.calls.append(LossCall(_kept(micro_batch), State(self._model(), buffers=False)))
        before = [_gradient(tensor()) for tensor in self._tensors]
        returned = self.loss_fn(model, micro_batch)
        for (held, version), tensor in zip(before, self._tensors, strict=True):
            self._compare(held, version, tensor())
        return returned

    def _compare(self, held: Tensor | None, version: int, tensor: Tensor | None) -> None:
        now, moved = _gradient(tensor)
        if now is held and moved == version:
            return
        gone = now is None or not bool(now.detach().any())
        self.cleared |= gone and held is not None
        self.added |= not gone


def _kept(micro_batch: Any) -> Any:
    """Copy a micro-batch, which the loss function may change; one that can't be copied is kept as it is."""
    try:
        return copied(micro_batch)
    except (AttributeError, LookupError, TypeError, RuntimeError, ValueError):
        return micro_batch


def _gradient(tensor: Tensor | None) -> tuple[Tensor | None, int]:
    gradient = None if tensor is None else tensor.grad
    return gradient, -1 if gradient is None else gradient._version


@contextmanager
def optimizers_kept() -> Iterator[list[str]]:
    """List the optimizers that step meanwhile, and put them back afterwards; the parameters are others' business."""
    kept: dict[int, tuple[torch.optim.Optimizer, Any]] = {}
    stepped: list[str] = []

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if id(optimizer) not in kept:
            kept[id(optimizer)] = optimizer, copy.deepcopy(optimizer.state_dict())
            stepped.append(type(optimizer).__name__)

    handle = register_optimizer_step_pre_hook(before)
    try:
        yield stepped
    finally:
        handle.remove()
        for optimizer, state in kept.values():
            optimizer.load_state_dict(state)


@contextmanager
def checkpoints_heard() -> Iterator[list[str]]:
    """Collect what torch says of checkpoints that no gradient can pass; other warnings are kept still meanwhile."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        yield said
    said += [str(each.message) for each in heard if "Gradients will be None" in str(each.message)]


class ReplayedLoss:
    """A loss function that starts each micro-batch with the draws that it began with before."""

    def __init__(self, loss_fn: LossFunction, starts: Sequence[State]) -> None:
        self.loss_fn, self.starts, self.calls = loss_fn, starts, 0

    def __call__(self, model: Any, micro_batch: Any) -> Any:
        """Call the loss function under the draws of the next start, and of the first after the last."""
        self.starts[self.calls % len(self.starts)].restore_random()
        self.calls += 1
        return self.loss_fn(model, micro_batch)


class HookSums:
    """What hooks on modules and parameters are shown of gradients: sums that do not depend on the order of
    micro-batches.

    Looks only where the user's own hooks are, so that nothing runs otherwise because it is looked at.
    """

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        """Look on while hooks are called."""
        handles: list[Any] = []
        for name, module in model.named_modules():
            if module._backward_hooks or module._backward_pre_hooks:
                handles.append(module.register_full_backward_hook(functools.partial(self._module, name)))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter._backward_hooks:
                handles.append(parameter.register_hook(functools.partial(self._parameter, name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def apart(self, other: HookSums, tolerance: float) -> list[str]:
        """Name the places where others have been shown something else."""
        pairs = [(name, total, other.sums.get(name)) for name, total in self.sums.items()]
        return [
            name
            for name, total, theirs in pairs
            if theirs is None or not float((total - theirs).norm()) <= tolerance * float(theirs.norm())
        ]

    def _module(self, name: str, module: nn.Module, given: Any, output: Any) -> None:
        squares = [grad.detach().double().square().sum() for grad in output if isinstance(grad, Tensor)]
        self._add(
            f"{name or type(module).__name__} (module)", torch.stack(squares).sum() if squares else torch.zeros(())
        )

    def _parameter(self, name: str, gradient: Tensor) -> None:
        self._add(name, gradient.detach().to_dense().double() if gradient.is_sparse else gradient.detach().double())

    def _add(self, name: str, value: Tensor) -> None:
        value = value.cpu()
        self.sums[name] = self.sums[name] + value if name in self.sums else value.clone()
