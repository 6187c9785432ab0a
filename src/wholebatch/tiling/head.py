"""A causal model's own loss from its hidden states: the logits are never made, or only a chunk of them.

While such a model runs with labels, its head returns what logits would be made of, and its loss function takes that in
their place. Between the two a model may scale and cap its logits; whoever wants anything else of them is told.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.errors import LossError
from wholebatch.loss.linear_head import causal_lm_head, uncompiled
from wholebatch.model.comparison import distance, tolerance_of
from wholebatch.model.gradient_hooks import has_hooks

TRIED = 32
"""How many positions of up to two rows a loss function is tried on."""

DEFERRED: ContextVar[nn.Module | None] = ContextVar("whose logits are not made", default=None)


class NoLogits(LossError, AttributeError):
    """Somebody reads logits that were never made."""


@dataclass(frozen=True)
class Later:
    """What logits would be made of.

    Attributes:
        hidden: (rows, length, width), what the head was given.
        head: the linear layer.
        scale: multiplies what the head returns.
        cap: multiplies the tanh of that; None without one.
        dtype: of the logits.
    """

    hidden: Tensor
    head: nn.Linear
    scale: float = 1.0
    cap: float | None = None
    dtype: torch.dtype = torch.float32

    @property
    def shape(self) -> torch.Size:
        """That of the logits."""
        return torch.Size((*self.hidden.shape[:-1], self.head.out_features))

    @property
    def device(self) -> torch.device:
        """That of the logits."""
        return self.hidden.device

    def float(self) -> Later:
        """Return it in single precision, in which the loss is added up anyway."""
        return replace(self, dtype=torch.float32) if self.dtype.itemsize < 4 else self

    def to(self, *where: Any, **also: Any) -> Later:
        """Return it in another precision on its own device."""
        kinds = [each for each in (*where, *also.values()) if isinstance(each, torch.dtype)]
        return replace(self, dtype=kinds[0]) if kinds else self

    def contiguous(self) -> Later:
        """Return it as it is."""
        return self

    def size(self, dim: int | None = None) -> Any:
        """Return the shape of the logits, or one of its numbers."""
        return self.shape if dim is None else self.shape[dim]

    def __mul__(self, factor: object) -> Later:
        if not isinstance(factor, Real):
            raise NoLogits(_said("multiplies them by something else than a number"))
        if self.cap is None:
            return replace(self, scale=self.scale * float(factor))
        return replace(self, cap=self.cap * float(factor))

    __rmul__ = __mul__

    def __truediv__(self, divisor: object) -> Later:
        if not isinstance(divisor, Real):
            raise NoLogits(_said("divides them by something else than a number"))
        return self * (1.0 / float(divisor))

    def tanh(self) -> Later:
        """Bend it, once."""
        if self.cap is not None:
            raise NoLogits(_said("bends them twice"))
        return replace(self, cap=1.0)

    def made(self, hidden: Tensor) -> Tensor:
        """Make the logits of some hidden states."""
        logits: Tensor = nn.functional.linear(hidden, self.head.weight, self.head.bias).to(self.dtype) * self.scale
        return logits if self.cap is None else torch.tanh(logits) * self.cap

    def __getattr__(self, name: str) -> Any:
        raise NoLogits(_said(f"reads .{name} of them"))

    def __getitem__(self, place: object) -> Any:
        raise NoLogits(_said("reads a part of them"))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.tanh:
            return args[0].tanh()
        raise NoLogits(_said(f"gives them to {getattr(function, '__name__', function)}"))


class CausalHead:
    """Takes the loss of one causal model from its hidden states.

    Attributes:
        refusals: why logits are made, by how the loss function was called; "" where they are not.
    """

    def __init__(self, model: Any, head: nn.Linear) -> None:
        self.refusals: dict[Hashable, str] = {}
        self.model, self.head = model, head
        self._replaced: list[tuple[nn.Module, str, Any]] = []

    @property
    def taken(self) -> bool:
        """Whether another one serves the model already."""
        return isinstance(vars(self.model).get("forward"), _Forward)

    def put(self) -> None:
        """Put the model's loss, forward and head in our hands."""
        if self._replaced:
            return
        own = self.model.loss_function
        self._put(self.model, "_loss_function", _Loss(self, own))
        self._put(self.model, "forward", _Forward(self, self.model.forward))
        self._put(self.head, "forward", _Head(self, self.head.forward))

    def _put(self, module: nn.Module, name: str, new: Any) -> None:
        self._replaced.append((module, name, vars(module).get(name, self)))
        setattr(module, name, new)

    def remove(self) -> None:
        """Put back what was there."""
        for module, name, before in self._replaced:
            delattr(module, name)
            if before is not self:
                setattr(module, name, before)
        self._replaced = []


class _Forward:
    """A model's forward, during which logits wait where there are labels."""

    def __init__(self, of: CausalHead, own: Callable[..., Any]) -> None:
        functools.update_wrapper(self, own, updated=())
        self._of, self._own = of, own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        labels = kwargs.get("labels")
        if labels is None and args:
            labels = inspect.signature(self._own).bind_partial(*args, **kwargs).arguments.get("labels")
        if labels is None or not torch.is_grad_enabled() or has_hooks(self._of.head):
            return self._own(*args, **kwargs)
        return self._deferred(*args, **kwargs)

    @uncompiled
    def _deferred(self, *args: Any, **kwargs: Any) -> Any:
        token = DEFERRED.set(self._of.head)
        try:
            return self._own(*args, **kwargs)
        finally:
            DEFERRED.reset(token)


class _Head:
    """A head's forward, which waits where the model takes its loss."""

    def __init__(self, of: CausalHead, own: Callable[..., Any]) -> None:
        functools.update_wrapper(self, own, updated=())
        self._head, self._own = of.head, own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if DEFERRED.get() is not self._head:
            return self._own(*args, **kwargs)
        hidden: Tensor = args[0] if args else kwargs["input"]
        low = torch.is_autocast_enabled(hidden.device.type)
        dtype = torch.get_autocast_dtype(hidden.device.type) if low else hidden.dtype
        return Later(hidden, self._head, dtype=dtype)


class _Loss:
    """A model's loss function, of what logits would be made of."""

    def __init__(self, of: CausalHead, own: Callable[..., Any]) -> None:
        functools.update_wrapper(self, own, updated=())
        self._of, self._own = of, own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        names = ("logits", "labels", "vocab_size")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        logits = given.pop("logits", None)
        if not isinstance(logits, Later):
            return self._own(*args, **kwargs)
        key = tuple(sorted(given)), logits.scale, logits.cap, logits.dtype
        if key not in self._of.refusals:
            self._of.refusals[key] = self._refusal(logits, given)
        if self._of.refusals[key]:
            return self._own(logits=logits.made(logits.hidden), **given)
        return _loss_of(logits, logits.hidden, **given)

    def _refusal(self, logits: Later, given: dict[str, Any]) -> str:
        """Try the loss function on a few positions and labels that differ; say if it means another loss."""
        hidden = logits.hidden.detach()[:2, :TRIED]
        classes = torch.arange(hidden[..., 0].numel(), device=hidden.device) * 7 % logits.head.out_features
        labels = torch.where(classes % 3 == 1, given.get("ignore_index", -100), classes).view(hidden.shape[:-1])
        tried = {**given, "labels": labels}
        if tried.get("shift_labels") is not None:
            tried["shift_labels"] = labels
        weight = [p for p in logits.head.parameters() if p.requires_grad]

        def found(loss_of: Callable[[Tensor], Tensor]) -> list[Tensor]:
            leaf = hidden.clone().requires_grad_()
            loss = loss_of(leaf)
            return [loss.detach(), *torch.autograd.grad(loss, [leaf, *weight])]

        try:
            expected = found(lambda leaf: self._own(logits=logits.made(leaf), **tried))
            ours = found(lambda leaf: _loss_of(logits, leaf, **tried))
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            return f"its loss function cannot be tried on a few positions: {str(error).splitlines()[0]:.120}"
        tolerance = tolerance_of(expected)
        same = all(distance([a], [b]) <= tolerance for a, b in zip(ours, expected, strict=True))
        return "" if same else f"{getattr(self._own, '__name__', 'its loss function')} is another loss"


def _loss_of(
    logits: Later,
    hidden: Tensor,
    labels: Tensor,
    shift_labels: Tensor | None = None,
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    **_: Any,
) -> Tensor:
    cap, scale = logits.cap, logits.scale
    term = causal_lm_head(
        hidden,
        logits.head.weight,
        None if shift_labels is not None else labels,
        logits.head.bias,
        shift_labels=shift_labels,
        ignore_index=ignore_index,
        softcap=cap,
        scale=scale if cap is None else scale * cap,
    )
    if num_items_in_batch is None:
        return term.value
    items = torch.as_tensor(num_items_in_batch, device=hidden.device)
    return term.total / items


def causal_heads(model: nn.Module) -> dict[str, CausalHead]:
    """Find the models that take their own loss from the logits of a plain linear head."""
    found: dict[int, tuple[str, CausalHead]] = {}
    for name, module in model.named_modules():
        asked: Any = getattr(module, "get_output_embeddings", None)
        if not callable(asked) or not hasattr(type(module), "loss_function"):
            continue
        head = asked()
        plain = isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward and "forward" not in vars(head)
        takes = "labels" in inspect.signature(module.forward).parameters
        if (plain or isinstance(vars(head).get("forward") if head is not None else None, _Head)) and takes:
            path = next((each for each, part in module.named_modules() if part is head), "head")
            found.setdefault(id(head), (f"{name}.{path}" if name else path, CausalHead(module, head)))
    return dict(found.values())


def _said(what: str) -> str:
    return (
        f"Logits were not made, as the model takes its loss from the hidden states (wb.tiled), and something {what}. "
        "Read them under torch.no_grad() or without labels=, or keep them: wb.tiled(model, head=False)."
    )
