"""Findings about gradients that travel over ranks: too often, too seldom, or at the wrong micro-batch."""

from __future__ import annotations

from wholebatch.doctor.findings.remedies import line_of
from wholebatch.doctor.micro_batch import WatchedMicroBatch
from wholebatch.doctor.trace import Collective
from wholebatch.doctor.windows import Story, WatchedWindow
from wholebatch.verify.finding import Change, Finding


def flags(window: WatchedWindow) -> list[bool]:
    """Return, for each micro-batch of a DDP model, whether its forward asked for a reduction."""
    found = [
        [forward.sync for forward in micro_batch.forwards if forward.wrapper == "ddp" and forward.sync is not None]
        for micro_batch in window.micro_batches
    ]
    return [any(syncs) for syncs in found if syncs]


def last_not_synchronised(story: Story, window: WatchedWindow) -> Finding | None:
    """The last micro-batch of the window is not reduced, so the ranks step with different gradients."""
    synced = flags(window)
    if not synced or synced[-1] or window.step is None or reduced_by_hand(story, window):
        return None
    at = [place + 1 for place, sync in enumerate(synced) if sync]
    which = (
        f"micro-batch {', '.join(map(str, at))} of {len(synced)} is"
        if at
        else f"none of {len(synced)} micro-batches is"
    )
    site = window.micro_batches[-1].forwards[0].site
    return Finding(
        "last-piece-not-synchronised",
        f"{which} reduced over the ranks, the last one is not",
        f"each of {story.trace.world} ranks steps with a gradient of its own",
        3.0,
        site,
        Change(
            "with model.no_sync() if i % k != 0 else nullcontext():",
            "with nullcontext() if last_micro_batch else model.no_sync():",
        ),
        "DDP reduces what is in .grad when it reduces: later micro-batches stay local.",
    )


def reduced_by_hand(story: Story, window: WatchedWindow) -> bool:
    """Tell whether gradients were reduced by a collective between the last backward and the step."""
    if window.step is None:
        return False
    between = story.trace.events[window.micro_batches[-1].backward.order : window.step.order]
    return any(isinstance(event, Collective) and event.name == "all_reduce" for event in between)


def synchronised_each_micro_batch(story: Story, window: WatchedWindow) -> Finding | None:
    """Gradients travel with every micro-batch though once would do."""
    synced = flags(window)
    if window.length < 2 or sum(synced) < 2 or framework(window) == "wholebatch":
        return None
    outside = any(forward_only(micro_batch) for micro_batch in window.micro_batches)
    site = window.micro_batches[0].forwards[0].site
    out = line_of(site, "output = model(batch)")
    return Finding(
        "no-sync-round-backward-only" if outside else "synchronised-each-piece",
        "no_sync stands round the backward only: DDP decides in the forward"
        if outside
        else "gradients are reduced with every micro-batch",
        f"{sum(synced)} reductions of {size(story, window)} a step instead of 1; the gradient is right",
        0.05,
        site,
        Change(out, f"with nullcontext() if last_micro_batch else model.no_sync(): {out}  # and the backward"),
    )


def forward_only(micro_batch: WatchedMicroBatch) -> bool:
    """Tell whether the forward asked for a reduction that the backward's place was to prevent."""
    return micro_batch.backward.sync is False and any(forward.sync for forward in micro_batch.forwards)


def size(story: Story, window: WatchedWindow) -> str:
    """Return the size of one reduction, in float32."""
    count = sum(story.trace.numels[number] for number in window.parameters) * 4.0
    unit = next(unit for unit in ("B", "kB", "MB", "GB") if count < 1000 or unit == "GB" or not (count := count / 1000))
    return f"{count:.3g} {unit}"


def framework(window: WatchedWindow) -> str | None:
    """Return whose loop calls backward."""
    site = window.micro_batches[0].backward.site if window.micro_batches else None
    return site.framework if site is not None else None


RULES = (last_not_synchronised, synchronised_each_micro_batch)
