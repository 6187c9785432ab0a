"""Pictures of a training loop as SVG: its windows, its effective batch, where its gradient is off."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence

from wholebatch.doctor.micro_batch import WatchedMicroBatch
from wholebatch.doctor.windows import Story, WatchedWindow

WIDTH = 860
ROW = 34
LABEL = 150
MOST_WINDOWS = 12
MOST_MICRO_BATCHES = 64
MOST_PARAMETERS = 16


def svg(height: float, parts: Sequence[str], title: str) -> str:
    """Wrap drawn parts into a picture that scales with its page."""
    inside = "".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img"><title>{html.escape(title)}</title>{inside}</svg>'


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """Draw words."""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{html.escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str, hint: str = "") -> str:
    """Draw a rectangle with a hint that shows under the pointer."""
    title = f"<title>{html.escape(hint)}</title>" if hint else ""
    size = f'width="{max(width, 1):.1f}" height="{height:.1f}"'
    return f'<rect x="{x:.1f}" y="{y:.1f}" {size} class="{kind}" rx="2">{title}</rect>'


def windows(stories: Sequence[Story]) -> str:
    """Draw each window as a row of its micro-batches, as wide as their items, and what happened between them."""
    shown = [(story, window) for story in stories for own in story.windows.values() for window in own][:MOST_WINDOWS]
    widest = max((sum(map(size_of, whole(window))) for _, window in shown), default=1.0)
    parts: list[str] = []
    for place, (story, window) in enumerate(shown):
        y = 6 + place * ROW
        name = f"rank {story.trace.rank}, " if len(stories) > 1 else ""
        parts.append(text(LABEL - 8, y + 16, f"{name}step {window.number + 1}", "label", "end"))
        parts += row(window, y, (WIDTH - LABEL - 60) / widest)
    return svg(12 + len(shown) * ROW, parts, "The micro-batches of each optimizer step")


def whole(window: WatchedWindow) -> list[WatchedMicroBatch]:
    """Return a window's micro-batches with those that it lost, in their order."""
    return sorted([*window.lost, *window.micro_batches], key=lambda micro_batch: micro_batch.backward.order)


def size_of(micro_batch: WatchedMicroBatch) -> float:
    """Return the items of a micro-batch, its rows where the loss could not be read."""
    return max((term.items for term in micro_batch.backward.terms), default=0.0) or float(micro_batch.rows) or 1.0


def row(window: WatchedWindow, y: float, unit: float) -> Iterator[str]:
    """Draw one window."""
    x = float(LABEL)
    micro_batches = whole(window)
    for place, micro_batch in enumerate(micro_batches[:MOST_MICRO_BATCHES]):
        width = size_of(micro_batch) * unit
        lost = any(micro_batch is other for other in window.lost)
        yield box(x, y, width - 2, 22, "lost" if lost else "micro-batch", hint_of(micro_batch, lost))
        if width > 26:
            yield text(x + width / 2 - 1, y + 15, f"{size_of(micro_batch):g}", "label" if lost else "inside", "middle")
        x += width
        yield from marks(window, place + 1, len(micro_batches), x - 2, y)
    ending = "skipped" if window.skipped else "step" if window.step is not None else "no step"
    yield text(x + 6, y + 15, ending, "label")


def marks(window: WatchedWindow, at: int, count: int, x: float, y: float) -> Iterator[str]:
    """Draw what happened right after a micro-batch: a clip, or an epoch's end."""
    if any(place == at for place, _ in window.clips):
        yield box(x - 1, y - 2, 3, 26, "clip" if at < count else "rightclip", f"clip after micro-batch {at} of {count}")
    if at in window.ended and at < count:
        yield box(x - 1, y - 4, 2, 30, "epoch", "the epoch ended here")


def hint_of(micro_batch: WatchedMicroBatch, lost: bool) -> str:
    """Say what a micro-batch is."""
    factors = ", ".join(
        f"{term.factor:.3g} x {term.reduction} over {term.items:g}" for term in micro_batch.backward.terms[:4]
    )
    value = f", loss {micro_batch.backward.value:.4g}" if micro_batch.backward.value is not None else ""
    return f"{micro_batch.rows} rows: {factors}{value}{' (thrown away)' if lost else ''}"


def effective_batch(stories: Sequence[Story]) -> str:
    """Draw the items that each step really learned from."""
    story = stories[0]
    steps = [window for own in story.windows.values() for window in own][: MOST_WINDOWS * 4]
    totals = [sum(map(size_of, window.micro_batches)) for window in steps]
    highest = max(totals, default=1.0) or 1.0
    wide = min(48.0, (WIDTH - LABEL - 20) / max(len(totals), 1))
    parts = [text(LABEL - 8, 20, f"{highest:g} items", "label", "end"), text(LABEL - 8, 120, "0", "label", "end")]
    for place, (window, total) in enumerate(zip(steps, totals, strict=True)):
        height = 105 * total / highest
        kind = "lost" if window.skipped else "micro-batch"
        hint = f"step {window.number + 1}: {total:g} items in {window.length} micro-batches"
        parts.append(box(LABEL + place * wide, 120 - height, wide - 3, height, kind, hint))
    return svg(130, parts, "Items per optimizer step")


def parameter_errors(errors: dict[str, float]) -> str:
    """Draw the parameters that are furthest off, as shares of the whole reference's norm."""
    worst = sorted(errors.items(), key=lambda item: -item[1])[:MOST_PARAMETERS]
    largest = max((error for _, error in worst), default=0.0) or 1.0
    parts: list[str] = []
    for place, (name, error) in enumerate(worst):
        y = 6 + place * 22
        parts.append(text(LABEL + 120, y + 13, name[-44:], "label", "end"))
        parts.append(box(LABEL + 128, y, (WIDTH - LABEL - 220) * error / largest, 16, "error", f"{name}: {error:.3g}"))
        parts.append(text(LABEL + 134 + (WIDTH - LABEL - 220) * error / largest, y + 13, f"{error:.1e}", "label"))
    return svg(12 + len(worst) * 22, parts, "Error by parameter")
