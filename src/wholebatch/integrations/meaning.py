"""What the loss of a Hugging Face Trainer averages over: declared, stated by the loss itself, or measured once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.errors import LossError
from wholebatch.integrations.boundary import everywhere
from wholebatch.integrations.reading import COUNTERS, HOW_TO_STATE, Counter, Inputs, contract, recognise, undivided
from wholebatch.integrations.routing import Load, Router, load_of, recognise_router
from wholebatch.loss import Answer, Mean, from_mean, read, total
from wholebatch.state import State
from wholebatch.window import Piece


@dataclass(frozen=True)
class Reading:
    """What a bare number is the mean of, and the experts' share in it."""

    counter: str
    router: Router | None = None


@dataclass(frozen=True)
class Balance:
    """What the experts' shares are divided by: the window's items and load, over all ranks."""

    items: float
    load: Load


class Meaning:
    """Ask a Trainer for its loss, and bring the answer into a form that states what it averages over.

    Args:
        trainer: whose `compute_loss` is asked.
        items: counts what a bare number averages over, if the user declared it.
        own: whether the loss is the model's own, not one that the user wrote.
        causal: whether the model shifts its labels.
    """

    def __init__(self, trainer: Any, items: Counter | None, own: bool, causal: Callable[[], bool]) -> None:
        self.reading: Reading | None = None
        self.asking = False
        self._trainer, self._items, self._own, self._causal = trainer, items, own, causal
        self._agreed = self._refused = False

    @property
    def declared(self) -> bool:
        """Whether the user said what a bare number is, so that nothing is to be measured."""
        return self._items is not None or self._trainer.loss_is_scaled_for_ga is not None

    def ask(self, model: nn.Module, inputs: Inputs, items: Any) -> tuple[Any, Any]:
        """Return the loss and, if it is the model's own, its outputs, for so many items in the batch.

        Over ranks the Trainer would multiply some losses by their number, guessing that gradients will be averaged.
        """
        trainer, args = self._trainer, self._trainer.args
        inputs = {**trainer._prepare_inputs(inputs)}
        told = None if items is None else torch.as_tensor(items, device=args.device).clamp(min=1)
        before = self.asking, args.average_tokens_across_devices
        self.asking, args.average_tokens_across_devices = True, False
        try:
            if not self._own:
                return trainer.compute_loss(model, inputs, num_items_in_batch=told), None
            loss, outputs = trainer.compute_loss(model, inputs, return_outputs=True, num_items_in_batch=told)
            return loss, outputs
        finally:
            self.asking, args.average_tokens_across_devices = before

    def state(self, model: nn.Module, inputs: Inputs, window_items: Any, balance: Balance | None = None) -> Any:
        """Return the loss of a micro-batch in a form that `wb.backward` can divide by the window's items."""
        shared, items = self._trainer.loss_is_scaled_for_ga, self.count([inputs])
        loss, outputs = self.ask(model, inputs, items if shared is None else window_items)
        if not is_number(loss):
            return loss
        if shared is not None:
            return total(loss) if shared else from_mean(loss, 1.0)
        if balance is None or self.reading is None or self.reading.router is None:
            return self._of_number(loss, inputs, items)
        router, mask = self.reading.router, inputs.get("attention_mask")
        apart = loss - router.coefficient * outputs["aux_loss"].to(loss.device)
        load = load_of(outputs["router_logits"], mask, router.top_k)
        share = apart * (0.0 if items is None else items) / balance.items
        return total(share + router.coefficient * balance.load.loss(load))

    def count(self, batches: list[Any]) -> Tensor | None:
        """Return what the losses of these micro-batches average over, together; None if it cannot be counted."""
        if not batches or not all(isinstance(inputs, Mapping) for inputs in batches):
            return None
        if self._items is not None:
            return torch.as_tensor(sum(self._items(inputs) for inputs in batches))
        if not any(isinstance(value, Tensor) and value.dim() for value in batches[0].values()):
            return None
        return torch.as_tensor(sum(COUNTERS[self._counter(inputs)](inputs) for inputs in batches))

    def agree(self, model: nn.Module, pieces: list[Piece]) -> None:
        """Measure what a bare number averages over, once, and take the same answer on every rank.

        Raises:
            LossError: on all ranks, if it cannot be known.
        """
        if self._agreed or self.declared:
            return
        answers = [answer for answer in everywhere(self._measured_or_refused(model, pieces)) if answer is not None]
        for refusal in (answer for answer in answers if isinstance(answer, LossError)):
            raise refusal
        self._agreed = bool(answers)
        self.reading = answers[0] if answers else None

    def balance(self, model: nn.Module, pieces: list[Piece]) -> Balance | None:
        """Count items and the experts' load over the window on all ranks, by a forward pass without gradient."""
        router = None if self.reading is None else self.reading.router
        if router is None:
            return None
        items, loads = 0.0, []
        with _without_trace(model):
            for piece in pieces:
                inputs = self._trainer._prepare_inputs(piece.load())
                outputs = self.ask(model, inputs, None)[1]
                loads.append(load_of(outputs["router_logits"], inputs.get("attention_mask"), router.top_k))
                items += float(self.count([inputs]) or 0)
        counted = everywhere((items, reduce(add, loads).cpu() if loads else None))
        return Balance(sum(n for n, _ in counted), reduce(add, [load for _, load in counted if load is not None]))

    def evaluated(self, model: nn.Module, inputs: Inputs) -> Tensor | None:
        """Return what a bare number averages over in an evaluation batch, or None where that is not known."""
        if self.reading is None and not self.declared and not self._refused:
            found = self._measured_or_refused(model, [Piece(lambda index: inputs, range(1))])
            self._refused = isinstance(found, LossError)  # an evaluation goes on, and keeps the Trainer's own number
            self.reading = found if isinstance(found, Reading) else None
        known = self._items is not None or (self.reading is not None and self.reading.router is None)
        return self.count([inputs]) if known else None

    def answer(self, loss: Any, inputs: Inputs, items: Tensor | None) -> Answer | None:
        """Read what `compute_loss` returned for an evaluation batch; None for a number that says nothing."""
        if not is_number(loss):
            return read(loss, rows=1)
        return None if items is None else read(self._of_number(loss, inputs, items), rows=1)

    def _of_number(self, loss: Tensor, inputs: Inputs, items: Tensor | None) -> Mean:
        if self._items is None and self._counter(inputs) == "one":
            return total(loss)
        return from_mean(loss, 0.0 if items is None else items)

    def _counter(self, inputs: Inputs) -> str:
        return self._order(inputs)[0] if self.reading is None else self.reading.counter

    def _order(self, inputs: Inputs) -> Sequence[str]:
        return contract(inputs, self._causal())

    def _measured_or_refused(self, model: nn.Module, pieces: list[Piece]) -> Reading | LossError | None:
        try:
            return self._measured(model, pieces)
        except LossError as refusal:
            return refusal

    def _measured(self, model: nn.Module, pieces: list[Piece]) -> Reading | None:
        """Measure on the first micro-batch that has something to learn from; None if there is none."""
        with _without_trace(model):
            loaded = (self._trainer._prepare_inputs(piece.load()) for piece in pieces)
            inputs = next((inputs for inputs in loaded if self.count([inputs])), None)
            model.eval()  # without dropout, so that two evaluations of the same rows agree
            return None if inputs is None else self._recognised(model, inputs)

    def _recognised(self, model: nn.Module, inputs: Inputs) -> Reading:
        order, tolerance = self._order(inputs), _tolerance(model, self._trainer.args)
        loss, outputs = self.ask(model, inputs, self.count([inputs]))
        if not is_number(loss):
            return Reading(order[0])  # it says so itself

        def loss_of(inputs: Inputs, items: Any) -> Tensor:
            return torch.as_tensor(self.ask(model, inputs, items)[0])

        rest = undivided(loss_of, inputs, COUNTERS[order[0]](inputs))
        if not self._own:
            if abs(rest) > tolerance or "labels" not in inputs:
                raise LossError(f"The loss is a bare number that is not divided by num_items_in_batch. {HOW_TO_STATE}")
            return Reading(order[0])
        if not tolerance < rest < 1 - tolerance or "aux_loss" not in outputs or "router_logits" not in outputs:
            return Reading(recognise(loss_of, inputs, order, tolerance))
        aside = rest * float(loss)
        router = recognise_router(outputs, inputs.get("attention_mask"), aside, tolerance)
        return Reading(recognise(lambda rows, items: loss_of(rows, items) - aside, inputs, order, tolerance), router)


def is_number(loss: Any) -> bool:
    """Say whether a loss is a bare number, which doesn't tell what it averages over."""
    return isinstance(loss, Tensor) and not loss.dim()


@contextlib.contextmanager
def _without_trace(model: nn.Module) -> Iterator[None]:
    before, training = State(model), model.training
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
        before.restore()


def _tolerance(model: nn.Module, args: Any) -> float:
    """Return how far two evaluations of one loss may lie apart."""
    fine = all(p.dtype in (torch.float32, torch.float64) for p in model.parameters())
    return 2e-5 if fine and not (args.bf16 or args.fp16) else 1e-2
