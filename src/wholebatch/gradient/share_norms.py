"""The squared length of every micro-batch's share of the gradient, taken as it arrives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from wholebatch.gradient.setup import Setup
from wholebatch.loss.counts import Count, precise, tensor_of
from wholebatch.loss.terms import ParsedLoss, TermKey
from wholebatch.loss.totals import KNOWN, LossTotals, quotient
from wholebatch.noise_scale import NoiseScale

NUMBERS = 7
"""How many numbers of a measurement are joined over ranks."""


@dataclass
class _Share:
    """What is noted of one micro-batch.

    Attributes:
        rows: how many it has.
        counts: each term's items in it.
        square: the squared length of what its backward brought; None before that, or where there was nothing.
    """

    rows: int
    counts: dict[TermKey, Count] = field(default_factory=dict)
    square: Tensor | None = None


class Unmeasured:
    """Measures nothing: what a window has whose noise nobody asked for, or asks for this time."""

    measures = False

    def __enter__(self) -> Unmeasured:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def heard(self, parsed: ParsedLoss | None, rows: int) -> None:
        """Note a micro-batch whose forward has run."""

    def begins(self, parsed: ParsedLoss) -> None:
        """Note that what arrives from now on is the share of a micro-batch."""

    def ends(self) -> None:
        """Note that all of it has arrived."""

    def scale(self, factor: Count) -> None:
        """Note that all sums have been multiplied."""

    def restart(self) -> None:
        """Forget the window so far: it begins anew."""

    def mark(self) -> int:
        """Return how many micro-batches have been noted, to rewind to."""
        return 0

    def rewind(self, mark: int) -> None:
        """Forget the micro-batches since a mark."""

    def numbers(self, sums: LossTotals) -> Tensor:
        """Return this rank's part of what is joined over ranks: zeros here, beside those of ranks that measure."""
        return torch.zeros(NUMBERS, dtype=torch.float64)

    def learn(self, numbers: Tensor, square: Tensor, sums: LossTotals, factor: Count) -> None:
        """Learn what the window has shown over all ranks."""

    def over(self) -> None:
        """Note that the window has come to its end."""


class Passing(Unmeasured):
    """Counts a window that is not measured.

    Args:
        reason: why, where it was due.
    """

    def __init__(self, noise: NoiseScale, reason: str | None = None) -> None:
        self._noise, self._reason = noise, reason

    def over(self) -> None:
        """Count it."""
        self._noise.passed(reason=self._reason)


class ShareNorms(Unmeasured):
    """Listens to the gradients of the parameters while micro-batches go back.

    Args:
        noise: takes what is found.
        setup: of the window.
        parameters: whose gradient is measured.
    """

    measures = True

    def __init__(self, noise: NoiseScale, setup: Setup, parameters: Sequence[Tensor]) -> None:
        self._noise, self._setup, self._parameters = noise, setup, parameters
        # Of a model on several devices, that of its first parameter: nothing is read back to the host.
        self._device = setup.model_info.device or next((p.device for p in parameters), torch.device("cpu"))
        self._wide = precise(self._device)
        self._shares: list[_Share] = []
        self._waiting: dict[int, _Share] = {}
        self._now: _Share | None = None
        self._lengths: dict[int, Tensor] = {}
        self._in_parts = self._once = False
        self._found: Tensor | None = None
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> ShareNorms:
        leaves = {id(leaf): leaf for leaf in (*self._parameters, *self._setup.ranks.leaves())}
        self._hooks = [leaf.register_hook(partial(self._arrived, key)) for key, leaf in leaves.items()]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()

    def heard(self, parsed: ParsedLoss | None, rows: int) -> None:
        """Note a micro-batch whose forward has run."""
        share = _Share(rows)
        self._shares.append(share)
        if parsed is not None:
            share.counts = {key: term.count for key, term in parsed.terms.items()}
            self._waiting[id(parsed)] = share

    def begins(self, parsed: ParsedLoss) -> None:
        """Note that what arrives from now on is the share of a micro-batch."""
        self._now = self._waiting.pop(id(parsed), None)
        self._lengths.clear()

    def ends(self) -> None:
        """Join the lengths of all parameters' parts."""
        if self._now is not None and self._lengths:
            lengths = [length.to(self._device, self._wide) for length in self._lengths.values()]
            self._now.square = torch.stack(lengths).square().sum()
        self._now = None

    def scale(self, factor: Count) -> None:
        """Note that all sums have been multiplied."""
        for share in self._shares:
            if share.square is not None:
                share.square = share.square * factor * factor

    def restart(self) -> None:
        """Forget the window so far."""
        self._shares.clear()
        self._waiting.clear()

    def mark(self) -> int:
        """Return how many micro-batches have been noted."""
        return len(self._shares)

    def rewind(self, mark: int) -> None:
        """Forget the micro-batches since a mark."""
        del self._shares[mark:]

    def numbers(self, sums: LossTotals) -> Tensor:
        """Add up over this rank's micro-batches what follows from their lengths, rows and items.

        Returns:
            Sums of |h|^2 / r, of u^2 / r and of u; the numbers of micro-batches and of rows; how often a gradient came
            in parts; 1. Here u is the fraction of a micro-batch in the terms that count their items.
        """
        counted = {key for key, kind in sums.schema.terms if kind not in KNOWN}
        found = torch.zeros(NUMBERS, dtype=self._wide, device=self._device)
        for share in self._shares:
            fraction = self._fraction(share, sums, counted)
            square = 0.0 if share.square is None else share.square
            found[0] += square / share.rows
            found[1] += fraction * fraction / share.rows
            found[2] += fraction
        found[0] /= self._setup.ranks.divides**2
        rows = sum(share.rows for share in self._shares)
        found[3:] += torch.tensor([len(self._shares), rows, self._in_parts, 1], dtype=found.dtype).to(found.device)
        return found

    def learn(self, numbers: Tensor, square: Tensor, sums: LossTotals, factor: Count) -> None:
        """Work out the two equations' numbers, and hand them on unread.

        Args:
            numbers: the sum of all ranks' :meth:`numbers`.
            square: the squared length of the whole batch's gradient.
            sums: of all ranks.
            factor: by which shares and gradient are still off.
        """
        shares, squares, fractions, micro_batches, rows, parts, ranks = numbers.to(self._device).unbind()
        kinds = [kind for _, kind in sums.schema.terms]
        steady = kinds.count("one") / max(len(kinds), 1)  # in terms without a count every row is as good as another
        spread = rows * squares + 2 * steady * fractions + steady**2
        unit = self._on(factor) ** 2 / self._scale(rows) ** 2
        complete = (parts == 0) & (ranks == self._setup.ranks.world)
        told = [rows * shares * unit, spread, micro_batches, rows, self._on(_items_of(sums)), square.to(rows) * unit]
        self._found = torch.stack([*told, complete.to(rows)])
        self._once = "once" in kinds

    def over(self) -> None:
        """Hand what was found on."""
        reason = "a term that exists once a batch (wb.once) is no sum over rows" if self._once else None
        self._noise.passed(None if self._once else self._found, reason)

    def _arrived(self, key: int, gradient: Tensor) -> None:
        if self._now is not None:
            self._in_parts |= key in self._lengths  # as the backwards inside of a reentrant checkpoint bring it
            self._lengths[key] = _length(gradient)

    def _fraction(self, share: _Share, sums: LossTotals, counted: set[TermKey]) -> Count:
        """Return which part of the batch's items a micro-batch has, averaged over the terms."""
        wholes = {key: sums.denominator(key, "mean") for key in counted & share.counts.keys()}
        parts = [quotient(self._on(share.counts[key]), self._on(whole)) for key, whole in wholes.items()]
        return sum(parts, start=0.0) / max(len(sums.schema.terms), 1)

    def _on(self, number: Count) -> Tensor:
        return tensor_of(number, self._device, self._wide)

    def _scale(self, like: Tensor) -> Tensor:
        """Return what the losses were multiplied with."""
        one = torch.ones_like(like)
        return one if self._setup.scaler is None else self._setup.scaler.scale(one)


def averaged(setup: Setup, also: Sequence[Tensor]) -> list[Tensor]:
    """List the parameters of model and optimizer whose gradient is one and the same on all ranks."""
    apart = {id(parameter) for parameter in setup.ranks.alone}
    found = {id(p): p for p in (*setup.model_info.parameters, *also) if p.requires_grad and id(p) not in apart}
    return list(found.values())


def share_norms(setup: Setup, also: Sequence[Tensor], meets: bool) -> Unmeasured:
    """Return what measures a window's shares, if its noise is asked for, due, and can be measured.

    Args:
        also: parameters besides those of the model.
        meets: whether rows of several micro-batches meet.
    """
    noise = setup.options.get("noise_scale")
    if noise is None:
        return Unmeasured()
    if not noise.due:
        return Passing(noise)
    parameters = averaged(setup, also)
    reason = _reason(setup, parameters, meets)
    return ShareNorms(noise, setup, parameters) if reason is None else Passing(noise, reason)


def _reason(setup: Setup, parameters: Sequence[Tensor], meets: bool) -> str | None:
    """Say why micro-batches are no samples of the gradient's noise, or their shares cannot be seen."""
    if meets or setup.ranks.meets:
        return "rows of all micro-batches meet in BatchNorm, so that no micro-batch has a gradient of its own"
    if setup.ranks.per_micro_batch:
        return 'sync="every" of a sharded model sends gradients on before they can be measured: pass sync="last"'
    if not setup.ranks.leaves() and any(hasattr(parameter, "placements") for parameter in parameters):
        return "parameters are laid out over ranks, of which each sees a part of a share"
    return None


def _length(gradient: Tensor) -> Tensor:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    wide = None if values.is_complex() else torch.promote_types(values.dtype, torch.float32)
    length: Tensor = torch.linalg.vector_norm(values.detach(), dtype=wide)
    return length


def _items_of(sums: LossTotals) -> Count:
    """Return the one denominator of a loss, not a number if it has several."""
    found = [sums.denominator(key, kind) for key, kind in sums.schema.terms if kind not in KNOWN]
    alike = len(found) == 1 or (bool(found) and all(isinstance(each, float) and each == found[0] for each in found))
    return found[0] if alike else math.nan
