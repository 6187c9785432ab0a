"""The cross entropy of a linear head, chunk by chunk: of the logits no more than one chunk's are ever there.

A token's loss, with logits ``z = cap * tanh(scale * (W h + b) / cap)``, is

    w[y] * ((1 - s) * -log p[y] + z_loss * logsumexp(z)^2) + s / V * sum over v of w[v] * -log p[v]

for class weights ``w`` and a smoothing ``s``. The gradient of their sum is linear in what comes in at the sum, one
number: so it is made in the forward, while a chunk's logits are there, and the backward multiplies by that number.
Three matrix products a chunk, as many as logits that are kept; a fourth would be needed to compute them again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import Function

from wholebatch.errors import LossError

LEAST, MOST = 16 * 2**20, 512 * 2**20
"""Bytes of a chunk where nobody says: as many as the head's gradient takes, within these."""


class Targets(NamedTuple):
    """What the tokens are held against, in the precision of the sums.

    Attributes:
        classes: (tokens,), 0 where nothing counts.
        counted: (tokens,), 1 where a label counts and 0 elsewhere.
        weights: (tokens,), the weight of the label's class, 0 where nothing counts.
        class_weight: (vocabulary,), or None.
    """

    classes: Tensor
    counted: Tensor
    weights: Tensor
    class_weight: Tensor | None


@dataclass(frozen=True)
class TokenLoss:
    """How a token's loss follows from its hidden state, and how many tokens are looked at together.

    Attributes:
        wanted: whether hidden states, weight and bias are to have a gradient.
        dtype: of the matrix products.
        memory: bytes of a chunk's logits; None chooses.
    """

    label_smoothing: float
    softcap: float | None
    scale: float
    z_loss: float
    wanted: tuple[bool, bool, bool]
    dtype: torch.dtype
    memory: int | None

    def summed(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets) -> _Sums:
        """Add the tokens' losses up, and with them the gradient of their sum."""
        chunk = _Chunk(self, hidden.to(self.dtype), weight.to(self.dtype), bias, targets)
        with _without_autocast(hidden.device.type):
            for start in range(0, len(hidden), chunk.tokens):
                chunk.add(slice(start, start + chunk.tokens))
        return chunk.sums

    def tokens(self, weight: Tensor, count: int) -> int:
        """Work out how many tokens make a chunk, all chunks alike."""
        wide = wide_of(self.dtype).itemsize
        memory = self.memory or min(max(weight.numel() * wide, LEAST), MOST)
        each = wide * (1 if self.softcap is None else 2) + (self.dtype.itemsize if self.dtype.itemsize < wide else 0)
        most = max(1, memory // max(len(weight) * each, 1))
        return math.ceil(count / max(1, math.ceil(count / most)))


class _Sums(NamedTuple):
    """The sum of the losses, and its gradients before they are multiplied, those of weight and bias in wide numbers."""

    loss: Tensor
    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


class _Chunk:
    """Adds up chunk after chunk, in the same buffers."""

    def __init__(self, how: TokenLoss, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets) -> None:
        self.tokens = max(1, how.tokens(weight, len(hidden)))
        self._how, self._hidden, self._weight, self._bias, self._targets = how, hidden, weight, bias, targets
        wide = wide_of(how.dtype)
        size = (min(self.tokens, len(hidden)), len(weight))
        self._logits = hidden.new_empty(size, dtype=wide)
        self._slope = None if how.softcap is None or not any(how.wanted) else torch.empty_like(self._logits)
        self._half = how.dtype != wide
        self._narrow = hidden.new_empty(size) if self._half else self._logits
        self.sums = _Sums(
            hidden.new_zeros((), dtype=wide),
            torch.empty_like(hidden) if how.wanted[0] else None,
            torch.zeros_like(weight, dtype=wide, memory_format=torch.contiguous_format) if how.wanted[1] else None,
            weight.new_zeros(len(weight), dtype=wide) if how.wanted[2] else None,
        )
        everywhere = None if targets.class_weight is None else targets.class_weight.sum()
        self._all_weights = len(weight) if everywhere is None else everywhere

    def add(self, where: slice) -> None:
        """Add the tokens of a chunk."""
        targets = self._targets
        classes, counted, weights = (t[where, None] for t in (targets.classes, targets.counted, targets.weights))
        hidden = torch.where(counted.bool(), self._hidden[where], 0.0)  # what does not count need not be a number
        logits, slope = self._computed(hidden)
        peaks = self._weighted(counted, weights, classes, logits)
        if not any(self._how.wanted):
            return
        chosen = (1 - self._how.label_smoothing) * weights
        by_class = self._how.label_smoothing / len(self._weight) * counted
        logits.mul_(
            (chosen + by_class * self._all_weights + 2 * self._how.z_loss * peaks.log_sum * weights) / peaks.sum
        )
        logits.scatter_add_(1, classes, -chosen)
        if self._how.label_smoothing:
            logits.sub_(by_class if targets.class_weight is None else by_class * targets.class_weight)
        if slope is not None:
            logits.mul_(slope)
        self._gather(where, hidden, logits, 1 + 2 * self._how.z_loss * peaks.log_sum.abs().amax())

    def _computed(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """Compute the logits, and the slope of the cap at each."""
        narrow, logits = self._narrow[: len(hidden)], self._logits[: len(hidden)]
        torch.mm(hidden, self._weight.T, out=narrow)
        if self._half:
            logits.copy_(narrow)
        if self._bias is not None:
            logits.add_(self._bias)
        if self._how.scale != 1:
            logits.mul_(self._how.scale)
        if self._how.softcap is None:
            return logits, None
        logits.div_(self._how.softcap).tanh_()
        slope = None if self._slope is None else self._slope[: len(hidden)]
        if slope is not None:
            torch.mul(logits, logits, out=slope).neg_().add_(1)
        return logits.mul_(self._how.softcap), slope

    def _weighted(self, counted: Tensor, weights: Tensor, classes: Tensor, logits: Tensor) -> _Peaks:
        """Add the chunk's losses, and leave in its logits their exponentials."""
        smoothing, class_weight = self._how.label_smoothing, self._targets.class_weight
        chosen = logits.gather(1, classes)
        if smoothing:
            every = logits.sum(1, keepdim=True) if class_weight is None else (logits @ class_weight)[:, None]
        largest = logits.amax(1, keepdim=True)
        sums = logits.sub_(largest).exp_().sum(1, keepdim=True)
        log_sums = largest + sums.log()
        losses = weights * ((1 - smoothing) * (log_sums - chosen) + self._how.z_loss * log_sums.square())
        if smoothing:
            losses += smoothing / len(self._weight) * counted * (self._all_weights * log_sums - every)
        # A class that is never said, its bias minus infinity, may stand in for a label that does not count.
        self.sums.loss.add_(torch.where(counted.bool(), losses, 0.0).sum())
        return _Peaks(sums, log_sums)

    def _gather(self, where: slice, hidden: Tensor, by_logit: Tensor, most: Tensor) -> None:
        """Add what a chunk gives to the gradients, from that by its logits before cap and scale.

        Args:
            most: no number by a logit is larger, before the scale.
        """
        if self._how.scale != 1:
            by_logit.mul_(self._how.scale)
        narrow = self._narrow[: len(hidden)]
        if self._half:
            narrow.copy_(by_logit)
        if self.sums.hidden is not None:
            torch.mm(narrow, self._weight, out=self.sums.hidden[where])
        if self.sums.weight is not None and self._half:
            self.sums.weight.add_(_in_range(narrow.T, hidden, most * abs(self._how.scale)))
        elif self.sums.weight is not None:
            self.sums.weight.addmm_(narrow.T, hidden)
        if self.sums.bias is not None:
            self.sums.bias.add_(by_logit.sum(0))


class _Peaks(NamedTuple):
    """Of each token: the sum of the exponentials, less the largest logit, and the logarithm of the whole sum."""

    sum: Tensor
    log_sum: Tensor


def _in_range(by_logit: Tensor, hidden: Tensor, most: Tensor) -> Tensor:
    """Multiply half numbers, of which float16 ends at 65,504: a word's sum over a chunk's tokens could pass it.

    Returns:
        The product, in the precision of the sums.
    """
    if hidden.dtype is not torch.float16:
        return torch.mm(by_logit, hidden)
    largest = (hidden.abs().amax().to(most) * most * len(hidden)).clamp(min=torch.finfo(most.dtype).tiny)
    room = torch.exp2(torch.floor(torch.log2(torch.finfo(hidden.dtype).max / largest)))
    room = room.clamp(max=1.0)  # a power of two takes no digit away
    return torch.mm(by_logit, hidden * room.to(hidden.dtype)).to(most.dtype).div_(room)


class HeadLoss(Function):
    """The sum of the tokens' losses, with its gradient made in the forward."""

    @staticmethod
    def forward(
        ctx: Any, how: TokenLoss, hidden: Tensor, weight: Tensor, bias: Tensor | None, *targets: Tensor | None
    ) -> Tensor:
        sums = how.summed(hidden, weight, bias, Targets(*targets))  # type: ignore[arg-type]
        ctx.how, ctx.spent = how, False
        # All of it through the hooks of whoever counts, moves or drops what is saved, a checkpoint among them.
        ctx.save_for_backward(hidden, weight, bias, *targets, *sums[1:])
        return sums.loss

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise LossError(
                "linear_cross_entropy makes its gradient in the forward, and that gradient has none of its own: "
                "create_graph=True asks for one. Take wb.losses.cross_entropy(F.linear(hidden, weight), labels) where "
                "the loss is differentiated twice."
            )
        hidden, weight, bias, *rest = ctx.saved_tensors
        gradients = rest[4:]
        if ctx.spent:  # a graph that was kept goes back a second time: the first took the sums away
            gradients = ctx.how.summed(hidden, weight, bias, Targets(*rest[:4]))[1:]
        ctx.spent = True
        try:
            shares = [_times(*pair, incoming[0]) for pair in zip(gradients, (hidden, weight, bias), strict=True)]
        except RuntimeError as error:
            if not str(error).startswith("vmap:"):
                raise
            raise LossError(f"Several gradients at once reached linear_cross_entropy. {_BACKWARD_ALONE}") from error
        return None, *shares, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise LossError(f"Forward-mode differentiation reached linear_cross_entropy. {_BACKWARD_ALONE}")


_BACKWARD_ALONE = (
    "It makes the gradient that one backward asks for, while its logits are there. Under torch.func, in forward mode "
    "and for several gradients at once take wb.losses.cross_entropy(F.linear(hidden, weight), labels)."
)


def refuse_transforms(tensors: Iterable[Any]) -> None:
    """Raise for tensors that a transform of torch.func has wrapped."""
    if any(isinstance(each, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(each) for each in tensors):
        raise LossError(f"A transform of torch.func reached linear_cross_entropy. {_BACKWARD_ALONE}")


def wide_of(dtype: torch.dtype) -> torch.dtype:
    """Name the type in which numbers of another one are added up."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def _times(gradient: Tensor | None, like: Tensor | None, incoming: Tensor) -> Tensor | None:
    """Multiply in place: a head's gradient is as large as the head, and what was saved of it is read no more."""
    if gradient is None or like is None:
        return None
    return gradient.data.mul_(incoming).to(like.dtype)


def _without_autocast(device: str) -> AbstractContextManager[Any]:
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()
