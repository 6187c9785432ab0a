"""Why a gradient is not the whole batch's: what was measured, put into words, with its cause and the change."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.comparison import Comparison
from wholebatch.detector import find_coupling
from wholebatch.errors import LossError, SplitError
from wholebatch.finding import Change, Finding
from wholebatch.gradient import LossFunction
from wholebatch.reference import Gradients, Reference, hooks_of, rows_or_one
from wholebatch.survey import uses_batch_statistics


def counts_differ(truth: Reference, in_pieces: Reference) -> bool:
    """Tell whether the pieces state other items than the whole batch does."""
    pairs = zip(truth.items, in_pieces.items, strict=False)
    kept = [(a, b) for a, b in pairs if not (a == 1.0 and b == in_pieces.pieces)]
    return any(abs(a - b) > 1e-6 * max(abs(a), 1.0) for a, b in kept)


def unstable(first: float, again: float) -> Finding:
    """The same rows under the same draws give different losses."""
    return Finding(
        "answers-differ",
        "the same rows under the same draws give different losses",
        f"{first:.9g}, then {again:.9g}",
        0.5,
        None,
        Change(
            "loss_fn(model, micro_batch)",
            "torch.use_deterministic_algorithms(True)  # or remove what changes with calls",
        ),
        "A state that moves with each call (a counter, a queue, an average) makes pieces depend on their order.",
    )


def miscounted(truth: Reference, in_pieces: Reference, size: Comparison) -> Finding:
    """The items that pieces state don't add up to those of the whole batch."""
    return Finding(
        "items-do-not-add-up",
        f"the pieces state {in_pieces.items} items together, the whole batch {truth.items}",
        str(size),
        max(size.error, 0.02),
        None,
        Change("wb.from_mean(outputs.loss, items=n)", "wb.from_mean(outputs.loss, items=what_this_loss_divided_by)"),
        "A count must be additive over rows: labels after the shift, weights actually used.",
    )


def padding(size: Comparison) -> Finding:
    """Rows that are padded less say something else."""
    return Finding(
        "padding-counts",
        "pieces are padded to their own longest row, and the same rows padded as in the whole batch give its gradient",
        str(size),
        max(size.error, 0.02),
        None,
        Change("loss_fn(model, micro_batch)", "wb.mean(values, weights=mask)  # and the mask for the model, too"),
        "What a model or a loss makes of padding changes with its width; masked, it makes nothing of it.",
    )


def nothing(truth: Reference) -> Finding:
    """A gradient of zeros is the same however it was made."""
    return Finding(
        "nothing-to-compare",
        "the gradient of the whole batch is zero, so nothing has been compared",
        f"{len(truth.gradients)} gradients, items {truth.items}" if truth.items else "the loss function said nothing",
        0.5,
        None,
        Change("wb.check(model, loss_fn, batch)", "wb.check(model, loss_fn, a_batch_with_something_to_learn_from)"),
        "A loss function that returns None, or labels that are all ignored, is exact in any pieces.",
    )


def bent_by_hooks(model: nn.Module, gradients: Gradients, scales: Sequence[float]) -> list[str]:
    """Name the parameters whose hooks don't do to a sum what they do to its parts, tried on multiples of gradients."""
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and hooks_of(parameter)
        if not all(adds_up(parameter, scale * gradients[name]) for scale in scales)
    ]


def adds_up(parameter: Tensor, gradient: Tensor) -> bool:
    """Tell whether the hooks of a parameter give for a gradient the sum of what they give for two parts of it."""
    gradient = gradient.to(parameter.device)
    shares = torch.linspace(-1, 2, gradient.numel(), dtype=gradient.real.dtype, device=gradient.device)
    part = gradient * shares.view_as(gradient)
    whole, *parts = (_through_hooks(parameter, each) for each in (gradient, part, gradient - part))
    return bool((sum(parts) - whole).abs().max() <= 1e-6 * max(float(each.abs().max()) for each in (whole, *parts)))


def _through_hooks(parameter: Tensor, gradient: Tensor) -> Tensor:
    for hook in hooks_of(parameter):
        changed = hook(gradient.clone())
        gradient = gradient if changed is None else changed
    return gradient


def hooked(names: Sequence[str], size: Comparison) -> Finding:
    """A hook sees the gradient of one piece, and does something to it that does not add up."""
    several = (
        f"{len(names)} parameters (first: {names[0]!r}) have hooks" if len(names) > 1 else f"{names[0]!r} has a hook"
    )
    return Finding(
        "hooks-see-pieces",
        f"{several} that clips, or adds, or otherwise does not act on a sum as on its parts; it sees pieces",
        str(size),
        max(size.error, 0.02),
        None,
        Change("parameter.register_hook(clip)", "wb.Step(..., max_grad_norm=...)  # or clip after wb.backward"),
        "A hook that scales or masks stays exact; one that clips belongs behind the last micro-batch.",
    )


def coupled(model: nn.Module, pieces: Sequence[Any], size: Comparison) -> Finding | None:
    """Name BatchNorm layers as the place where rows should meet; None if there are none."""
    layers = [name for name, module in model.named_modules() if uses_batch_statistics(module)]
    if not layers:
        return None
    rows = rows_or_one(pieces[0])
    what = f"{len(layers)} BatchNorm layers (first: '{layers[0]}') normalise pieces of {rows} rows by themselves"
    return meeting(what, str(size), size.error, 'batch_norm="exact"')


def meeting(
    what: str,
    amount: str,
    error: float,
    into: str = "wb.coupled_backward(model, encode, loss_fn, batch, micro_batch_size=...)",
) -> Finding:
    """Rows of different pieces should meet and don't."""
    return Finding(
        "rows-meet",
        what,
        amount,
        max(error, 0.02),
        None,
        Change("wb.backward(model, loss_fn, batch, micro_batch_size=...)", into),
        "The pieces, read plainly, give the same gradient as backward: what differs is what they are pieces of.",
    )


def where_rows_meet(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    whole: Sequence[str] = (),
    batch_norm_is_exact: bool = False,
) -> str | None:
    """Return what the detector says of a copy of the model, None if nothing meets or nothing could be tried."""
    twin = copy.deepcopy(model)
    for module in twin.modules():
        if batch_norm_is_exact and uses_batch_statistics(module):
            module.eval()
    try:
        found = find_coupling(twin, loss_fn, batch, whole)
    except (SplitError, LossError, TypeError):  # a batch that the detector can't cut in halves
        return None
    return str(found) if found else None


def unexplained(size: Comparison, why: str) -> Finding:
    """A difference whose cause is not known."""
    return Finding(
        "unexplained",
        "the gradient is not the whole batch's, and the cause is not known",
        f"{size}; {why}",
        max(size.error, 0.02),
        None,
        Change("", "report.by_parameter  # shows where the difference lies"),
    )
