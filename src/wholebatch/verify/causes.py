"""Why a gradient is not the whole batch's: what was measured, put into words, with its cause and the change."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from wholebatch.first_window.reasons import DRAWN, HOOKS, ITEMS, MEETING, PADDING, REDRAWN, STATE, STEPS, Reason
from wholebatch.model.comparison import Comparison
from wholebatch.model.inspection import uses_batch_statistics
from wholebatch.verify.finding import Change, Finding
from wholebatch.verify.reference import Reference


def counts_differ(stated: Sequence[float], whole: Sequence[float]) -> bool:
    """Tell whether items differ by more than rounding, or in number."""
    return len(stated) != len(whole) or any(
        abs(a - b) > 1e-6 * max(abs(a), abs(b), 1.0) for a, b in zip(stated, whole, strict=True)
    )


def unstable(first: float, again: float, moved: Sequence[str] = ()) -> Finding:
    """The same rows under the same draws give different losses."""
    places = f"; {', '.join(moved[:3])} moves with each call" if moved else ""
    what = f"the same rows under the same draws give different losses{places}"
    return _for(STATE, what, f"{first:.9g}, then {again:.9g}", 0.5)


def _for(reason: Reason, what: str, amount: str, harm: float) -> Finding:
    """Say what was measured, and what is wrong with it in the words that the first window has for it, too."""
    return Finding(reason.rule, what, amount, harm, None, Change(reason.out, reason.into), reason.why)


def miscounted(
    whole: Sequence[float],
    in_micro_batches: Sequence[float],
    size: Comparison,
    held: Sequence[float] = (),
    weights: Sequence[float] = (),
    shifted: bool = False,
) -> Finding:
    """The items that micro-batches state are not those that their losses were divided by."""
    what = f"the micro-batches state {_listed(in_micro_batches)} items together, the whole batch {_listed(whole)}"
    if shifted:
        what = (
            f"{what}; labels counted before the shift: each row states one item more than its loss was divided by "
            f"(the micro-batches state {_listed(held)})"
        )
    elif weights:
        what = (
            f"{what}; micro-batches that state {_listed(held)} make up the whole batch with weights {_listed(weights)}"
        )
    return _for(ITEMS, what, str(size), max(size.error, 0.02))


def _listed(numbers: Sequence[float]) -> str:
    shown = ", ".join(f"{number:.6g}" for number in numbers[:8])
    return f"({shown}{', ...' if len(numbers) > 8 else ''})"


def same_shape(shape: tuple[int, ...], rows: int, part: int, size: Comparison) -> Finding:
    """A loss that has as many values for few rows as for many is no list of rows."""
    return Finding(
        "loss-mixes-rows",
        f"the loss has {shape} values for {rows} rows and {shape} for {part}: one a class or a feature, not one a row",
        str(size),
        max(size.error, 0.02),
        None,
        Change(
            "wb.backward(model, loss_fn, batch, micro_batch_size=...)",
            "wb.coupled_backward(model, encode, loss_fn, batch, micro_batch_size=...)",
        ),
        "Each of these values is made of all rows of a micro-batch, and a mean over micro-batches is another one.",
    )


def through_rows(size: Comparison) -> Finding:
    """A list with one entry a row, whose entries are as long as the batch."""
    return Finding(
        "list-cut-through",
        "a list with one entry a row was cut through its entries; cut by entries, it gives the whole batch's gradient",
        str(size),
        max(size.error, 0.02),
        None,
        Change(
            "wb.backward(model, loss_fn, batch, micro_batch_size=...)",
            "wb.backward(model, loss_fn, samples, micro_batch_size=..., collate=make_batch)",
        ),
        "Entries that are as long as the batch look like the columns of a batch.",
    )


def behind_time(rows: int, size: Comparison) -> Finding:
    """Rows on the second dimension, as of a recurrent network without ``batch_first``."""
    return Finding(
        "time-cut-through",
        f"the first dimension was cut; cut on the second one, which has {rows}, it gives the whole batch's gradient",
        str(size),
        max(size.error, 0.02),
        None,
        Change("{'x': x}  # (time, rows, ...)", "{'x': x.transpose(0, 1)}  # and turned back in loss_fn"),
        "Rows lie behind time, as recurrent networks take them without batch_first=True.",
    )


def fails_in_micro_batches(error: Exception, sizes: str, places: str) -> Finding:
    """The whole batch runs, and a micro-batch of it does not; perhaps as it is cut through what belongs together."""
    return Finding(
        "fails-in-pieces",
        f"the whole batch runs, a micro-batch (of {sizes}) does not",
        f"{type(error).__name__}: {' '.join(str(error).split()):.200}" + (f". {places}" if places else ""),
        1.0,
        None,
        Change("wb.backward(model, loss_fn, batch, micro_batch_size=...)", "wb.backward(model, loss_fn, batch)"),
        places or "The loss function asks for rows that lie in another micro-batch, or for more of them.",
    )


def cleared() -> Finding:
    """The loss function clears gradients, so that of a window the last micro-batch remains."""
    return Finding(
        "loss-clears-gradients",
        "the loss function clears gradients, which wait there for the window's end",
        "of several micro-batches, those before are lost",
        1.0,
        None,
        Change("optimizer.zero_grad()  # inside of loss_fn", "optimizer.zero_grad()  # after optimizer.step()"),
    )


def goes_backward() -> Finding:
    """The loss function calls backward by itself, and returns the loss as well."""
    return Finding(
        "loss-goes-backward",
        "gradients arrive while the loss function runs: it calls backward() itself",
        "they are counted beside those of the loss that it returns",
        1.0,
        None,
        Change("loss.backward()  # inside of loss_fn", "return loss  # unreduced; going backward is done for you"),
    )


def weights_moved(names: Sequence[str], optimizers: Sequence[str]) -> Finding:
    """Parameters are others than before the window, and no step has been asked for."""
    who = f"{optimizers[0]} steps" if optimizers else "a hook or the loss function writes to them"
    moved = f"{len(names)} parameters (first: {names[0]!r}) move while the window runs: {who}"
    amount = "the micro-batches before the last are of other weights, or are applied one by one"
    return _for(STEPS, moved if names else f"{who} while the window runs", amount, 1.0)


def batch_written(names: Sequence[str]) -> Finding:
    """What the caller handed over is not what it was."""
    return Finding(
        "batch-written-to",
        f"the caller's batch is written to (first: its tensor of shape {names[0]})",
        f"{len(names)} tensors",
        0.5,
        None,
        Change("value.mul_(2)", "value = value * 2  # on a copy of its own"),
        "Micro-batches are views of the batch: what is written into them stays for the next epoch.",
    )


def lost_in_checkpoint(names: Sequence[str]) -> Finding:
    """A reentrant checkpoint whose inputs need no gradient gives none to what is inside."""
    return Finding(
        "gradient-lost-in-checkpoint",
        f"{len(names)} parameters (first: {names[0]!r}) get no gradient: torch says that a reentrant checkpoint is "
        "given inputs of which none requires one",
        "their .grad stays None, in the whole batch too",
        1.0,
        None,
        Change("checkpoint(block, x, use_reentrant=True)", "checkpoint(block, x, use_reentrant=False)"),
    )


def redrawn(operators: Sequence[str]) -> Finding:
    """A checkpoint that draws anew when it runs its forward again."""
    return Finding(
        REDRAWN.rule,
        f"{', '.join(operators)}: {REDRAWN.why.rstrip('.')}",
        "seen in the plain reading of the whole batch",
        1.0,
        None,
        Change(REDRAWN.out, REDRAWN.into),
    )


def none_here(names: Sequence[str], size: Comparison) -> Finding:
    """The plain whole batch gives a gradient where the window gives none."""
    return Finding(
        "no-gradient-here",
        f"{len(names)} parameters (first: {names[0]!r}) get a gradient from the whole batch and none from the window",
        str(size),
        max(size.error, 0.02),
        None,
        Change("", "report.by_parameter  # shows where the difference lies"),
    )


def shown_otherwise(names: Sequence[str]) -> Finding:
    """Hooks read gradients before the window has brought them to their size."""
    return Finding(
        "hooks-see-another-size",
        f"hooks in {len(names)} places (first: {names[0]!r}) are shown gradients of another size than "
        f"micro-batches have",
        "a provisional number divides them until the window ends",
        0.5,
        None,
        Change(
            "wb.backward(model, loss_fn, batch, micro_batch_size=...)",
            "wb.backward(..., items=lambda micro_batch: len(micro_batch['labels']))",
        ),
        "Per-sample clipping, curvature and noise scales read them there; with items= they are right from the start.",
    )


def another_loss(ours: float, whole: float) -> Finding:
    """The gradient agrees, and the loss that is reported does not."""
    return Finding(
        "loss-differs",
        "the window reports another loss than the whole batch has",
        f"{ours:.9g} against {whole:.9g}",
        0.1,
        None,
        Change("wb.once(value)", "wb.mean(values)  # a value that is made of rows is another one in each micro-batch"),
    )


def drawn(places: Sequence[str], size: Comparison) -> Finding:
    """Rows that draw for themselves do not add up, though with the same numbers for each row they do."""
    what = (
        f"each row with random numbers of its own ({', '.join(places[:3])}), micro-batches give another gradient than "
        "the whole batch; with the same numbers for each row they give its own"
    )
    return _for(DRAWN, what, str(size), max(size.error, 0.02))


def other_with_draws(size: Comparison) -> Finding:
    """With draws on, the window is not the sum of its micro-batches run with the draws they made."""
    return Finding(
        "draws-differ",
        "with draws on, the window gives another gradient than its micro-batches run again with the draws they made",
        str(size),
        max(size.error, 0.02),
        None,
        Change("", "report.by_parameter  # shows where the difference lies"),
    )


def other_buffers(names: Sequence[str]) -> Finding:
    """Buffers stand elsewhere after the window than after the whole batch."""
    return Finding(
        "buffers-differ",
        f"{len(names)} buffers (first: {names[0]!r}) stand elsewhere after the window than after the whole batch",
        "running values follow each micro-batch",
        0.1,
        None,
        Change("wb.backward(...)", 'wb.backward(..., batch_norm="exact")  # or move them in after_step'),
    )


def padding(size: Comparison) -> Finding:
    """Rows that are padded less say something else."""
    what = (
        "micro-batches are padded to their own longest row, and the same rows padded as in the whole batch give its "
        "gradient"
    )
    return _for(PADDING, what, str(size), max(size.error, 0.02))


def nothing(truth: Reference) -> Finding:
    """A gradient of zeros is the same however it was made."""
    return Finding(
        "nothing-to-compare",
        "the gradient of the whole batch is zero up to rounding, so nothing has been compared",
        f"{len(truth.gradients)} gradients, items {truth.items}" if truth.items else "the loss function said nothing",
        0.5,
        None,
        Change("wb.check(model, loss_fn, batch)", "wb.check(model, loss_fn, a_batch_with_something_to_learn_from)"),
        "A loss function that returns None, or labels that are all ignored, is exact in any micro-batches.",
    )


def hooked(names: Sequence[str], size: Comparison) -> Finding:
    """A hook sees the gradient of one micro-batch, and does something to it that does not add up."""
    several = (
        f"{len(names)} parameters (first: {names[0]!r}) have hooks" if len(names) > 1 else f"{names[0]!r} has a hook"
    )
    what = f"{several} that clips, or adds, or otherwise does not act on a sum as on its parts; it sees micro-batches"
    return _for(HOOKS, what, str(size), max(size.error, 0.02))


def coupled(model: nn.Module, sizes: str, size: Comparison) -> Finding | None:
    """Name BatchNorm layers as the place where rows should meet; None if there are none."""
    layers = [name for name, module in model.named_modules() if uses_batch_statistics(module)]
    if not layers:
        return None
    what = f"{len(layers)} BatchNorm layers (first: '{layers[0]}') normalise micro-batches of {sizes} by themselves"
    return meeting(what, str(size), size.error, 'batch_norm="exact"')


def meeting(what: str, amount: str, error: float, into: str = MEETING.into) -> Finding:
    """Rows of different micro-batches should meet and don't."""
    return _for(MEETING._replace(into=into), what, amount, max(error, 0.02))


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
