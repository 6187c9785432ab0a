"""Watch a training loop: what it does, unchanged, becomes a trace, and the trace becomes findings."""

from __future__ import annotations

import contextlib
import functools
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from wholebatch.doctor.first_window import Exhibit
from wholebatch.doctor.hooks import installed
from wholebatch.doctor.hypotheses import Measurement, measure
from wholebatch.doctor.patching import Wrapping
from wholebatch.doctor.processes import around_processes, load
from wholebatch.doctor.recorder import Recorder, StopWatching
from wholebatch.doctor.report import Report, report_on
from wholebatch.doctor.trace import Trace
from wholebatch.loss.terms import LossFunction


class Seen:
    """What `watch` saw so far, in this process and in those it started with `torch.multiprocessing`."""

    def __init__(self, recorder: Recorder, reference: LossFunction | None = None) -> None:
        self.recorder = recorder
        self.reference = reference
        self.measurement: Measurement | None = None
        self.others: list[Trace] = []

    @property
    def trace(self) -> Trace:
        """The events that this process saw."""
        trace, parameters = self.recorder.trace, self.recorder.parameters
        trace.names, trace.sampled, trace.modules = parameters.names, parameters.sampled, parameters.members
        trace.numels = [parameter.numel() for parameter in parameters.tensors]
        return trace

    @property
    def traces(self) -> list[Trace]:
        """The traces of all processes that trained: this one's, unless only its children did."""
        own = self.trace
        return [own, *self.others] if own.steps or not self.others else self.others

    def report(self) -> Report:
        """Return the findings, most harmful first, with what they rest on; measured, where a reference was given."""
        exhibit = self.recorder.exhibit
        measurable = self.reference is not None and exhibit is not None and exhibit.closed
        if self.measurement is None and measurable and exhibit is not None and self.reference is not None:
            self.measurement = measure(exhibit, self.reference, self.trace.world, exhibit.bound)
        return report_on(self.traces, self.measurement)


@contextlib.contextmanager
def watch(steps: int = 0, reference: LossFunction | None = None) -> Iterator[Seen]:
    """Watch the training loop that runs inside the context; the loop computes exactly what it computes without.

    Torch's global hooks on modules and optimizers tell most of it. Where torch has none (backward, clipping,
    ``zero_grad``, `GradScaler`, schedulers, data loaders, collectives) the function is replaced until the context
    ends and put back then, also after an error. Gradients are looked at, never written. Costs a few per cent of a step.

    Args:
        steps: leave the loop once this many optimizer steps were seen whole, by an exception that this context
            swallows; 0 watches to the end.
        reference: a loss function as `wholebatch.backward` takes it. The first window's model, batches and gradient
            are kept, and the report says how far that gradient is from the reference's, and why. In one process.

    Returns:
        A `Seen`; ``seen.report()`` holds the findings.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with watch() as seen:
        ...     model(torch.ones(4, 2)).mean().backward()
        ...     optimizer.step()
        >>> seen.trace.steps, seen.report().ok
        (1, True)

    """
    recorder, wrapping = Recorder(steps, Exhibit() if reference is not None else None), Wrapping()
    seen = Seen(recorder, reference)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="wholebatch-doctor-") as folder, installed(recorder):
        around_processes(folder, functools.partial(watch, steps), wrapping)
        try:
            yield seen
            recorder.trace.complete = recorder.trace.error is None
        except StopWatching:
            pass  # enough was seen
        finally:
            wrapping.restore()
            seen.others = load(Path(folder))
            recorder.trace.watched_seconds = time.perf_counter() - started
