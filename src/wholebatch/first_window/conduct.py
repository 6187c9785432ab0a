"""What a loss function does besides returning a loss: what it does to gradients is seen, what is none is refused."""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple

from torch import Tensor, nn

from wholebatch.errors import LossError
from wholebatch.model.inspection import ModelInfo

THOROUGH = 2
"""In how many micro-batches every parameter is looked at: what clears gradients shows in the second."""

SAMPLE = 12
"""How many of them are looked at closely, and in later ones too."""

EXAMPLE = "def loss_fn(model, batch): return F.cross_entropy(model(batch['x']), batch['y'], reduction='none')"


def refuse_no_function(loss_fn: Any) -> None:
    """Raise if what stands in the loss function's place is no function of a model and a micro-batch.

    Raises:
        TypeError: saying what it is, and what to pass.
    """
    kind = type(loss_fn).__name__
    if isinstance(loss_fn, type):
        found = f"the class {loss_fn.__name__}"
    elif isinstance(loss_fn, nn.modules.loss._Loss) or getattr(loss_fn, "__module__", "") == "torch.nn.functional":
        found = f"{getattr(loss_fn, '__name__', f'{kind}()')}, which takes outputs and targets"
    elif isinstance(loss_fn, Tensor):
        found = f"a tensor of shape {tuple(loss_fn.shape)}: a loss that has been computed already"
    elif callable(loss_fn):
        said = _cannot_take_two(loss_fn)
        if not said:
            return
        found = f"{getattr(loss_fn, '__name__', kind)}, called with model and micro-batch: {said}"
    else:
        found = f"{kind} {loss_fn!r:.60}"
    raise TypeError(f"loss_fn is {found}; loss_fn(model, micro_batch) is called for each micro-batch. Write {EXAMPLE}")


def _cannot_take_two(function: Callable[..., Any]) -> str:
    """Say why a function cannot be called with two arguments; nothing if it can, or nobody knows."""
    try:  # a decorator may take other arguments than what it wraps
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind(None, None)
    except TypeError as error:
        return str(error)
    return ""


class _Look(NamedTuple):
    """A parameter and its gradient, and how often each had been written to."""

    parameter: Tensor
    version: int
    grad: Tensor | None
    grad_version: int


class WatchedLoss:
    """Calls a loss function and looks whether it has left gradients and parameters alone.

    A window's gradients lie in ``.grad`` while it runs, so a loss function that clears them loses what earlier
    micro-batches have added, and one that goes backward by itself adds its own a second time. Looks at every parameter
    twice, and closely at a few in every micro-batch.

    Attributes:
        micro_batch: the last one that the loss function was given.

    Args:
        loss_fn: what is called.
        parameters: what it has to leave alone, by whatever key; may grow.
    """

    def __init__(self, loss_fn: Callable[[Any, Any], Any], parameters: dict[int, Tensor]) -> None:
        self.micro_batch: Any = None
        self._loss_fn, self._parameters, self._calls = loss_fn, parameters, 0

    def __call__(self, model: Any, micro_batch: Any) -> Any:
        """Call the loss function.

        Raises:
            LossError: if it changed gradients or parameters.
        """
        few, gradients = self._few(), self._gradients()
        # Some loss functions take labels out of the mapping that they are given.
        self.micro_batch = dict(micro_batch) if type(micro_batch) is dict else micro_batch
        returned = self._loss_fn(model, micro_batch)
        changed = {id(p): _Look(p, p._version, grad, 0) for p, grad in gradients if p.grad is not grad}
        changed |= {id(look.parameter): look for look in few if _is_changed(look)}
        if changed:
            raise LossError(_reproach(list(changed.values())))
        return returned

    def _few(self) -> list[_Look]:
        """Look closely at some parameters: what is written in place shows in their versions."""
        few = islice(self._parameters.values(), 0, None, 1 + len(self._parameters) // SAMPLE)
        return [_look_at(p) for p in few if not nn.parameter.is_lazy(p)]

    def _gradients(self) -> list[tuple[Tensor, Tensor | None]]:
        """Look at which gradients are there, for every parameter, in the first micro-batches."""
        self._calls += 1
        return [(p, p.grad) for p in self._parameters.values()] if self._calls <= THOROUGH else []


def refuse_silence(
    loss_fn: Callable[[Any, Any], Any], model_info: ModelInfo, run_again: Callable[[], Any] | None
) -> None:
    """Raise if a loss function that returned None for every micro-batch has forgotten to return its loss.

    One that returns a loss in one place and None in another has chosen so: there was nothing to learn from.

    Args:
        run_again: runs it on one micro-batch; None where that cannot be tried.

    Raises:
        LossError: if it runs the model and returns None by no decision of its own.
    """
    code = _code_of(loss_fn)
    says_nothing, says_something = _returns(code)
    if says_nothing and says_something:
        return
    if run_again is None:
        forgot = code is not None and not says_something and _names_first_argument(code)
    else:
        forgot = _runs(model_info.model, run_again)
    if forgot:
        raise LossError(
            "loss_fn returned None for every micro-batch although it ran the model: it lacks a return. Return the "
            "loss, unreduced: return F.cross_entropy(logits, labels, reduction='none'). Where a micro-batch has "
            "nothing to learn from, an explicit None is right, beside a loss for others."
        )


def _look_at(parameter: Tensor) -> _Look:
    grad = parameter.grad
    return _Look(parameter, parameter._version, grad, 0 if grad is None else grad._version)


def _is_changed(look: _Look) -> bool:
    now = look.parameter.grad
    return (
        now is not look.grad
        or look.parameter._version != look.version
        or (now is not None and now._version != look.grad_version)
    )


def _reproach(looks: Sequence[_Look]) -> str:
    """Say what a loss function did to the first of these that shows it most clearly."""
    stepped = [look for look in looks if look.parameter._version != look.version]
    added = [look for look in looks if look.grad is None and look.parameter.grad is not None]
    cleared = [look for look in looks if look.grad is not None and _is_cleared(look.parameter.grad)]
    if stepped:
        what, count = "has changed", len(stepped)
        mend = (
            "Each micro-batch would see other weights. Step once, after wb.backward, or with wb.Step; an average that "
            "follows the model, or an embedding's max_norm=, belongs after the step (after_step=), and what a first "
            "forward sets by its rows is set by one forward of the model before."
        )
    elif cleared:
        what, count = "has cleared the gradients of", len(cleared)
        mend = (
            "What earlier micro-batches added is lost. Leave zero_grad() out of loss_fn and call it once a window, "
            "after optimizer.step()."
        )
    else:
        what, count = "has added to the gradients of", len(added) or len(looks)
        mend = (
            "It calls backward() itself, and its loss would count twice. Return the loss and leave backward() out; "
            "where the loss needs a gradient of its own, torch.autograd.grad(...) adds to none."
        )
    shape = tuple((stepped or cleared or added or looks)[0].parameter.shape)
    return f"loss_fn {what} {count} parameters while it ran (first: shape {shape}). {mend}"


def _is_cleared(grad: Tensor | None) -> bool:
    return grad is None or not bool(grad.any())


def _code_of(function: Any) -> types.CodeType | None:
    """The code that runs when something is called; None where it is not Python's."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    if not isinstance(function, types.FunctionType):
        function = inspect.getattr_static(type(function), "__call__", None)
    return getattr(function, "__code__", None)


def _returns(code: types.CodeType | None) -> tuple[bool, bool]:
    """Tell whether code returns None somewhere, and whether it returns anything else somewhere."""
    nothing = something = False
    before: dis.Instruction | None = None
    for instruction in dis.get_instructions(code) if code is not None else ():
        if instruction.opname in ("RETURN_VALUE", "RETURN_CONST"):
            said = instruction if instruction.opname == "RETURN_CONST" else before
            is_none = said is not None and "CONST" in said.opname and said.argval is None
            nothing, something = nothing or is_none, something or not is_none
        before = instruction
    return nothing, something


def _names_first_argument(code: types.CodeType) -> bool:
    first = code.co_varnames[: code.co_argcount]
    return any(instruction.argval in first for instruction in dis.get_instructions(code))


def _runs(model: nn.Module, run: Callable[[], Any]) -> bool:
    """Tell whether a module is called meanwhile."""
    calls: list[bool] = []
    hook = model.register_forward_pre_hook(lambda *_: calls.append(True))
    try:
        run()
    finally:
        hook.remove()
    return bool(calls)
