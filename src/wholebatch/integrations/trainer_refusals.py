"""What a Hugging Face Trainer is by its class and its settings, and those under which no step of it can be exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from wholebatch.batch.sizes import Size
from wholebatch.errors import InexactError
from wholebatch.integrations.foreign_loop import world
from wholebatch.integrations.trainer_shares import Outside

COUPLED: dict[str, Callable[[Any], bool]] = {
    "KTO's KL baseline, which each micro-batch estimates from its own rows (loss_type='apo_zero_unpaired' has none; "
    "exact(KTOTrainer, coupled=True) takes it of all rows)": (
        lambda trainer: (
            bool(getattr(trainer, "calculate_KL", False))
            and trainer.args.gradient_accumulation_steps * world() > 1
            and not trainer._coupled
        )
    ),
}
"""Losses known by name that depend on the cut although the first gradients do not show it."""


def shifts(trainer: transformers.Trainer) -> bool:
    """Say whether the model predicts each label from the position before it."""
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    known = type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return known or bool(getattr(trainer, "_loss_shifts_labels", False))


def owner_of(trainer: transformers.Trainer, method: str) -> type:
    """Return the class whose method the user's trainer runs."""
    return next(kind for kind in type(trainer).__mro__ if kind is not Outside and method in vars(kind))


def refuse(trainer: transformers.Trainer, size: Size, stays: bool) -> None:
    """Name the first setting under which the Trainer's steps are not ours to make."""
    args, optim = trainer.args, getattr(trainer.args.optim, "value", trainer.args.optim)
    tokens = size is not None and str(args.include_num_input_tokens_seen) not in ("no", "False")
    refused = {
        "micro_batch_size, as it prepares its own inputs with each call": size is not None and stays,
        "include_num_input_tokens_seen with a micro_batch_size, as samples are not collated when it counts": tokens,
        "several GPUs in one process (DataParallel; torchrun starts a process for each)": args.n_gpu > 1,
        "tensor, context or sequence parallelism, where ranks hold the same rows or parts of them and what all ranks "
        "count is not the window's (wb.shares counts over a group of ranks, in a loop of your own)": any(
            (getattr(getattr(trainer.accelerator, "parallelism_config", None), f"{kind}_size", 1) or 1) > 1
            for kind in ("tp", "cp", "sp")
        ),
        "a model sharded when it was loaded": getattr(trainer, "is_distributed_loading_by_transformers", False),
        "auto_find_batch_size, which trains on smaller batches (say micro_batch_size=wb.Auto(...))": (
            args.auto_find_batch_size
        ),
        f"optim={optim!r}, which steps within the backward pass": "lomo" in optim or "layerwise" in optim,
    }
    refused |= {name: on(trainer) for name, on in COUPLED.items()}
    for name in (name for name, on in refused.items() if on):
        own = type(trainer).__name__.removeprefix("Exact")
        raise InexactError(f"exact({own}) cannot make a step exact under {name}. Turn it off.")
