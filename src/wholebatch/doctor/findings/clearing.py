"""Findings about clearing: gradients that stay, micro-batches that are thrown away, gradients of another optimizer's
loss.
"""

from __future__ import annotations

from collections.abc import Iterator

from wholebatch.doctor.findings.remedies import condition_of, line_of, moved
from wholebatch.doctor.micro_batch import WatchedMicroBatch
from wholebatch.doctor.trace import Forward
from wholebatch.doctor.windows import Story, WatchedWindow
from wholebatch.model.comparison import Comparison, compare
from wholebatch.verify.finding import Change, Finding
from wholebatch.verify.source_line import Site


def not_cleared(story: Story, window: WatchedWindow) -> Finding | None:
    """The gradient that an earlier step has used is still there when the next one steps."""
    if not window.stale or window.number == 0 or not window.micro_batches:
        return None
    before = story.windows[window.optimizer][window.number - 1]
    size = stale_amount(window)
    site = _stepped_at(before, window.micro_batches[0].backward.site)
    rule = "not-cleared-after-skipped-step" if before.skipped else "zero-grad-missing"
    what = "after a skipped step the gradients stay" if before.skipped else "gradients are not cleared after the step"
    return Finding(
        rule,
        f"{what}: window {window.number + 1} adds to those of window {before.number + 1}",
        str(size) if size is not None else "each step repeats all earlier ones",
        1.0 + (size.error if size is not None else 0.0),
        site,
        cleared_after(site),
        error=size.error if size is not None else None,
    )


def _stepped_at(window: WatchedWindow, otherwise: Site | None) -> Site | None:
    """Say where a window was stepped, or where a scaler tried to."""
    if window.step is not None:
        return window.step.site
    tried = [event.site for _, event in window.scaler if event.call == "step"]
    return tried[-1] if tried else otherwise


def stale_amount(window: WatchedWindow) -> Comparison | None:
    """Compare the step's gradient with the one without what an earlier step has used already."""
    found, before = window.found(), window.own(window.micro_batches[0].backward.before)
    if found is None or before is None:
        return None
    return compare(found, found - window.only(window.stale, before))


def cleared_after(site: Site | None) -> Change:
    """Clear after the step at `site`, or let `wb.Step` do it."""
    text = line_of(site, "optimizer.step()")
    return Change(text, f"{text}; optimizer.zero_grad()")


def cleared_per_micro_batch(story: Story, window: WatchedWindow) -> Finding | None:
    """Gradients are cleared between the micro-batches of a window, so only the last ones count."""
    thrown = thrown_away(window)
    if not thrown or not usual_loss(story, window) or not window.explained():
        return None
    lost, kept = len(thrown), len(window.micro_batches)
    site = window.cleared[0].site
    size = lost_amount(window, thrown)
    return Finding(
        "zero-grad-per-piece",
        f"gradients are cleared inside the window: {lost} of {lost + kept} micro-batches are thrown away",
        str(size) if size is not None else f"only {kept} of {lost + kept} micro-batches count",
        1.0,
        site,
        moved(site, "optimizer.zero_grad()", "only after optimizer.step()"),
        error=size.error if size is not None else None,
    )


def thrown_away(window: WatchedWindow) -> list[WatchedMicroBatch]:
    """Return the lost backwards that were micro-batches of a loss that the step is made of.

    A gradient that was only looked at (of an attack, a norm, another task) is no loss, and neither is one that was
    put back by hand: where nothing is left, the step must have found nothing.
    """
    if not window.micro_batches:
        return window.lost if window.step is not None and not window.step.pending else []
    kept = {id(micro_batch) for micro_batch in window.micro_batches}
    lost = {id(micro_batch) for micro_batch in window.lost}
    mixed = [loss for loss in window.losses if any(id(micro_batch) in kept for micro_batch in loss)]
    return [micro_batch for loss in mixed for micro_batch in loss if id(micro_batch) in lost]


def usual_loss(story: Story, window: WatchedWindow) -> bool:
    """Tell whether most windows lose micro-batches (each time anew), as against the tail of an epoch."""
    windows = story.windows[window.optimizer]
    losing = sum(bool(other.lost) for other in windows)
    return losing * 2 > len(windows) and (len(windows) > 1 or len(window.micro_batches) <= 1)


def lost_amount(window: WatchedWindow, thrown: list[WatchedMicroBatch]) -> Comparison | None:
    """Return how far the kept micro-batches are from all micro-batches, from the gradients that were there."""
    gained = [window.gained(micro_batch) for micro_batch in (*thrown, *window.micro_batches)]
    found = window.found()
    if found is None or any(micro_batch is None for micro_batch in gained):
        return None
    whole = sum(micro_batch for micro_batch in gained if micro_batch is not None)
    return compare(found, found.new_zeros(found.shape) + whole)


def tail_dropped(story: Story, window: WatchedWindow) -> Finding | None:
    """The micro-batches of an unfinished window are cleared away, or never stepped."""
    full = story.usual_length(window.optimizer)
    thrown = thrown_away(window)
    # As many as a whole window has were left out on purpose: a loss that was not finite.
    if window.step is not None and 0 < len(thrown) < full and not usual_loss(story, window):
        return dropped(story, window, thrown, window.cleared[0].site, "cleared away before any step")
    unfinished = story.trace.complete and window.step is None and window.number > 0 and not window.skipped
    paths = {
        micro_batch.backward.path for seen in story.windows[window.optimizer] for micro_batch in seen.micro_batches
    }
    same_loop = all(micro_batch.backward.path in paths for micro_batch in window.micro_batches)
    if unfinished and window.micro_batches and same_loop and window.length < full:
        return dropped(story, window, window.micro_batches, window.micro_batches[-1].backward.site, "never stepped")
    return None


def dropped(
    story: Story, window: WatchedWindow, micro_batches: list[WatchedMicroBatch], site: Site | None, fate: str
) -> Finding:
    """Say which micro-batches were lost."""
    rows = sum(micro_batch.rows for micro_batch in micro_batches)
    steps = [seen.step for seen in story.windows[window.optimizer] if seen.step is not None]
    condition = condition_of(steps[0].site if steps else None) or "if (i + 1) % k == 0:"
    return Finding(
        "last-window-dropped",
        f"the last {len(micro_batches)} micro-batches ({rows} rows) are backpropagated but {fate}",
        f"{rows} rows of each epoch teach nothing",
        0.5,
        site,
        Change(
            condition, f"{condition.rstrip(':')} or i + 1 == len(loader):  # divide by the micro-batches of this window"
        ),
        "A short window is a step of its own, divided by what it holds.",
    )


def foreign_gradients(story: Story, window: WatchedWindow) -> Finding | None:
    """The optimizer steps with the gradient of a loss that is another optimizer's."""
    for other in story.windows:
        if other == window.optimizer or window.step is None:
            continue
        strangers = list(judged_micro_batches(story, window, other))
        if strangers and len(strangers) < len(window.micro_batches):
            return leak(story, window, strangers, other)
    return None


def judged_micro_batches(story: Story, window: WatchedWindow, other: int) -> Iterator[WatchedMicroBatch]:
    """Yield the micro-batches that only judge the other optimizer's output with this one's parameters.

    They touch the other's parameters too, that one steps with nothing else, and what it made went into a module of
    this one: a generator's loss through the discriminator. A loss that goes the other way, through a body into a
    further head, belongs to both.
    """
    theirs = {
        micro_batch.backward.path
        for seen in story.windows[other]
        for micro_batch in seen.micro_batches
        if seen.step is not None
    }
    foreign = story.trace.optimizers[other].parameters - window.parameters
    own = window.parameters - story.trace.optimizers[other].parameters
    for micro_batch in window.micro_batches:
        reached = micro_batch.backward.touched & foreign and theirs == {micro_batch.backward.path}
        if reached and takes_from(story, micro_batch, own, foreign):
            yield micro_batch


def takes_from(story: Story, micro_batch: WatchedMicroBatch, own: frozenset[int], foreign: frozenset[int]) -> bool:
    """Tell whether a module with some of the own parameters took in what one with foreign parameters made."""
    makers = {
        f.order for f in micro_batch.forwards if parameters_in(story, f) & foreign and not parameters_in(story, f) & own
    }
    return any(set(f.after) & makers for f in micro_batch.forwards if parameters_in(story, f) & own)


def parameters_in(story: Story, forward: Forward) -> frozenset[int]:
    """Return the parameters of the module that a forward called."""
    return story.trace.modules[forward.module] if forward.module >= 0 else frozenset()


def leak(story: Story, window: WatchedWindow, strangers: list[WatchedMicroBatch], other: int) -> Finding:
    """Describe gradients of another loss in an optimizer's step."""
    gained = [window.gained(micro_batch) for micro_batch in strangers]
    found = window.found()
    known = found is not None and all(micro_batch is not None for micro_batch in gained)
    size = None
    if known and found is not None:
        size = compare(found, found - sum(micro_batch for micro_batch in gained if micro_batch is not None))
    site = strangers[0].backward.site
    name = story.trace.optimizers[other].name
    return Finding(
        "gradient-of-another-loss",
        f"this loss belongs to another optimizer ({name}), but its gradient stays in "
        f"{len(window.parameters)} parameters that {story.optimizer_name(window)} steps too",
        str(size) if size is not None else "two losses are mixed in one step",
        0.9,
        site,
        Change(
            line_of(site, "loss.backward()"), f"{line_of(site, 'loss.backward()')[:-1]}inputs=list(own_parameters))"
        ),
        "Backward reaches every parameter that the loss depends on, and clearing waits for the boundary.",
        size.error if size is not None else None,
    )


RULES = (not_cleared, cleared_per_micro_batch, tail_dropped, foreign_gradients)
