"""One backward of a window, with the forwards that its loss comes from."""

from __future__ import annotations

import dataclasses
import math

from wholebatch.doctor.trace import Backward, Forward
from wholebatch.verify.source_line import Site


@dataclasses.dataclass
class WatchedMicroBatch:
    """One backward of a window and the forwards that led to it, in order."""

    backward: Backward
    forwards: list[Forward]

    @property
    def rows(self) -> int:
        """The rows of the first forward that led here; 0 when none was seen."""
        if self.backward.rows is not None:
            return self.backward.rows
        return next((forward.rows or 0 for forward in self.forwards), 0)

    @property
    def site(self) -> Site | None:
        """The user's line nearest to the loss: that of the forward where a framework calls backward."""
        site = self.backward.site
        if (
            site is None
            or site.framework in (None, "accelerate")
            or not self.forwards
            or self.forwards[-1].site is None
        ):
            return site
        return dataclasses.replace(self.forwards[-1].site, framework=site.framework)

    @property
    def last_forwards(self) -> list[Forward]:
        """The forwards that the loss was computed from directly."""
        return [forward for forward in self.forwards if forward.order in self.backward.forwards] or self.forwards[-1:]

    @property
    def asks_for_sync(self) -> bool | None:
        """Whether DDP was to reduce this micro-batch; None without DDP."""
        asked = [forward.sync for forward in self.forwards if forward.sync is not None]
        return any(asked) if asked else None

    def next_batch(self, other: WatchedMicroBatch) -> bool:
        """Tell whether the same loader gave another batch for the other micro-batch."""
        own, its = (micro_batch.forwards[-1].batch if micro_batch.forwards else None for micro_batch in (self, other))
        return own is not None and its is not None and own[0] == its[0] and own[1] != its[1]

    def same_batch(self, other: WatchedMicroBatch) -> bool:
        """Tell whether both are known to be of one and the same batch of a loader."""
        own, its = (micro_batch.forwards[-1].batch if micro_batch.forwards else None for micro_batch in (self, other))
        return own is not None and own == its

    def alike(self, other: WatchedMicroBatch) -> bool:
        """Tell whether two losses are made of the same parts and reach the same parameters."""
        own, its = ([(term.path, term.name) for term in micro_batch.backward.terms] for micro_batch in (self, other))
        same = self.modules() == other.modules() and self.signs() == other.signs()
        return same and own == its and self.backward.touched == other.backward.touched

    def same_forwards(self, other: WatchedMicroBatch) -> bool:
        """Tell whether both losses come from one and the same forward."""
        own = {forward.order for forward in self.last_forwards}
        return own == {forward.order for forward in other.last_forwards}

    def same_rows(self, other: WatchedMicroBatch) -> bool:
        """Tell whether all that the models of both were called with is the same memory."""
        own = [forward.inputs for forward in self.forwards if forward.inputs]
        return bool(own) and own == [forward.inputs for forward in other.forwards if forward.inputs]

    def modules(self) -> tuple[int, ...]:
        """Return the modules that the loss was computed from directly."""
        return tuple(sorted({forward.module for forward in self.last_forwards}))

    def signs(self) -> tuple[float, ...]:
        """Return the sign of each term: a critic's loss is subtracted on real rows and added on false ones."""
        return tuple(math.copysign(1.0, term.factor) for term in self.backward.terms)

    def targets(self) -> tuple[float, ...]:
        """Return the numbers that all rows are compared with; empty where a term compares them with several."""
        found = [term.target for term in self.backward.terms]
        return tuple(target for target in found if target is not None) if None not in found else ()
