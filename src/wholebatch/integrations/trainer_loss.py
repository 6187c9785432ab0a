"""What the loss of a Hugging Face Trainer averages over: stated by the loss, counted by the user, or measured."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.batch.window import MicroBatch
from wholebatch.errors import LossError
from wholebatch.first_window.draws import FixedDraws
from wholebatch.first_window.norms import NormWatch
from wholebatch.integrations import probing
from wholebatch.integrations.foreign_loop import everywhere
from wholebatch.integrations.infer_denominator import HOW_TO_STATE, Count, Counter, Inputs, contract, has_rows
from wholebatch.integrations.moe_balance import Balance, load_of
from wholebatch.integrations.recognition import Question, Reading, Recognition
from wholebatch.integrations.side_effects import Kept
from wholebatch.loss.terms import LossSum, ParsedLoss, from_mean, read, total
from wholebatch.model.state import State

GIVEN = 4
"""Micro-batches that a rank of a sharded model gives to measure on; of all ranks the square of it."""

_COUNT_THE_WEIGHTS = (
    "Return wb.losses.cross_entropy(logits, labels, weight=weight) from compute_loss, or count the weights: "
    "exact(Trainer, items=lambda batch: weight[batch['labels']].sum())."
)


class Meaning:
    """Ask a Trainer for its loss, and bring the answer into a form that states what it averages over.

    Args:
        trainer: whose `compute_loss` is asked.
        items: counts what a bare number averages over, if the user declared it.
        own: whether the loss is the model's own, not one that the user wrote.
        causal: whether the model shifts its labels.
        believes: whether the user's `items` are taken without a proof.
    """

    def __init__(
        self, trainer: Any, items: Counter | None, own: bool, causal: Callable[[], bool], believes: bool
    ) -> None:
        self.reading: Reading | None = Reading() if believes and items is not None else None
        self.asking = False
        self.own = own
        self._trainer, self._items, self._causal = trainer, items, causal
        self._believes = believes
        self._looks: set[Any] = set()
        self._reference: Inputs | None = None
        self._refused = self._seen_rows = False

    def ask(self, model: nn.Module, inputs: Inputs, items: Any) -> tuple[Any, Any]:
        """Return the loss and, if it is the model's own, its outputs, for so many items in the batch.

        Over ranks the Trainer would multiply some losses by their number, guessing that gradients will be averaged.
        """
        trainer = self._trainer
        inputs = {**trainer._prepare_inputs(inputs)}
        told = None if items is None else torch.as_tensor(items, device=trainer.args.device).clamp(min=1)
        before, self.asking = self.asking, True
        try:
            with trainer.compute_loss_context_manager(), self.alone():
                if not self.own:
                    return trainer.compute_loss(model, inputs, num_items_in_batch=told), None
                loss, outputs = trainer.compute_loss(model, inputs, return_outputs=True, num_items_in_batch=told)
                return loss, outputs
        finally:
            self.asking = before

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Keep the loss from multiplying itself by the number of ranks, which `share` does for every loss."""
        args = self._trainer.args
        before, args.average_tokens_across_devices = args.average_tokens_across_devices, False
        try:
            yield
        finally:
            args.average_tokens_across_devices = before

    def state(self, model: nn.Module, inputs: Inputs, window_items: Any, balance: Balance | None = None) -> Any:
        """Return the loss of a micro-batch in a form that `wb.backward` can divide by the window's items."""
        items = self.count([inputs])
        shared = self._trainer.loss_is_scaled_for_ga is True and self._items is None
        loss, outputs = self.ask(model, inputs, window_items if shared else items)
        if not is_number(loss):
            return loss
        if shared:
            return total(loss)
        if balance is None or self.reading is None or self.reading.router is None:
            return self._of_number(loss, inputs, items)
        router, mask = self.reading.router, inputs.get("attention_mask")
        apart = loss - router.coefficient * outputs["aux_loss"].to(loss.device)
        load = load_of(outputs["router_logits"], mask, router.top_k)
        share = apart * (0.0 if items is None else items) / balance.items
        return total(share + router.coefficient * balance.load.loss(load))

    def share(self, loss: Any, here: float, window: float, alone: bool = False) -> Tensor:
        """Return the share of the window's loss that a micro-batch's loss is, once the window's items are counted.

        Args:
            loss: as `compute_loss` returned it; a bare number that divides was told the window's items.
            here: the micro-batch's items.
            window: the window's items, over all ranks.
            alone: whether the micro-batch is the whole window, so that its mean is the window's.
        """
        reading = self.reading or Reading()
        if not is_number(loss):
            return value_of(loss) if alone else self._share_of_terms(loss, here, window)
        summed = self._items is None and reading.counters[:1] == (Count("one"),)
        weight = here / max(window, 1e-30) if not (alone or summed or reading.divides or reading.shared) else 1.0
        return torch.where(torch.tensor(bool(here), device=loss.device), loss, 0.0) * weight

    def _share_of_terms(self, loss: Any, here: float, window: float) -> Tensor:
        answer = read(loss, rows=1)
        terms = [] if answer is None else list(answer.terms.values())
        if len(terms) != 1 or abs(float(terms[0].count) - here) > 1e-5 * max(here, 1.0):
            counted = [float(term.count) for term in terms]
            raise LossError(
                f"items= counted {here:g} in this micro-batch, and the terms of its loss count {counted}. Where each "
                "micro-batch runs at its own time there is one term, and items= counts what it averages over."
            )
        return terms[0].total * terms[0].weight / max(window, 1e-30)

    def count(self, batches: Sequence[Any]) -> Tensor | None:
        """Return what the losses of these micro-batches average over, together; None if it cannot be counted."""
        if not batches:
            return None
        if self._items is not None:
            return torch.as_tensor(sum(self._items(inputs) for inputs in batches))
        if not all(map(has_rows, batches)):
            return None
        return torch.as_tensor(sum(self._counter(inputs)(inputs) for inputs in batches))

    def new(self, batches: Sequence[Any]) -> bool:
        """Say whether a micro-batch looks unlike all that what the loss averages over was proven with."""
        if self.reading is not None and (self._believes or self.reading.stated or self.reading.shared):
            return False
        looks = [probing.look_of(inputs) for inputs in batches if has_rows(inputs)]
        return self.reading is None or any(not look <= self._looks for look in looks)

    def agree(self, model: nn.Module, batches: Sequence[Any]) -> None:
        """Measure what a bare number averages over in these micro-batches, and take the same answer on every rank.

        Raises:
            LossError: on all ranks, if it cannot be known, or is not what it was.
        """
        batches = self._probes(batches)
        answers = everywhere(self._measured_or_refused(model, batches))
        for refusal in (answer for answer in answers if isinstance(answer, LossError)):
            raise refusal
        found: list[Reading] = [answer for answer in answers if answer is not None]
        if not found:
            return
        if self._seen_rows:  # a row against itself proves nothing: the next one is looked at together with it
            self._looks.update(*(probing.look_of(inputs) for inputs in batches if has_rows(inputs)))
        reading: Reading | None = found[0] if self.reading is None else self.reading
        for other in found:
            reading = None if reading is None else reading.joined(other)
        if reading is None:
            said = [[str(count) for count in each.counters] or each for each in (self.reading, *found) if each]
            raise LossError(
                f"The loss averages over another thing from micro-batch to micro-batch: {said}. {HOW_TO_STATE}"
            )
        self.reading = reading

    def balance(self, model: nn.Module, micro_batches: list[MicroBatch]) -> Balance | None:
        """Count items and the experts' load over the window on all ranks, by a forward pass without gradient."""
        router = None if self.reading is None else self.reading.router
        if router is None:
            return None
        items, loads = 0.0, []
        with self.without_trace(model), torch.no_grad():
            for micro_batch in micro_batches:
                inputs = self._trainer._prepare_inputs(micro_batch.load())
                outputs = self.ask(model, inputs, None)[1]
                loads.append(load_of(outputs["router_logits"], inputs.get("attention_mask"), router.top_k))
                items += float(self.count([inputs]) or 0)
        counted = everywhere((items, reduce(add, loads).cpu() if loads else None))
        return Balance(sum(n for n, _ in counted), reduce(add, [load for _, load in counted if load is not None]))

    def evaluated(self, model: nn.Module, inputs: Inputs) -> Tensor | None:
        """Return what a bare number averages over in an evaluation batch, or None where that is not known."""
        if self.reading is None and not self._refused:
            found = self._measured_or_refused(model, self._probes([inputs]))
            self._refused = isinstance(found, LossError)  # an evaluation goes on, and keeps the Trainer's own number
            self.reading = found if isinstance(found, Reading) else None
        reading = self.reading
        known = reading is not None and reading.router is None and not reading.shared
        return self.count([inputs]) if known else None

    def answer(self, loss: Any, inputs: Inputs, items: Tensor | None) -> ParsedLoss | None:
        """Read what `compute_loss` returned for an evaluation batch; None for a number that says nothing."""
        if not is_number(loss):
            return read(loss, rows=1)
        return None if items is None else read(self._of_number(loss, inputs, items), rows=1)

    def _of_number(self, loss: Tensor, inputs: Inputs, items: Tensor | None) -> LossSum:
        if self._items is None and self._counter(inputs).kind == "one":
            return total(loss)
        return from_mean(loss, 0.0 if items is None else items)

    def _counter(self, inputs: Inputs) -> Count:
        known = self.reading is not None and self.reading.counters
        return self.reading.counters[0] if known and self.reading is not None else self._order(inputs)[0]

    def _order(self, inputs: Inputs, ignored: Sequence[int] = ()) -> list[Count]:
        return contract(inputs, self._causal(), ignored)

    @property
    def _sharded(self) -> bool:
        return bool(self._trainer.is_deepspeed_enabled or self._trainer.is_fsdp_enabled)

    def _probes(self, batches: Sequence[Any]) -> Sequence[Any]:
        """Return what to measure on: for a sharded model some of all ranks', as they have to run forwards together."""
        if not self._sharded:
            return batches
        rows = [_on_cpu(inputs) for inputs in batches if has_rows(inputs)]
        new = [inputs for inputs in rows if not probing.look_of(inputs) <= self._looks]
        found = [inputs for theirs in everywhere(new[:GIVEN]) for inputs in theirs]
        return found[: GIVEN * GIVEN] or [inputs for theirs in everywhere(rows[:1]) for inputs in theirs][:GIVEN]

    def _measured_or_refused(self, model: nn.Module, batches: Sequence[Any]) -> Reading | LossError | None:
        try:
            with self.without_trace(model):
                return self._measured(model, batches)
        except LossError as refusal:
            return refusal

    def _measured(self, model: nn.Module, batches: Sequence[Any]) -> Reading | None:
        """Measure on the micro-batches that have something to learn from; None if there is none, or only NaN."""
        useful = [inputs for inputs in batches if has_rows(inputs) and self.count([inputs])]
        useful = useful or ([] if self._reference is None else [self._reference])
        if not useful:
            return None
        with torch.no_grad(), probing.Targets() as seen:
            loss, outputs = self.ask(model, useful[0], self.count(useful[:1]))
        if not is_number(loss):
            return Reading(stated=True)
        if not math.isfinite(float(loss)):
            return None
        if seen.weighted and self._items is None:
            raise LossError(
                "The loss divides by the sum of its class weights, which differs from micro-batch to micro-batch. "
                f"{_COUNT_THE_WEIGHTS if isinstance(useful[0].get('labels'), Tensor) else HOW_TO_STATE}"
            )
        known = [self._reference, *useful] if self._reference is not None else useful
        self._seen_rows |= probing.differ(known)
        self._reference = useful[0]
        args = self._trainer.args
        declared, half = self._trainer.loss_is_scaled_for_ga, bool(args.bf16 or args.fp16)
        question = Question(model, self.ask, self._items, self.own, declared, self._sharded, half)
        return Recognition(question, self._order(useful[0], seen.ignored), seen.ignored, outputs).reading(known)

    @contextlib.contextmanager
    def without_trace(self, model: nn.Module) -> Iterator[None]:
        """Ask in eval mode, with draws that are the same for every row, and put everything back."""
        before = State(model)
        modules = list(model.modules())
        kept = Kept(self._trainer, sharded=modules) if self._sharded else Kept(self._trainer, *modules)
        waits = contextlib.nullcontext  # a sharded model is not asked for gradients
        if not self._sharded:
            waits = getattr(self._trainer.model_wrapped, "no_sync", waits)
        try:
            with waits(), FixedDraws(), NormWatch(hold=True):
                model.eval()
                yield
        finally:
            kept.restore()
            before.restore()


def value_of(loss: Any) -> Tensor:
    """Return the loss of a whole batch in one micro-batch."""
    answer = read(loss, rows=1)
    means = (
        [from_mean(term.value, term.count).total / max(float(term.count), 1e-30) for term in answer.terms.values()]
        if answer
        else []
    )
    return torch.stack(means).sum()


def _on_cpu(inputs: Inputs) -> Inputs:
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in inputs.items()}


def is_number(loss: Any) -> bool:
    """Say whether a loss is a bare number, which doesn't tell what it averages over."""
    return isinstance(loss, Tensor) and not loss.dim()
