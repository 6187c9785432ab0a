"""Findings about what belongs to the boundary of a window: clip, scaler, scheduler, weight average."""

from __future__ import annotations

import math

from wholebatch.doctor.findings.remedies import line_of, moved
from wholebatch.doctor.trace import Clip, Event, Schedule
from wholebatch.doctor.windows import Story, WatchedWindow
from wholebatch.model.comparison import Comparison, compare
from wholebatch.verify.finding import Change, Finding


def clip_per_micro_batch(story: Story, window: WatchedWindow) -> Finding | None:
    """Gradients are clipped before the window is complete."""
    early = [clip for at, clip in window.clips if 0 < at < len(window.micro_batches) and not math.isinf(clip.bound)]
    if not early or window.length < 2 or not window.step:
        return None
    size = clip_amount(window)
    return Finding(
        "clip-per-piece",
        f"gradients are clipped after each micro-batch, {len(window.clips)} times for one step",
        str(size) if size is not None else "the sum of clipped micro-batches is not the clipped sum",
        0.8,
        early[0].site,
        moved(early[0].site, "clip_grad_norm_(parameters, 1.0)", "once a window, before the step"),
        "Clipping a partial sum changes what the later micro-batches are added to.",
        size.error if size is not None else None,
    )


def clip_amount(window: WatchedWindow) -> Comparison | None:
    """Compare the step with one clip of the whole sum, when the sample holds the whole gradient."""
    gained = [micro_batch for micro_batch in map(window.gained, window.micro_batches) if micro_batch is not None]
    applied = window.own(window.step.sample) if window.step is not None else None
    if applied is None or len(gained) != len(window.micro_batches):
        return None
    whole = applied.new_zeros(applied.shape) + sum(gained)
    bound = window.clips[-1][1].bound
    return compare(applied, whole * min(1.0, bound / max(float(whole.norm()), 1e-30)))


def clip_before_unscale(story: Story, window: WatchedWindow) -> Finding | None:
    """Gradients are clipped while they still carry the scaler's factor."""
    for at, clip in window.clips:
        scaled = any(micro_batch.backward.scaled for micro_batch in window.micro_batches[:at])
        if scaled and not unscaled_before(window, clip):
            return scaled_clip(window, clip)
    return None


def unscaled_before(window: WatchedWindow, clip: Clip) -> bool:
    """Tell whether the gradients were unscaled in this window before the clip."""
    return any(event.call == "unscale_" and event.order < clip.order for _, event in window.scaler)


def scaled_clip(window: WatchedWindow, clip: Clip) -> Finding:
    """Describe a clip of scaled gradients."""
    scale = next((event.scale for _, event in window.scaler), 0.0)
    norm = f"the norm seen is {clip.norm:.3g}" if clip.norm is not None else "the norm seen is scaled"
    real = f", the gradient's is {clip.norm / scale:.3g}" if clip.norm is not None and scale else ""
    return Finding(
        "clip-before-unscale",
        "gradients are clipped before the scaler's factor is taken out",
        f"{norm}{real}",
        1.0,
        clip.site,
        Change(
            line_of(clip.site, "clip_grad_norm_(...)"),
            f"scaler.unscale_(optimizer); {line_of(clip.site, 'clip_grad_norm_(...)')}",
        ),
        "Every step is clipped to next to nothing, by a bound that changes with the scale.",
    )


def unscale_twice(story: Story, window: WatchedWindow) -> Finding | None:
    """`unscale_` is called again before the scaler's update."""
    calls = [event for _, event in window.scaler if event.call == "unscale_"]
    if len(calls) < 2:
        return None
    return Finding(
        "unscale-twice",
        f"unscale_ is called {len(calls)} times in one window",
        "torch refuses the second call; earlier micro-batches would be divided by the scale twice",
        2.0,
        calls[1].site,
        moved(calls[1].site, "scaler.unscale_(optimizer)", "once a window, before the step"),
    )


def update_inside(story: Story, window: WatchedWindow) -> Finding | None:
    """The scaler's factor may change between the micro-batches of a window."""
    calls = [event for at, event in window.scaler if event.call == "update" and at > 0]
    if not calls or window.length < 2:
        return None
    return Finding(
        "scaler-update-inside-window",
        f"scaler.update() is called {len(calls)} times before the window's step",
        "micro-batches of one sum carry different scales as soon as the scale moves",
        0.7,
        calls[0].site,
        moved(calls[0].site, "scaler.update()", "only after scaler.step(optimizer)"),
    )


def schedule_per_micro_batch(story: Story, window: WatchedWindow) -> Finding | None:
    """The learning rate moves with every micro-batch."""
    early = [event for at, event in window.schedules if 0 < at < len(window.micro_batches)]
    if not early or window.length < 2:
        return None
    return Finding(
        "scheduler-per-piece",
        f"the scheduler steps with every micro-batch, {window.length} times for one optimizer step",
        f"the schedule ends {window.length} x too early",
        0.6,
        early[0].site,
        moved(early[0].site, "scheduler.step()", "only after optimizer.step()"),
    )


def average_per_micro_batch(story: Story, window: WatchedWindow) -> Finding | None:
    """The weight average takes in unchanged weights with every micro-batch."""
    early = [event for at, event in window.averages if 0 < at < len(window.micro_batches)]
    if not early or window.length < 2:
        return None
    return Finding(
        "average-per-piece",
        f"the weight average is updated with every micro-batch, {window.length} times for one optimizer step",
        f"it follows the weights {window.length} x too fast (decay ** {window.length} a step)",
        0.5,
        early[0].site,
        moved(early[0].site, "ema.update()", "only after optimizer.step()"),
    )


def moved_on_skip(story: Story, window: WatchedWindow) -> Finding | None:
    """Scheduler or weight average go on although the scaler skipped the step."""
    if not window.skipped:
        return None
    later = [*story.windows[window.optimizer], story.leftover[window.optimizer]][window.number + 1]
    calls: list[Event] = [event for at, event in (*later.schedules, *later.averages) if at == 0]
    if not calls:
        return None
    kind = "scheduler" if isinstance(calls[0], Schedule) else "weight average"
    return Finding(
        "moved-on-skipped-step",
        f"the scaler skipped window {window.number + 1}, the {kind} moved all the same",
        f"the {kind} is one step ahead of the weights for every skipped step",
        0.4,
        calls[0].site,
        moved(calls[0].site, "scheduler.step()", "only if scaler.get_scale() >= scale_before"),
    )


RULES = (
    clip_per_micro_batch,
    clip_before_unscale,
    unscale_twice,
    update_inside,
    schedule_per_micro_batch,
    average_per_micro_batch,
    moved_on_skip,
)
