"""What is wrong where micro-batches are not the batch, and the change: the same words for the first window and a check.

Who measures says what was measured; why that is wrong, and what mends it, stands here.
"""

from __future__ import annotations

from typing import NamedTuple


class Reason(NamedTuple):
    """One way in which micro-batches fail to be the batch.

    Attributes:
        rule: its short name.
        why: what is wrong, in one sentence.
        mend: the call or the change that mends it, in one sentence.
        out: a line to take out.
        into: the line to put in its place.
    """

    rule: str
    why: str
    mend: str
    out: str
    into: str

    def __str__(self) -> str:
        return f"{self.why} {self.mend}"


ITEMS = Reason(
    "items-do-not-add-up",
    "Items have to add up over rows, or the loss is not that of the batch: labels after the shift, weights in use.",
    "State what the mean was divided by: wb.from_mean(loss, items=n), or return the values themselves: "
    "wb.mean(values, weights).",
    "wb.from_mean(outputs.loss, items=n)",
    "wb.from_mean(outputs.loss, items=what_this_loss_divided_by)",
)

PADDING = Reason(
    "padding-counts",
    "The model or the loss makes something of padding, and a micro-batch is padded less than the batch.",
    "Mask it in both: an attention_mask for the model, wb.mean(values, mask) for the loss.",
    "loss_fn(model, micro_batch)",
    "wb.mean(values, weights=mask)  # and the mask for the model, too",
)

STATE = Reason(
    "answers-differ",
    "What moves with each call (a counter, a queue, an average) makes micro-batches depend on their order.",
    "What moves once a batch belongs after the step: wb.Step(..., after_step=[...]).",
    "loss_fn(model, micro_batch)",
    "Step(..., after_step=[move_on])  # what moves with calls moves once a batch",
)

STEPS = Reason(
    "steps-inside-the-window",
    "Each micro-batch would be stepped with by itself.",
    "Take the hook or the step away, and step after wb.backward, or use wb.Step; a teacher or an average that follows "
    "the model belongs after the step (after_step=).",
    "optimizer in the backward, or in loss_fn",
    "optimizer.step()  # after wb.backward, or wb.Step",
)

HOOKS = Reason(
    "hooks-see-pieces",
    "A hook or a backward of its own acts on the gradient of a micro-batch otherwise than on its rows; clipping does.",
    "Clip after the window: wb.Step(max_grad_norm=...).",
    "parameter.register_hook(clip)",
    "wb.Step(..., max_grad_norm=...)  # or clip after wb.backward",
)

MEETING = Reason(
    "rows-meet",
    "Rows meet in the model or in the loss function, by statistics of the micro-batch or pairs of its rows.",
    "wb.find_coupling(model, loss_fn, batch) says where; a loss over all rows takes wb.coupled_backward.",
    "wb.backward(model, loss_fn, batch, micro_batch_size=...)",
    "wb.coupled_backward(model, encode, loss_fn, batch, micro_batch_size=...)",
)

DRAWN = Reason(
    "draws-mix-rows",
    "Either the loss is divided by a number that is drawn, such as the places of a random mask, or numbers drawn for "
    "some rows serve others: a permutation (mixup, negatives), cat([t, 1 - t]). Micro-batches draw others than the "
    "batch, so neither is a sum over rows.",
    "Divide by what was drawn: wb.mean(values, mask), or wb.LossSum(total, mask.sum()). Numbers that bring rows "
    "together? Draw them with the batch, and they go with their rows.",
    "wb.from_mean(values[mask].mean(), items=len(rows))",
    "wb.mean(values, weights=mask)  # what is drawn counts; draw permutations with the batch",
)

SHARED = (
    "drawn once for all rows of a micro-batch, so unless it is seeded, each draws its own where the batch would draw "
    "one; for the draws as they are made, the gradient is exact. Drawn with the batch, it is the same for all"
)
"""What is said of a draw that belongs to no row."""

HELD = (
    "what is drawn there goes with no row, as its shape shows, so it was the same for each row; whether it counts or "
    "mixes rows is not shown"
)
"""What is said of a draw that could not be given to rows."""

REDRAWN = Reason(
    "checkpoint-draws-anew",
    "What a checkpoint runs again in the backward draws other random numbers than its forward did, so the gradient is "
    "that of no loss at all, in the whole batch either.",
    "Leave preserve_rng_state=False out: checkpoint(block, x, use_reentrant=False).",
    "checkpoint(block, x, preserve_rng_state=False)",
    "checkpoint(block, x, use_reentrant=False)",
)

PROVISIONAL = (
    "It would be shown gradients over a provisional number of items, as the batch's is known at the end. State that "
    "beforehand: items=lambda micro_batch: ..., what its loss is averaged over (its rows, its tokens)."
)
"""Why what acts on the size of a gradient has to know the denominator first."""
