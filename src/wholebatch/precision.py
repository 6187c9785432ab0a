"""Where the gradients of a window are summed, and in which precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType

import torch
from torch import Tensor, nn

from wholebatch.loss import Count


class Gradients:
    """The gradients of one window, kept apart from what stood in ``.grad`` before it.

    The window's own sum may be multiplied or dropped without touching what the user had accumulated; leaving
    the ``with`` block by an exception drops it, so ``.grad`` is then as before the call.

    1. :meth:`__enter__` sets existing gradients aside, so that ``.grad`` holds the window's sum alone.
    2. Backward passes add to ``.grad`` as usual.
    3. :meth:`scale` brings the sum to its true denominator.
    4. :meth:`put_back` adds what was set aside, in place, as ``loss.backward()`` would have done.

    Args:
        parameters: the tensors that may receive gradients.
        views: whether ``.grad`` may be a view into buckets that others write to, so that it must be copied.
    """

    def __init__(self, parameters: Iterable[Tensor], views: bool = False) -> None:
        self.parameters = {id(p): p for p in parameters if p.requires_grad}
        self._views = views
        self._aside: dict[int, Tensor] = {}

    def __enter__(self) -> Gradients:
        self._set_aside(self.parameters.values())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if kind is not None:
            self.drop()

    def include(self, leaves: Iterable[Tensor]) -> list[Tensor]:
        """Take in further leaves that are about to receive gradients; return those that are new."""
        new = [leaf for leaf in leaves if id(leaf) not in self.parameters]
        self.parameters.update((id(leaf), leaf) for leaf in new)
        self._set_aside(new)
        return new

    @property
    def held(self) -> list[Tensor]:
        """The tensors in which the window's sum now lies."""
        return [p.grad for p in self.parameters.values() if p.grad is not None]

    @property
    def clean(self) -> bool:
        """Whether nothing stood in ``.grad`` before the window."""
        return not self._aside

    def scale(self, factor: Count) -> None:
        """Multiply the window's sum by a factor, in float32 or better whatever the gradients' dtype."""
        scale_(self.held, factor)

    def zero(self) -> None:
        """Write zeros into the window's sum, whatever it holds."""
        for grad in self.held:
            grad.zero_()

    def mask(self, alive: Tensor) -> None:
        """Write zeros into the window's sum unless a truth value on the device holds, without reading it."""
        for grad in self.held:
            if not grad.is_sparse:
                grad.masked_fill_(~alive.to(grad.device), 0)

    def put_back(self) -> None:
        """Add what was set aside; the tensor that the user held is the one that remains in ``.grad``."""
        for key, before in self._aside.items():
            parameter = self.parameters[key]
            parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)
        self._aside.clear()

    def drop(self, keep: Callable[[Tensor], bool] = lambda parameter: False) -> None:
        """Take back what the window added, except to the parameters that ``keep`` names."""
        for key, parameter in self.parameters.items():
            if not keep(parameter):
                parameter.grad = self._aside.pop(key, None)

    def restart(self) -> None:
        """Forget the window's sum and begin it anew."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def _set_aside(self, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                grad = parameter.grad
                self._aside[id(parameter)] = grad.clone() if self._views else grad
                parameter.grad = None


def leaves_of(outputs: Iterable[Tensor]) -> list[Tensor]:
    """List the leaf tensors that a backward pass from these outputs would reach."""
    stack = [node for node in (output.grad_fn for output in outputs) if node is not None]
    seen, leaves = set(stack), []
    while stack:
        node = stack.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            leaves.append(leaf)
        fresh = [following for following, _ in node.next_functions if following is not None and following not in seen]
        seen.update(fresh)
        stack.extend(fresh)
    return leaves


@torch.no_grad()
def scale_(grads: Sequence[Tensor], factor: Count) -> None:
    """Multiply gradients in place, in float32 or better.

    A factor rounded to bfloat16 would be off by up to 0.4 % for the whole gradient, so halves go through float32.
    """
    dense: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        if grad.is_sparse:
            grad.mul_(_on(factor, grad.device, grad.dtype.to_real()))
        elif is_half(grad):
            grad.copy_(grad.float() * _on(factor, grad.device, torch.float32))
        else:
            dense.setdefault((grad.device, grad.dtype), []).append(grad)
    for (device, dtype), group in dense.items():
        torch._foreach_mul_(group, _on(factor, device, dtype.to_real()))


@torch.no_grad()
def total_norm(grads: Sequence[Tensor], device: torch.device) -> Tensor:
    """Measure the 2-norm of all gradients together, over dtypes and devices.

    Each tensor's norm is taken in float32 or better, sparse gradients are coalesced first (duplicate indices would
    count apart), and the norms are joined in float64 where the device has it.

    Returns:
        One number, on the given device.
    """
    if not grads:
        return torch.zeros((), device=device)
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        values = grad.coalesce().values() if grad.is_sparse else grad
        groups.setdefault((values.device, values.dtype), []).append(values)
    norms: list[Tensor] = []
    for (_, dtype), group in groups.items():
        wide = dtype if dtype.is_complex else torch.promote_types(dtype, torch.float32)
        norms += [norm.real.to(device, precise(device)) for norm in torch._foreach_norm(group, 2, dtype=wide)]
    return torch.linalg.vector_norm(torch.stack(norms))


def precise(device: torch.device) -> torch.dtype:
    """Name the widest floating-point type of a device."""
    return torch.float32 if device.type == "mps" else torch.float64


def is_half(tensor: Tensor) -> bool:
    """Tell whether a tensor has fewer than 32 bits a number."""
    return tensor.is_floating_point() and tensor.element_size() < 4


def power_of_two(number: Count) -> Count:
    """Round up to a power of two of at least 1: a divisor that costs no digit."""
    if isinstance(number, Tensor):
        return torch.exp2(torch.ceil(torch.log2(number.abs().clamp(min=1.0))))
    return 2.0 ** math.ceil(math.log2(max(abs(number), 1.0)))


def device_of(model: nn.Module) -> torch.device | None:
    """Name the one device of a model's parameters and buffers; None if it has several or none."""
    devices = {t.device for t in (*model.parameters(), *model.buffers()) if t.device.type != "meta"}
    return devices.pop() if len(devices) == 1 else None


def _on(factor: Count, device: torch.device, dtype: torch.dtype) -> Count:
    return factor.to(device, dtype) if isinstance(factor, Tensor) else factor
