"""The change that mends a fault, in the words of the framework whose loop it is."""

from __future__ import annotations

import re

from wholebatch.finding import Change
from wholebatch.site import Site

BACKWARD = re.compile(r"([\w.\[\]\"']+)\.backward\(")


def line_of(site: Site | None, otherwise: str) -> str:
    """Return the user's line, or what it usually looks like."""
    text = site.text if site is not None else ""
    return text or otherwise


def scaled_backward(site: Site | None, factor: str) -> Change:
    """Let the loss of the backward at `site` be followed by `factor`, such as "/ 4", in the framework's words."""
    framework = site.framework if site is not None else None
    if framework == "transformers":
        return Change(
            line_of(site, "trainer.train()"),
            "Trainer(..., compute_loss_func=lambda out, labels, num_items_in_batch: loss_sum / num_items_in_batch)",
        )
    if framework in ("lightning", "pytorch_lightning"):
        return Change(
            line_of(site, "return loss"), f"return loss {factor}  # Lightning divides by accumulate_grad_batches"
        )
    text = line_of(site, "loss.backward()")
    if framework == "accelerate" and "backward(" in text:
        inner = text.split("backward(", 1)[1].rsplit(")", 1)[0]
        return Change(text, text.replace(f"backward({inner})", f"backward({inner} {factor})"))
    match = BACKWARD.search(text)
    if match is None:
        return Change(text, f"(loss {factor}).backward()")
    return Change(text, text.replace(f"{match[1]}.backward(", f"({match[1]} {factor}).backward(", 1))


def moved(site: Site | None, usual: str, to: str) -> Change:
    """Keep the line at `site`, at the place that `to` describes."""
    text = line_of(site, usual)
    return Change(text, f"{text}  # {to}")
