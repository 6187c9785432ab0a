"""Random draws held still, so that a batch and its parts can be compared at all.

Dropout draws per row and in the order of the rows, so that a batch and its halves differ by chance alone. Here every
draw is replaced by numbers that do not depend on the row: what remains different is not chance. Draws are seen below
autograd, where torch marks every operator that takes random numbers, whoever calls it: a layer, a kernel of attention,
an own mask, with the global generator or another one. What torch does not see (NumPy, Python's ``random``) is left.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from wholebatch.model.dispatch import OperatorMode

STEP = 0.6180339887498949
"""Multiples of the golden ratio's fraction fill the unit interval evenly, however many are taken."""

TORCH = Path(torch.__file__).parent

DROPOUT_ARGUMENTS = ("dropout_p", "dropout")
"""What kernels that drop out inside call their probability, forward and backward."""

TRAINING = 5
"""Where every function of torch that normalises over the batch takes whether it is by the rows' own statistics."""

Values = Callable[[Tensor], Tensor]


class FixedDraws(OperatorMode):
    """Replace random draws by fixed numbers that are the same for every row.

    The number at a place depends on its last index alone, if there are two dimensions or more, and is one and the same
    otherwise. Dropout of whole kernels is switched off. A permutation becomes the reversed order, so that rows that are
    mixed with each other still are.

    Attributes:
        seen: the names of the operators whose draws were replaced.
        redrawn: the names of those that a checkpoint draws anew when it runs its forward again, where it should draw
            the same.
        half: whether something was computed in fewer than 32 bits.

    Args:
        alike: use one and the same number everywhere, for draws whose last dimension is that of the rows.

    Example:
        >>> with FixedDraws() as draws:
        ...     same = torch.equal(torch.rand(2, 3)[0], torch.rand(4, 3)[3])
        >>> same, sorted(draws.seen)
        (True, ['rand'])
    """

    def __init__(self, alike: bool = False) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.redrawn: set[str] = set()
        self.half = False
        self._states: set[Any] = set()
        self._alike = alike
        self._plans: dict[Any, Callable[..., Any] | None] = {}

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
                self._note(name.strip("_"), (*args, kwargs.get("device")))
                return own(function, args, kwargs)

            return drawn
        if any(argument.name in DROPOUT_ARGUMENTS for argument in schema.arguments):
            return lambda args, kwargs: function(*self._without_dropout(schema, args), **_no_dropout(kwargs))
        if torch.Tag.nondeterministic_seeded not in function.tags:
            return None
        return lambda args, kwargs: self._fixed(function, args, kwargs)

    def _note(self, name: str, given: Sequence[Any]) -> None:
        """Remember what is drawn and from which state, and move that on, as the draw would have.

        What a checkpoint runs again in the backward has to draw from a state that some forward has drawn from.
        """
        self.seen.add(name)
        devices = [each.device if isinstance(each, Tensor) else each for each in given]
        device = next((each for each in devices if isinstance(each, torch.device)), torch.device("cpu"))
        if device.type not in ("cpu", "cuda"):
            return
        state = torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)
        key = str(device), hash(bytes(state.tolist()))
        torch.rand((), device=device)
        if torch._C._current_graph_task_id() == -1:
            self._states.add(key)
        elif torch.is_grad_enabled() and key not in self._states:  # what a hook draws is not run again
            self.redrawn.add(name)

    def _without_dropout(self, schema: Any, args: Any) -> list[Any]:
        changed = list(args)
        for place, argument in enumerate(schema.arguments[: len(changed)]):
            if argument.name in DROPOUT_ARGUMENTS and isinstance(changed[place], float):
                if changed[place]:
                    self._note(schema.name.rpartition("::")[2].strip("_"), args)
                changed[place] = 0.0
        return changed

    def _fixed(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator of which no more is known than that it draws, and fill what it made."""
        self._note(function._schema.name.rpartition("::")[2].strip("_"), (*args, kwargs.get("device")))
        return self._fill(function(*args, **kwargs), lambda u: u)

    def _fill(self, result: Any, values: Values) -> Any:
        """Write ``values`` of numbers between 0 and 1 into a tensor, which keeps its identity."""
        if type(result) is not Tensor or not result.dim() or self._alike:
            return result.copy_(values(torch.full((), 0.37, dtype=torch.float64)))
        place = torch.arange(result.shape[-1] if result.dim() > 1 else 1, dtype=torch.float64)
        return result.copy_(values((0.37 + STEP * place) % 1.0).to(result.device).expand(result.shape))

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
        levels = self._fill(torch.empty(target.shape, dtype=torch.float64, device=target.device), lambda u: u)
        return target.copy_(levels < chance)

    def _randint(self, function: Any, args: Any, kwargs: Any) -> Any:
        made = function(*args, **kwargs)
        names = [argument.name for argument in function._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        low, high = int(given.get("low", 0)), int(given["high"])
        return self._fill(made, lambda u: (low + u * (high - low)).floor())

    _randint_like = _randint

    def _randperm(self, function: Any, args: Any, kwargs: Any) -> Any:
        made = function(*args, **kwargs)
        return made.copy_(torch.arange(len(made) - 1, -1, -1))

    def _multinomial(self, function: Any, args: Any, kwargs: Any) -> Any:
        chances, wanted = args[0], int(args[1] if len(args) > 1 else kwargs["num_samples"])
        likely = chances.argsort(dim=-1, descending=True, stable=True)
        places = torch.arange(wanted, device=likely.device) % likely.shape[-1]
        return likely.index_select(-1, places)

    def _poisson(self, function: Any, args: Any, kwargs: Any) -> Any:
        return args[0].round()

    def _native_dropout(self, function: Any, args: Any, kwargs: Any) -> Any:
        kept = 1.0 - float(args[1]) if len(args) < 3 or args[2] is not False else 1.0
        mask = torch.ones_like(args[0], dtype=torch.bool)
        return args[0] * (1.0 / kept if kept else 0.0), mask  # as its backward scales

    def _rrelu_with_noise(self, function: Any, args: Any, kwargs: Any) -> Any:
        given, noise = args[0], args[1]
        lower, upper = _two(args[2:], kwargs, ("lower", "upper"), (1 / 8, 1 / 3))
        noise.copy_(torch.where(given <= 0, (lower + upper) / 2, 1.0))
        return given.mul_(noise) if function._schema.name.endswith("_") else given * noise


class NormWatch(TorchFunctionMode):
    """Note every call that normalises by the statistics of the rows it is given, registered as a layer or not.

    Sees the call, so it finds layers that no module has registered: a helper's, a class's, a bare function's.

    Args:
        hold: let each such call use its running statistics instead, those of an untrained layer where it has none.

    Attributes:
        seen: where each such call was made, and the running mean that it was given.

    Example:
        >>> with NormWatch() as norms:
        ...     _ = torch.nn.BatchNorm1d(3)(torch.randn(4, 3))
        >>> len(norms.seen)
        1
    """

    def __init__(self, hold: bool = False) -> None:
        super().__init__()
        self.seen: list[tuple[str, Tensor | None]] = []
        self._hold = hold

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at what is called, and go on."""
        kwargs = kwargs or {}
        if "batch_norm" in getattr(function, "__name__", "") and _given(args, kwargs, "training", TRAINING) is True:
            place = 1 if function is F.batch_norm else 3  # torch's own functions take weight and bias before it
            mean = _given(args, kwargs, "running_mean", place)
            self.seen.append((place_of(sys._getframe(1)), mean))
            if self._hold:
                args, kwargs = _running(args, kwargs, place, mean)
        return function(*args, **kwargs)


def _given(args: Any, kwargs: dict[str, Any], name: str, place: int) -> Any:
    return kwargs.get(name, args[place] if len(args) > place else None)


def _running(args: Any, kwargs: dict[str, Any], place: int, mean: Tensor | None) -> tuple[Any, dict[str, Any]]:
    """Change the arguments of a normalising call so that it uses running statistics."""
    given: Tensor = _given(args, kwargs, "input", 0)
    changed: dict[str, tuple[int, Any]] = {"training": (TRAINING, False)}
    if mean is None:
        width = given.shape[1]
        changed |= {"running_mean": (place, given.new_zeros(width)), "running_var": (place + 1, given.new_ones(width))}
    for name, (at, value) in changed.items():
        args, kwargs = (
            ((*args[:at], value, *args[at + 1 :]), kwargs) if len(args) > at else (args, {**kwargs, name: value})
        )
    return args, kwargs


def place_of(frame: FrameType | None) -> str:
    """Name the layer that a call was made by, and the line of the user's own that called it."""
    layer, own = "", ""
    while frame is not None and not own:
        code = frame.f_code
        owner, path = frame.f_locals.get("self"), Path(code.co_filename)
        if isinstance(owner, nn.modules.batchnorm._NormBase):
            layer = type(owner).__name__
        if TORCH not in path.parents and code.co_name != "__torch_function__":  # a watch, which only passes on
            own = f"{code.co_name}, {path.name}, line {frame.f_lineno}"
        frame = frame.f_back
    return f"{layer or 'batch_norm'} (called in {own})"


@contextmanager
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
