"""The Hugging Face Trainer with the gradient of the whole window.

The Trainer's own loop stays: it draws the micro-batches of a window, calls `training_step` for each, then clips, steps,
logs and saves. Here `training_step` waits for the window's last call and runs the whole window then, so that each piece
is divided by what the window averages over.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, cast

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from typing_extensions import Unpack

import wholebatch as wb
from wholebatch.errors import InexactError
from wholebatch.integrations.boundary import everywhere, world
from wholebatch.integrations.meaning import Meaning, is_number
from wholebatch.integrations.reading import Counter
from wholebatch.options import Options
from wholebatch.sizes import Size
from wholebatch.sums import Schema, Sums, Tally
from wholebatch.window import Window, pieces_of

T = TypeVar("T", bound=transformers.Trainer)


def exact(trainer: type[T], micro_batch_size: Size = None, **options: Unpack[Options]) -> type[T]:
    """Return a subclass of a Trainer whose step is the whole window's, whatever `gradient_accumulation_steps`.

    Everything else stays: arguments, callbacks, checkpoints, resuming. The loss may be the model's own, a
    `compute_loss_func` or an overridden `compute_loss`, and may return any form that `wb.backward` knows. A bare number
    is read as `loss_is_scaled_for_ga` says: True, it is a share of the whole window's; False, each micro-batch's mean
    counts alike. If that is None, the model's own loss is measured once, a loss that divides by `num_items_in_batch` is
    taken at its word, and any other is refused. Costs a few forward passes of one micro-batch at the start, and one
    more forward pass a window where experts are balanced.

    Args:
        trainer: `transformers.Trainer` or any subclass of it.
        micro_batch_size: cuts the window again: rows (an int), `wb.Tokens(...)` or `wb.Auto(...)`. The collator is
            then applied to each piece, except where `loss_is_scaled_for_ga` is True. None keeps the Trainer's own.
        **options: as of `wb.backward`; `items=` counts what a bare number averages over in a micro-batch.

    Raises:
        InexactError: on construction, for a setting of the Trainer that cannot be made exact; it is named.
        LossError: in the first step, if what the loss averages over cannot be known.

    Example:
        >>> exact(transformers.Seq2SeqTrainer).__name__
        'ExactSeq2SeqTrainer'
    """
    items = options.pop("items", None)
    settings = {"_size": micro_batch_size, "_items": items and staticmethod(items), "_options": options}
    own = () if trainer is transformers.Trainer else (trainer,)
    return cast("type[T]", type(f"Exact{trainer.__name__}", (_Outside, *own, _Inside), settings))


@dataclass
class _Waiting:
    """A window between its first call of `training_step` and its last; items are those of all ranks, if countable."""

    batches: list[Any]
    calls: int
    items: Tensor | None


class _Inside(transformers.Trainer):
    """The steps of a window; stands below the user's own class, whose overrides reach it by `super()`."""

    _size: Size = None
    _items: Counter | None = None
    _options: ClassVar[Options] = {}
    _waiting: _Waiting | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _refuse(self, self._size)
        compute_loss = next(k for k in type(self).__mro__ if k is not _Outside and "compute_loss" in vars(k))
        own = compute_loss is transformers.Trainer and self.compute_loss_func is None
        self._meaning = Meaning(self, self._items, own, lambda: _shifts(self))

    def get_train_dataloader(self) -> Any:
        """Leave the samples as they are where the window is cut again: the collator comes afterwards."""
        collator: Any = self.data_collator
        self.data_collator = _as_they_are if self._cuts_samples else collator
        try:
            return super().get_train_dataloader()
        finally:
            self.data_collator = collator

    def set_initial_training_values(self, args: Any, dataloader: Any) -> tuple[Any, ...]:
        """Let every rank run as many windows as the one with most, so that none waits for the others in vain."""
        values = tuple(super().set_initial_training_values(args, dataloader))
        return tuple(max(of_ranks) for of_ranks in zip(*everywhere(values), strict=True))

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """Draw a window and remember it; a short one is filled up, so that the loop's own count comes out even."""
        batches = list(itertools.islice(epoch_iterator, num_batches))
        items = None if self._cuts_samples else self._meaning.count(batches)
        if world() > 1:
            drawn = [count for rank, count in everywhere((len(batches), items and float(items))) if rank]
            items = None if None in drawn else torch.tensor(sum(drawn))
        if not batches and not (world() > 1 and drawn):
            return [], None
        self._waiting = _Waiting(batches, num_batches, None if items is None else items.to(device))
        return batches + [{}] * (num_batches - len(batches)), self._waiting.items

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Wait for the window's last call, then leave the whole window's gradient and return its loss."""
        waiting = self._waiting
        if waiting is None:
            raise InexactError(
                f"{type(self).__name__} draws its windows without Trainer.get_batch_samples, so they cannot be seen "
                "whole. Let the override call super().get_batch_samples."
            )
        waiting.calls -= 1
        if waiting.calls:
            return torch.zeros((), device=self.args.device)
        self._waiting = None
        model.train()
        getattr(self.optimizer, "train", model.train)()  # optimizers without a schedule have modes too
        return self._run(model, waiting)

    def floating_point_ops(self, inputs: Any) -> int:
        """Count nothing for what fills a window up, nor for samples: they are counted when they are collated."""
        return int(super().floating_point_ops(dict(inputs))) if inputs and isinstance(inputs, Mapping) else 0

    def _track_num_input_tokens(self, inputs: Any) -> None:
        if not inputs:  # ranks count together: one that has nothing left brings nothing
            inputs = {getattr(self.model, "main_input_name", "input_ids"): torch.zeros(0, device=self.args.device)}
        super()._track_num_input_tokens(inputs)

    @property
    def _cuts_samples(self) -> bool:
        return self._size is not None and self.loss_is_scaled_for_ga is None

    def _run(self, model: nn.Module, waiting: _Waiting) -> Tensor:
        batch: Any = Window(waiting.batches)
        options = Options(**self._options)
        if self._cuts_samples:
            batch, options["collate"] = list(itertools.chain.from_iterable(batch)), self.data_collator
        pieces = pieces_of(batch, self._size, whole=options.get("whole", ()), collate=options.get("collate"))
        alone = self.accelerator.unwrap_model(model)
        self._meaning.agree(alone, pieces)
        balance = self._meaning.balance(alone, pieces)

        def loss_fn(model: nn.Module, inputs: Any) -> Any:
            if self._cuts_samples:
                self.current_flos += self.floating_point_ops(inputs)
            return self._meaning.state(model, inputs, waiting.items, balance)

        result = wb.backward(model, loss_fn, batch, self._size, scaler=self.accelerator.scaler, **options)
        items = result.items.values() if isinstance(result.items, dict) else result.items
        if self.accelerator.scaler is None and not any(map(float, items)):
            model.zero_grad()  # nothing was to be learned: not even momentum and decay should move
        return result.loss.to(device=self.args.device)


class _Outside(transformers.Trainer):
    """The true evaluation loss; stands above the user's own class and sees what its `compute_loss` returned."""

    _meaning: Meaning
    _tally: Tally | None = None

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return what the user's class returned within a window, and one number outside of it."""
        if self._meaning.asking:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        kept, items = {**inputs}, self._meaning.evaluated(model, inputs)
        if num_items_in_batch is not None and items is not None:
            num_items_in_batch = items
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        answer = self._meaning.answer(loss, kept, items)
        if self._tally is not None:
            self._tally.add(answer)
        if answer is not None and not is_number(loss):
            loss = torch.stack([term.value for term in answer.terms.values()]).sum()
        return (loss, outputs) if return_outputs else loss

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Average the loss over what it averages over in all of the data, not over batches."""
        tally = self._tally = Tally()
        try:
            output = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
        finally:
            self._tally = None
        here = tally.sums()
        heard = [(schema, numbers) for schema, numbers in everywhere((here.schema, here.numbers(here.schema)))]
        schema, name = heard[0][0], f"{metric_key_prefix}_loss"
        if output.metrics is not None and name in output.metrics and schema != Schema():
            whole = Sums.of_numbers(schema, torch.stack([numbers for _, numbers in heard]).sum(0))
            output.metrics[name] = float(whole.report(None)["loss"])
        return output


def _shifts(trainer: transformers.Trainer) -> bool:
    """Say whether the model predicts each label from the position before it."""
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    known = type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return known or bool(getattr(trainer, "_loss_shifts_labels", False))


def _refuse(trainer: transformers.Trainer, size: Size) -> None:
    """Name the first setting under which the Trainer's steps are not ours to make."""
    args, optim = trainer.args, getattr(trainer.args.optim, "value", trainer.args.optim)
    means = trainer.loss_is_scaled_for_ga is False and size is not None
    tokens = size is not None and str(args.include_num_input_tokens_seen) not in ("no", "False")
    refused = {
        "include_num_input_tokens_seen with a micro_batch_size, as samples are not collated when it counts": tokens,
        "loss_is_scaled_for_ga=False with a micro_batch_size, as a mean of means depends on the cut": means,
        "several GPUs in one process (DataParallel; torchrun starts a process for each)": args.n_gpu > 1,
        "deepspeed": trainer.is_deepspeed_enabled,
        "fsdp": bool(trainer.is_fsdp_enabled),
        "tensor, context or sequence parallelism": getattr(trainer.accelerator, "parallelism_config", None) is not None,
        "a model sharded when it was loaded": getattr(trainer, "is_distributed_loading_by_transformers", False),
        "auto_find_batch_size, which trains on smaller batches (say micro_batch_size=wb.Auto(...))": (
            args.auto_find_batch_size
        ),
        f"optim={optim!r}, which steps within the backward pass": "lomo" in optim or "layerwise" in optim,
    }
    for name in (name for name, on in refused.items() if on):
        raise InexactError(f"exact({type(trainer).__name__}) cannot make a step exact under {name}. Turn it off.")


def _as_they_are(samples: list[Any]) -> Any:
    return samples
