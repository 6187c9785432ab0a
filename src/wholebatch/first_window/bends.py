"""What is bent beyond some point adds up as long as no part is beyond: refused, or said, before a later window is."""

from __future__ import annotations

from wholebatch.errors import InexactError
from wholebatch.first_window import reasons
from wholebatch.first_window.kinks import Kink, bent_over_rows, turns_at_places
from wholebatch.first_window.sample import TriedRows
from wholebatch.first_window.trial import Trial, TrialOutcome


def refuse_bent(trial: Trial, sample: TriedRows, outcome: TrialOutcome, alone: bool) -> str:
    """Refuse what bends a value of all rows; say what compares one, or reads it as a number; "" for neither.

    Args:
        trial: for experiments on what no graph shows.
        sample: rows that add up.
        outcome: of these.
        alone: whether nothing says that these are rows.

    Raises:
        InexactError: naming the call.
    """
    met = bent_over_rows(outcome.kinks[0], outcome.kinks[1:])
    said = [kink for kink in met if kink.compares]
    for kink in met:
        if kink.compares:
            continue
        if alone:
            said.append(kink)
        elif kink.side == "graph" or trial.feels(sample, kink):
            raise InexactError(_words(kink))
    if outcome.provisional:
        _refuse_scaled(trial, sample, outcome)
    beyond = next((kink.place for kink in said if trial.feels(sample, kink)), "")
    return f"; {beyond} takes a value of all rows, and what comes of it on the other side is not shown" * bool(beyond)


def _words(kink: Kink) -> str:
    if kink.side == "backward":
        return (
            f"{kink.place} bends a value that is one of all rows of a micro-batch while gradients flow, such as the "
            "gradient of a parameter. These rows lie on one side, so the parts add up now; each micro-batch's share "
            f"would be bent by itself as soon as one lies on the other. {reasons.HOOKS.mend} "
            'verify="never" goes on as a plain loop would.'
        )
    return (
        f"{kink.place} bends a value that is one of all rows of a micro-batch, such as their mean. These rows lie on "
        "one side, so the parts add up now; as soon as some micro-batches lie on the other, their sum is "
        "another than what the whole batch would give. A loss over all rows takes wb.coupled_backward, which "
        "bends the value of the batch; to bend each row's own, do so before the mean: "
        'wb.mean(values.clamp(min=...)); verify="never" goes on as a plain loop would.'
    )


def _refuse_scaled(trial: Trial, sample: TriedRows, outcome: TrialOutcome) -> None:
    """Raise if something bends gradients that are of a provisional size, though it does not bind here.

    Raises:
        InexactError: naming the call.
    """
    candidates = {kink.place for kink in outcome.kinks[0] if kink.side == "backward" and not kink.compares}
    if not candidates:
        return
    whole = sample.portion(sample.whole)
    runs = trial.compare(whole, [whole], even=False).kinks
    for turns in turns_at_places(runs):
        kink, half = turns[0]
        follows = kink.shape == half.shape and bool((kink.value.abs() == 2 * half.value.abs()).all())
        if kink.place in candidates and kink.value.any() and follows and trial.feels(sample, kink):
            raise InexactError(
                f"{kink.place} clips or bends a gradient on its way, beyond some size. {reasons.PROVISIONAL}"
            )
