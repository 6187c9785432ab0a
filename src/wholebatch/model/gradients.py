"""Where the gradients of a window are summed, and in which precision."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from wholebatch.errors import LossError
from wholebatch.loss.counts import Count, is_half, precise
from wholebatch.model.inspection import ModelInfo

Mark: TypeAlias = "dict[int, tuple[tuple[Tensor | None, int], tuple[Tensor | None, int]]]"
"""For each parameter its sums in ``.grad`` and in wider buffers, and how often they had been written to."""

NOTHING = ((None, -1), (None, -1))


class GradientAccumulator:
    """The gradients of one window, kept apart from what stood in ``.grad`` before it.

    The window's own sum may be multiplied or dropped without touching what the user had accumulated. Until the window
    is over, :meth:`take_back` leaves ``.grad`` as it was before :meth:`begin`, whatever has been done since and
    wherever it was broken off: nothing is changed before it is known how to change it back.

    1. :meth:`begin` sets existing gradients aside, so that the window's sum stands alone.
    2. Backward passes add to it: in ``.grad``, or in wider buffers for parameters of few bits.
    3. :meth:`scale` brings the sum to its true denominator.
    4. :meth:`merge` adds what was set aside, as ``loss.backward()`` would have done.
    5. :meth:`round` leaves all in ``.grad``, in the parameters' own precision.

    Attributes:
        parameters: the tensors that may receive gradients, by identity.
        open: whether what was done since :meth:`begin` may still have to be taken back.
        running: whether backward passes may still come.
    """

    def __init__(self) -> None:
        self.parameters: dict[int, Tensor] = {}
        self.open = False
        self._views = False
        self._dtype: torch.dtype | None = None
        self._before: dict[int, Tensor | None] = {}
        self._aside: dict[int, Tensor] = {}
        self._copies: dict[int, Tensor] = {}
        self._wide: dict[int, Tensor] = {}
        self._homes: dict[int, Tensor] = {}
        self._hooks: list[RemovableHandle] = []
        self._passing: set[int] = set()
        self._alone: set[int] = set()
        self._groups: Sequence[dist.ProcessGroup] = ()
        self.running = False
        self._own: set[int] = set()

    def begin(
        self,
        parameters: Iterable[Tensor],
        also: Iterable[Tensor] = (),
        views: bool = False,
        accumulate_in: torch.dtype | None = None,
    ) -> None:
        """Set aside what stands in ``.grad``.

        Args:
            parameters: those of the model.
            also: further tensors that may receive gradients.
            views: whether ``.grad`` may be a view into buckets that others write to, so that it must be copied.
            accumulate_in: the precision of the sum for parameters of fewer bits; None for their own.

        Raises:
            LossError: if another window of this thread, still on its way, is one of the same parameters.
        """
        self._views, self._dtype, self._hooks = views, accumulate_in, []
        learning = [parameter for parameter in parameters if parameter.requires_grad]
        self._own = {id(parameter) for parameter in learning}
        _refuse_window_inside(self)
        self.open = self.running = True
        self.include(learning)
        self.include(tensor for tensor in also if tensor.requires_grad)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let another window of the same parameters run meanwhile, one that leaves no trace."""
        self.running = False
        try:
            yield
        finally:
            self.running = True

    def end(self) -> None:
        """Let go of what listens for backward passes; the window runs no more of them."""
        self.running = False  # a hook that an interrupt has left behind does nothing
        for hook in self._hooks:
            hook.remove()

    def take_back(self) -> None:
        """Leave in ``.grad`` what stood there before, and let go of all parameters."""
        try:
            self._take_back()
        finally:  # an interrupt may come here too: the rest is taken back all the same
            if self.open:
                self._take_back()

    def _take_back(self) -> None:
        self.end()
        self.drop()
        self.open = False

    def include(self, leaves: Iterable[Tensor]) -> None:
        """Take in further leaves that are about to receive gradients."""
        for leaf in leaves:
            if id(leaf) not in self.parameters:
                self._set_aside(leaf)
                if not isinstance(leaf, nn.Parameter):
                    self._passing.add(id(leaf))

    def release(self) -> None:
        """Let go of leaves that nobody else holds any more, such as an input of one micro-batch."""
        for key in list(self._passing):
            lent = weakref.ref(self.parameters[key])
            del self.parameters[key]  # not taken out by a call, behind which an interrupt could lose it
            leaf = lent()
            if leaf is None:
                self._let_go(key)
            else:
                self.parameters[key] = leaf

    @property
    def clean(self) -> bool:
        """Whether nothing stood in ``.grad`` before the window."""
        return not self._aside

    def held(self, parameters: Iterable[Tensor] | None = None) -> list[Tensor]:
        """List the tensors in which the window's sum now lies, of all or of the given parameters."""
        sums = (self.take(p) for p in (self.parameters.values() if parameters is None else parameters))
        return [total for total in sums if total is not None]

    def take(self, parameter: Tensor) -> Tensor | None:
        """Return a parameter's sum."""
        return self._wide.get(id(parameter), parameter.grad)

    def put(self, parameter: Tensor, total: Tensor | None) -> None:
        """Make a tensor the parameter's sum."""
        if not self._widens(parameter):
            parameter.grad = total
        elif total is None:
            self._wide.pop(id(parameter), None)
        else:
            self._wide[id(parameter)] = total.to(self._dtype)

    @property
    def rounds(self) -> bool:
        """Whether bringing the sum to its denominator, or into ``.grad``, rounds away what a norm would still see."""
        return bool(self._wide) or any(is_half(total) for total in self.held())

    def mark(self) -> Mark:
        """Return what tells, later, whether a backward has added anything: every sum, and how often it was written."""
        return {key: (_written(p.grad), _written(self._wide.get(key))) for key, p in self.parameters.items()}

    def moved(self, mark: Mark) -> bool:
        """Tell whether anything has been added since a mark, also to leaves that were included since."""
        return any(
            now is not before or version != earlier
            for key, sums in self.mark().items()
            for (now, version), (before, earlier) in zip(sums, mark.get(key, NOTHING), strict=True)
        )

    def scale(self, factor: Count) -> None:
        """Multiply the window's sum by a factor, in float32 or better whatever the gradients' dtype."""
        scale_(self.held(), factor)

    def zero(self) -> None:
        """Write zeros into the window's sum, whatever it holds."""
        for total in self.held():
            local(total).zero_()

    def mask(self, alive: Tensor) -> None:
        """Write zeros into the window's sum unless a truth value on the device holds, without reading it."""
        for total in self.held():
            if not total.is_sparse:
                local(total).masked_fill_(~alive.to(total.device), 0)

    @torch.no_grad()
    def merge(self) -> None:
        """Add what was set aside; the tensor that the user held is the one that remains in ``.grad``."""
        for key, before in self._aside.items():
            parameter = self.parameters[key]
            total = self.take(parameter)
            if self._widens(parameter):
                self._wide[key] = before.to(self._dtype, copy=True) if total is None else total.add_(before)
                self._homes[key] = before
            else:
                self._copies[key] = before.clone()
                parameter.grad = before if total is None else before.add_(total)
        self._aside.clear()

    @torch.no_grad()
    def round(self) -> None:
        """Bring the sums of parameters of few bits into ``.grad``, rounded once."""
        self.preview()
        self._wide.clear()
        self._homes.clear()

    @torch.no_grad()
    def preview(self) -> list[Tensor]:
        """Round into ``.grad`` and keep the wider sums all the same; return what the optimizer would get."""
        for key, total in self._wide.items():
            parameter = self.parameters[key]
            home = self._homes.get(key)
            if home is None:
                home = self._homes[key] = torch.empty_like(total, dtype=gradient_dtype(parameter))
            elif home is self._before.get(key) and key not in self._copies:
                self._copies[key] = home.clone()
            parameter.grad = home.copy_(total)
        return [p.grad for p in self.parameters.values() if p.grad is not None]

    def keep_apart(self, parameters: Iterable[Tensor], groups: Sequence[dist.ProcessGroup]) -> None:
        """Note which parameters are others on each rank of some groups, so that a norm counts those of all ranks."""
        self._alone, self._groups = {id(parameter) for parameter in parameters}, groups

    def norm(self, device: torch.device) -> Tensor:
        """Measure the 2-norm of what the optimizer would get, over all ranks."""
        grads = self.preview()
        if not self._alone:
            return total_norm(grads, device)
        own = {id(p.grad) for key, p in self.parameters.items() if key in self._alone and p.grad is not None}
        parts = total_norm([grad for grad in grads if id(grad) in own], device).to(precise(device)).square()
        for group in self._groups:
            dist.all_reduce(parts, group=group)
        return (total_norm([grad for grad in grads if id(grad) not in own], device).square() + parts).sqrt()

    @torch.no_grad()
    def drop(self, keep: Callable[[Tensor], bool] = lambda parameter: False) -> None:
        """Take back what the window added and let go of its parameters, except those that ``keep`` names."""
        for key, parameter in list(self.parameters.items()):
            if keep(parameter):
                continue
            if key in self._before:  # else it was about to be included, and nothing has been done to it
                before = self._before[key]
                if before is not None and key in self._copies:
                    before.copy_(self._copies[key])
                parameter.grad = before
            self._let_go(key)

    def restart(self) -> None:
        """Forget the window's sum and begin it anew."""
        self._wide.clear()
        for parameter in self.parameters.values():
            parameter.grad = None

    def _let_go(self, key: int) -> None:
        for kept in (self._before, self._aside, self._copies, self._wide, self._homes, self.parameters):
            kept.pop(key, None)
        self._passing.discard(key)

    def _set_aside(self, parameter: Tensor) -> None:
        key, before = id(parameter), parameter.grad
        if before is not None and self._views:
            before = before.clone()
        self.parameters[key] = parameter
        self._before[key] = before  # from here on it is known how to take back what follows
        if before is not None:
            self._aside[key] = before
            parameter.grad = None
        if self._widens(parameter):
            hook = parameter.register_post_accumulate_grad_hook(self._widen)
            self._hooks.append(hook)

    def _widens(self, parameter: Tensor) -> bool:
        if self._dtype is None or not parameter.is_floating_point():
            return False
        return _bits(gradient_dtype(parameter)) < _bits(self._dtype)

    def _widen(self, parameter: Tensor) -> None:
        """Move what a backward has added to the wider sum; if there is no memory to, the sum is as it was."""
        key, grad = id(parameter), parameter.grad
        if grad is not None and self.running:
            parameter.grad = None
            total = self._wide.get(key)
            self._wide[key] = grad.to(self._dtype) if total is None else total.add_(grad)


def _written(total: Tensor | None) -> tuple[Tensor | None, int]:
    return total, -1 if total is None else total._version


T = TypeVar("T")


def all_or_nothing(work: Callable[[GradientAccumulator], T]) -> T:
    """Run what adds to ``.grad``. If it raises, at whatever line, every ``.grad`` is as it was before.

    Example:
        >>> weight = torch.ones(1, requires_grad=True)
        >>> weight.grad = torch.ones(1)
        >>> def work(gradients):
        ...     gradients.begin([weight])
        ...     (3 * weight).backward()
        ...     raise KeyboardInterrupt
        >>> try:
        ...     all_or_nothing(work)
        ... except KeyboardInterrupt:
        ...     print(weight.grad)
        tensor([1.])
    """
    gradients, learns, done = GradientAccumulator(), torch.is_grad_enabled(), False
    try:
        result = work(gradients)
        gradients.open, done = False, True  # not by a call: an interrupt could come between its end and ours
        return result
    finally:
        if not done:
            torch.set_grad_enabled(learns)  # torch's own blocks do not set it back if they are interrupted as they end
        if gradients.open:
            gradients.take_back()


class _RunningWindows(threading.local):
    """The windows of a thread that are on their way."""

    def __init__(self) -> None:
        self.windows: WeakSet[GradientAccumulator] = WeakSet()


_RUNNING = _RunningWindows()
"""So that a window inside of another one is noticed. Nothing else depends on it."""


def _refuse_window_inside(gradients: GradientAccumulator) -> None:
    for other in _RUNNING.windows:
        shared = len(gradients._own & other._own) if other.running else 0
        if shared:
            raise LossError(
                f"A window was begun inside of another one of the same model: they share {shared} of "
                f"{len(gradients._own)} parameters, and the inner gradient would be taken for a share of the outer's. "
                "Call wb.backward outside of loss_fn, or inside of it on a copy of the model (copy.deepcopy(model))."
            )
    _RUNNING.windows.add(gradients)


@torch.no_grad()
def scale_(grads: Sequence[Tensor], factor: Count) -> None:
    """Multiply gradients in place, in float32 or better.

    A factor rounded to bfloat16 would be off by up to 0.4 % for the whole gradient, so halves go through float32.
    """
    dense: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in map(local, grads):
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
    """Measure the 2-norm of all gradients together, over dtypes, devices and shards.

    Each tensor's norm is taken in float32 or better, sparse gradients are coalesced first (duplicate indices would
    count apart), and the norms are joined in float64 where the device has it. Shards are joined over their ranks.

    Returns:
        One number, on the given device.
    """
    if not grads:
        return torch.zeros((), device=device)
    groups: dict[tuple[Any, ...], list[Tensor]] = {}
    for grad in grads:
        values = grad.coalesce().values() if grad.is_sparse else grad
        groups.setdefault((_shards_of(values), values.device, values.dtype), []).append(local(values))
    squares: list[Tensor] = []
    for (shards, _, dtype), group in groups.items():
        wide = dtype if dtype.is_complex else torch.promote_types(dtype, torch.float32)
        norms = torch.stack(torch._foreach_norm(group, 2, dtype=wide))
        squares.append(norms.real.to(device, precise(device)).square().sum())
        for ranks in shards:
            torch.distributed.all_reduce(squares[-1], group=ranks)
    return torch.stack(squares).sum().sqrt()


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor that is spread over ranks, else the tensor itself."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def _shards_of(tensor: Any) -> tuple[Any, ...]:
    """The process groups over which a tensor is cut."""
    placements = getattr(tensor, "placements", ())
    return tuple(tensor.device_mesh.get_group(i) for i, place in enumerate(placements) if place.is_shard())


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """Name the dtype of a parameter's gradient: its own, unless ``grad_dtype`` says another (torch 2.10 and newer)."""
    said: torch.dtype | None = getattr(parameter, "grad_dtype", None)
    return said or parameter.dtype


def _bits(dtype: torch.dtype) -> int:
    return 8 * dtype.itemsize


def device_of(model: nn.Module) -> torch.device | None:
    """Name the one device of a model's parameters and buffers; None if it has several or none."""
    return ModelInfo(model).device


def _on(factor: Count, device: torch.device, dtype: torch.dtype) -> Count:
    return factor.to(device, dtype) if isinstance(factor, Tensor) else factor
