"""The change that mends a fault, in the words of the framework whose loop it is."""

from __future__ import annotations

import linecache
import re

from wholebatch.verify.finding import Change
from wholebatch.verify.source_line import Site

PAIRS = {")": "(", "]": "[", "}": "{"}
SCALED_LOSS = re.compile(r"scale\((.+)\)\.backward\(")
ACCELERATE = re.compile(r"backward\((.+)\)")


def line_of(site: Site | None, otherwise: str) -> str:
    """Return the user's line, or what it usually looks like."""
    text = site.text if site is not None else ""
    return text or otherwise


def scaled_backward(site: Site | None, factor: str, undo: int = 0) -> Change:
    """Let the loss of the backward at `site` be followed by `factor`, such as "/ 4", in the framework's words.

    undo: a whole number that the loss has been divided by already, where it is divided before the line.
    """
    framework = site.framework if site is not None else None
    if framework == "wholebatch":
        return Change(
            line_of(site, "wb.backward(model, loss_fn, micro_batch)"),
            "wb.backward(model, loss_fn, wb.Window(micro_batches))  # once a window, with all its micro-batches",
        )
    if framework in ("transformers", "trl"):
        return in_trainer(site)
    if framework in ("lightning", "pytorch_lightning"):
        return Change(
            line_of(site, "return loss"),
            "return whole(self, wb.mean(losses))  # and callbacks=[Exact()], both of wholebatch.integrations.lightning",
        )
    text = line_of(site, "loss.backward()")
    if framework == "accelerate" and (match := ACCELERATE.search(text)):
        back = "* accelerator.gradient_accumulation_steps " if undo else ""
        return Change(text, text.replace(match[1], f"{match[1]} {back}{factor}", 1))
    if match := SCALED_LOSS.search(text):
        return Change(text, text.replace(f"scale({match[1]})", f"scale(({undone(match[1])}) {factor})", 1))
    back = f"* {undo} " if undo else ""
    if loss := before_backward(text):
        return Change(text, text.replace(f"{loss}.backward(", f"({loss} {back}{factor}).backward(", 1))
    return Change(text, f"(loss {factor}).backward()")


def before_backward(text: str) -> str:
    """Return the expression whose backward a line calls, empty where the line does not hold all of it."""
    end = start = text.find(".backward(")
    open_brackets: list[str] = []
    while start > 0:
        before = text[start - 1]
        if before in PAIRS:
            open_brackets.append(PAIRS[before])
        elif open_brackets and before == open_brackets[-1]:
            open_brackets.pop()
        elif not open_brackets and not (before.isalnum() or before in "_."):
            break
        start -= 1
    return text[start:end] if end > 0 and not open_brackets else ""


def condition_of(site: Site | None) -> str:
    """Return the condition that the line at `site` stands under, empty where it stands under none."""
    if site is None:
        return ""
    lines = linecache.getlines(site.file)[: site.line]
    depth = indentation(lines[-1]) if lines else 0
    for line in reversed(lines):
        if line.strip() and indentation(line) < depth:
            return line.strip() if line.strip().startswith("if ") else ""
    return ""


def indentation(line: str) -> int:
    """Return how far a line is indented."""
    return len(line) - len(line.lstrip())


def undone(expression: str) -> str:
    """Return an expression without its last division by a name or a number."""
    return re.sub(r"\s*/\s*[\w.]+$", "", expression)


def in_trainer(site: Site | None) -> Change:
    """State the share of the whole window in the Trainer's words."""
    if site is not None and site.function == "compute_loss":
        return Change(
            "return loss  # the mean of this micro-batch",
            "return loss_sum / num_items_in_batch  # with trainer.loss_is_scaled_for_ga = True",
        )
    return Change(
        "trainer = Trainer(model, arguments, ...)",
        "trainer = wholebatch.integrations.transformers.exact(Trainer)(model, arguments, ...)",
    )


def moved(site: Site | None, usual: str, to: str) -> Change:
    """Keep the line at `site`, at the place that `to` describes."""
    text = line_of(site, usual)
    return Change(text, f"{text}  # {to}")
