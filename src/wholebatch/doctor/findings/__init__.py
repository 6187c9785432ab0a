"""The findings: each a small function of what was seen, silent on a right loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from wholebatch.doctor.findings import boundary, clearing, division, model, ranks
from wholebatch.doctor.weights import Division, divisions
from wholebatch.doctor.windows import Story, WatchedWindow
from wholebatch.verify.finding import Change, Finding

WINDOW_RULES: tuple[Callable[[Story, WatchedWindow], Finding | None], ...] = (
    *clearing.RULES,
    *boundary.RULES,
    *ranks.RULES,
    *model.RULES,
)
# Of float32 sums: a measured difference below is none. Shorter formats blur more, and their faults are larger too.
ROUNDING = 1e-4
# A cause and what only follows from it: the followers are not reported beside it.
FOLLOWERS = {
    "zero-grad-per-piece": {
        "last-window-short",
        "first-window-short",
        "loss-not-divided",
        "mean-of-means",
        "parameters-without-gradient",
    },
    "optimizer-in-backward": {"last-window-short", "first-window-short", "loss-not-divided", "mean-of-means"},
    "carried-into-next-epoch": {"last-window-dropped", "mean-of-means"},
    "first-window-short": {"last-window-short", "last-window-dropped"},
    "in-batch-negatives": {"mean-of-means", "loss-not-divided"},
    "unscale-twice": {"clip-per-piece"},
    "loss-not-divided": {"mean-of-means", "rank-local-denominator"},
    "clip-per-piece": {"clip-before-unscale"},
    "ranks-counted-twice": {"labels-counted-before-shift"},
    "scaler-update-inside-window": {"mean-of-means"},
    "gradient-of-another-loss": {"zero-grad-missing"},
}


def find(stories: list[Story]) -> list[Finding]:
    """Return what is wrong with a loop, most harmful first, one finding a rule.

    Args:
        stories: one a rank, the first speaking for those rules that look at one rank only.

    """
    worst: dict[str, Finding] = {}
    for found in filter(felt, every(stories)):
        known = worst.get(found.rule)
        if known is None or found.harm > known.harm:
            worst[found.rule] = found
    followers = set().union(*(FOLLOWERS.get(rule, set()) for rule in worst))
    return sorted((found for rule, found in worst.items() if rule not in followers), key=lambda found: -found.harm)


def felt(finding: Finding) -> bool:
    """Tell whether a finding is more than rounding where its size was measured on the loop's own gradients."""
    return finding.error is None or finding.error > ROUNDING


def every(stories: list[Story]) -> Iterator[Finding]:
    """Yield everything that any rule says of any window."""
    for story in stories:
        windows = [window for own in story.windows.values() for window in own]
        for window in (*windows, *story.leftover.values()):
            yield from filter(None, (rule(story, window) for rule in WINDOW_RULES))
    for one in divisions(stories):
        backward = one.shares[0].micro_batch.backward
        ours = backward.site is not None and backward.site.framework == "wholebatch" and not backward.call
        if not one.cached and not ours:
            yield from filter(None, (said(rule, one) for rule in division.RULES))


def said(rule: Callable[[Division], Finding | None], one: Division) -> Finding | None:
    """Return what a rule says of a division, and of its losses where these may be added on purpose."""
    finding = rule(one)
    if finding is None or not one.finer:
        return finding
    return next(filter(None, (rule(loss) for loss in one.finer)), None)


__all__ = ["Change", "Finding", "find"]
