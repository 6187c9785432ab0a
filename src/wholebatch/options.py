"""How the micro-batches of a window run: one set of options, taken alike by every public function."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypedDict

import torch
from torch import Tensor

Counts: TypeAlias = "float | Tensor | Sequence[float | Tensor] | Mapping[str, float | Tensor]"


class Options(TypedDict, total=False):
    """How the pieces of a batch run; all optional, all by name.

    Attributes:
        items: a function of the micro-batch that returns the counts of the terms, in their order or under their
            names. Makes every denominator known beforehand, so that losses with several denominators need no
            counting pass.
        collate: makes a micro-batch of a list of samples; the batch is then a plain sequence of samples.
        whole: names of leaves that go whole into every micro-batch although they look as if they had rows, such as
            weights of as many classes as there are rows.
        sync: when gradients travel over ranks: "last", once a window; "every", with each micro-batch.
        accumulate_in: the precision of the window's sum for parameters of fewer bits, such as ``torch.float32``.
        offload: keep what autograd saves in host memory while it waits. With ``batch_norm="exact"``: what crosses
            from stage to stage; on the CPU itself most of that is made twice instead.
        batch_norm: what BatchNorm layers in training mode do. "exact": statistics of the whole batch over all
            ranks, forward and backward, running statistics moved on once; "exact-per-rank": of each rank's share;
            "exact-lock-step": the same for a model that no graph can be made of, with the graphs of all pieces in
            memory; "pooled": each piece normalises by itself and running statistics are pooled and moved on once;
            "micro": as in a plain loop.
    """

    items: Callable[[Any], Counts] | None
    collate: Callable[[list[Any]], Any] | None
    whole: Sequence[str]
    sync: Literal["last", "every"]
    accumulate_in: torch.dtype | None
    offload: bool
    batch_norm: Literal["exact", "exact-per-rank", "exact-lock-step", "pooled", "micro"] | None


CHOICES: dict[str, tuple[object, ...]] = {
    "sync": ("last", "every"),
    "batch_norm": (None, "exact", "exact-per-rank", "exact-lock-step", "pooled", "micro"),
}


KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "items": (callable, "a function of the micro-batch: items=lambda batch: len(batch['labels'])"),
    "collate": (callable, "a function of a list of samples, such as a DataLoader's collate_fn"),
    "whole": (lambda v: isinstance(v, (tuple, list, set, frozenset)), "a sequence of names: whole=('mask',)"),
    "accumulate_in": (
        lambda v: isinstance(v, torch.dtype) and v.is_floating_point,
        "a floating-point dtype: accumulate_in=torch.float32",
    ),
    "offload": (lambda v: isinstance(v, bool), "True or False"),
}
"""What the other options must be, and how to say it."""


def checked(options: Options) -> Options:
    """Refuse a misspelt option or an unknown choice, which would otherwise be a silent no-op.

    Raises:
        TypeError: for an option that does not exist; names the nearest.
        ValueError: for a value that the option does not know.
    """
    for name, value in options.items():
        if name not in Options.__annotations__:
            near = difflib.get_close_matches(name, Options.__annotations__, 1)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            raise TypeError(f"There is no option '{name}'.{hint} Options: {', '.join(Options.__annotations__)}.")
        if name in CHOICES and value not in CHOICES[name]:
            known = ", ".join(repr(choice) for choice in CHOICES[name] if choice is not None)
            raise ValueError(f"{name}={value!r} is not known. Choose one of {known}.")
        if name in KINDS and value is not None and not KINDS[name][0](value):
            raise TypeError(f"{name}={value!r:.80} is of type {type(value).__name__}; pass {KINDS[name][1]}.")
    return options
