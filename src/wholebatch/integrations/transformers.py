"""The Hugging Face Trainer with the gradient of the whole window.

The Trainer's own loop stays: it draws the micro-batches of a window, calls `training_step` for each, then clips, steps,
logs and saves. Here `training_step` waits for the window's last call and runs the whole window then, so that each piece
is divided by what the window averages over. What a ready-made loss averages over is measured once, on the first
micro-batch (`wholebatch.integrations.reading`).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from typing_extensions import Unpack

import wholebatch as wb
from wholebatch.errors import InexactError, LossError
from wholebatch.integrations.reading import COUNTERS, HOW_TO_STATE, Counter, contract, recognise, undivided
from wholebatch.integrations.routing import Load, Router, load_of, recognise_router
from wholebatch.loss import Mean, from_mean, read, total
from wholebatch.options import Options
from wholebatch.sizes import Size
from wholebatch.state import State
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


@dataclass(frozen=True)
class _Reading:
    """What a bare number is the mean of, and the experts' share in it."""

    counter: str
    router: Router | None = None


@dataclass
class _Waiting:
    """A window between its first call of `training_step` and its last; items are those of all ranks, if countable."""

    batches: list[Any]
    calls: int
    items: Tensor | None


@dataclass(frozen=True)
class _Balance:
    """What the experts' shares are divided by: the window's items and load, over all ranks."""

    items: Tensor
    load: Load


class _Inside(transformers.Trainer):  # type: ignore[misc]
    """The steps of a window; stands below the user's own class, whose overrides reach it by `super()`."""

    _size: Size = None
    _items: Counter | None = None
    _options: Options = {}
    _waiting: _Waiting | None = None
    _reading: _Reading | None = None
    _agreed = False
    _asked = False
    _running = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _refuse(self)

    @property
    def _cuts_samples(self) -> bool:
        return self._size is not None and self.loss_is_scaled_for_ga is None

    def get_train_dataloader(self) -> Any:
        """Leave the samples as they are where the window is cut again: the collator comes afterwards."""
        collator = self.data_collator
        self.data_collator = _as_they_are if self._cuts_samples else collator
        try:
            return super().get_train_dataloader()
        finally:
            self.data_collator = collator

    def set_initial_training_values(self, args: Any, dataloader: Any) -> tuple[Any, ...]:
        """Let every rank run as many windows as the one with most, so that none waits for the others in vain."""
        values = tuple(super().set_initial_training_values(args, dataloader))
        return tuple(max(of_ranks) for of_ranks in zip(*_everywhere(values), strict=True))

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """Draw a window and remember it; a short one is filled up, so that the loop's own count comes out even."""
        batches = list(itertools.islice(epoch_iterator, num_batches))
        items = None if self._cuts_samples else self._count(batches)
        everywhere = _everywhere((len(batches), None if items is None else float(items))) if _world() > 1 else []
        if not batches and not any(drawn for drawn, _ in everywhere):
            return [], None
        if everywhere:
            counts = [count for drawn, count in everywhere if drawn]
            items = None if None in counts else torch.tensor(sum(counts), device=device)
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
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        return self._run(model, waiting)

    def floating_point_ops(self, inputs: Any) -> int:
        """Count nothing for what fills a window up, nor for samples: they are counted when they are collated."""
        return int(super().floating_point_ops(inputs)) if inputs and isinstance(inputs, Mapping) else 0

    def _track_num_input_tokens(self, inputs: Any) -> None:
        if not inputs:  # ranks count together: one that has nothing left brings nothing
            inputs = {getattr(self.model, "main_input_name", "input_ids"): torch.zeros(0, device=self.args.device)}
        super()._track_num_input_tokens(inputs)

    def _run(self, model: nn.Module, waiting: _Waiting) -> Tensor:
        batch: Any = Window(waiting.batches)
        options = Options(**self._options)
        if self._cuts_samples:
            batch, options["collate"] = list(itertools.chain.from_iterable(batch)), self.data_collator
        self._agree(batch, options)
        balance = self._balance(batch, options)

        def loss_fn(model: nn.Module, inputs: Any) -> Any:
            if self._cuts_samples:
                self.current_flos += float(self.floating_point_ops(inputs))
            return self._stated(model, inputs, waiting.items, balance)

        result = wb.backward(model, loss_fn, batch, self._size, scaler=self.accelerator.scaler, **options)
        if self.accelerator.scaler is None and not any(map(float, _values(result.items))):
            model.zero_grad()  # nothing was to be learned: not even momentum and decay should move
        return result.loss.to(self.args.device)

    def _stated(self, model: nn.Module, inputs: Any, window_items: Any, balance: _Balance | None = None) -> Any:
        """Return the loss of a micro-batch in a form that states what it averages over."""
        scaled, items = self.loss_is_scaled_for_ga, self._count([inputs])
        loss, outputs = self._loss(model, inputs, items if scaled is None else window_items)
        if not isinstance(loss, Tensor) or loss.dim():
            return loss
        if scaled is not None:
            return total(loss) if scaled else from_mean(loss, 1.0)
        if balance is not None and self._reading is not None and self._reading.router is not None and items is not None:
            return _balanced(loss, outputs, inputs, items, balance, self._reading.router)
        return self._from_number(loss, inputs, items)

    def _from_number(self, loss: Tensor, inputs: Any, items: Tensor | None) -> Mean:
        if self._items is None and self._counter(inputs) == "one":
            return total(loss)
        return from_mean(loss, 0.0 if items is None else items)

    def _loss(self, model: nn.Module, inputs: Any, items: Any) -> tuple[Any, Any]:
        """Ask for the loss and the outputs, and keep the Trainer from multiplying by the number of processes."""
        inputs = {**self._prepare_inputs(inputs)}
        told = None if items is None else torch.as_tensor(items, device=self.args.device).clamp(min=1)
        before = self._running, self.args.average_tokens_across_devices
        self._running, self.args.average_tokens_across_devices = True, False
        try:
            if not self._the_models_own:
                return self.compute_loss(model, inputs, num_items_in_batch=told), None
            loss, outputs = self.compute_loss(model, inputs, return_outputs=True, num_items_in_batch=told)
            return loss, outputs
        finally:
            self._running, self.args.average_tokens_across_devices = before

    @property
    def _the_models_own(self) -> bool:
        overridden = next(k for k in type(self).__mro__ if k is not _Outside and "compute_loss" in vars(k))
        return overridden is transformers.Trainer and self.compute_loss_func is None

    def _count(self, batches: list[Any]) -> Tensor | None:
        """Return what the losses of these micro-batches average over, together."""
        if not batches or not all(isinstance(inputs, Mapping) for inputs in batches):
            return None
        if self._items is not None:
            return torch.as_tensor(sum(self._items(inputs) for inputs in batches))
        if not any(isinstance(value, Tensor) and value.dim() for value in batches[0].values()):
            return None
        return torch.as_tensor(sum(COUNTERS[self._counter(inputs)](inputs) for inputs in batches))

    def _counter(self, inputs: Mapping[str, Any]) -> str:
        return self._order(inputs)[0] if self._reading is None else self._reading.counter

    def _order(self, inputs: Mapping[str, Any]) -> list[str]:
        model = self.accelerator.unwrap_model(self.model)
        model = model.get_base_model() if hasattr(model, "get_base_model") else model
        causal = type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        return contract(inputs, causal or getattr(self, "_loss_shifts_labels", False))

    def _agree(self, batch: Any, options: Options) -> None:
        """Measure what the loss averages over, once, and take the same answer on every rank."""
        if self._agreed or self._items is not None or self.loss_is_scaled_for_ga is not None:
            return
        found: _Reading | str | None = None
        try:
            found = self._measured(batch, options)
        except LossError as error:
            found = str(error)
        answers = [answer for answer in _everywhere(found) if answer is not None]
        for refused in (answer for answer in answers if isinstance(answer, str)):
            raise LossError(refused)
        self._agreed = bool(answers)
        self._reading = answers[0] if answers else None

    def _measured(self, batch: Any, options: Options) -> _Reading | None:
        model = self.accelerator.unwrap_model(self.model)
        before, training = State(model), model.training
        model.eval()
        try:
            with torch.no_grad():
                for piece in pieces_of(
                    batch, self._size, whole=options.get("whole", ()), collate=options.get("collate")
                ):
                    inputs = self._prepare_inputs(piece.load())
                    if self._count([inputs]):
                        return self._recognised(model, inputs)
        finally:
            model.train(training)
            before.restore()
        return None

    def _recognised(self, model: nn.Module, inputs: Mapping[str, Any]) -> _Reading:
        order, tolerance = self._order(inputs), _tolerance(model, self.args)
        loss, outputs = self._loss(model, inputs, self._count([inputs]))
        if not isinstance(loss, Tensor) or loss.dim():
            return _Reading(order[0])  # it states its items itself

        def loss_of(inputs: Mapping[str, Any], items: Any) -> Tensor:
            return cast("Tensor", self._loss(model, inputs, items)[0])

        rest = undivided(loss_of, inputs, COUNTERS[order[0]](inputs))
        if not self._the_models_own:
            if abs(rest) > tolerance or "labels" not in inputs:
                raise LossError(f"The loss is a bare number that is not divided by num_items_in_batch. {HOW_TO_STATE}")
            return _Reading(order[0])
        if not tolerance < rest < 1 - tolerance or "aux_loss" not in outputs or "router_logits" not in outputs:
            return _Reading(recognise(loss_of, inputs, order, tolerance))
        aside = rest * float(loss)
        router = recognise_router(outputs, inputs.get("attention_mask"), aside, tolerance)
        return _Reading(recognise(lambda x, n: loss_of(x, n) - aside, inputs, order, tolerance), router)

    def _balance(self, batch: Any, options: Options) -> _Balance | None:
        """Count items and experts' load over the window on all ranks, by a forward pass without gradient."""
        router = None if self._reading is None else self._reading.router
        if router is None:
            return None
        model = self.accelerator.unwrap_model(self.model)
        before, items, loads = State(model), 0.0, []
        with torch.no_grad():
            for piece in pieces_of(batch, self._size, whole=options.get("whole", ()), collate=options.get("collate")):
                inputs = self._prepare_inputs(piece.load())
                outputs = self._loss(model, inputs, None)[1]
                loads.append(load_of(outputs["router_logits"], inputs.get("attention_mask"), router.top_k))
                items += float(self._count([inputs]) or 0)
        before.restore()
        here = (items, reduce(add, loads).cpu() if loads else None)
        everywhere = _everywhere(here)
        load = reduce(add, [load for _, load in everywhere if load is not None])
        return _Balance(torch.tensor(sum(items for items, _ in everywhere)), load)


class _Outside(transformers.Trainer):  # type: ignore[misc]
    """The true evaluation loss; stands above the user's own class and sees what its `compute_loss` returned."""

    _sums: dict[Any, list[float]] | None = None

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return what the user's class returned within a window, and one number outside of it."""
        items = None if self._running else self._evaluated(model, {**inputs})
        told = num_items_in_batch if num_items_in_batch is None or items is None else items
        kept = {**inputs}
        answer = super().compute_loss(model, inputs, return_outputs=return_outputs, num_items_in_batch=told)
        if self._running:
            return answer
        loss, outputs = answer if return_outputs else (answer, None)
        number = isinstance(loss, Tensor) and not loss.dim()
        stated = read(loss if not number else items if items is None else self._from_number(loss, kept, items), rows=1)
        terms = {} if stated is None else stated.terms
        for key, term in terms.items() if self._sums is not None else ():
            above, below = self._sums.setdefault(key, [0.0, 0.0])
            self._sums[key] = [above + float(term.total * term.weight), below + float(term.count)]
        value = loss if number else sum(term.value for term in terms.values())
        return (value, outputs) if return_outputs else value

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Average the loss over what it averages over in all of the data, not over batches."""
        self._sums = {}
        try:
            output = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
            seen = [sums for sums in _everywhere(self._sums) if sums]
        finally:
            self._sums = None
        if seen and f"{metric_key_prefix}_loss" in output.metrics:
            terms = [[sum(column) for column in zip(*(sums[key] for sums in seen), strict=True)] for key in seen[0]]
            output.metrics[f"{metric_key_prefix}_loss"] = sum(above / below for above, below in terms if below)
        return output

    def _evaluated(self, model: nn.Module, inputs: Any) -> Tensor | None:
        """Return what a bare number averages over, or None where that is not known."""
        if self.loss_is_scaled_for_ga is not None:
            return None
        if self._reading is None and self._items is None and not self._asked:
            self._asked = True
            with contextlib.suppress(LossError):
                self._reading = self._measured(Window([inputs]), {})
        if self._items is None and (self._reading is None or self._reading.router is not None):
            return None
        return self._count([inputs])


def _balanced(loss: Tensor, outputs: Any, inputs: Any, items: Tensor, balance: _Balance, router: Router) -> Mean:
    """Return a micro-batch's share of the loss and of the experts' balance."""
    own = router.coefficient * outputs["aux_loss"].to(loss.device)
    load = load_of(outputs["router_logits"], inputs.get("attention_mask"), router.top_k)
    shared = router.coefficient * balance.load.loss(load)
    return total((loss - own) * items / balance.items + shared)


def _refuse(trainer: transformers.Trainer) -> None:
    """Name the first setting under which the Trainer's steps are not ours to make."""
    args, accelerator = trainer.args, trainer.accelerator
    parallel = getattr(accelerator, "parallelism_config", None)
    means = trainer.loss_is_scaled_for_ga is False and trainer._size is not None
    refused = {
        "loss_is_scaled_for_ga=False with a micro_batch_size: the mean of means depends on the cut": means,
        "several GPUs in one process (DataParallel); start one process for each with torchrun": args.n_gpu > 1,
        "deepspeed": trainer.is_deepspeed_enabled,
        "fsdp": bool(trainer.is_fsdp_enabled),
        "tensor, context or sequence parallelism": parallel is not None,
        "a model sharded when it was loaded": getattr(trainer, "is_distributed_loading_by_transformers", False),
        "auto_find_batch_size, which trains on smaller batches; say micro_batch_size=wb.Auto(...)": args.auto_find_batch_size,
        f"optim={args.optim.value!r}, which steps within the backward pass": any(
            word in str(args.optim).lower() for word in ("lomo", "layerwise")
        ),
    }
    for name in (name for name, on in refused.items() if on):
        raise InexactError(f"exact({type(trainer).__name__}) cannot make a step exact under {name}. Turn it off.")


def _tolerance(model: nn.Module, args: Any) -> float:
    """Return how far two evaluations of one loss may lie apart."""
    fine = all(p.dtype in (torch.float32, torch.float64) for p in model.parameters())
    return 2e-5 if fine and not (args.bf16 or args.fp16) else 1e-2


def _world() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _everywhere(value: Any) -> list[Any]:
    """Return what every rank has to say."""
    answers: list[Any] = [value] * _world()
    if len(answers) > 1:
        dist.all_gather_object(answers, value)
    return answers


def _values(items: Any) -> Any:
    return items.values() if isinstance(items, dict) else items


def _as_they_are(samples: list[Any]) -> list[Any]:
    return samples
