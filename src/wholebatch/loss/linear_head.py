"""Ready-made losses that take hidden states and the weight of a head, and never hold all logits."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from numbers import Real
from typing import Any, ParamSpec, TypedDict, TypeVar

import torch
from torch import Tensor
from typing_extensions import Unpack

from wholebatch.amounts import bytes_in
from wholebatch.errors import LossError
from wholebatch.loss.head import HeadLoss, Targets, TokenLoss, refuse_transforms, wide_of
from wholebatch.loss.labels import as_classes, known, same_shape, shifted
from wholebatch.loss.terms import LossSum, describe, floating

P = ParamSpec("P")
R = TypeVar("R")


class HeadOptions(TypedDict, total=False):
    """What :func:`linear_cross_entropy` takes by name."""

    class_weight: Tensor | None
    ignore_index: int
    label_smoothing: float
    softcap: float | None
    scale: float
    z_loss: float
    memory: int | str | None


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """Keep a compiler out of a function: its graph ends before and begins behind."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            apart: Callable[P, R] = torch.compiler.disable(function)  # made here: to ask for it imports the compiler
            return apart(*args, **kwargs)
        return function(*args, **kwargs)

    return called


@uncompiled
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    scale: float = 1.0,
    z_loss: float = 0.0,
    memory: int | str | None = None,
) -> LossSum:
    """Average the cross entropy of a linear head over the labels that count, without ever holding all logits.

    The mean is that of ``cross_entropy(F.linear(hidden, weight, bias), labels, class_weight)``, of its value as of its
    gradient. Logits are there for one chunk of tokens at a time: the gradient is made while they are, in the forward,
    and multiplied by what comes in at the loss in the backward. It takes a copy of the head's gradient, in float32
    where the head has fewer bits, and no time besides: as many matrix products as logits that are kept. A forward
    without a backward, as in a counting pass, costs as much as with one; under ``torch.no_grad()`` it is a forward.

    Args:
        hidden: (rows, ..., width), what the head is given.
        weight: (vocabulary, width), the head's own, tied or not, with or without gradient.
        labels: (rows, ...) class indices, of any integer type or bool.
        bias: (vocabulary,), the head's.
        class_weight: (vocabulary,), a weight a class: of its tokens in the sum and in the denominator.
        ignore_index: the label that does not count.
        label_smoothing: as in torch, from 0 to 1.
        softcap: bounds logits to ``softcap * tanh(logits / softcap)``, after the scale.
        scale: multiplies the logits, a number.
        z_loss: adds ``z_loss * logsumexp(logits) ** 2`` to each token's loss, under the same weight and denominator.
        memory: bytes of a chunk's logits, a number or "64MiB"; by default as many as the head's gradient takes, from 16
            to 512 MiB.

    Raises:
        LossError: if shapes or types do not fit, a label on the CPU is no class, or a tensor is cut over ranks; in the
            backward, if the gradient is to be differentiated again.

    Example:
        >>> import torch, wholebatch as wb
        >>> hidden, head = torch.zeros(3, 5), torch.nn.Linear(5, 4)
        >>> wb.losses.linear_cross_entropy(hidden, head.weight, torch.tensor([0, 2, -100]), head.bias).count
        2.0

    Source:
        Gradients in the forward, chunk by chunk: Liger Kernel (arXiv 2410.10989), section 3.2.
    """
    _fitting_head(hidden, weight, labels, bias, class_weight)
    refuse_transforms((hidden, weight, bias, class_weight, labels))
    same_shape(hidden.shape[:-1], labels.shape)
    wide = wide_of(dtype := _product_type(hidden))
    classes = as_classes(labels).flatten().to(hidden.device)
    counted = classes != ignore_index
    known(classes[counted] if counted.device.type == "cpu" else None, len(weight), ignore_index)
    safe = torch.where(counted, classes, 0)
    by_class, unit = (None, 1.0) if class_weight is None else _normalised(class_weight.to(hidden.device, wide))
    weights = counted.to(wide) if by_class is None else by_class[safe] * counted
    learning = torch.is_grad_enabled()
    wanted = (hidden.requires_grad, weight.requires_grad, bias is not None and bias.requires_grad)
    how = TokenLoss(
        _number(label_smoothing, "label_smoothing", 0.0, 1.0),
        softcap=softcap if softcap is None else _number(softcap, "softcap", math.ulp(0.0)),
        scale=_number(scale, "scale"),
        z_loss=_number(z_loss, "z_loss"),
        wanted=wanted if learning else (False, False, False),
        dtype=dtype,
        memory=None if memory is None else bytes_in(memory),
    )
    targets = Targets(safe, counted.to(wide), weights, by_class)
    total = HeadLoss.apply(how, hidden.flatten(0, -2), weight, bias, *targets)  # type: ignore[no-untyped-call]
    count = counted.sum() if class_weight is None else weights.sum() * unit
    return LossSum(total * unit, count, kind="labels" if class_weight is None else "weighted labels", source=labels)


def causal_lm_head(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    shift_labels: Tensor | None = None,
    **options: Unpack[HeadOptions],
) -> LossSum:
    """Average next-token cross entropy over every supervised token, from hidden states and the head's weight.

    :func:`causal_lm` of ``F.linear(hidden, weight, bias)``, in the memory of :func:`linear_cross_entropy`.

    Args:
        hidden: (rows, length, width), what the head is given: a model's last hidden state, after its last norm.
        weight: (vocabulary, width), the head's own.
        labels: (rows, length), not shifted; ``ignore_index`` where nothing is to be learned.
        bias: (vocabulary,), the head's.
        shift_labels: (rows, length), already shifted by the collate function; taken as they are.
        **options: ``class_weight``, ``ignore_index``, ``label_smoothing``, ``softcap``, ``scale``, ``z_loss`` and
            ``memory`` of :func:`linear_cross_entropy`.

    Raises:
        LossError: unless exactly one of labels and shift_labels is given, or as :func:`linear_cross_entropy`.

    Example:
        >>> import torch, wholebatch as wb
        >>> head = torch.nn.Linear(8, 5)
        >>> wb.losses.causal_lm_head(torch.zeros(1, 3, 8), head.weight, torch.tensor([[1, 2, 3]]), head.bias).count
        2.0
    """
    source, targets = shifted(labels, shift_labels, options.get("ignore_index", -100), "causal_lm_head")
    term = linear_cross_entropy(hidden, weight, targets, bias, **options)
    kind = "shifted labels" if options.get("class_weight") is None else "weighted shifted labels"
    return LossSum(term.total, term.count, kind=kind, source=source)


def _fitting_head(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, class_weight: Tensor | None
) -> None:
    """Raise for a head that does not fit the hidden states, or is not whole."""
    given: dict[str, Any] = {
        "hidden": hidden,
        "weight": weight,
        "labels": labels,
        "bias": bias,
        "class_weight": class_weight,
    }
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor) and (tensor is not None or name in ("hidden", "weight", "labels")):
            raise LossError(
                f"{name} is {describe(tensor)}; pass a tensor: head.weight, head.bias of a torch.nn.Linear."
            )
        if hasattr(tensor, "__tensor_flatten__"):
            raise LossError(
                f"{name} is a {type(tensor).__name__}: cut over ranks, or packed. The loss needs it whole, as it is "
                "inside of the forward of the module that owns it. Call linear_cross_entropy there, or pass "
                f"{name}.full_tensor(grad_placements=...)."
            )
    floating(hidden, "hidden")
    floating(weight, "weight")
    if weight.dim() != 2 or hidden.dim() < 2 or hidden.shape[-1] != weight.shape[1]:
        raise LossError(
            f"hidden of shape {tuple(hidden.shape)} and weight of shape {tuple(weight.shape)} do not fit: pass "
            "(rows, ..., width) and (vocabulary, width), as torch.nn.Linear keeps it."
        )
    for name in ("bias", "class_weight"):
        tensor = given[name]
        if tensor is not None and tensor.shape != weight.shape[:1]:
            raise LossError(
                f"{name} of shape {tuple(tensor.shape)} does not fit a vocabulary of {len(weight)}: pass one a class."
            )
    _multiplied(hidden, weight, bias)
    if class_weight is not None and class_weight.requires_grad:
        raise LossError("class_weight requires a gradient, and gets none here. Pass class_weight.detach().")


def _multiplied(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise unless hidden states and head have a product: in one type, on one device, dense."""
    double = torch.float64 in (hidden.dtype, weight.dtype)  # autocast leaves it as it is
    if hidden.dtype != weight.dtype and (double or not torch.is_autocast_enabled(hidden.device.type)):
        raise LossError(
            f"hidden is {hidden.dtype} and weight {weight.dtype}: their product has no type"
            f"{'' if double else ' without torch.autocast'}. Pass hidden.to(weight.dtype)."
        )
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and floating(tensor, name).device != hidden.device:
            raise LossError(
                f"{name} is on {tensor.device} and hidden on {hidden.device}. Pass hidden.to({name}.device)."
            )
    if {hidden.layout, weight.layout} != {torch.strided}:
        raise LossError(f"hidden is {hidden.layout} and weight {weight.layout}; pass dense ones: weight.to_dense().")


def _product_type(hidden: Tensor) -> torch.dtype:
    """Name the type in which hidden states and head are multiplied here."""
    device = hidden.device.type
    chosen = torch.is_autocast_enabled(device) and hidden.dtype != torch.float64
    return torch.get_autocast_dtype(device) if chosen else hidden.dtype


def _number(value: object, name: str, least: float = -math.inf, most: float = math.inf) -> float:
    if not isinstance(value, Real):
        raise LossError(
            f"{name} is {describe(value)}; here it is a number. A scale that is learned goes onto the hidden states: "
            "linear_cross_entropy(hidden * scale, weight, labels)."
        )
    number = float(value)
    if not (math.isfinite(number) and least <= number <= most):
        allowed = "finite" if math.isinf(least) else "above 0, and finite" if math.isinf(most) else "from 0 to 1"
        raise LossError(f"{name} is {value}; it must be {allowed}.")
    return number


def _normalised(class_weight: Tensor) -> tuple[Tensor, Tensor]:
    """Bring class weights to at most 2 by a power of two: no sum of half numbers depends on what they are told in.

    Returns:
        The weights, and what they are told in.
    """
    unit = torch.exp2(torch.floor(torch.log2(class_weight.abs().amax())))
    unit = torch.where((unit > 0) & unit.isfinite(), unit, 1.0)
    return class_weight / unit, unit
