"""Random draws replaced by known numbers, so that a batch and its parts can be compared at all.

Dropout draws per row and in the order of the rows, so that a batch and its halves differ by chance alone. Here every
draw is replaced by numbers that a row keeps, or that are the same for each row: what remains different is not chance.
Draws are seen below autograd, where torch marks every operator that takes random numbers, whoever calls it: a layer, a
kernel of attention, an own mask, with the global generator or another one. What torch does not see (NumPy, Python's
``random``) is left.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from wholebatch.errors import PASSED_ON
from wholebatch.first_window.levels import Draw, HeldStill, Levels
from wholebatch.first_window.lines import TORCH, line_of
from wholebatch.model.dispatch import OperatorMode

DROPOUT_ARGUMENTS = ("dropout_p", "dropout")
"""What kernels that drop out inside call their probability, forward and backward."""

Values = Callable[[Tensor], Tensor]


class FixedDraws(OperatorMode):
    """Replace random draws by numbers that are known beforehand: by default the same for every row.

    Dropout of whole kernels is switched off. A permutation is never the order as it was, so that rows that are mixed
    with each other still are.

    Attributes:
        seen: the names of the operators whose draws were replaced.
        own: where the user's own code draws, in words; layers of torch, which draw for each number by itself, aside.
        redrawn: the names of those that a checkpoint draws anew when it runs its forward again, where it should draw
            the same.
        half: whether something was computed in fewer than 32 bits.

    Args:
        levels: gives the numbers.

    Example:
        >>> with FixedDraws() as draws:
        ...     same = torch.equal(torch.rand(2, 3)[0], torch.rand(4, 3)[3])
        >>> same, sorted(draws.seen)
        (True, ['rand'])
    """

    def __init__(self, levels: Levels | None = None) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.own: set[str] = set()
        self.redrawn: set[str] = set()
        self.half = False
        self._states: set[Any] = set()
        self._levels: Levels = levels or HeldStill()
        self._draw = Draw()
        self._first: dict[torch.device, Tensor] = {}
        self._plans: dict[Any, Callable[..., Any] | None] = {}

    def begin(self, rows: Sequence[int]) -> None:
        """Draw for these rows from now on, from the random state of the first draw; the first rows are the whole."""
        self._levels.begin(rows)
        for device, state in self._first.items():
            _set_state(device, state)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in self._plans:
            self._plans[function] = self._plan(function)
        plan, kwargs = self._plans[function], kwargs or {}
        if plan is None:
            result = function(*args, **kwargs)
        else:  # a generator of the user's own stays where it is
            result = plan(args, {**kwargs, "generator": None} if "generator" in kwargs else kwargs)
        self.half |= isinstance(result, Tensor) and result.is_floating_point() and result.element_size() < 4
        return result

    def _plan(self, function: Any) -> Callable[..., Any] | None:
        """Say how an operator is called instead; None if it takes no random numbers."""
        schema = getattr(function, "_schema", None)
        if schema is None:  # an operator of a higher order, made of others
            return None
        name = schema.name.rpartition("::")[2]
        own = getattr(self, f"_{name.strip('_')}", None)
        if torch.Tag.nondeterministic_seeded in function.tags and own is not None:

            def drawn(args: Any, kwargs: Any) -> Any:
                with self._drawing(name.strip("_"), (*args, kwargs.get("device"))):
                    return own(function, args, kwargs)

            return drawn
        if any(argument.name in DROPOUT_ARGUMENTS for argument in schema.arguments):
            return lambda args, kwargs: function(*self._without_dropout(schema, args), **_no_dropout(kwargs))
        if torch.Tag.nondeterministic_seeded not in function.tags:
            return None
        return lambda args, kwargs: self._fixed(function, args, kwargs)

    @contextlib.contextmanager
    def _drawing(self, name: str, given: Sequence[Any]) -> Iterator[None]:
        """Remember what is drawn and from which state, and move that on by one step, however much is drawn.

        What a checkpoint runs again in the backward has to draw from a state that some forward has drawn from.
        """
        self.seen.add(name)
        devices = [each.device if isinstance(each, Tensor) else each for each in given]
        device = next((each for each in devices if isinstance(each, torch.device)), torch.device("cpu"))
        place, layer = _caller()
        if not layer:
            self.own.add(str(Draw(None, name, place)))
        if device.type not in ("cpu", "cuda"):
            self._draw = Draw(None, name, place, layer)
            yield
            return
        state = _state_of(device)
        self._first.setdefault(device, state)
        key = str(device), hash(bytes(state.tolist()))
        if torch._C._current_graph_task_id() == -1:
            self._states.add(key)
        elif torch.is_grad_enabled() and key not in self._states:  # what a hook draws is not run again
            self.redrawn.add(name)
        self._draw = Draw(key, name, place, layer)
        try:
            yield
        finally:
            _set_state(device, state)
            torch.rand((), device=device)

    def _without_dropout(self, schema: Any, args: Any) -> list[Any]:
        changed = list(args)
        for place, argument in enumerate(schema.arguments[: len(changed)]):
            if argument.name not in DROPOUT_ARGUMENTS or not isinstance(changed[place], float):
                continue
            if changed[place]:
                with self._drawing(schema.name.rpartition("::")[2].strip("_"), args):
                    pass
            changed[place] = 0.0
        return changed

    def _fixed(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator of which no more is known than that it draws, and fill what it made."""
        name = function._schema.name.rpartition("::")[2].strip("_")
        with self._drawing(name, (*args, kwargs.get("device"))):
            return self._fill(function(*args, **kwargs), lambda u: u)

    def _fill(self, result: Any, values: Values) -> Any:
        """Write ``values`` of numbers between 0 and 1 into a tensor, which keeps its identity."""
        shape = tuple(result.shape) if type(result) is Tensor else ()
        levels = self._levels.of(self._draw, shape, result.device)
        return result.copy_(values(levels).to(result.device).expand(result.shape))

    def _uniforms(self, like: Tensor) -> Tensor:
        """Numbers between 0 and 1, as many as another tensor has."""
        empty = torch.empty(like.shape, dtype=torch.float64, device=like.device)
        self._fill(empty, lambda u: u)
        return empty

    def _uniform(self, function: Any, args: Any, kwargs: Any) -> Any:
        low, high = _two(args[1:], kwargs, ("from", "to"), (0.0, 1.0))
        return self._fill(_target(args[0], function), lambda u: low + (high - low) * u)

    def _rand(self, function: Any, args: Any, kwargs: Any) -> Any:
        return self._fill(function(*args, **kwargs), lambda u: u)

    _rand_like = _rand

    def _randn(self, function: Any, args: Any, kwargs: Any) -> Any:
        return self._fill(function(*args, **kwargs), _gauss)

    _randn_like = _randn

    def _normal(self, function: Any, args: Any, kwargs: Any) -> Any:
        if function._schema.name.endswith("_"):
            mean, deviation = _two(args[1:], kwargs, ("mean", "std"), (0.0, 1.0))
            return self._fill(args[0], lambda u: mean + deviation * _gauss(u))
        made = function(*args, **kwargs)
        mean, deviation = _two(args, kwargs, ("mean", "std"), (0.0, 1.0))
        return self._fill(made, _gauss).mul_(deviation).add_(mean)

    def _log_normal(self, function: Any, args: Any, kwargs: Any) -> Any:
        mean, deviation = _two(args[1:], kwargs, ("mean", "std"), (1.0, 2.0))
        return self._fill(_target(args[0], function), lambda u: (mean + deviation * _gauss(u)).exp())

    def _exponential(self, function: Any, args: Any, kwargs: Any) -> Any:
        rate = _one(args[1:], kwargs, "lambd", 1.0)
        return self._fill(_target(args[0], function), lambda u: -torch.log1p(-u) / rate)

    def _geometric(self, function: Any, args: Any, kwargs: Any) -> Any:
        chance = _one(args[1:], kwargs, "p", 0.5)
        return self._fill(
            _target(args[0], function), lambda u: (torch.log1p(-u) / math.log1p(-min(chance, 1 - 1e-12))).ceil()
        )

    def _bernoulli(self, function: Any, args: Any, kwargs: Any) -> Any:
        # Defaults do not arrive: 0.5 stands for a number left out, the tensor itself where none can be given.
        given = _one(args[1:], kwargs, "p", 0.5 if function._overloadname == "float" else None)
        target = _target(args[0], function)
        chance = args[0] if given is None else given
        if not isinstance(chance, Tensor):
            return self._fill(target, lambda u: (u < chance).double())
        return target.copy_(self._uniforms(target) < chance)

    def _randint(self, function: Any, args: Any, kwargs: Any) -> Any:
        made = function(*args, **kwargs)
        names = [argument.name for argument in function._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        low, high = int(given.get("low", 0)), int(given["high"])
        return self._fill(made, lambda u: (low + u * (high - low)).floor())

    _randint_like = _randint

    def _randperm(self, function: Any, args: Any, kwargs: Any) -> Any:
        made = function(*args, **kwargs)
        order = self._uniforms(made).argsort(stable=True)
        as_it_was = bool((order == torch.arange(len(made), device=order.device)).all())
        return made.copy_(order.flip(0) if as_it_was else order)

    def _multinomial(self, function: Any, args: Any, kwargs: Any) -> Any:
        chances, wanted = args[0], int(args[1] if len(args) > 1 else kwargs["num_samples"])
        noise = -(-self._uniforms(chances).log()).log()  # the largest sums are a draw without putting back
        likely = (chances.double().log() + noise).argsort(dim=-1, descending=True, stable=True)
        places = torch.arange(wanted, device=likely.device) % likely.shape[-1]
        return likely.index_select(-1, places)

    def _poisson(self, function: Any, args: Any, kwargs: Any) -> Any:
        rate = args[0]
        return (rate + rate.sqrt() * _gauss(self._uniforms(rate)).to(rate.dtype)).round().clamp(min=0)

    def _native_dropout(self, function: Any, args: Any, kwargs: Any) -> Any:
        kept = 1.0 - float(args[1]) if len(args) < 3 or args[2] is not False else 1.0
        mask = self._uniforms(args[0]) < kept
        return args[0] * mask * (1.0 / kept if kept else 0.0), mask  # as its backward scales

    def _rrelu_with_noise(self, function: Any, args: Any, kwargs: Any) -> Any:
        given, noise = args[0], args[1]
        lower, upper = _two(args[2:], kwargs, ("lower", "upper"), (1 / 8, 1 / 3))
        slope = lower + (upper - lower) * self._uniforms(given)
        noise.copy_(torch.where(given <= 0, slope, 1.0))
        return given.mul_(noise) if function._schema.name.endswith("_") else given * noise


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Let compiled functions run as they were written, so that unusual shapes compile nothing."""
    with torch.compiler.set_stance("force_eager"):
        yield


def _gauss(levels: Tensor) -> Tensor:
    return math.sqrt(2.0) * torch.erfinv(2.0 * levels - 1.0)


def _no_dropout(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: 0.0 if name in DROPOUT_ARGUMENTS else value for name, value in kwargs.items()}


def _target(given: Tensor, function: Any) -> Tensor:
    """The tensor to fill: the given one for an operator in place, else a new one like it."""
    return given if function._schema.name.endswith("_") else torch.empty_like(given)


def _one(args: Any, kwargs: dict[str, Any], name: str, otherwise: Any) -> Any:
    given = args[0] if args and not isinstance(args[0], torch.Generator) else kwargs.get(name)
    return otherwise if given is None else given


def _two(args: Any, kwargs: dict[str, Any], names: tuple[str, str], otherwise: tuple[Any, Any]) -> tuple[Any, Any]:
    first = args[0] if len(args) > 0 else kwargs.get(names[0], otherwise[0])
    second = args[1] if len(args) > 1 else kwargs.get(names[1], otherwise[1])
    return first, second


def _caller() -> tuple[str, bool]:
    """Name the user's line that draws, and tell whether one of torch's own layers does it there."""
    frame: Any = sys._getframe(1)
    while frame is not None and not _is_a_layers(frame) and _is_between(frame):
        frame = frame.f_back
    return str(line_of(frame) or ""), frame is not None and _is_a_layers(frame)


def _is_a_layers(frame: FrameType) -> bool:
    return TORCH / "nn" in Path(frame.f_code.co_filename).parents


def _is_between(frame: FrameType) -> bool:
    """Tell whether a frame only passes on what was called."""
    code = frame.f_code
    watches = code.co_name in PASSED_ON or code.co_filename in (__file__, contextlib.__file__)
    return watches or TORCH in Path(code.co_filename).parents


def _state_of(device: torch.device) -> Tensor:
    return torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)


def _set_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state, device)
