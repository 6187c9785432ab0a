"""Notice a hand-written weight average: an operation that mixes parameters into other tensors."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

PLAIN = (Tensor, nn.Parameter)
BLENDS = ("lerp_", "add_", "sub_", "copy_", "addcmul_")
# Operations that a weight average may be made of on the way to the blend; all others are left alone.
STEPS = ("add", "radd", "sub", "rsub", "mul", "rmul", "div", "truediv", "lerp", "clone", "to", "float", "double", "cpu")


class AverageWatch(TorchFunctionMode):
    """Call `notice` when an in-place blend takes a parameter, or what was just made of one, into a foreign tensor.

    Active only between a backward and the next forward, so that the forward pass runs at full speed.
    """

    def __init__(self, number_of: Callable[[Tensor], int | None], notice: Callable[[int], None]) -> None:
        super().__init__()
        self.number_of = number_of
        self.notice = notice
        self.derived: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = plain_name(getattr(func, "__name__", ""))
        if (name not in BLENDS and name not in STEPS) or torch.compiler.is_compiling():
            return result
        if not torch.is_grad_enabled() or not any_requires_grad(args):
            self.follow(name, args, result)
        return result

    def follow(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        """Carry the mark "made of a parameter" from arguments to result, or report its arrival in a foreign tensor."""
        source = next((number for tensor in flat(args[1:]) if (number := self.origin(tensor)) is not None), None)
        target = next(flat(args[:1]), None)
        if target is None:
            return
        own = self.origin(target)
        if name in BLENDS and source is not None and own is None and not target.requires_grad:
            self.notice(source)
        elif type(result) in PLAIN and result.numel() > 1 and result is not target:
            self.mark(name, result, own, source, args)

    def mark(self, name: str, result: Tensor, own: int | None, source: int | None, args: tuple[Any, ...]) -> None:
        """Remember what is made of a parameter; its sum with a foreign tensor is an average in a new place."""
        number = own if own is not None else source
        if number is None or self.number_of(result) is not None:
            return
        foreign = [tensor for tensor in flat(args) if self.origin(tensor) is None and tensor.shape == result.shape]
        if name in ("add", "lerp", "radd") and foreign and not result.requires_grad:
            self.notice(number)
        else:
            self.derived[id(result)] = (weakref.ref(result), number)

    def origin(self, tensor: Tensor) -> int | None:
        """Return the number of the parameter that a tensor is, shares memory with, or was made of."""
        number = self.number_of(tensor)
        made = self.derived.get(id(tensor)) if number is None else None
        return made[1] if made is not None and made[0]() is tensor else number


def plain_name(name: str) -> str:
    """Return an operation's name without what marks it as special or foreach: "__rmul__" gives "rmul"."""
    in_place = name.endswith("_") and not name.endswith("__")
    return name.removeprefix("_foreach_").strip("_") + ("_" if in_place else "")


class AverageSwitch:
    """Enter and leave the mode that sees averages, never out of turn with other modes of the user's.

    Entered only where as many modes are entered as at the beginning, left only where it is the innermost one. So a
    mode that the user enters in between (``with torch.device(...)``) is left by its own end, and by nothing else.
    """

    def __init__(self, mode: AverageWatch) -> None:
        self.mode = mode
        self.ground = mode_depth()
        self.entered = False
        self.stay = contextlib.ExitStack()

    def on(self) -> None:
        """Enter the mode, unless the user has entered one of theirs."""
        if not self.entered and mode_depth() == self.ground:
            self.stay.enter_context(self.mode)
            self.entered = True

    def off(self) -> None:
        """Leave the mode if it is the innermost one."""
        if self.entered and mode_depth() == self.ground + 1:
            self.stay.close()
            self.mode.derived.clear()
            self.entered = False

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Leave the mode for a while, and enter it again if it was entered."""
        entered = self.entered
        self.off()
        try:
            yield
        finally:
            if entered:
                self.on()


def mode_depth() -> int:
    """Return how many torch function modes are entered."""
    return int(torch._C._len_torch_function_stack())


def flat(args: Any) -> Any:
    """Yield the plain tensors among arguments, the first one of each list; a tracer's stand-ins are none."""
    for value in args:
        first = value[0] if isinstance(value, (list, tuple)) and value else value
        if type(first) in PLAIN:
            yield first


def any_requires_grad(args: Any) -> bool:
    """Tell whether a tensor among the arguments is part of a graph beyond being a leaf."""
    return any(tensor.grad_fn is not None for tensor in flat(args))
