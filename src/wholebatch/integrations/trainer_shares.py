"""The share of its window's loss that every micro-batch of a Hugging Face Trainer goes back with.

`Shares` is a window whose items are known, `Waiting` one that runs whole at its last call. `Outside` stands above the
user's own class, so that it sees what that class's `compute_loss` returned.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn

from wholebatch.errors import InexactError
from wholebatch.integrations.foreign_loop import everywhere
from wholebatch.integrations.infer_denominator import Counter, has_rows, targets_of
from wholebatch.integrations.trainer_loss import Meaning, is_number
from wholebatch.integrations.watching import FirstWindow
from wholebatch.loss.totals import LossAccumulator, LossTotals, Schema

DIVIDING = ("loss_is_scaled_for_ga", "model_accepts_loss_kwargs")
"""What the Trainer looks at after `compute_loss` to decide whether it divides the loss itself."""


@dataclass
class Shares:
    """A window whose items are known: what is left of it, and all its items over all ranks.

    Attributes:
        counts: the items of the micro-batches still to come, in order; None for one that only fills the window up.
        items: the items of the window, over all ranks.
        ranks: over how many ranks the engine averages.
        running: whether a micro-batch is in the Trainer's own step just now.
        reached: whether the step at hand has asked for a loss there.
        rows: how many rows micro-batches had.
    """

    counts: list[float | None]
    items: float
    ranks: int
    running: bool = False
    reached: bool = False
    rows: set[int] = field(default_factory=set)


@dataclass
class Waiting:
    """A window between its first call of `training_step` and its last; items are those of all ranks, if countable."""

    batches: list[Any]
    calls: int
    items: Tensor | None


def _seeing(own: Callable[..., Any], seen: Callable[..., Any]) -> Callable[..., Any]:
    """Return an override that is seen as those below `Outside` are."""

    @functools.wraps(own)
    def override(self: Any, *args: Any, **kwargs: Any) -> Any:
        return seen(self, functools.partial(own, self), *args, **kwargs)

    return override


class Outside(transformers.Trainer):
    """Stands above the user's own class: sees what its `compute_loss` returned, and that its step is the Trainer's."""

    if TYPE_CHECKING:  # of `Inside`, below

        @property
        def _meaning(self) -> Meaning: ...
        @property
        def _first(self) -> FirstWindow: ...

    _items: Counter | None
    _shares: Shares | None
    _waiting: Waiting | None
    _tally: LossAccumulator | None = None
    _is_whole: bool
    _stays: bool
    _asked: bool = False
    _inside_step: bool = False
    _stepped_already: bool = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """See what a class that is derived from an exact one overrides, as if it had been made exact itself."""
        super().__init_subclass__(**kwargs)
        for name, seen in (("compute_loss", Outside._seen), ("training_step", Outside._stepped)):
            if name in vars(cls):
                setattr(cls, name, _seeing(vars(cls)[name], seen))

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run the user's step, and refuse one that goes back by itself."""
        return self._stepped(super().training_step, model, *args, **kwargs)

    def _stepped(self, step: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._inside_step:  # an override of a class that is derived from another override
            return step(model, *args, **kwargs)
        if self._shares is not None:
            self._shares.reached = False
        self._inside_step, self._stepped_already = True, False
        try:
            loss = step(model, *args, **kwargs)
        finally:
            self._inside_step = False
        if self._shares is not None and not self._shares.reached:
            model.zero_grad()
            raise InexactError(
                f"The training_step of {type(self).__name__} goes back by itself, with a loss whose share of the "
                "window is not known to it. Let the override call super().training_step, and compute_loss make the "
                "loss."
            )
        return loss

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the share of the window's loss within a step, and one number outside of it."""
        return self._seen(super().compute_loss, model, inputs, *args, **kwargs)

    def _seen(self, ask: Callable[..., Any], model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Ask a class for the loss, the user's uppermost, which may ask those below it in turn."""
        if self._asked or self._meaning.asking or self._waiting is not None:
            return ask(model, inputs, *args, **kwargs)
        self._asked = True
        try:
            if self._stays:
                self._same_rows(inputs)
                return ask(model, inputs, *args, **kwargs)
            if self._shares is not None and self._shares.running:
                return self._share(self._shares, ask, model, inputs, *args, **kwargs)
            return self._evaluated(ask, model, inputs, *args, **kwargs)
        finally:
            self._asked = False

    def _share(
        self, shares: Shares, ask: Callable[..., Any], model: nn.Module, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Ask the user's class for the loss, and keep the Trainer from dividing it again."""
        here = shares.counts[0] or 0.0
        told: Any = torch.tensor(max(shares.items, 1.0), device=self.args.device)
        if self._is_whole:  # the model's own mean is that of the batch
            told = None if self._meaning.own and self._items is None else kwargs.get("num_items_in_batch")
        with self._meaning.alone():
            returned = ask(model, inputs, *args, **{**kwargs, "num_items_in_batch": told})
        outputs = kwargs.get("return_outputs", args[0] if args else False)
        loss, rest = returned if outputs else (returned, None)
        share = self._meaning.share(loss, here, shares.items, alone=self._is_whole) * shares.ranks
        self._first.look(share)
        self.loss_is_scaled_for_ga = self.model_accepts_loss_kwargs = True  # so that nothing divides it again
        return (share, rest) if outputs else share

    def _same_rows(self, inputs: Any) -> None:
        """Refuse micro-batches of several sizes where each one's mean counts alike."""
        if self._shares is None or not self._shares.running or self.loss_is_scaled_for_ga or not has_rows(inputs):
            return
        self._shares.rows.add(len(targets_of(inputs)))
        if len(self._shares.rows) > 1:
            raise InexactError(
                f"{type(self).__name__} gives the mean of each micro-batch the same weight "
                f"(loss_is_scaled_for_ga=False), but its micro-batches have {sorted(self._shares.rows)} rows. Let "
                "every micro-batch have as many rows."
            )

    def _evaluated(self, ask: Callable[..., Any], model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Note what an evaluation batch's loss averages over; a loss that states it becomes a number."""
        kept, items = {**inputs}, self._meaning.evaluated(model, inputs)
        if kwargs.get("num_items_in_batch") is not None and items is not None:
            kwargs["num_items_in_batch"] = items
        returned = ask(model, inputs, *args, **kwargs)
        outputs = kwargs.get("return_outputs", args[0] if args else False)
        loss, rest = returned if outputs else (returned, None)
        answer = self._meaning.answer(loss, kept, items)
        if self._tally is not None:
            self._tally.add(answer)
        if answer is not None and not is_number(loss):
            loss = torch.stack([term.value for term in answer.terms.values()]).sum()
        return (loss, rest) if outputs else loss

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Average the loss over what it averages over in all of the data, not over batches."""
        tally = self._tally = LossAccumulator()
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
            whole = LossTotals.of_numbers(schema, torch.stack([numbers for _, numbers in heard]).sum(0))
            output.metrics[name] = float(whole.report(None)["loss"])
        return output
