"""A batch that changes while a run goes on: at steps, with epochs, or with the noise of the gradient."""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Mapping
from typing import Any, Protocol

from wholebatch.amounts import shown, whole_number
from wholebatch.noise_scale import NoiseScale

ENOUGH = 8
"""How many measurements a batch rests on before it follows them: one alone may be off by as much as it says."""

FORMS = (
    '"16,64@200,256@600" (64 rows from step 200 on), {0: 16, 200: 64}, "16..256@epoch" (twice as many each epoch), or '
    '"16..256@noise" with noise_scale='
)


class _Rule(Protocol):
    """How many rows a step has."""

    def at(self, step: int, epoch: int) -> int:
        """Return the rows of a step, counted from 0 over all epochs."""

    @property
    def settled(self) -> bool:
        """Whether that is known beforehand."""

    @property
    def largest(self) -> int:
        """The most rows of any step."""


class BatchSchedule:
    """Say how many rows the batch of each step has, over all ranks.

    A small batch is enough while the gradient is long and its noise short, and a large one saves steps later. What
    changes is the batch that is meant; the micro-batch stays what memory allows, and every step is the exact gradient
    of its own batch. Taken by ``DealtBatches``, ``windows`` and the program. Learning rates are the caller's:
    ``scale_lr(lr, batch=schedule.at(step), base_batch=...)``.

    Args:
        stages: ``"16,64@200,256@600"``, or ``{0: 16, 200: 64, 600: 256}``: rows from a step on, counted from 0.
            ``"16..256@epoch"``: twice as many rows with each epoch, from 16 to 256 at most. ``"16..256@noise"``: from
            16 on, twice as many whenever the noise scale is that large, 256 at most, and never fewer again. One number:
            a batch that does not change.
        noise_scale: what measures the noise, for ``"@noise"``; the same object as the step has.

    Raises:
        ValueError: for stages that do not say what every step holds.
        TypeError: for anything else, and where a noise scale is missing or has no use.

    Example:
        >>> schedule = wb.BatchSchedule("16,64@200")
        >>> [schedule.at(step) for step in (0, 199, 200, 10_000)]
        [16, 16, 64, 64]
        >>> [wb.BatchSchedule("16..64@epoch").at(step=0, epoch=epoch) for epoch in range(4)]
        [16, 32, 64, 64]

    Source:
        Smith et al. 2018, arXiv 1711.00489 (growing the batch in the place of a falling rate); Merrill et al. 2025,
        arXiv 2505.23971 (batch warm-up).
    """

    def __init__(self, stages: str | int | Mapping[int, int], noise_scale: NoiseScale | None = None) -> None:
        self._rule: _Rule = _rule_of(stages, noise_scale)

    def __repr__(self) -> str:
        return f"BatchSchedule({str(self)!r})"

    def __str__(self) -> str:
        return str(self._rule)

    def at(self, step: int, epoch: int = 0) -> int:
        """Return the rows of the batch of a step.

        Args:
            step: counted from 0 over all epochs.
            epoch: counted from 0, for a schedule by epochs.
        """
        return self._rule.at(step, epoch)

    @property
    def settled(self) -> bool:
        """Whether every step's batch is known beforehand; not where it follows the noise."""
        return self._rule.settled

    @property
    def smallest(self) -> int:
        """The rows of the smallest batch."""
        return self._rule.at(0, 0)

    @property
    def largest(self) -> int:
        """The rows of the largest batch that there may be."""
        return self._rule.largest

    def state_dict(self) -> dict[str, Any]:
        """Return what was decided so far: nothing but for a batch that follows the noise."""
        return {"stages": str(self), **(self._rule.state_dict() if isinstance(self._rule, _Following) else {})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what was decided, so that a resumed run has the same batches.

        Raises:
            ValueError: if the state belongs to another schedule.
        """
        if state.get("stages") != str(self):
            raise ValueError(
                f"The state was saved with the batch schedule {state.get('stages')!r}, and this is {str(self)!r}: its "
                "batches would not be the same. Build the schedule as it was."
            )
        if isinstance(self._rule, _Following):
            self._rule.load_state_dict(state)


class _Stages:
    """Other numbers of rows from given steps on."""

    settled = True

    def __init__(self, stages: Mapping[int, int]) -> None:
        self._starts = sorted(stages)
        self._rows = [stages[start] for start in self._starts]
        self.largest = max(self._rows)

    def __str__(self) -> str:
        first, *later = zip(self._rows, self._starts, strict=True)
        return ",".join([str(first[0]), *(f"{rows}@{start}" for rows, start in later)])

    def at(self, step: int, epoch: int) -> int:
        """Return the rows of the last stage that has begun."""
        return self._rows[bisect.bisect_right(self._starts, step) - 1]


class _Doubling:
    """Twice as many rows with each epoch."""

    settled = True

    def __init__(self, least: int, most: int) -> None:
        self._least, self.largest = least, most

    def __str__(self) -> str:
        return f"{self._least}..{self.largest}@epoch"

    def at(self, step: int, epoch: int) -> int:
        """Return the rows of an epoch."""
        return min(self.largest, self._least << min(epoch, self.largest.bit_length()))


class _Following:
    """Twice as many rows whenever the noise scale says that they are worth it.

    What was decided of a step stays so: a loader asks ahead, and a resumed run asks again.
    """

    settled = False

    def __init__(self, least: int, most: int, noise: NoiseScale) -> None:
        self._least, self.largest, self._noise = least, most, noise
        self._sizes: list[tuple[int, int]] = [(0, least)]
        self._decided = 0
        self._measured = 0

    def __str__(self) -> str:
        return f"{self._least}..{self.largest}@noise"

    def state_dict(self) -> dict[str, Any]:
        """Return from which step on how many rows, until which step that is decided, and what was seen by then."""
        return {"sizes": [list(size) for size in self._sizes], "decided": self._decided, "measured": self._measured}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what was decided."""
        self._sizes = [(int(step), int(rows)) for step, rows in state["sizes"]]
        self._decided, self._measured = int(state["decided"]), int(state["measured"])

    def at(self, step: int, epoch: int) -> int:
        """Return the rows that were decided on, or decide."""
        if step > self._decided:
            self._decided = step
            self._decide(step)
        return self._sizes[bisect.bisect_right(self._sizes, (step, self.largest)) - 1][1]

    def _decide(self, step: int) -> None:
        now = self._sizes[-1][1]
        # What was measured before a change tells of the smaller batch as well, but each doubling waits for news.
        if now >= self.largest or self._noise.seen < self._measured + ENOUGH * self._noise.every:
            return
        found = self._noise.estimate()
        if found.windows >= ENOUGH and found.rows >= 2 * now:
            self._sizes.append((step, min(self.largest, 2 * now)))
            self._measured = self._noise.seen


def _rule_of(stages: Any, noise: NoiseScale | None) -> _Rule:
    span = re.fullmatch(r"\s*(\d+)\s*\.\.\s*(\d+)\s*@\s*(epoch|noise)\s*", stages) if isinstance(stages, str) else None
    if noise is not None and not isinstance(noise, NoiseScale):
        raise TypeError(f"noise_scale={shown(noise)} is none. Pass the one that the step measures with.")
    if (noise is not None) != (span is not None and span[3] == "noise"):
        reason = "says nothing of the noise" if noise is not None else "follows the noise, which nothing measures"
        raise TypeError(
            f"The batch schedule {stages!r} {reason}. For a batch that follows it, give both: "
            'wb.BatchSchedule("16..256@noise", noise_scale=noise).'
        )
    if span is None:
        return _Stages(_checked(_read(stages) if isinstance(stages, str) else stages))
    least, most = int(span[1]), int(span[2])
    if not 1 <= least <= most:
        raise ValueError(f"The batch schedule {stages!r} goes from {least} rows to {most}. Give the smaller one first.")
    return _Doubling(least, most) if noise is None else _Following(least, most, noise)


def _read(text: str) -> dict[int, int]:
    """Read "16,64@200"."""
    stages: dict[int, int] = {}
    for place, part in enumerate(text.split(",")):
        found = re.fullmatch(r"\s*(\d+)\s*(?:@\s*(\d+)\s*)?", part)
        if found is None or (place == 0) != (found[2] is None):
            raise ValueError(f"The batch schedule {text!r} cannot be read at {part!r}. Write one of: {FORMS}.")
        start = int(found[2] or 0)
        if start in stages:
            raise ValueError(f"The batch schedule {text!r} says twice what begins at step {start}. Leave one out.")
        stages[start] = int(found[1])
    return stages


def _checked(stages: Any) -> Mapping[int, int]:
    """Return stages that say what every step holds."""
    if not isinstance(stages, Mapping):
        return {0: whole_number(stages, "The batch", "wb.BatchSchedule(64)")}
    starts, rows = list(stages), list(stages.values())
    whole = all(isinstance(number, int) and not isinstance(number, bool) for number in (*starts, *rows))
    if not whole or not starts or min(starts) != 0 or min(rows) < 1 or sorted(starts) != starts:
        raise ValueError(
            f"The stages {dict(stages)!r:.80} do not say what every step holds. Begin at step 0, name steps in order, "
            "and let each stage hold a row or more: {0: 16, 200: 64}."
        )
    return stages


def as_schedule(batch: int | BatchSchedule, name: str, example: str) -> BatchSchedule:
    """Return a schedule for one, or for a batch that does not change."""
    return batch if isinstance(batch, BatchSchedule) else BatchSchedule(whole_number(batch, name, example))


def steps_of(schedule: BatchSchedule, rows: int, first: int, epoch: int) -> list[int]:
    """Return how many rows each step of an epoch has, the last one what is left.

    Args:
        rows: of the epoch.
        first: the number of its first step.
        epoch: its number.
    """
    sizes: list[int] = []
    for step in itertools.count(first):
        if rows <= 0:
            return sizes
        sizes.append(min(rows, schedule.at(step, epoch)))
        rows -= sizes[-1]
    return sizes
