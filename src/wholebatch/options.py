"""How the micro-batches of a window run: one set of options, taken alike by every public function."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypedDict

import torch
from torch import Tensor
from torch.amp import GradScaler

from wholebatch.noise_scale import NoiseScale

Counts: TypeAlias = "float | Tensor | Sequence[float | Tensor] | Mapping[str, float | Tensor]"


class Options(TypedDict, total=False):
    """How the micro-batches of a batch run; all optional, all by name.

    Attributes:
        items: a function of the micro-batch that returns the counts of the terms, in their order or under their
            names. Makes every denominator known beforehand, so that losses with several denominators need no
            counting pass.
        collate: makes a micro-batch of a list of samples; the batch is then a plain sequence of samples.
        whole: names of leaves that go whole into every micro-batch although they look as if they had rows, such as
            weights of as many classes as there are rows.
        sync: when gradients travel over ranks: "last", once a window; "every", with each micro-batch; "alone", never:
            this process has a model of its own, although others have joined ``torch.distributed`` too.
        accumulate_in: the precision of the window's sum for parameters of fewer bits, such as ``torch.float32``.
        offload: keep what autograd saves in host memory while it waits. With ``batch_norm="exact"``: what crosses
            from stage to stage; on the CPU itself most of that is made twice instead.
        batch_norm: what BatchNorm layers in training mode do. "exact": statistics of the whole batch over all
            ranks, forward and backward, running statistics moved on once; "exact-per-rank": of each rank's share;
            "exact-lock-step": the same for a model that no graph can be made of, with the graphs of all micro-batches
            in memory; "pooled": each micro-batch normalises by itself and running statistics are pooled and moved on
            once; "micro": as in a plain loop.
        verify: when a window proves that it may be cut: one micro-batch runs whole and in two uneven parts, each row
            with random draws of its own and without a trace, and gradient, loss and items must agree. "first" (the
            default): in the first window of a model, a loss function and a set of options, which then takes up to
            three more micro-batches' time; "always": in every window, for tests; "never".
        noise_scale: measures every n-th window how noisy the gradient is, of its micro-batches: `NoiseScale`.
    """

    items: Callable[[Any], Counts] | None
    collate: Callable[[list[Any]], Any] | None
    whole: Sequence[str]
    sync: Literal["last", "every", "alone"]
    accumulate_in: torch.dtype | None
    offload: bool
    batch_norm: Literal["exact", "exact-per-rank", "exact-lock-step", "pooled", "micro"] | None
    verify: Literal["first", "always", "never"]
    noise_scale: NoiseScale | None


CHOICES: dict[str, tuple[object, ...]] = {
    "sync": ("last", "every", "alone"),
    "verify": ("first", "always", "never"),
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
    "noise_scale": (lambda v: isinstance(v, NoiseScale), "what measures it, and keep it: noise_scale=wb.NoiseScale()"),
}
"""What the other options must be, and how to say it."""


BACKWARD = ("model", "loss_fn", "batch", "micro_batch_size", "scaler")
"""What ``backward`` takes besides options, by name."""

STEP = (*BACKWARD[:2], *BACKWARD[3:], "optimizer", "max_grad_norm", "scheduler", "after_step", "on_nonfinite")
"""What ``Step`` takes besides options, by name."""

ELSEWHERE = {
    "max_grad_norm": "clip|clip_norm|clip_grad|clip_grad_norm|max_norm|grad_clip|gradient_clip_val|grad_norm_clip",
    "micro_batch_size": "microbatch|micro_batch|micro_batches|micro_bsz|batch_size|chunk_size|chunks"
    "|per_device_batch_size|per_device_train_batch_size|train_micro_batch_size_per_gpu|accumulation_steps|accumulate_steps|accumulation"
    "|grad_accumulation_steps|gradient_accumulation_steps|accumulate_grad_batches|num_micro_batches",
    "scheduler": "lr_scheduler|schedulers|schedule|sched",
    "scaler": "grad_scaler|amp_scaler|loss_scaler",
    "loss_fn": "loss|loss_function|loss_func|criterion|compute_loss",
    "after_step": "ema|callback|callbacks|on_step|hooks",
    "optimizer": "optim|opt",
    "items": "count|counts|denominator|denominators|num_items|num_items_in_batch|normalizer",
    "collate": "collate_fn|collator|data_collator",
    "accumulate_in": "accumulate_dtype|accum_dtype|grad_dtype|sum_in|precision|dtype",
    "offload": "cpu_offload|offload_to_cpu|save_on_cpu",
    "sync": "no_sync|sync_every|gradient_sync|synchronize|synchronise",
    "noise_scale": "noise|gradient_noise_scale|gns|gns_monitor",
    "on_nonfinite": "skip_nonfinite|skip_nan|on_nan|error_if_nonfinite",
}
"""What other tools call these."""

MEANT = {word: ours for ours, words in ELSEWHERE.items() for word in words.split("|")}


def checked(options: Options, named: Sequence[str] = BACKWARD) -> Options:
    """Refuse a misspelt option or an unknown choice, which would otherwise be a silent no-op.

    Args:
        options: as they were given.
        named: what the function that was called takes besides them.

    Raises:
        TypeError: for an option that does not exist; names the nearest.
        ValueError: for a value that the option does not know.
    """
    for name, value in options.items():
        if name not in Options.__annotations__:
            known = (*named, *Options.__annotations__)
            raise TypeError(f"There is no option '{name}'.{_nearest(name, known)} Options: {', '.join(known[1:])}.")
        if name in CHOICES and value not in CHOICES[name]:
            said = ", ".join(repr(choice) for choice in CHOICES[name] if choice is not None)
            raise ValueError(f"{name}={value!r} is not known. Choose one of {said}.")
        if name in KINDS and value is not None and not KINDS[name][0](value):
            raise TypeError(f"{name}={value!r:.80} is of type {type(value).__name__}; pass {KINDS[name][1]}.")
    return options


def checked_scaler(scaler: Any) -> GradScaler | None:
    """Return a scaler that scales, None for one that is switched off.

    Raises:
        TypeError: for anything that is no scaler.
    """
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise TypeError(
            f"scaler is {scaler!r:.80}, of type {type(scaler).__name__}; pass a scaler, which keeps its scale between "
            "steps: scaler=torch.amp.GradScaler(device)."
        )
    return scaler if scaler is not None and scaler.is_enabled() else None


def _nearest(name: str, known: Sequence[str]) -> str:
    """Say which argument was meant, by what other tools call it or by its letters."""
    meant = MEANT.get(name.lower(), name)
    if meant not in known and meant in STEP:
        return f" wb.Step(..., {meant}=...) takes it; beside the gradient alone it is your own call."
    near = [meant] if meant in known else difflib.get_close_matches(meant, known, 1)
    rows = ", the rows of one micro-batch" if near == ["micro_batch_size"] else ""
    return f" Did you mean '{near[0]}'{rows}?" if near else ""
