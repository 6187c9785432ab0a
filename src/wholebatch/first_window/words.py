"""What a trial has shown, in words."""

from __future__ import annotations

from collections.abc import Sequence

from wholebatch.first_window import reasons
from wholebatch.first_window.sample import TriedRows
from wholebatch.first_window.trial import TrialOutcome


def or_stated(outcome: TrialOutcome) -> str:
    """What else it may be where the loss function divides by itself, which nobody can do again."""
    for key, kind in outcome.whole.schema.terms:
        if kind == "one":
            return (
                f" Or the sum {key[0]!r} was divided by something of the micro-batch: what is a mean over n items is "
                "wb.from_mean(loss, items=n)."
            )
        if key in outcome.stated:
            return (
                f" Or the mean was divided by something else than the {float(outcome.whole.counts[key]):g} items that "
                "are stated for these rows, such as labels that are not ignored: wb.from_mean(loss, items=n) with that "
                "number."
            )
    return ""


def named(sample: TriedRows) -> str:
    """Say how many rows were tried."""
    layout = "" if sample.layout == "rows" else f" ({sample.layout})"
    return f"{len(sample.whole)} rows{layout}"


def verified(sample: TriedRows, outcome: TrialOutcome) -> str:
    """Say what adds up, and how far."""
    extra = " on BatchNorm's running statistics," if outcome.batch_norms else ""
    fixed = ", random draws held still" if outcome.seen else ""
    if outcome.drawn_by_rows:
        fixed = ", each row with draws of its own"
    return (
        f"verified on {named(sample)}:{extra} whole and in two parts ({sample.sizes}) gradients agree to "
        f"{outcome.gradient:.0e}, losses to {outcome.loss:.0e}, items exactly{fixed}"
    )


def of_draws(held: Sequence[str], shared: Sequence[str]) -> str:
    """Say what has not been shown of random draws."""
    said = f"; {_listed(held)}: {reasons.HELD}" * bool(held)
    return said + f"; {_listed(shared)}: {reasons.SHARED}" * bool(shared)


def _listed(places: Sequence[str]) -> str:
    more = f" and {len(places) - 3} more" * (len(places) > 3)
    return ", ".join(places[:3]) + more
