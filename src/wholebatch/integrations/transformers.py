"""The Hugging Face Trainer with the gradient of the whole window.

The Trainer's own loop and step stay. It draws the micro-batches of a window before it runs the first: there the items
of the window are counted, over all ranks. Then each call of `training_step` runs its own micro-batch through the
Trainer's own backward, with the loss scaled to its share of the window's. No gradient is touched, so that engines which
shard gradients work as ever. Where shares cannot be known beforehand (a new cut, terms that are stated by the loss,
balanced experts, BatchNorm over the whole batch) `training_step` waits for the window's last call and runs all of it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar, cast

import torch
import transformers
from torch import Tensor, nn
from typing_extensions import Unpack

import wholebatch as wb
from wholebatch.batch.sizes import Size
from wholebatch.batch.window import Window, micro_batches_of
from wholebatch.errors import InexactError, WholeBatchError
from wholebatch.integrations.foreign_loop import everywhere, world
from wholebatch.integrations.infer_denominator import Counter
from wholebatch.integrations.streams import draw, refuse_repeats
from wholebatch.integrations.trainer_coupled import Coupling
from wholebatch.integrations.trainer_loss import Meaning
from wholebatch.integrations.trainer_refusals import owner_of, refuse, shifts
from wholebatch.integrations.trainer_shares import DIVIDING, Outside, Shares, Waiting
from wholebatch.integrations.watching import Between, FirstWindow
from wholebatch.options import Options, checked

T = TypeVar("T", bound=transformers.Trainer)

DEFERRING = ("accumulate_in", "offload")
"""Options that a micro-batch by itself cannot serve."""


def exact(
    trainer: type[T],
    micro_batch_size: Size = None,
    *,
    coupled: bool = False,
    tiled: bool = False,
    **options: Unpack[Options],
) -> type[T]:
    """Return a subclass of a Trainer whose step is the whole window's, whatever `gradient_accumulation_steps`.

    Everything else stays: arguments, callbacks, checkpoints, resuming. The loss may
    be the model's own, a `compute_loss_func` or an overridden `compute_loss`, and may return any form that
    `wb.backward` knows. What a bare number averages over is measured at the start and proven: a micro-batch against two
    uneven parts of it, in value and in gradient, by `items=` if it is given. What no count explains is refused. A class
    that declares its loss a share of the window's (`loss_is_scaled_for_ga = True`) is believed, unless `items=` is
    given. Costs a few forward passes of one micro-batch at the start and where targets look new, and one more forward
    pass a window where experts are balanced.

    Args:
        trainer: `transformers.Trainer` or any subclass of it.
        micro_batch_size: cuts the window again: rows (an int), `wb.Tokens(...)` or `wb.Auto(...)`. The collator is
            then applied to each micro-batch, except where `loss_is_scaled_for_ga` is True. None keeps the Trainer's
            own.
        coupled: takes the loss of all rows of the window at once, over all ranks, for losses in which rows meet
            (negatives of the batch, CLIP, sorted rows) and those of several means: `compute_loss` then sees what the
            model says of every row. Micro-batches are run twice, as by `wb.coupled_backward`, and what the model
            returns for the window is held.
        tiled: trains with the model's blocks over tiles of positions, and takes a causal model's own loss without
            logits, as :func:`wholebatch.tiled` does: for long rows. Undone by ``trainer.tiles.remove()``.
        **options: as of `wb.backward`; `items=` counts what a bare number averages over in a micro-batch.

    Raises:
        InexactError: on construction, for a setting of the Trainer that cannot be made exact; it is named.
        LossError: in the first step, if what the loss averages over cannot be known.

    Example:
        >>> exact(transformers.Seq2SeqTrainer).__name__
        'ExactSeq2SeqTrainer'
    """
    items = checked(options).pop("items", None)
    if coupled and (items is not None or isinstance(micro_batch_size, wb.Auto)):
        told = "items=" if items is not None else f"micro_batch_size={micro_batch_size!r}"
        raise TypeError(f"{told} has no meaning under coupled=True, which takes the loss of all rows. Leave it out.")
    settings = {"_size": micro_batch_size, "_items": items and staticmethod(items), "_options": options}
    settings |= {"_coupled": coupled, "_tiled": tiled}
    own = () if trainer is transformers.Trainer else (trainer,)
    return cast("type[T]", type(f"Exact{trainer.__name__}", (Outside, *own, Inside), settings))


class Inside(transformers.Trainer):
    """The steps of a window; stands below the user's own class, whose overrides reach it by `super()`."""

    _size: Size = None
    _items: Counter | None = None
    _options: ClassVar[Options] = {}
    _coupled: bool = False
    _tiled: bool = False
    _shares: Shares | None = None
    _waiting: Waiting | None = None
    _last: Any = None
    _stepped_already: bool = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        refuse(self, self._size, self._stays)

    # Made when they are first asked for: a class that calls Trainer.__init__ by name leaves ours out.

    @functools.cached_property
    def _meaning(self) -> Meaning:
        compute_loss = owner_of(self, "compute_loss")
        own = compute_loss is transformers.Trainer and self.compute_loss_func is None
        believes = dict(self._options).get("verify") == "never"
        return Meaning(self, self._items, own, lambda: shifts(self), believes)

    @functools.cached_property
    def tiles(self) -> wb.tiling.blocks.Tiled | None:
        """What runs over tiles of positions, under ``tiled=True`` and from the first training on."""
        return wb.tiled(cast("nn.Module", self.model)) if self._tiled else None

    @functools.cached_property
    def _coupling(self) -> Coupling:
        return Coupling(self, self._meaning)

    @functools.cached_property
    def _between(self) -> Between:
        return Between(
            f"Look into the training_step of {type(self).__name__} and into callbacks: leave zeroing to the Trainer, "
            "clip by max_grad_norm=, and change gradients in a callback's on_pre_optimizer_step."
        )

    @functools.cached_property
    def _first(self) -> FirstWindow:
        return FirstWindow(
            self._options,
            'Choose exact(Trainer, batch_norm="exact") (statistics of the whole batch) or "micro" (as usual)',
        )

    def get_train_dataloader(self) -> Any:
        """Leave the samples as they are where the window is cut again, and repeat no row to even ranks out."""
        refuse(self, self._size, self._stays)
        _ = self.tiles
        collator, loading = self.data_collator, self.accelerator.dataloader_config
        even = loading.even_batches
        self.data_collator = cast("Any", _as_they_are if self._cuts_samples else collator)
        loading.even_batches = even and self._stays
        try:
            loader = super().get_train_dataloader()
        finally:
            self.data_collator, loading.even_batches = collator, even
        if not self._stays:
            refuse_repeats(loader)
        return loader

    def set_initial_training_values(self, args: Any, dataloader: Any) -> tuple[Any, ...]:
        """Let every rank run as many windows as the one with most, so that none waits for the others in vain."""
        values = tuple(super().set_initial_training_values(args, dataloader))
        return tuple(max(of_ranks) for of_ranks in zip(*everywhere(values), strict=True))

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """Draw a window and count its items over all ranks; a short one is filled up to the length of the loop."""
        if self._stays:
            self._shares = Shares([], 0.0, 1)
            drawn: tuple[list[Any], Any] = super().get_batch_samples(epoch_iterator, num_batches, device)
            return drawn
        batches = draw(epoch_iterator, num_batches, self.accelerator)
        counted = not self._cuts_samples and not self._coupled
        if counted:
            self._learn(batches)
        items = self._meaning.count(batches) if counted else None
        ranks = everywhere((len(batches), items and float(items)))
        most, heard = max(n for n, _ in ranks), [count for n, count in ranks if n]
        if not most:
            return [], None
        whole = None if None in heard or not heard else torch.tensor(float(sum(heard)), device=device)
        self._shares = self._waiting = None
        self._between.over()
        if self._defers:
            self._waiting = Waiting(batches, num_batches, whole)
            return batches + [{}] * (num_batches - len(batches)), whole
        return self._shared(batches, most, num_batches, whole), whole

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Run a micro-batch by the Trainer's own step with its share of the window's loss, or wait for the window."""
        again = self._stepped_already
        self._stepped_already = True
        if again and not self._stays and not (self._is_whole and self._shares is not None):
            model.zero_grad()
            raise InexactError(
                f"The training_step of {type(self).__name__} runs the Trainer's step twice for one micro-batch, as "
                "adversarial training (FGM, PGD) does: what it moves in between follows the gradient of the "
                "micro-batches so far, not that of the batch. Let one micro-batch be the batch "
                "(gradient_accumulation_steps=1), or write the loop: wb.backward, move, wb.backward."
            )
        if self._shares is not None:
            return self._run_share(model, inputs, num_items_in_batch, self._shares)
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
        return self._size is not None and self.loss_is_scaled_for_ga is not True

    @property
    def _stays(self) -> bool:
        """Whether each step is the Trainer's own: a share that the class itself makes of batches that it makes itself.

        Trainers that generate what they learn from count their calls, and share the window out themselves.
        """
        declared = self.loss_is_scaled_for_ga is not None and self._items is None
        return declared and owner_of(self, "_prepare_inputs") not in (transformers.Trainer, Inside)

    @property
    def _defers(self) -> bool:
        """Whether the window has to run whole, at its last call; refused where that cannot be."""
        reading = self._meaning.reading
        stated = reading is not None and reading.stated and self._items is None
        reasons = {
            "coupled=True": self._coupled,
            f"micro_batch_size={self._size!r}": self._size is not None,
            f"batch_norm={self._options.get('batch_norm')!r}": self._options.get("batch_norm") not in (None, "micro"),
            "accumulate_in= or offload=": any(self._options.get(name) for name in DEFERRING),
            "a loss that states what it averages over when it is computed (count it beforehand: items=)": stated,
            "balanced experts": reading is not None and reading.router is not None,
        }
        reason = next((name for name, on in reasons.items() if on), None)
        engine = "deepspeed" if self.is_deepspeed_enabled else "fsdp" if self.is_fsdp_enabled else None
        stateful = owner_of(self, "_prepare_inputs") not in (transformers.Trainer, Inside)
        if reason and (engine or stateful):
            whose = f"{engine} runs its own backward" if engine else f"{type(self).__name__} prepares its own inputs"
            raise InexactError(
                f"The window would have to wait for its last micro-batch because of {reason}, but {whose} with each "
                "micro-batch. Leave it out."
            )
        return reason is not None

    def _learn(self, batches: Sequence[Any]) -> None:
        """Measure what the loss averages over, once and wherever targets look new; not where each is a whole batch."""
        if self._is_whole or not any(everywhere(self._meaning.new(batches))):
            return
        self.current_gradient_accumulation_steps = len(batches)
        sharded = (
            self.is_deepspeed_enabled or self.is_fsdp_enabled
        )  # whose parameters are whole inside the wrapper only
        alone = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        self._meaning.agree(self.model_wrapped if sharded else alone, batches)

    @property
    def _is_whole(self) -> bool:
        """Whether each micro-batch is the whole batch of a step."""
        return self.args.gradient_accumulation_steps == 1 and world() == 1 and self._size is None

    def _shared(self, batches: list[Any], most: int, calls: int, whole: Tensor | None) -> list[Any]:
        """Note what every micro-batch counts, and fill the window up where other ranks or the loop run longer.

        Ranks run forwards together, so a rank with fewer micro-batches repeats its last one with no weight.
        """
        if not batches and self._last is None:
            raise InexactError("A rank has no row at all, not even in the first window. Use fewer processes.")
        self._last = batches[-1] if batches else self._last
        counts: list[float | None] = [float(self._meaning.count([each]) or 0.0) for each in batches]
        items = float(sum(filter(None, counts))) if whole is None else float(whole)
        repeated = most - len(batches)
        self._shares = Shares([None] * (calls - most) + counts + [0.0] * repeated, items, self._averaged_ranks)
        sharded = self.is_deepspeed_enabled or self.is_fsdp_enabled
        self._first.begin([self.accelerator.unwrap_model(self.model)], most * world(), hooks=not sharded)
        return [{}] * (calls - most) + batches + [self._last] * repeated

    @property
    def _averaged_ranks(self) -> int:
        return int(self.accelerator.num_processes)

    def _run_share(self, model: nn.Module, inputs: Any, items: Any, shares: Shares) -> Tensor:
        if shares.counts and shares.counts[0] is None:
            shares.counts.pop(0)
            shares.reached = True
            return torch.zeros((), device=self.args.device)
        try:
            self._between.look()
        except InexactError:
            model.zero_grad()
            raise
        before = {name: vars(self)[name] for name in DIVIDING if name in vars(self)}
        shares.running = shares.reached = True
        try:
            loss = super().training_step(model, inputs, items)
        except WholeBatchError:
            model.zero_grad()
            raise
        finally:
            shares.running = False
            for name in DIVIDING:
                vars(self).pop(name, None)
            vars(self).update(before)
        last = len(shares.counts) < 2
        if shares.counts and not self._is_whole:
            shares.counts.pop(0)
        # An engine of its own may keep gradients elsewhere, and write them when it likes.
        if not (self._stays or last or self.is_deepspeed_enabled or self.is_fsdp_enabled):
            self._between.note(model.parameters())
        if not self._stays and last and not shares.items and self.accelerator.scaler is None:
            model.zero_grad()  # nothing was to be learned: not even momentum and decay should move
        return loss

    def _run(self, model: nn.Module, waiting: Waiting) -> Tensor:
        batch: Any = Window(waiting.batches)
        options = Options(**self._options)
        if self._cuts_samples:
            batch, options["collate"] = list(itertools.chain.from_iterable(batch)), self.data_collator
        micro_batches = micro_batches_of(
            batch, self._size, whole=options.get("whole", ()), collate=options.get("collate")
        )
        alone = self.accelerator.unwrap_model(model, keep_torch_compile=False)
        if self._coupled:
            loaded = [micro_batch.load() for micro_batch in micro_batches]
            options.pop("collate", None)
            return self._coupling.run(model, alone, loaded, options).loss.to(device=self.args.device)
        if self._cuts_samples:
            collated = [micro_batch.load() for micro_batch in micro_batches]
            if any(everywhere(self._meaning.new(collated))):
                self._meaning.agree(alone, collated)
        balance = self._meaning.balance(alone, micro_batches)

        def loss_fn(model: nn.Module, inputs: Any) -> Any:
            if self._cuts_samples:
                self.current_flos += self.floating_point_ops(inputs)
            return self._meaning.state(model, inputs, waiting.items, balance)

        result = wb.backward(model, loss_fn, batch, self._size, scaler=self.accelerator.scaler, **options)
        items = result.items.values() if isinstance(result.items, dict) else result.items
        if self.accelerator.scaler is None and not any(map(float, items)):
            model.zero_grad()  # nothing was to be learned: not even momentum and decay should move
        return result.loss.to(device=self.args.device)


def _as_they_are(samples: list[Any]) -> Any:
    return samples
