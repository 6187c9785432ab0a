"""A block over tiles of positions, each computed again in the backward; and the trial that positions don't meet.

A feed-forward block is a function of each position alone. What it saves for the backward, several times the width of
what it is given, is then needed for one tile at a time: a tile keeps its input, and runs a second time when its
gradient is wanted. Nobody is asked whether a block is of that kind. The first time that one is called it is tried,
on some of what it was given: whole, and in uneven parts, in value and in gradient, draws held still. What differs,
draws one number for many positions, or keeps anything of what it saw runs as it always did.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

from wholebatch.first_window.draws import FixedDraws
from wholebatch.first_window.levels import Draw, Levels
from wholebatch.first_window.quiet import quietly
from wholebatch.loss.linear_head import uncompiled
from wholebatch.model.comparison import distance, tolerance_of
from wholebatch.model.gradient_hooks import has_hooks
from wholebatch.model.inspection import ModelInfo
from wholebatch.model.memory import counting_again, is_out_of_memory
from wholebatch.model.snapshot import Snapshot
from wholebatch.model.state import State

TRIED = 192
"""How many positions of a row a trial looks at, of up to two rows."""

KEPT_SMALL = 1 / 64
"""What stands for every draw of a trial: dropout keeps all, unless it drops nearly all."""

PLAIN = (bool, int, float, str, type(None))

INSIDE: ContextVar[bool] = ContextVar("inside of a tile", default=False)


class Tile:
    """Stands in the place of a method of a module, and runs it over tiles of positions once that is proven right.

    Attributes:
        refusals: why the block was left alone, by how it was called; "" where it runs in tiles.

    Args:
        module: the block.
        method: the name of what is replaced: its forward, or a method that is a block by itself.
        positions: of a row in a tile; as many as are wide, if None.
    """

    def __init__(self, module: nn.Module, method: str, positions: int | None) -> None:
        own: Callable[..., Any] = getattr(module, method)
        functools.update_wrapper(self, own, updated=())
        self.refusals: dict[Hashable, str] = {}
        self._module, self._method, self._own, self._positions = module, method, own, positions
        self._before: Any = None

    def put(self) -> None:
        """Stand in the method's place."""
        own = getattr(self._module, self._method)
        if own is not self:
            self._own, self._before = own, vars(self._module).get(self._method)
            setattr(self._module, self._method, self)

    def remove(self) -> None:
        """Put back what was there."""
        if vars(self._module).get(self._method) is self:
            delattr(self._module, self._method)
            if self._before is not None:
                setattr(self._module, self._method, self._before)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or INSIDE.get():
            return self._own(*args, **kwargs)
        return self._called(*args, **kwargs)

    @uncompiled
    def _called(self, *args: Any, **kwargs: Any) -> Any:
        call = _Call.of(self._own, args, kwargs)
        if call is None:
            self.refusals.setdefault("call", "given other things than one vector a position")
        if call is None or self._refusal(call):
            return self._own(*args, **kwargs)
        return call.tiled(self._positions or call.given[0].shape[-1])

    def _refusal(self, call: _Call) -> str:
        """Say why this call does not run in tiles, after a trial where it is the first of its kind."""
        inner = [each for each in self._module.modules() if each is not self._module or self._method != "forward"]
        if any(has_hooks(each) for each in inner):
            return self.refusals.setdefault("hooks", "a hook inside looks at all positions together")
        key = (call.kind, tuple(each.training for each in self._module.modules()))
        if key not in self.refusals:
            self.refusals[key] = _Trial(self._module, call).refusal()
        return self.refusals[key]


class _Call:
    """One call of a block whose tensors hold one vector for each position: (..., positions, width)."""

    def __init__(
        self, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], places: list[int | str]
    ) -> None:
        self._own, self._args, self._kwargs, self._places = own, args, kwargs, places
        self.given: list[Tensor] = [kwargs[place] if isinstance(place, str) else args[place] for place in places]

    @classmethod
    def of(cls, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call | None:
        """Read a call; None for one of another form."""
        everything: dict[int | str, Any] = dict([*enumerate(args), *kwargs.items()])
        others = {place: value for place, value in everything.items() if not isinstance(value, PLAIN)}
        shapes = {value.shape[:-1] for value in others.values() if _is_of_positions(value)}
        whole = len(shapes) == 1 and all(map(_is_of_positions, others.values()))
        return cls(own, args, kwargs, list(others)) if whole else None

    @property
    def kind(self) -> Hashable:
        """What another call has to share with a proven one."""
        constants = [repr(value) for value in (*self._args, *self._kwargs.values()) if isinstance(value, PLAIN)]
        device = self.given[0].device.type
        forms = [(each.dim(), each.shape[-1], each.dtype) for each in self.given]
        return *forms, torch.is_autocast_enabled(device), *constants

    def on(self, *given: Tensor) -> Any:
        """Call the block on other positions."""
        args, kwargs = list(self._args), dict(self._kwargs)
        for place, tensor in zip(self._places, given, strict=True):
            if isinstance(place, str):
                kwargs[place] = tensor.contiguous()  # here, so that what waits for the backward is no copy
            else:
                args[place] = tensor.contiguous()
        token = INSIDE.set(True)
        try:
            return self._own(*args, **kwargs)
        finally:
            INSIDE.reset(token)

    def tiled(self, positions: int) -> Tensor:
        """Run the block tile by tile."""
        tiles = zip(*(each.split(positions, dim=-2) for each in self.given), strict=True)
        return torch.cat(
            [checkpoint(self.on, *tile, use_reentrant=False, context_fn=_contexts) for tile in tiles], dim=-2
        )


def _is_of_positions(value: Any) -> bool:
    """Tell whether a value holds a vector for each position, and is a tensor of torch's own."""
    usable = isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1 and value.numel() > 0
    special = hasattr(value, "__tensor_flatten__")
    return usable and not special and not torch._C._functorch.is_functorch_wrapped_tensor(value)


def _contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    return nullcontext(), counting_again()


class _Low(Levels):
    """Gives every draw the same number, and counts how many numbers were drawn."""

    def __init__(self) -> None:
        self.drawn = 0

    def begin(self, rows: Any) -> None:
        """Count from nothing."""
        self.drawn = 0

    def of(self, draw: Draw, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Return the number."""
        self.drawn += torch.Size(shape).numel()
        return torch.full((), KEPT_SMALL, dtype=torch.float64, device=device)


class _Trial:
    """Runs a block on some of its positions, whole and in uneven parts, and leaves no trace."""

    def __init__(self, module: nn.Module, call: _Call) -> None:
        self._module, self._call = module, call
        self._parameters = [p for p in module.parameters() if p.requires_grad and not nn.parameter.is_lazy(p)]

    def refusal(self) -> str:
        """Say what speaks against tiles; "" if nothing does."""
        rows = [slice(0, 2)] * (self._call.given[0].dim() - 2)
        sample = [given.detach()[(*rows, slice(0, TRIED))] for given in self._call.given]
        length = sample[0].shape[-2]
        if length < 2:
            return "there is one position alone, and nothing to be tried on"
        info = ModelInfo(self._module)
        before, state = Snapshot(info), State(info)
        try:
            with _disable_current_modes(), quietly(), torch.enable_grad(), _no_saved_hooks():
                said = self._compared(sample, [length])
                return said if isinstance(said, str) else self._parts_against(said, sample, before)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            if is_out_of_memory(error):
                raise
            return f"it cannot run on fewer positions: {str(error).splitlines()[0]:.120}"
        finally:
            before.restore()
            state.restore()

    def _parts_against(self, whole: tuple[list[Tensor], int], sample: list[Tensor], before: Snapshot) -> str:
        length = sample[0].shape[-2]
        moved = before.moved()
        if moved:
            return f"it changes {moved[0].name} ({moved[0].kind})"
        if before.drew_elsewhere():
            return "it draws random numbers outside of torch"
        first = max(1, length // 3)
        for cut in ([first, length - first], [1] * 3 + [length - 3] if length > 3 else [1] * length):
            parts = self._compared(sample, cut)
            if isinstance(parts, str):
                return parts
            if parts[1] != whole[1]:
                return "it draws the same random numbers for many positions"
            tolerance = tolerance_of(whole[0])
            if any(not distance([a], [b]) <= tolerance for a, b in zip(parts[0], whole[0], strict=True)):
                return "positions meet in it"
        return ""

    def _compared(self, sample: list[Tensor], cut: list[int]) -> str | tuple[list[Tensor], int]:
        """Return values and gradients of the sample in parts, and how many numbers were drawn; or what is wrong."""
        levels = _Low()
        leaves = [each.clone().requires_grad_() for each in sample]
        with FixedDraws(levels):
            parts = list(zip(*(leaf.split(cut, dim=-2) for leaf in leaves), strict=True))
            outs = [self._call.on(*part) for part in parts]
            for out, part in zip(outs, parts, strict=True):
                if not _is_of_positions(out) or out.shape[:-1] != part[0].shape[:-1]:
                    return "it returns other things than one vector a position"
            whole = torch.cat(outs, dim=-2)
            if not whole.requires_grad or not bool(whole.isfinite().all()):
                return "its values or gradients show nothing"
            seeds = torch.arange(whole.numel(), device=whole.device).remainder(17).sub(7.5).view_as(whole).to(whole)
            wanted = [*leaves, *self._parameters]
            found: Sequence[Tensor | None] = torch.autograd.grad(whole, wanted, seeds, allow_unused=True)
        if not any(g is not None and bool(g.any()) for g in found):
            return "its values or gradients show nothing"
        gradients = [torch.zeros_like(t) if g is None else g for g, t in zip(found, wanted, strict=True)]
        return [whole.detach(), *gradients], levels.drawn


@contextmanager
def _no_saved_hooks() -> Iterator[None]:
    """Save for a trial's backward where torch saves: it is no part of what the caller counts or moves."""
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor):
        yield
