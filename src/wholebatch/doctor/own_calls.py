"""Calls of this library inside a watched loop: each is one micro-batch of the loop's window, however many it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch import step
from wholebatch.doctor.graph import terms_of
from wholebatch.doctor.patching import Listener, PatchedCall, Wrapping
from wholebatch.doctor.recorder import Recorder
from wholebatch.doctor.trace import Backward, TracedTerm
from wholebatch.gradient import coupled
from wholebatch.gradient import separable as gradient


class LibraryCall:
    """One call from its beginning until the gradient of its window is complete.

    What happens inside (forwards, backwards of micro-batches, trials of the first window) makes no events.
    `factors` are the numbers that the user's loss function multiplies its loss with.
    """

    def __init__(self, recorder: Recorder, name: str, model: Any, scaler: Any) -> None:
        self.recorder = recorder
        if isinstance(model, nn.Module):
            recorder.parameters.add_module(model)
        self.event: Backward | None = recorder.begin_backward(None)
        self.factors: list[tuple[float, ...]] = []
        if self.event is not None:
            self.event.call = name
            self.event.scaled = scaler is not None and scaler.is_enabled()
            if self.event.site is not None:
                self.event.site = dataclasses.replace(self.event.site, framework="wholebatch")
            recorder.call = self

    def listen(self, roots: Any) -> None:
        """Read the user's own factors off the shares of a micro-batch."""
        if torch._C._len_torch_dispatch_stack() > 0:
            return  # a trial of the first window, with its draws held still
        tensors = list(roots) if isinstance(roots, (list, tuple)) else [roots]
        self.factors = [factors_of(root) for root in tensors if isinstance(root, Tensor)]

    def close(self, result: Any = None) -> None:
        """Note the micro-batch, once its gradient is complete."""
        event, self.event = self.event, None
        if event is None:
            return
        self.recorder.call = None
        if result is not None:
            event.rows = result.rows
            event.value = float(result.loss)
            event.terms = terms_in(event.call, result, self.factors)
        self.recorder.end_backward(event)


def factors_of(root: Tensor) -> tuple[float, ...]:
    """Return what a share was multiplied with, without the items that a mean was multiplied with to be a sum."""
    terms = terms_of(root) if root.numel() == 1 else ()
    if len(terms) != 1:
        return ()
    factors = list(terms[0].factors)
    made = next((factor for factor in factors if terms[0].reduction == "mean" and factor == terms[0].items), None)
    if made is not None:
        factors.remove(made)
    return tuple(factors)


def terms_in(name: str, result: Any, factors: list[tuple[float, ...]]) -> tuple[TracedTerm, ...]:
    """Return what a call averaged over: each of its terms is a mean over the rows or tokens that it was given."""
    named = result.items if isinstance(result.items, Mapping) else dict(enumerate(result.items))
    own = factors if len(factors) == len(named) else [()] * len(named)
    return tuple(
        TracedTerm(str(key), name, "mean", product(these), these, float(items), float(items))
        for (key, items), these in zip(named.items(), own, strict=True)
    )


def product(factors: tuple[float, ...]) -> float:
    """Return the product of factors."""
    total = 1.0
    for factor in factors:
        total *= factor
    return total


def around_library(recorder: Recorder, wrapping: Wrapping) -> None:
    """Hear the calls that leave the gradient of a window."""

    def listener(name: str) -> Listener:
        def called(call: PatchedCall) -> Any:
            inside = LibraryCall(recorder, name, call.given(0, "model"), call.kwargs.get("scaler"))
            result = None
            try:
                result = call.run()
            finally:
                inside.close(result)
            return result

        return called

    def stepped(call: PatchedCall) -> Any:
        own = call.given(0, "self")
        inside = LibraryCall(recorder, "wb.Step", own.model, own.scaler)
        try:
            return call.run()
        finally:
            inside.close()

    wrapping.function(gradient, "backward", listener("wb.backward"))
    wrapping.function(coupled, "coupled_backward", listener("wb.coupled_backward"))
    wrapping.method(step.Step, "__call__", stepped)
