"""What the doctor tells: findings, what they rest on, as lines for a terminal and as data."""

from __future__ import annotations

import dataclasses
import linecache
from typing import Any

from wholebatch.doctor.findings import Finding, find
from wholebatch.doctor.hypotheses import Measurement
from wholebatch.doctor.measure import usual_error
from wholebatch.doctor.trace import Backward, OptimizerStep, Trace
from wholebatch.doctor.weights import divisions
from wholebatch.doctor.windows import Story, WatchedWindow, read

REDUCED = (
    "FSDP reduces gradients with every micro-batch: the least memory. "
    "model.set_requires_gradient_sync(last_micro_batch) reduces "
    "once a window, and holds the gradient unsharded until then."
)
# What a measurement calls by a general name, and what the trace may know more of.
SAME = {"rows-meet": ("batch-norm", "in-batch-negatives"), "last-window-short": ("first-window-short",)}


@dataclasses.dataclass
class Report:
    """Findings, most harmful first, and what was seen.

    ok: nothing was found, and there was something to look at. notes: facts that are no faults.
    """

    findings: list[Finding]
    notes: list[str]
    stories: list[Story]
    looked: bool = True
    measurement: Measurement | None = None

    @property
    def ok(self) -> bool:
        """Whether steps were seen and nothing was found."""
        return self.looked and not self.findings

    @property
    def status(self) -> int:
        """The exit status: 0 clean, 1 with findings, 2 when there was nothing to look at."""
        return 1 if self.findings else 0 if self.looked else 2

    @property
    def trace(self) -> Trace:
        """The first rank's events."""
        return self.stories[0].trace

    def text(self) -> str:
        """Return the report for a terminal."""
        lines = [self.heading()]
        for number, finding in enumerate(self.findings, 1):
            place = f"  [{finding.site}]" if finding.site is not None else ""
            lines += [
                "",
                f"{number}. {finding.rule}: {finding.what}: {finding.amount}{place}",
                *([f"   - {finding.change.out}"] if stands(finding) else []),
                f"   + {finding.change.into}",
            ]
            lines += [f"   {finding.why}"] if finding.why else []
        lines += ["", *self.notes] if self.notes else []
        return "\n".join([*lines, "", self.verdict()])

    def heading(self) -> str:
        """Return one line on what was watched."""
        trace = self.trace
        micro_batches = len(trace.of(Backward))
        ranks = f", {len(self.stories)} ranks" if len(self.stories) > 1 else ""
        return f"wholebatch doctor: {trace.steps} optimizer steps, {micro_batches} backwards{ranks}"

    def verdict(self) -> str:
        """Return the last line."""
        if self.findings:
            count = len(self.findings)
            return f"{count} finding{'s' if count > 1 else ''}, the most harmful first."
        if not self.looked:
            return "No optimizer step was seen, so there was nothing to look at."
        return f"No fault was seen in {self.trace.steps} steps."

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain data for JSON."""
        return {
            "ok": self.ok,
            "status": self.status,
            "steps": self.trace.steps,
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            "notes": self.notes,
            "windows": [window_row(story, window) for story in self.stories for window in windows_of(story)],
            "error": self.trace.error,
        }


def stands(finding: Finding) -> bool:
    """Tell whether the line to take out is in the file, so that nobody looks for one that is not."""
    if finding.site is None:
        return False
    return any(finding.change.out in line for line in linecache.getlines(finding.site.file))


def windows_of(story: Story) -> list[WatchedWindow]:
    """Return the windows of all optimizers in the order of their steps."""
    windows = [window for own in story.windows.values() for window in own]
    return sorted(windows, key=lambda window: window.step.order if window.step is not None else 0)


def window_row(story: Story, window: WatchedWindow) -> dict[str, Any]:
    """Return one window as plain data: its micro-batches with their items and rows, and its step."""
    return {
        "rank": story.trace.rank,
        "optimizer": story.optimizer_name(window),
        "pieces": [
            {
                "rows": micro_batch.rows,
                "items": [term.items for term in micro_batch.backward.terms],
                "factors": [term.factor for term in micro_batch.backward.terms],
                "loss": micro_batch.backward.value,
            }
            for micro_batch in window.micro_batches
        ],
        "lost": len(window.lost),
        "stepped": window.step is not None,
        "norm": window.step.norm if window.step is not None else None,
        "clips": len(window.clips),
    }


def report_on(traces: list[Trace], measurement: Measurement | None = None) -> Report:
    """Read the traces of all ranks and say what is wrong."""
    stories = [read(trace) for trace in sorted(traces, key=lambda trace: trace.rank)]
    findings = with_measurement(find(stories), measurement)
    notes = list(notes_on(stories, findings))
    if measurement is not None:
        notes = [f"First window against the reference: {measurement.comparison}.", *measurement.notes, *notes]
    if stories[0].trace.error is not None:
        notes.append(f"The script ended by its own error: {stories[0].trace.error}")
    looked = any(isinstance(event, OptimizerStep) for event in stories[0].trace.events)
    return Report(findings, notes, stories, looked, measurement)


def with_measurement(findings: list[Finding], measurement: Measurement | None) -> list[Finding]:
    """Put what was measured before what was only seen; the same cause is said once, with the measured size."""
    measured = measurement.finding() if measurement is not None else None
    if measured is None:
        return findings
    rules = (measured.rule, *SAME.get(measured.rule, ()))
    seen = next((finding for finding in findings if finding.rule in rules), None)
    if seen is not None:
        measured = dataclasses.replace(seen, amount=measured.amount, harm=measured.harm)
    return [measured, *(finding for finding in findings if finding is not seen)]


def reduces_each_micro_batch(window: WatchedWindow) -> bool:
    """Tell whether FSDP reduced gradients with every micro-batch of a window of several."""
    sharded = [
        micro_batch
        for micro_batch in window.micro_batches
        if any(forward.wrapper == "fsdp" for forward in micro_batch.forwards)
    ]
    return window.length > 1 and len(sharded) > 1 and all(micro_batch.backward.touched for micro_batch in sharded)


def notes_on(stories: list[Story], findings: list[Finding]) -> list[str]:
    """Return facts worth knowing that are no faults."""
    notes = [REDUCED] if any(reduces_each_micro_batch(window) for window in windows_of(stories[0])) else []
    for one in divisions(stories):
        error = usual_error(one)
        if error is not None and error > 1e-3 and not findings:
            counts = ", ".join(f"{items:g}" for items in one.items[:8])
            notes.append(
                f"Items vary between micro-batches ({counts}): dividing each by its own count would give an error of "
                f"{error:.2g} on this data; this loop does not."
            )
            break
    return notes
