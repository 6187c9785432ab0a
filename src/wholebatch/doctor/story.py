"""Order the events of a trace into windows: what each optimizer step was made of, and what became of the rest."""

from __future__ import annotations

import dataclasses
import statistics

import torch
from torch import Tensor

from wholebatch.doctor.trace import (
    Average,
    Backward,
    Clip,
    Epoch,
    Event,
    Forward,
    Scaler,
    Schedule,
    Step,
    Trace,
    ZeroGrad,
)
from wholebatch.site import Site


@dataclasses.dataclass
class Piece:
    """One backward of a window and the forwards that led to it."""

    backward: Backward
    forwards: list[Forward]

    @property
    def rows(self) -> int:
        """The rows of the first forward that led here; 0 when none was seen."""
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


@dataclasses.dataclass
class Window:
    """What happened for one optimizer from its previous step to this one.

    lost: pieces whose gradients were cleared before any step used them; `cleared` tells where.
    stale: gradients of an earlier window were still there when the first piece began.
    ended: after how many of the pieces an epoch came to its end.
    clips, updates: with the number of pieces that had run by then.
    """

    optimizer: int
    number: int
    parameters: frozenset[int]
    slices: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    pieces: list[Piece] = dataclasses.field(default_factory=list)
    lost: list[Piece] = dataclasses.field(default_factory=list)
    cleared: list[Event] = dataclasses.field(default_factory=list)
    stale: bool = False
    skipped: bool = False
    step: Step | None = None
    ended: list[int] = dataclasses.field(default_factory=list)
    clips: list[tuple[int, Clip]] = dataclasses.field(default_factory=list)
    scaler: list[tuple[int, Scaler]] = dataclasses.field(default_factory=list)
    schedules: list[tuple[int, Schedule]] = dataclasses.field(default_factory=list)
    averages: list[tuple[int, Average]] = dataclasses.field(default_factory=list)

    @property
    def length(self) -> int:
        """How many micro-batches: backwards called from the same line; those of other lines run along."""
        sites: dict[object, int] = {}
        for piece in self.pieces:
            site = piece.backward.site
            sites[site] = sites.get(site, 0) + 1
        return max(sites.values(), default=0)

    def found(self) -> Tensor | None:
        """Return the sampled gradient before the first clip after the last piece, or before the step."""
        late = [clip.sample for at, clip in self.clips if at == len(self.pieces)]
        return self.own(late[0] if late else self.step.sample if self.step is not None else None)

    def own(self, sample: Tensor | None) -> Tensor | None:
        """Return the part of a sample that belongs to this window's optimizer, zeros where it was not taken yet."""
        if sample is None or not self.slices:
            return None
        parts = [sample[start : start + numel] for start, numel in self.slices]
        whole = [
            part if len(part) == numel else sample.new_zeros(numel)
            for part, (_, numel) in zip(parts, self.slices, strict=True)
        ]
        return torch.cat(whole).double()

    def gained(self, piece: Piece) -> Tensor | None:
        """Return what a piece added to the sampled gradient of this window's optimizer."""
        after, before = self.own(piece.backward.after), self.own(piece.backward.before)
        return after if before is None else after - before if after is not None else None


@dataclasses.dataclass
class Story:
    """One rank's trace in windows, by optimizer; `leftover` windows never came to a step."""

    trace: Trace
    windows: dict[int, list[Window]]
    leftover: dict[int, Window]

    def usual_length(self, optimizer: int) -> int:
        """Return how many pieces most windows of an optimizer have, the longest among equals."""
        lengths = [window.length for window in self.windows[optimizer] if window.pieces]
        return max(statistics.multimode(lengths), default=0) if lengths else 0

    def optimizer_name(self, window: Window) -> str:
        """Return the class name of a window's optimizer."""
        return self.trace.optimizers[window.optimizer].name


def read(trace: Trace) -> Story:
    """Return the windows of every optimizer that made a step, or tried to."""
    active = dict.fromkeys(event.optimizer for event in trace.of(Step))
    active.update(dict.fromkeys(event.optimizer for event in trace.of(Scaler) if event.call != "update"))
    readers = {number: Reader(trace, number) for number in active if number in trace.optimizers}
    for reader in readers.values():
        reader.run()
    windows = {number: reader.closed for number, reader in readers.items()}
    leftover = {number: reader.window for number, reader in readers.items()}
    return Story(trace, windows, leftover)


class Reader:
    """Walks through the events once, for one optimizer."""

    def __init__(self, trace: Trace, optimizer: int) -> None:
        self.trace = trace
        self.optimizer = optimizer
        self.own = trace.optimizers[optimizer].parameters
        self.closed: list[Window] = []
        self.forwards: list[Forward] = []
        self.cleared: list[Event] = []
        self.window = self.fresh()

    def fresh(self) -> Window:
        """Return an empty window with the next number."""
        slices = [self.trace.sampled[number] for number in sorted(self.own & self.trace.sampled.keys())]
        return Window(self.optimizer, len(self.closed), self.own, slices)

    def run(self) -> None:
        """Read every event."""
        for event in self.trace.events:
            read_one = getattr(self, f"on_{event.kind}", None)
            if read_one is not None:
                read_one(event)

    def on_forward(self, event: Forward) -> None:
        """Keep it for the backward to come."""
        self.forwards.append(event)

    def on_backward(self, event: Backward) -> None:
        """Add a piece, after noticing whether the earlier ones are still there."""
        if event.touched & self.own or self.waits_unsharded(event):
            self.notice_cleared(event)
            if not self.window.pieces and not self.window.lost and event.pending & event.touched & self.own:
                self.window.stale = True
            self.window.pieces.append(Piece(event, self.forwards))
        self.forwards = []

    def waits_unsharded(self, event: Backward) -> bool:
        """Tell whether FSDP keeps this backward's gradient to itself until it reduces: nothing shows in ``.grad``."""
        return not event.touched and any(forward.wrapper == "fsdp" and forward.grad for forward in self.forwards)

    def notice_cleared(self, event: Backward) -> None:
        """Drop the pieces that were cleared: lost ones are kept apart, used ones are forgotten."""
        held = frozenset().union(*(piece.backward.touched for piece in self.window.pieces)) & self.own
        if not held or held & event.pending:
            return
        lost = [piece for piece in self.window.pieces if not self.used(piece.backward, event)]
        self.window.lost += lost
        if lost:
            self.window.cleared += self.cleared[-1:] or [event]
        self.window.pieces = []

    def used(self, piece: Backward, later: Backward) -> bool:
        """Tell whether a piece served something before it was cleared.

        A step of any optimizer, a change of the weights by other means (sharpness-aware steps), or a closure that
        an optimizer calls again.
        """
        between = self.trace.events[piece.order + 1 : later.began]
        stepped = any(
            isinstance(event, Step) and self.trace.optimizers[event.optimizer].parameters & piece.touched
            for event in between
        )
        return stepped or piece.weights != later.weights or self.same_closure(piece, later)

    def same_closure(self, piece: Backward, later: Backward) -> bool:
        """Tell whether both ran inside one and the same step."""
        steps = self.trace.of(Step)
        return any(step.began <= piece.began and later.order < step.order for step in steps)

    def on_step(self, event: Step) -> None:
        """Close the window, if it is this optimizer's step."""
        if event.optimizer == self.optimizer:
            self.window.step = event
            self.close()

    def on_scaler(self, event: Scaler) -> None:
        """Note the call; a skipped step closes the window too."""
        if event.call == "update" or event.optimizer == self.optimizer:
            self.window.scaler.append((len(self.window.pieces), event))
        if event.call == "step" and event.optimizer == self.optimizer and not event.stepped:
            self.window.skipped = True
            self.close()

    def close(self) -> None:
        """Put the window away and begin the next."""
        self.closed.append(self.window)
        self.window = self.fresh()
        self.cleared = []

    def on_clip(self, event: Clip) -> None:
        """Note a clip of this optimizer's gradients."""
        if event.parameters & self.own:
            self.window.clips.append((len(self.window.pieces), event))

    def on_zero_grad(self, event: ZeroGrad) -> None:
        """Remember where gradients were cleared last."""
        if event.parameters & self.own:
            self.cleared.append(event)

    def on_schedule(self, event: Schedule) -> None:
        """Note a scheduler's step."""
        self.window.schedules.append((len(self.window.pieces), event))

    def on_average(self, event: Average) -> None:
        """Note a weight average."""
        self.window.averages.append((len(self.window.pieces), event))

    def on_epoch(self, event: Epoch) -> None:
        """Note that data came to an end inside the window."""
        if event.what == "end" and self.window.pieces:
            self.window.ended.append(len(self.window.pieces))
