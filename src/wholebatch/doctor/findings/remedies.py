"""The change that mends a fault, in the words of the framework whose loop it is."""

from __future__ import annotations

import re

from wholebatch.finding import Change
from wholebatch.site import Site

NAMED_LOSS = re.compile(r"([A-Za-z_][\w.\[\]\"']*)\.backward\(")
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
    if match := NAMED_LOSS.search(text):
        return Change(text, text.replace(f"{match[1]}.backward(", f"({match[1]} {back}{factor}).backward(", 1))
    return Change(text, f"(loss {factor}).backward()")


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
