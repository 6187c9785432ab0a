"""Order the events of a trace into windows: what each optimizer step was made of, and what became of the rest."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from typing import Any

import torch
from torch import Tensor

from wholebatch.doctor.grouping import gathered, losses_of
from wholebatch.doctor.micro_batch import WatchedMicroBatch
from wholebatch.doctor.trace import (
    Average,
    Backward,
    Clip,
    Epoch,
    Event,
    Forward,
    OptimizerStep,
    Scaler,
    Schedule,
    Trace,
    ZeroGrad,
)

PARALLEL = 1e-3


@dataclasses.dataclass
class WatchedWindow:
    """What happened for one optimizer from its previous step to this one.

    micro_batches: what is in the gradient that the step finds; lost: what was cleared before any step used it,
        `cleared`
    tells where. stale: the parameters in which an earlier window's gradient is still there at the step.
    clips and so on: with the number of micro-batches that had run by then.
    """

    optimizer: int
    number: int
    parameters: frozenset[int]
    slices: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
    micro_batches: list[WatchedMicroBatch] = dataclasses.field(default_factory=list)
    lost: list[WatchedMicroBatch] = dataclasses.field(default_factory=list)
    cleared: list[Event] = dataclasses.field(default_factory=list)
    stale: frozenset[int] = frozenset()
    skipped: bool = False
    step: OptimizerStep | None = None
    events: list[Event] = dataclasses.field(default_factory=list)

    @functools.cached_property
    def gathered(self) -> list[list[WatchedMicroBatch]]:
        """The micro-batches, lost ones too, by the lines that made them."""
        return gathered(sorted((*self.lost, *self.micro_batches), key=lambda micro_batch: micro_batch.backward.order))

    @functools.cached_property
    def losses(self) -> list[list[WatchedMicroBatch]]:
        """The micro-batches, lost ones too, by the loss that they are micro-batches of."""
        return [loss for group in self.gathered for loss in losses_of(group)]

    @property
    def length(self) -> int:
        """How many micro-batches: those of the loss that has most; the others run along."""
        kept = {id(micro_batch) for micro_batch in self.micro_batches}
        return max((sum(id(micro_batch) in kept for micro_batch in loss) for loss in self.losses), default=0)

    @property
    def clips(self) -> list[tuple[int, Clip]]:
        """The clips of this optimizer's gradients."""
        return self.at(Clip)

    @property
    def scaler(self) -> list[tuple[int, Scaler]]:
        """The calls of a scaler."""
        return self.at(Scaler)

    @property
    def schedules(self) -> list[tuple[int, Schedule]]:
        """The steps of this optimizer's schedulers."""
        return self.at(Schedule)

    @property
    def averages(self) -> list[tuple[int, Average]]:
        """The weight averages that took in this optimizer's parameters."""
        return self.at(Average)

    @property
    def ended(self) -> list[int]:
        """After how many of the micro-batches data came to its end."""
        return [at for at, event in self.at(Epoch) if event.what == "end" and at > 0]

    def at(self, kind: type[Event]) -> list[tuple[int, Any]]:
        """Return events of one kind, each with the number of micro-batches that had run by then."""
        return [
            (sum(micro_batch.backward.order < event.order for micro_batch in self.micro_batches), event)
            for event in self.events
            if isinstance(event, kind)
        ]

    def found(self) -> Tensor | None:
        """Return the sampled gradient before the first clip after the last micro-batch, or before the step."""
        late = [clip.sample for at, clip in self.clips if at == len(self.micro_batches)]
        return self.own(late[0] if late else self.step.sample if self.step is not None else None)

    def own(self, sample: Tensor | None) -> Tensor | None:
        """Return the part of a sample that belongs to this window's optimizer, zeros where it was not taken yet."""
        if sample is None or not self.slices:
            return None
        parts = [sample[start : start + numel] for start, numel in self.slices.values()]
        whole = [
            part if len(part) == numel else sample.new_zeros(numel)
            for part, (_, numel) in zip(parts, self.slices.values(), strict=True)
        ]
        return torch.cat(whole).double()

    def only(self, numbers: frozenset[int], own: Tensor) -> Tensor:
        """Return a vector as `own` returns it, zeros in all but these parameters."""
        kept = [own.new_full((numel,), float(number in numbers)) for number, (_, numel) in self.slices.items()]
        return own * torch.cat(kept)

    def gained(self, micro_batch: WatchedMicroBatch) -> Tensor | None:
        """Return what a micro-batch added to the sampled gradient of this window's optimizer."""
        after, before = self.own(micro_batch.backward.after), self.own(micro_batch.backward.before)
        if after is None or before is None:
            return after
        return after - before

    def explained(self) -> bool:
        """Tell whether the gradient that the step finds is what the backwards left, up to a factor.

        It is not where the loop works on gradients by itself: projects them, adds noise, puts others in their place.
        """
        found = self.found()
        last = self.own(self.micro_batches[-1].backward.after) if self.micro_batches else None
        if found is None or last is None:
            return True
        return parallel(found, last) is not None


@dataclasses.dataclass
class Story:
    """One rank's trace in windows, by optimizer; `leftover` windows never came to a step."""

    trace: Trace
    windows: dict[int, list[WatchedWindow]]
    leftover: dict[int, WatchedWindow]

    def usual_length(self, optimizer: int) -> int:
        """Return how many micro-batches most windows of an optimizer have, the longest among equals."""
        lengths = [window.length for window in self.windows[optimizer] if window.micro_batches]
        return max(statistics.multimode(lengths), default=0) if lengths else 0

    def optimizer_name(self, window: WatchedWindow) -> str:
        """Return the class name of a window's optimizer."""
        return self.trace.optimizers[window.optimizer].name


def read(trace: Trace) -> Story:
    """Return the windows of every optimizer that made a step, or tried to."""
    active = dict.fromkeys(event.optimizer for event in trace.of(OptimizerStep))
    active.update(dict.fromkeys(event.optimizer for event in trace.of(Scaler) if event.call != "update"))
    readers = {number: Reader(trace, number) for number in active if number in trace.optimizers}
    for reader in readers.values():
        reader.run()
    windows = {number: reader.closed for number, reader in readers.items()}
    leftover = {number: reader.window for number, reader in readers.items()}
    return Story(trace, windows, leftover)


class Reader:
    """Walks through the events once, for one optimizer, and keeps account of what its gradients are made of.

    held: each micro-batch that is in them, with the parameters in which it still is. used: those that an earlier step
        of
    this optimizer has used.
    """

    def __init__(self, trace: Trace, optimizer: int) -> None:
        self.trace = trace
        self.optimizer = optimizer
        self.own = trace.optimizers[optimizer].parameters
        self.closed: list[WatchedWindow] = []
        self.forwards: list[Forward] = []
        self.cleared: list[Event] = []
        self.held: list[tuple[WatchedMicroBatch, frozenset[int]]] = []
        self.used: set[int] = set()
        self.window = self.fresh()

    def fresh(self) -> WatchedWindow:
        """Return an empty window with the next number."""
        numbers = sorted(self.own & self.trace.sampled.keys())
        return WatchedWindow(self.optimizer, len(self.closed), self.own, {n: self.trace.sampled[n] for n in numbers})

    def run(self) -> None:
        """Read every event."""
        for event in self.trace.events:
            read_one = getattr(self, f"on_{event.kind}", None)
            if read_one is not None:
                read_one(event)
        end = len(self.trace.events)
        unused = [micro_batch for micro_batch, _ in self.held if id(micro_batch) not in self.used]
        self.window.micro_batches = [micro_batch for micro_batch in unused if not self.stepped_with(micro_batch, end)]

    def on_forward(self, event: Forward) -> None:
        """Keep it for the backward to come."""
        self.forwards.append(event)

    def on_backward(self, event: Backward) -> None:
        """Add a micro-batch, after noticing whether the earlier ones are still there."""
        micro_batch = WatchedMicroBatch(event, self.came_from(event) or self.forwards)
        self.forwards = []
        reached = event.touched & self.own
        if reached or waits_unsharded(micro_batch):
            self.notice_cleared(event.pending, event)
            self.held.append((micro_batch, reached))

    def came_from(self, event: Backward) -> list[Forward]:
        """Return the forwards that the graph of a loss leads to, and those that these took their inputs from."""
        found: set[int] = set()
        waiting = list(event.forwards)
        while waiting:
            number = waiting.pop()
            forward = self.trace.events[number]
            if number not in found and isinstance(forward, Forward):
                found.add(number)
                waiting += forward.after
        return [
            event for event in (self.trace.events[number] for number in sorted(found)) if isinstance(event, Forward)
        ]

    def notice_cleared(self, pending: frozenset[int], now: Event) -> None:
        """Take out of account what is no longer in any gradient, and note what no step had used."""
        kept: list[tuple[WatchedMicroBatch, frozenset[int]]] = []
        lost: list[WatchedMicroBatch] = []
        for micro_batch, numbers in self.held:
            left = numbers & pending
            if left or not numbers:
                kept.append((micro_batch, left))
            elif not self.served(micro_batch, now):
                lost.append(micro_batch)
        self.held = kept
        self.window.lost += lost
        if lost:
            self.window.cleared += self.cleared[-1:] or [now]

    def served(self, micro_batch: WatchedMicroBatch, now: Event) -> bool:
        """Tell whether the gradient of a micro-batch served something before it was cleared.

        A step of any optimizer, a change of the weights by other means (sharpness-aware steps), or a closure that an
        optimizer calls again.
        """
        later = now if isinstance(now, Backward) else None
        if id(micro_batch) in self.used or (later is not None and micro_batch.backward.weights != later.weights):
            return True
        return self.stepped_with(micro_batch, getattr(now, "began", now.order)) or self.same_closure(micro_batch, now)

    def stepped_with(self, micro_batch: WatchedMicroBatch, until: int) -> bool:
        """Tell whether an optimizer of any parameter that a micro-batch reached has stepped before an event."""
        between = self.trace.events[micro_batch.backward.order + 1 : until]
        reached = micro_batch.backward.touched
        return any(
            isinstance(e, OptimizerStep) and self.trace.optimizers[e.optimizer].parameters & reached for e in between
        )

    def same_closure(self, micro_batch: WatchedMicroBatch, now: Event) -> bool:
        """Tell whether both ran inside one and the same step, which may call its closure often."""
        steps = self.trace.of(OptimizerStep)
        return any(step.began <= micro_batch.backward.began and now.order <= step.order for step in steps)

    def on_step(self, event: OptimizerStep) -> None:
        """Close the window, if it is this optimizer's step."""
        if event.optimizer == self.optimizer:
            if not event.in_backward:
                self.notice_cleared(event.pending, event)
            self.window.step = event
            self.close()

    def on_scaler(self, event: Scaler) -> None:
        """Note the call; a skipped step closes the window too."""
        if event.call == "update" or event.optimizer == self.optimizer:
            self.window.events.append(event)
        if event.call == "step" and event.optimizer == self.optimizer and not event.stepped:
            self.window.skipped = True
            self.close()

    def close(self) -> None:
        """Put the window away and begin the next; what is in the gradients stays there until it is cleared."""
        self.window.micro_batches = [micro_batch for micro_batch, _ in self.held if id(micro_batch) not in self.used]
        self.window.stale = frozenset().union(
            *(left for micro_batch, left in self.held if id(micro_batch) in self.used)
        )
        self.used |= {id(micro_batch) for micro_batch, _ in self.held}
        self.held = [(micro_batch, left) for micro_batch, left in self.held if left]
        self.closed.append(self.window)
        self.window = self.fresh()
        self.cleared = []

    def on_clip(self, event: Clip) -> None:
        """Note a clip of this optimizer's gradients."""
        if event.parameters & self.own:
            self.window.events.append(event)

    def on_zero_grad(self, event: ZeroGrad) -> None:
        """Remember where gradients were cleared last."""
        if event.parameters & self.own:
            self.cleared.append(event)

    def on_schedule(self, event: Schedule) -> None:
        """Note a step of this optimizer's scheduler."""
        if event.optimizer in (-1, self.optimizer):
            self.window.events.append(event)

    def on_average(self, event: Average) -> None:
        """Note an average of this optimizer's parameters."""
        if not event.parameters or event.parameters & self.own:
            self.window.events.append(event)

    def on_epoch(self, event: Epoch) -> None:
        """Note where data comes to its end."""
        self.window.events.append(event)


def waits_unsharded(micro_batch: WatchedMicroBatch) -> bool:
    """Tell whether FSDP keeps a backward's gradient to itself until it reduces: nothing shows in ``.grad``."""
    return not micro_batch.backward.touched and any(
        forward.wrapper == "fsdp" and forward.grad for forward in micro_batch.forwards
    )


def parallel(vector: Tensor, other: Tensor) -> float | None:
    """Return by what factor a vector is another one, None where it is not."""
    size = float(other.norm())
    ratio = float(vector.norm()) / size if size else 0.0
    if ratio <= 0 or float((vector - ratio * other).norm()) > PARALLEL * float(vector.norm()):
        return None
    return ratio
