"""Findings about what the loss is divided by: the micro-batches, their items, the ranks."""

from __future__ import annotations

import re

from wholebatch.doctor.findings.remedies import condition_of, line_of, scaled_backward
from wholebatch.doctor.measure import reweighed
from wholebatch.doctor.weights import Division, contains, near
from wholebatch.model.comparison import Comparison, scale
from wholebatch.verify.finding import Change, Finding


def not_divided(division: Division) -> Finding | None:
    """Each micro-batch contributes a whole mean: the gradient grows with the number of micro-batches."""
    if not (division.is_mean and division.length > 1) or not undivided(division):
        return None
    other = divisor(division) if division.alone else 0
    ratio = division.whole if other else division.whole / own_weight(division)
    usual = division.length == division.lengths[0] or division.lengths[0] < 2
    divided = f"divided by {other}, not by" if other else "not divided over"
    part = "the loss" if division.alone else f"the term {division.shares[0].term.name} of the loss"
    return Finding(
        "loss-not-divided",
        f"{part} is {divided} the {division.length} micro-batches of the window",
        str(scale(ratio)) + ("" if division.alone else ", for this term"),
        # A window that holds the left-over micro-batches of another one is no measure for the others.
        abs(ratio - 1) * (1.0 if usual else 0.5),
        division.site,
        divided_remedy(division, other),
        "Each backward adds the gradient of a whole mean, so the sum grows with the number of micro-batches."
        + counted_items(division),
    )


def divided_remedy(division: Division, other: int) -> Change:
    """Divide the loss by the micro-batches, or the one term that is not divided."""
    if division.alone and len(set(division.items)) > 1:  # divided by the micro-batches they would be a mean of means
        return scaled_backward(division.site, "* items / items_of_the_window", other)
    if division.alone:
        return scaled_backward(division.site, f"/ {division.length}", other)
    text = line_of(division.site, "loss.backward()")
    term = division.shares[0].term
    return Change(text, f"{text}  # with {term.factor:.3g} x {term.name} divided by {division.length}")


def counted_items(division: Division) -> str:
    """Say what the items are, where micro-batches differ in them."""
    if len(set(division.items)) < 2:
        return ""
    token = division.shares[0].term.name.startswith("NllLoss")
    what = "labels that are not ignored" if token else "entries that it averages over"
    counts = ", ".join(f"{items:g}" for items in division.items[:8])
    return f" items: the {what} in a micro-batch, here {counts}."


def undivided(division: Division) -> bool:
    """Tell whether no part of any factor has to do with the number of micro-batches or with a share of the items."""
    if near(division.whole, 1.0) or (not division.even() and weighted(division)):
        return False
    if len({round(abs(share.term.factor), 9) for share in division.shares}) > 1:
        return False
    lengths = {count * ranks for count in (division.length, *division.lengths) for ranks in (1, division.world)}
    return not any(contains(factors, 1 / length) for factors in division.factors() for length in lengths if length > 1)


def weighted(division: Division) -> bool:
    """Tell whether micro-batches of unequal items have factors that follow the items."""
    return len(set(division.items)) > 1 and division.even()


def own_weight(division: Division) -> float:
    """Return the weight that the user gave the term: its factor, unless that is 1 or the number of ranks."""
    factor = abs(division.shares[0].term.factor) * division.after
    return 1.0 if near(factor, 1.0) or near(factor, division.world) else factor


def divisor(division: Division) -> int:
    """Return the whole number of micro-batches that the losses are divided by, 0 when there is none."""
    for factor in reversed(division.shares[0].term.factors or (1.0,)):
        number = round(1 / abs(factor)) if factor else 0
        if number > 1 and near(abs(factor), 1 / number):
            return number
    return 0


def short_window(division: Division) -> Finding | None:
    """A window holds fewer micro-batches than the number it is divided by."""
    full = divisor(division)
    if not division.is_mean or not 0 < division.length < full or near(division.whole, 1.0):
        return None
    if full not in division.lengths:
        return None  # a weight of the loss, not a number of micro-batches
    if not near(division.whole, division.length / full):
        return None
    first = division.windows[0].number == 0
    ratio = division.length / full
    return Finding(
        "first-window-short" if first else "last-window-short",
        f"{'the first' if first else 'a short'} window holds {division.length} of {full} micro-batches, divided by "
        f"{full}",
        str(scale(ratio)),
        (1 - ratio) * 0.9,
        division.site,
        short_remedy(division, full, first),
        "The window's own mean divides by the micro-batches it really holds.",
    )


def short_remedy(division: Division, full: int, first: bool) -> Change:
    """Count before the test, or divide by what the window holds."""
    step = division.windows[0].step
    condition = condition_of(step.site if step is not None else None) or f"if i % {full} == 0:"
    if first and (counter := re.search(r"(\w+) %", condition)):
        return Change(condition, condition.replace(counter[0], f"({counter[1]} + 1) %", 1))
    return scaled_backward(division.site, "/ micro_batches_in_this_window", full)


def carried_over(division: Division) -> Finding | None:
    """A window holds more micro-batches than the number it is divided by: those of an unfinished window came along."""
    full = divisor(division)
    if not division.is_mean or full < 2 or division.length <= full or full not in division.lengths:
        return None
    if not near(division.whole, division.length / full):
        return None
    ratio = division.length / full
    site = division.site
    return Finding(
        "carried-into-next-epoch",
        f"a window holds {division.length} micro-batches and is divided by {full}: {division.length - full} were "
        f"left in "
        ".grad by an unfinished window before it",
        str(scale(ratio)),
        ratio - 1,
        site,
        Change(
            "for batch in loader:  # a new epoch", "optimizer.zero_grad(); for batch in loader:  # or step at the end"
        ),
        "The counter starts anew with the epoch, .grad does not.",
    )


def mean_of_means(division: Division) -> Finding | None:
    """Micro-batches that differ in items are averaged as if they did not."""
    if not division.is_mean or len(division.shares) < 2 or division.even() or undivided(division):
        return None
    if division.world > 1 and division.even(ranks=False):
        return None
    measured = reweighed(division)
    size = measured or by_weight(division)
    counts = ", ".join(f"{items:g}" for items in division.items[:8])
    return Finding(
        "mean-of-means",
        f"micro-batches of {counts} items each weigh {weight_text(division)} of the window",
        str(size),
        max(size.error, 0.02),
        division.site,
        scaled_backward(division.site, "* items / items_of_the_window", divisor(division)),
        "Each micro-batch divides by its own items; items of a short micro-batch then count more than those of a "
        "long one." + counted_items(division),
        measured.error if measured is not None else None,
    )


def weight_text(division: Division) -> str:
    """Return what each micro-batch weighs, as a fraction where all weigh the same."""
    weights = [weight / division.whole for weight in division.weights]
    equal = max(weights) - min(weights) < 1e-3
    return f"1/{len(weights)}" if equal else ", ".join(f"{weight:.2f}" for weight in weights[:8])


def by_weight(division: Division) -> Comparison:
    """Estimate an error from the weights alone: how far the micro-batches' weights are from their share of the
    items.
    """
    total = sum(division.items)
    apart = [abs(w / division.whole - n / total) for w, n in zip(division.weights, division.items, strict=True)]
    return Comparison(sum(apart), 1.0, 1.0 - sum(apart) / 2)


def rank_denominators(division: Division) -> Finding | None:
    """Each rank divides by its own items before gradients are averaged over ranks."""
    if division.world < 2 or len(division.shares) < 2 or division.even() or not division.even(ranks=False):
        return None
    size = by_weight(division)
    items: dict[int, float] = {}
    for share in division.shares:
        items[share.rank] = items.get(share.rank, 0.0) + share.term.items
    counts = ", ".join(f"{number:g}" for number in items.values())
    site = division.site
    return Finding(
        "rank-local-denominator",
        f"ranks with {counts} items each divide by their own and are then averaged alike",
        str(size),
        max(size.error, 0.02),
        site,
        scaled_backward(site, ("* items " if division.is_mean else "") + "* world_size / items_of_all_ranks"),
        "The average over ranks is the mean over all items only if all ranks hold the same number.",
    )


def uneven_sums(division: Division) -> Finding | None:
    """Sums are divided by numbers that differ from micro-batch to micro-batch."""
    if division.is_mean or len(division.shares) < 2 or division.even():
        return None
    if division.world > 1 and division.even(ranks=False):
        return None
    measured = reweighed(division)
    size = measured or by_weight(division)
    site = division.site
    return Finding(
        "mean-of-means",
        "micro-batches of one window divide by different numbers",
        str(size),
        max(size.error, 0.02),
        site,
        scaled_backward(site, "* its_divisor / items_of_the_window"),
        "An item weighs the same in every micro-batch only if all micro-batches divide by the items of the whole "
        "window.",
        measured.error if measured is not None else None,
    )


def ranks_counted(division: Division) -> Finding | None:
    """The average over ranks comes on top of a division by all items, or is undone where nothing divides."""
    if division.world < 2 or not division.even() or (divisor(division) not in (0, 1) and division.is_mean):
        return None
    for ratio, what in (
        (1 / division.world, "the loss is divided by the items of all ranks, and then averaged over them again"),
        (float(division.world), "the loss is multiplied by the number of ranks though nothing divides by it"),
    ):
        if near(division.whole, ratio):
            site = division.site
            factor = "* world_size" if ratio < 1 else "/ world_size"
            return Finding(
                "ranks-counted-twice", what, str(scale(ratio)), abs(ratio - 1), site, scaled_backward(site, factor)
            )
    return None


def labels_before_shift(division: Division) -> Finding | None:
    """The denominator counts the labels before they are shifted: one too many a row."""
    if division.is_mean or not division.even() or near(division.whole, 1.0):
        return None
    total = sum(division.items)
    used = total / division.whole
    with_first = total + division.rows
    if not any(other > total and near_count(used, other) for other in (with_first, division.labels)):
        return None
    site = division.site
    return Finding(
        "labels-counted-before-shift",
        f"{total:g} items are learned from but the loss is divided by {used:g}: "
        f"the labels were counted before the shift, one too many for each of {division.rows} rows",
        str(scale(division.whole)),
        max(1 - division.whole, 0.015),
        site,
        shift_remedy(division),
        "The first token of a row is never a target.",
    )


def near_count(value: float, other: float) -> bool:
    """Tell whether a denominator is this count, to rounding and not to a whole item."""
    return abs(value - other) < 0.02


def shift_remedy(division: Division) -> Change:
    """Count what the loss counts."""
    site = division.site
    if site is not None and site.framework == "transformers":
        return Change(
            "num_items_in_batch = (labels != -100).sum()  # what the Trainer counts for this model",
            "labels[:, 0] = -100  # in the collator: what is never a target is not counted",
        )
    return Change("items = (labels != -100).sum()", "items = (labels[:, 1:] != -100).sum()")


RULES = (
    not_divided,
    short_window,
    carried_over,
    ranks_counted,
    labels_before_shift,
    rank_denominators,
    mean_of_means,
    uneven_sums,
)
