"""Findings about clearing: gradients that stay, pieces that are thrown away, gradients of another optimizer's loss."""

from __future__ import annotations

from collections.abc import Iterator

from wholebatch.comparison import compare
from wholebatch.doctor.findings.remedies import line_of, moved
from wholebatch.doctor.story import Piece, Story, Window
from wholebatch.finding import Change, Finding
from wholebatch.site import Site


def not_cleared(story: Story, window: Window) -> Finding | None:
    """The gradient of the window before is still there when the first piece of this one begins."""
    if not window.stale or window.number == 0 or not window.pieces:
        return None
    before = story.windows[window.optimizer][window.number - 1]
    found, stale = window.found(), window.own(window.pieces[0].backward.before)
    size = compare(found, found - stale) if found is not None and stale is not None else None
    tried = [event.site for _, event in before.scaler if event.call == "step"]
    site = before.step.site if before.step is not None else tried[-1] if tried else window.pieces[0].backward.site
    rule = "not-cleared-after-skipped-step" if before.skipped else "zero-grad-missing"
    what = "after a skipped step the gradients stay" if before.skipped else "gradients are not cleared after the step"
    return Finding(
        rule,
        f"{what}: window {window.number + 1} adds to those of window {before.number + 1}",
        str(size) if size is not None else "each step repeats all earlier ones",
        1.0 + (size.error if size is not None else 0.0),
        site,
        Change(line_of(site, "optimizer.step()"), f"{line_of(site, 'optimizer.step()')}; optimizer.zero_grad()"),
    )


def cleared_per_piece(story: Story, window: Window) -> Finding | None:
    """Gradients are cleared between the pieces of a window, so only the last ones count."""
    if not window.lost or not usual_loss(story, window):
        return None
    lost, kept = len(window.lost), len(window.pieces)
    site = window.cleared[0].site
    return Finding(
        "zero-grad-per-piece",
        f"gradients are cleared inside the window: {lost} of {lost + kept} pieces are thrown away",
        lost_amount(window) or f"only {kept} of {lost + kept} pieces count",
        1.0,
        site,
        moved(site, "optimizer.zero_grad()", "only after optimizer.step()"),
    )


def usual_loss(story: Story, window: Window) -> bool:
    """Tell whether most windows lose pieces (each time anew), as against the tail of an epoch."""
    windows = story.windows[window.optimizer]
    losing = sum(bool(other.lost) for other in windows)
    return losing * 2 > len(windows) and (len(windows) > 1 or len(window.pieces) == 1)


def lost_amount(window: Window) -> str | None:
    """Return how far the kept pieces are from all pieces, from the gradients that were there."""
    gained = [window.gained(piece) for piece in (*window.lost, *window.pieces)]
    found = window.found()
    if found is None or any(piece is None for piece in gained):
        return None
    whole = sum(piece for piece in gained if piece is not None)
    return str(compare(found, found.new_zeros(found.shape) + whole))


def tail_dropped(story: Story, window: Window) -> Finding | None:
    """The pieces of an unfinished window are cleared away, or never stepped."""
    if window.step is not None and window.lost and not usual_loss(story, window):
        return dropped(window.lost, window.cleared[0].site, "cleared away before any step")
    unfinished = story.trace.complete and window.step is None and window.number > 0 and not window.skipped
    full = story.usual_length(window.optimizer)
    sites = {piece.backward.site for seen in story.windows[window.optimizer] for piece in seen.pieces}
    same_loop = all(piece.backward.site in sites for piece in window.pieces)
    if unfinished and window.pieces and same_loop and window.length < full:
        return dropped(window.pieces, window.pieces[-1].backward.site, "never stepped")
    return None


def dropped(pieces: list[Piece], site: Site | None, fate: str) -> Finding:
    """Say which pieces were lost."""
    rows = sum(piece.rows for piece in pieces)
    return Finding(
        "last-window-dropped",
        f"the last {len(pieces)} pieces ({rows} rows) are backpropagated but {fate}",
        f"{rows} rows of each epoch teach nothing",
        0.5,
        site,
        Change(
            "if (i + 1) % k == 0:",
            "if (i + 1) % k == 0 or i + 1 == len(loader):  # divide by the pieces of this window",
        ),
        "A short window is a step of its own, divided by what it holds.",
    )


def foreign_gradients(story: Story, window: Window) -> Finding | None:
    """The optimizer steps with the gradient of a loss that is another optimizer's."""
    for other in story.windows:
        if other == window.optimizer or window.step is None:
            continue
        strangers = list(shared_pieces(story, window, other))
        if strangers and len(strangers) < len(window.pieces):
            return leak(story, window, strangers, other)
    return None


def shared_pieces(story: Story, window: Window, other: int) -> Iterator[Piece]:
    """Yield the pieces that touch the other optimizer's parameters too, if that one steps with nothing else."""
    theirs = {piece.backward.site for seen in story.windows[other] for piece in seen.pieces if seen.step is not None}
    foreign = story.trace.optimizers[other].parameters - window.parameters
    for piece in window.pieces:
        if piece.backward.touched & foreign and theirs == {piece.backward.site}:
            yield piece


def leak(story: Story, window: Window, strangers: list[Piece], other: int) -> Finding:
    """Describe gradients of another loss in an optimizer's step."""
    gained = [window.gained(piece) for piece in strangers]
    found = window.found()
    known = found is not None and all(piece is not None for piece in gained)
    size = None
    if known and found is not None:
        size = compare(found, found - sum(piece for piece in gained if piece is not None))
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
    )


RULES = (not_cleared, cleared_per_piece, tail_dropped, foreign_gradients)
