"""What a loss function returns: terms, each a sum over the micro-batch that states its own denominator.

A term of the whole batch is ``weight * (sum of totals) / (sum of counts)``, both sums over every micro-batch
of every rank. A micro-batch knows its own total and count only; dividing is the business of the window.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, TypeAlias

import torch
from torch import Tensor

from wholebatch.errors import LossError
from wholebatch.loss.counts import Count, is_half

TermKey: TypeAlias = "tuple[str | int, int]"
LossFunction: TypeAlias = "Callable[[Any, Any], Any]"
"""Called as ``loss_fn(model, micro_batch)``; returns one of the forms below."""

FORMS = """A loss function returns one of:
  a tensor with one loss per row or token (reduction="none")      the mean of these over the whole batch
  wb.mean(values, weights)                                         sum(weights * values) / sum(weights)
  wb.from_mean(outputs.loss, items=n)                              a ready-made mean over n items
  wb.total(values)                                                 their sum, no denominator
  wb.once(value)                                                   a value that exists once per batch
  a + 0.1 * b, or {"ce": a, "aux": 0.1 * b}                        several terms
  (loss, {"accuracy": correct.float()})                            a loss and metrics
  None                                                             nothing to learn from here"""

NOT_LINEAR = (
    "A function of the whole batch's mean cannot be taken of one micro-batch's share of it: only sums of terms, and "
    "terms times numbers. For any function of all rows use wb.coupled_backward."
)


OPERATORS = (Tensor.add, Tensor.sub, Tensor.mul, Tensor.div)
"""What torch calls ``+ - * /`` between a tensor and something else."""


class Terms:
    """A weighted sum of terms, as made by ``a + 0.1 * b``."""

    def __init__(self, parts: Sequence[LossSum]) -> None:
        self._parts = tuple(parts)

    @property
    def parts(self) -> tuple[LossSum, ...]:
        """The terms, in the order in which they were written."""
        return self._parts

    @property
    def value(self) -> Tensor:
        """The weighted mean of this micro-batch alone, with its graph: for use outside of a window."""
        return torch.stack([part.value for part in self.parts]).sum()

    def __add__(self, other: object) -> Terms:
        if isinstance(other, Terms):
            return Terms(self.parts + other.parts)
        if isinstance(other, Real) and other == 0:
            return self
        several = isinstance(other, Tensor) and other.numel() > 1
        raise LossError(
            f"Cannot add {describe(other)} to a term: what it is averaged over cannot be known. Wrap it: "
            + "wb.mean(x) for one loss a row or token, " * several
            + "wb.total(x) for a sum over the batch, wb.once(x) for a value that exists once per batch."
        )

    __radd__ = __add__

    def __sub__(self, other: object) -> Terms:
        return self + (-other) if isinstance(other, Terms) else self + other

    def __rsub__(self, other: object) -> Terms:
        return -self + other

    def __neg__(self) -> Terms:
        return self * -1.0

    def __mul__(self, factor: object) -> Terms:
        factor = _weight(factor)
        return Terms([replace(part, weight=_product(part.weight, factor)) for part in self.parts])

    __rmul__ = __mul__

    def __truediv__(self, divisor: object) -> Terms:
        return self * (1.0 / _weight(divisor))

    def __pow__(self, exponent: object) -> Terms:
        raise LossError(f"Cannot take a power of a term and {describe(exponent)}. {NOT_LINEAR}")

    __rpow__ = __pow__

    def __rtruediv__(self, other: object) -> Terms:
        raise LossError(f"Cannot divide {describe(other)} by a term. {NOT_LINEAR}")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", str(function))
        if function in OPERATORS or name.startswith("__"):
            return NotImplemented  # a tensor beside an operator: the term's own reflected one is asked next
        raise _not_a_number(f"Cannot take torch's {name} of a term.")

    def __float__(self) -> float:
        raise _not_a_number("A term is no number.")

    __int__ = __abs__ = __round__ = __float__

    def __format__(self, form: str) -> str:
        if form:
            raise _not_a_number(f"Cannot write a term as {form!r}.")
        return str(self)

    def __eq__(self, other: object) -> bool:
        return self is other if not isinstance(other, (Real, Tensor)) else self < other

    __hash__ = object.__hash__

    def __lt__(self, other: object) -> bool:
        raise _not_a_number(f"Cannot compare a term with {describe(other)}.")

    __gt__ = __le__ = __ge__ = __lt__

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"A term of the loss has no {name!r}: it is a sum whose denominator the window knows. Return it from the "
            f"loss function; its mean over this micro-batch alone is .value. {NOT_LINEAR}"
        )


@dataclass(frozen=True, eq=False)
class LossSum(Terms):
    """State one term of the loss: its sum over this micro-batch and the items it is averaged over.

    The term of the whole batch is ``sum of total / sum of count`` over all micro-batches and ranks.

    Args:
        total: sum over the micro-batch, a tensor with one element, with its graph.
        count: what the sum is averaged over here (rows, tokens, boxes, a sum of weights), a number or a tensor
            with one element; carries no gradient. Terms that share the very same tensor share a denominator.

    Raises:
        LossError: if ``total`` is no floating-point tensor with one element, or ``count`` carries gradient.

    Example:
        >>> import torch, wholebatch as wb
        >>> squares = torch.tensor([1.0, 4.0, 9.0])
        >>> float(wb.LossSum(squares.sum(), 3).value)
        4.666666507720947
    """

    total: Tensor
    count: Count
    weight: Count = field(default=1.0, kw_only=True)
    kind: str = field(default="count", kw_only=True, repr=False)
    source: object = field(default=None, kw_only=True, repr=False)
    spread: int = field(default=1, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        total = floating(self.total, "total")
        if total.numel() != 1:
            raise LossError(f"LossSum(total, count) takes sums: total has shape {tuple(total.shape)}. Use total.sum().")
        object.__setattr__(self, "total", _wide(total.reshape(())))
        object.__setattr__(self, "source", self.count if self.source is None else self.source)
        object.__setattr__(self, "count", plain_count(self.count))

    @property
    def parts(self) -> tuple[LossSum, ...]:
        """This term alone."""
        return (self,)

    @property
    def value(self) -> Tensor:
        """The weighted mean of this micro-batch alone, with its graph: for use outside of a window."""
        return self.total * self.weight / self.count

    @property
    def group(self) -> tuple[object, ...]:
        """What identifies the denominator within one micro-batch: equal groups share it."""
        kind = "shape" if self.kind == "bare" else self.kind
        return kind, id(self.source) if isinstance(self.source, Tensor) else self.source, self.spread


def mean(values: Tensor, weights: Tensor | None = None) -> LossSum:
    """Average values over the whole batch: ``sum(weights * values) / sum(weights)``, or their plain mean.

    Args:
        values: losses without reduction, of any shape with at least one dimension, usually (rows, ...).
        weights: a mask or weights of the same shape, or of its leading dimensions (one weight a row); carries no
            gradient. Positions with a ``False`` weight are not read at all. Terms that are given the very same
            tensor share a denominator, which saves the counting pass.

    Returns:
        One term for the loss function to return.

    Raises:
        LossError: if values have no dimension, or the weights' shape does not fit or they carry gradient.

    Example:
        >>> import torch, wholebatch as wb
        >>> float(wb.mean(torch.tensor([1.0, 2.0, 9.0]), torch.tensor([True, True, False])).value)
        1.5
    """
    values = floating(values, "values")
    if values.dim() == 0:
        raise LossError(f"mean(values) needs values before they are reduced; got one number. {FORMS}")
    if weights is None:
        return _term(_sum(values), float(values.numel()), "shape", values.shape)
    spread = _spread(weights, values)
    chosen = torch.where(spread, values, 0) if spread.dtype is torch.bool else values * spread
    each = values.numel() // max(weights.numel(), 1)
    return _term(_sum(chosen), plain_count(_sum(spread)), "weights", weights, each)


def _term(total: Tensor, count: Count, kind: str, source: object, spread: int = 1) -> LossSum:
    """Make a term of sums that need no check; it is made with every micro-batch, so it is made quickly."""
    made = object.__new__(LossSum)
    vars(made).update(total=total, count=count, weight=1.0, kind=kind, source=source, spread=spread)
    return made


def total(values: Tensor) -> LossSum:
    """Add values up over the whole batch, over all ranks, without any denominator.

    Args:
        values: of any shape, one number included.

    Example:
        >>> import torch, wholebatch as wb
        >>> float(wb.total(torch.tensor([1.0, 2.0])).value)
        3.0
    """
    return _term(_sum(floating(values, "values")), 1.0, "one", None)


def once(value: Tensor) -> LossSum:
    """Add a value that exists once per batch and is the same in each micro-batch.

    A regulariser of the weights, a learned log-variance: each micro-batch computes it, one counts.

    Args:
        value: a tensor with one element that does not depend on the micro-batch.

    Example:
        >>> import torch, wholebatch as wb
        >>> weight = torch.tensor([3.0, 4.0])
        >>> float((0.5 * wb.once(weight.square().sum())).parts[0].value)
        12.5
    """
    return LossSum(value, 1.0, kind="once")


def from_mean(loss: Tensor, items: Count) -> LossSum:
    """Take a ready-made mean, such as a model's own ``outputs.loss``, over a stated number of items.

    Args:
        loss: the mean over this micro-batch, a tensor with one element.
        items: the number of items it was divided by, as a number or a tensor with one element: for a causal
            language model the labels that are not ignored *after* the shift. With 0 items the loss is not read.

    Raises:
        LossError: if the loss has more than one element or ``items`` carries gradient.

    Example:
        >>> import torch, wholebatch as wb
        >>> float(wb.from_mean(torch.tensor(2.0), items=8).total)
        16.0
    """
    loss = floating(loss, "loss")
    if loss.numel() != 1:
        raise LossError(f"from_mean takes one mean; got shape {tuple(loss.shape)}. For values use wb.mean(values).")
    count = plain_count(items)
    loss = _wide(loss.reshape(()))
    if isinstance(count, Tensor):
        share = torch.where(count.to(loss.device) != 0, loss, 0) * count.to(loss.device)
    else:
        share = loss * count if count else torch.zeros_like(loss)
    return LossSum(share, count, source=items)


@dataclass(frozen=True)
class ParsedLoss:
    """What the loss function said about one micro-batch, taken apart."""

    terms: dict[TermKey, LossSum]
    metrics: dict[str, LossSum]
    named: bool

    @property
    def groups(self) -> dict[TermKey, int]:
        """The denominator each term belongs to, numbered in the order of their first appearance."""
        numbers: dict[tuple[object, ...], int] = {}
        return {key: numbers.setdefault(term.group, len(numbers)) for key, term in self.terms.items()}

    def without(self, keys: Collection[TermKey]) -> ParsedLoss:
        """Leave some terms out."""
        return replace(self, terms={key: term for key, term in self.terms.items() if key not in keys})


def read(returned: object, rows: int = 1, alone: bool = False) -> ParsedLoss | None:
    """Read what a loss function returned for a micro-batch.

    Args:
        returned: any of the forms.
        rows: of the micro-batch, where it is read alone: one element for several rows is then refused. 1 where the
            shapes are looked at over the whole window.
        alone: whether the micro-batch has a single row, whose dimension is easily lost.

    Raises:
        LossError: if what the loss averages over cannot be known.
    """
    if alone and isinstance(returned, Tensor) and returned.dim() == 0:
        raise LossError(
            "The loss function returned a tensor without dimensions for a micro-batch of one row. If that is the row's "
            "own loss, squeeze() has taken the dimension of the rows too: say squeeze(-1), or return "
            f"loss.reshape(-1). If it is a mean or a sum: {FORMS}"
        )
    metrics: dict[str, LossSum] = {}
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping):
        returned, stated = returned
        metrics = {name: _metric(name, value, rows) for name, value in _named(stated).items()}
    if returned is None:
        return ParsedLoss({}, metrics, named=False) if metrics else None
    if isinstance(returned, Mapping):
        _refuse_outputs(returned)
        named: dict[TermKey, LossSum] = {
            (name, j): part for name, value in _named(returned).items() for j, part in enumerate(_parts(value, rows))
        }
        return ParsedLoss(named, metrics, named=True)
    return ParsedLoss({(i, 0): part for i, part in enumerate(_parts(returned, rows))}, metrics, named=False)


def _refuse_outputs(returned: Mapping[Any, object]) -> None:
    """Raise for a loss beside other things, as models and training steps of other libraries return it."""
    others = [str(name) for name in returned if name != "loss"]
    if others and "loss" in returned:
        raise LossError(
            f"The loss function returned {type(returned).__name__} with 'loss' beside "
            f"{', '.join(map(repr, others[:3]))}{', ...' * (len(others) > 3)}. Entries of a dict are terms, and "
            f"are added up. Return the loss alone, or "
            'with what is only to be looked at beside it: return loss, {"accuracy": correct.float()}. If all are terms '
            "of the loss, name them after what they are."
        )


def describe(value: object) -> str:
    """Name a value in an error: its kind, and its shape where it has one."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}" if value.dim() else "a tensor without dimensions"
    return f"{type(value).__name__} {value!r:.60}"


def floating(value: object, name: str) -> Tensor:
    """Pass a real floating-point tensor on.

    Raises:
        LossError: for anything else.
    """
    if isinstance(value, Tensor) and value.is_floating_point():
        return value
    kind = f"a tensor of {value.dtype}" if isinstance(value, Tensor) else describe(value)
    raise LossError(f"'{name}' is {kind}; a loss needs a real floating-point tensor. {FORMS}")


def plain_count(count: object) -> Count:
    """Take a count as a number if it is known on the host, else as a tensor without dimensions.

    Raises:
        LossError: if it is neither, or carries gradient.
    """
    if isinstance(count, Real):
        return float(count)
    if not isinstance(count, Tensor) or count.numel() != 1:
        raise LossError(f"A count is a number or a tensor with one element; got {describe(count)}.")
    if count.requires_grad:
        raise LossError("The count carries gradient, which no denominator does here. Pass count.detach().")
    count = count.reshape(())
    return float(count) if count.device.type == "cpu" else count


def _parts(value: object, rows: int) -> tuple[LossSum, ...]:
    if isinstance(value, Terms):
        return value.parts
    if not isinstance(value, Tensor):
        raise LossError(f"The loss function returned {describe(value)}. {FORMS}")
    if value.dim() == 0:
        raise LossError(
            f"The loss function returned a tensor without dimensions ({value.dtype}): a mean or a sum over the "
            f"micro-batch. What it was divided by cannot be known, so it cannot be put right. {FORMS}"
        )
    if value.numel() == 1 and rows > 1:
        raise LossError(
            f"The loss function returned one element for a micro-batch of {rows} rows. If it is the only value there "
            f"is, say so with wb.mean(values); if it is a mean, wb.from_mean(loss, items=n). {FORMS}"
        )
    values = floating(value, "values")
    return (_term(_sum(values), float(values.numel()), "bare", values.shape),)


def _named(stated: Mapping[Any, object]) -> dict[str, object]:
    names = {str(name): value for name, value in stated.items()}
    if len(names) < len(stated):
        raise LossError(f"Two of the names {list(stated)} are the same when written out. Give each its own.")
    return names


def _metric(name: str, value: object, rows: int) -> LossSum:
    if isinstance(value, Tensor) and not value.is_floating_point() and not value.is_complex():
        value = value.float()
    try:
        parts = _parts(value, rows)
    except LossError as error:
        raise LossError(f"The metric {name!r} cannot be averaged over the batch. {error}") from None
    if len(parts) != 1:
        raise LossError(f"The metric {name!r} is a sum of {len(parts)} terms; give each its own name.")
    return replace(parts[0], total=parts[0].total.detach())


def _not_a_number(what: str) -> LossError:
    return LossError(
        f"{what} It is a sum whose denominator the window knows; the mean over this micro-batch alone is the .value "
        f"of wb.mean(...), for logs. {NOT_LINEAR}"
    )


def _weight(factor: object) -> Count:
    if isinstance(factor, Real):
        return float(factor)
    if isinstance(factor, Tensor) and factor.numel() == 1:
        return factor.reshape(())
    raise LossError(f"A term is weighted by a number or a tensor with one element; got {describe(factor)}.")


def _product(a: Count, b: Count) -> Count:
    return b if isinstance(a, float) and a == 1.0 else a * b


def _spread(weights: object, values: Tensor) -> Tensor:
    if not isinstance(weights, Tensor):
        raise LossError(f"weights is {describe(weights)}; pass a tensor of shape {tuple(values.shape)}.")
    if weights.requires_grad:
        raise LossError("The weights carry gradient, which no denominator does here. Pass weights.detach().")
    if weights.shape != values.shape[: weights.dim()] or weights.dim() == 0:
        raise LossError(
            f"weights of shape {tuple(weights.shape)} do not fit values of shape {tuple(values.shape)}: give one "
            f"weight a value, or one for each of the leading dimensions, such as {tuple(values.shape[:1])}."
        )
    trailing = (1,) * (values.dim() - weights.dim())
    return weights.to(values.device).reshape(weights.shape + trailing).expand(values.shape)


def _sum(values: Tensor) -> Tensor:
    return values.sum(dtype=torch.float32) if is_half(values) else values.sum()


def _wide(value: Tensor) -> Tensor:
    return value.float() if is_half(value) else value
