"""Findings about the model: where rows meet, parameters left out, short formats, fused optimizers."""

from __future__ import annotations

import math

from torch import Tensor

from wholebatch.doctor.findings.ranks import framework
from wholebatch.doctor.findings.remedies import line_of
from wholebatch.doctor.micro_batch import WatchedMicroBatch
from wholebatch.doctor.trace import Backward
from wholebatch.doctor.weights import contains
from wholebatch.doctor.windows import Story, WatchedWindow
from wholebatch.verify.finding import Change, Finding

MANY_MICRO_BATCHES = 16
MOST_MICRO_BATCHES_MEANT = 128
# Relative error of a sum of k gradients rounded at every addition grows like the root of k: measured 0.5 % at 16,
# 1.0 % at 64, 1.8 % at 256, 3.3 % at 1,024 micro-batches for bfloat16; float16 keeps three bits more.
ROUNDING = {"bfloat16": 1.25e-3, "float16": 1.25e-3 / 8}


def batch_norm(story: Story, window: WatchedWindow) -> Finding | None:
    """BatchNorm layers normalise each micro-batch by itself."""
    layers = list(
        dict.fromkeys(
            name
            for micro_batch in window.micro_batches
            for f in micro_batch.forwards
            if f.grad
            for name in f.batch_norms
        )
    )
    if window.length < 2 or not layers or framework(window) == "wholebatch":
        return None
    rows = window.micro_batches[0].rows
    site = window.micro_batches[0].forwards[0].site
    many = f"{len(layers)} BatchNorm layer{'s' * (len(layers) > 1)}"
    return Finding(
        "batch-norm",
        f"{many} in training mode (first: '{layers[0]}'), each micro-batch of {rows} rows normalised by itself",
        f"another gradient than the whole batch's; running statistics move {window.length} times a step",
        0.3,
        site,
        Change(
            line_of(site, "output = model(batch)"),
            'wb.backward(model, loss_fn, batch, micro_batch_size, batch_norm="exact")',
        ),
    )


def nothing_received(story: Story, window: WatchedWindow) -> Finding | None:
    """Trainable parameters in the optimizer never get a gradient."""
    if window.number or window.step is None:
        return None
    steps = [seen.step for seen in story.windows[window.optimizer] if seen.step is not None]
    missing = frozenset.intersection(*(step.missing for step in steps))
    if not missing or any(step.in_backward for step in steps):
        return None
    names = ", ".join(story.trace.names[number] for number in sorted(missing)[:3])
    site = window.step.site
    return Finding(
        "parameters-without-gradient",
        f"{len(missing)} of {len(window.parameters)} trainable parameters receive nothing: {names}",
        f"None in all {len(steps)} steps seen",
        0.02,
        site,
        Change(line_of(site, "optimizer.step()"), "parameter.requires_grad_(False)  # or use it in the forward"),
        "A frozen input under reentrant checkpointing, a detached branch or a forgotten head look like this.",
    )


def short_format(story: Story, window: WatchedWindow) -> Finding | None:
    """Many micro-batches are added up in a format of few bits."""
    kinds = [micro_batch.backward.dtype for micro_batch in window.micro_batches]
    kind = next((kind for kind in kinds if kind in ROUNDING), None)
    if kind is None or window.length < MANY_MICRO_BATCHES:
        return None
    site = window.micro_batches[0].backward.site
    return Finding(
        "short-format-sum",
        f"{window.length} micro-batches are added up in {kind}",
        f"about {ROUNDING[kind] * math.sqrt(window.length):.1%} of the gradient is lost to rounding",
        ROUNDING[kind] * math.sqrt(window.length),
        site,
        Change(
            line_of(site, "loss.backward()"),
            "wb.backward(model, loss_fn, batch, micro_batch_size, accumulate_in=torch.float32)",
        ),
    )


def optimizer_in_backward(story: Story, window: WatchedWindow) -> Finding | None:
    """The optimizer steps inside backward although the loss is that of one micro-batch of several."""
    if window.step is None or not window.step.in_backward or (not window.micro_batches and not window.step.pending):
        return None
    count = micro_batches_meant(story, window.step.order)
    if count < 2:
        return None
    return Finding(
        "optimizer-in-backward",
        f"the optimizer steps inside backward, with each of {count} micro-batches",
        f"{count} updates with 1/{count} of the gradient each",
        1.5,
        window.step.site,
        Change(
            line_of(window.step.site, "optimizer.step()  # in a hook"), "optimizer.step()  # at the boundary, no hook"
        ),
        "A hook on a parameter cannot know where the window ends.",
    )


def micro_batches_meant(story: Story, order: int) -> int:
    """Return the number that the backward around an event divides its loss by, 1 when none."""
    after = next((event for event in story.trace.of(Backward) if event.began <= order <= event.order), None)
    factors = [term.factors for term in after.terms] if after is not None else []
    return next(
        (count for count in range(2, MOST_MICRO_BATCHES_MEANT + 1) if any(contains(f, 1 / count) for f in factors)), 1
    )


def in_batch_negatives(story: Story, window: WatchedWindow) -> Finding | None:
    """A contrastive loss sees only the rows of its micro-batch."""
    micro_batches = [
        micro_batch
        for micro_batch in window.micro_batches
        if any(term.paired and alone(micro_batch, term.total) for term in micro_batch.backward.terms)
    ]
    if (
        window.length < 2 or len(micro_batches) < window.length
    ):  # a class that happens to be the row's number is no pairing
        return None
    rows = [int(max(term.total for term in micro_batch.backward.terms)) for micro_batch in micro_batches]
    site = micro_batches[0].backward.site
    return Finding(
        "in-batch-negatives",
        f"every row of the loss is compared with the {rows[0]} rows of its own micro-batch",
        f"{rows[0] - 1} negatives a row instead of {sum(rows) - 1}: another objective",
        0.9,
        site,
        Change(
            line_of(site, "loss.backward()"), "wb.coupled_backward(model, encode, loss_fn, batch, micro_batch_size)"
        ),
        "A mean of small contrastive losses is not the large one.",
    )


def alone(micro_batch: WatchedMicroBatch, rows: float) -> bool:
    """Tell whether a loss over `rows` rows saw no more than the micro-batch's own."""
    return not micro_batch.rows or rows <= micro_batch.rows


def loss_side_parameters(story: Story, window: WatchedWindow) -> Finding | None:
    """The whole loss is back-propagated once a micro-batch, so what lies in the loss itself is counted every time."""
    values = [
        micro_batch.backward.value for micro_batch in window.micro_batches if micro_batch.backward.value is not None
    ]
    count = window.length
    if count < 2 or len(values) != count or max(values) - min(values) > 1e-3 * max(map(abs, values), default=0):
        return None
    wide = all(
        any(term.total > micro_batch.rows > 0 for term in micro_batch.backward.terms)
        for micro_batch in window.micro_batches
    )
    names = repeated_parameters(story, window) if wide else []
    if not names:
        return None
    site = window.micro_batches[0].backward.site
    return Finding(
        "loss-parameters-counted-again",
        f"the whole loss is back-propagated {count} times, so '{', '.join(names[:3])}' in the loss itself "
        f"get {count} gradients",
        f"gradient {count} x too large for {len(names)} parameter{'s' * (len(names) > 1)}, cosine 1.000",
        0.85,
        site,
        Change(
            line_of(site, "loss.backward()"),
            f"{names[0]}.grad /= {count}  # before clip and step, or wb.coupled_backward",
        ),
        "Each pass reaches its own micro-batch of the encoder once, and the loss's own parameters every time.",
    )


def repeated_parameters(story: Story, window: WatchedWindow) -> list[str]:
    """Return the parameters that get the same gradient from every micro-batch."""
    found = []
    for number in sorted(window.parameters & story.trace.sampled.keys()):
        start, numel = story.trace.sampled[number]
        gained = [part(micro_batch, start, numel) for micro_batch in window.micro_batches]
        parts = [vector for vector in gained if vector is not None]
        if len(parts) == len(window.micro_batches) and all_alike(parts):
            found.append(story.trace.names[number])
    return found


def part(micro_batch: WatchedMicroBatch, start: int, numel: int) -> Tensor | None:
    """Return what a micro-batch added to one parameter."""
    after, before = micro_batch.backward.after, micro_batch.backward.before
    if after is None or len(after) < start + numel:
        return None
    own = after[start : start + numel]
    return own - before[start : start + numel] if before is not None and len(before) >= start + numel else own


def all_alike(parts: list[Tensor]) -> bool:
    """Tell whether gradients are equal to rounding and not zero."""
    size = float(parts[0].norm())
    return size > 0 and all(float((other - parts[0]).norm()) <= 1e-3 * size for other in parts)


RULES = (
    batch_norm,
    nothing_received,
    short_format,
    optimizer_in_backward,
    in_batch_negatives,
    loss_side_parameters,
)
