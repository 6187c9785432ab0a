"""Accelerate's loops with the gradient of the whole window: given whole, or gathered by `accelerator.accumulate`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import accelerate
from torch import Tensor, nn
from typing_extensions import Unpack

import wholebatch as wb
from wholebatch.batch.sizes import Size
from wholebatch.errors import InexactError, LossError
from wholebatch.integrations.foreign_loop import Boundary
from wholebatch.integrations.watching import Between, FirstWindow, refuse_unserved
from wholebatch.model.reached import leaves_of
from wholebatch.options import Options

SERVED = ("NO", "MULTI_CPU", "MULTI_GPU")


def backward(
    accelerator: accelerate.Accelerator,
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Any],
    batch: Any,
    micro_batch_size: Size = None,
    **options: Unpack[Options],
) -> wb.Result:
    """Leave the gradient of a whole batch, or of a window, of a prepared model: `wb.backward` with its scaler.

    Takes the place of `accelerator.accumulate` and `accelerator.backward`, which divides by its own
    `gradient_accumulation_steps`; nothing is divided a second time here. Call it once a step, then clip, step and zero
    as ever: `accelerator.clip_grad_norm_`, the prepared optimizer and scheduler.

    Args:
        accelerator: which prepared the model.
        model: as `accelerator.prepare` returned it.
        loss_fn: as of `wb.backward`.
        batch: as of `wb.backward`; `wb.windows(loader, k)` makes windows of a prepared loader.
        micro_batch_size: as of `wb.backward`.
        **options: as of `wb.backward`.

    Raises:
        InexactError: where Accelerate's back end makes the step itself; it is named. Also between the steps of
            `accelerator.accumulate`.

    Example:
        >>> accelerator = accelerate.Accelerator(cpu=True)
        >>> model = accelerator.prepare(torch.nn.Linear(3, 1))
        >>> backward(accelerator, model, lambda model, x: model(x).square(), torch.randn(10, 3), 4).micro_batches
        3
    """
    _refuse(accelerator)
    if not accelerator.sync_gradients:
        raise InexactError(
            "Accelerate is between the steps of an accelerator.accumulate, which holds the prepared optimizers of all "
            "accelerators back, but a whole window is a step. Call backward outside of accelerator.accumulate, and let "
            f"each loop with it end (gradient_accumulation_steps={accelerator.gradient_accumulation_steps} here)."
        )
    return wb.backward(model, loss_fn, batch, micro_batch_size, scaler=accelerator.scaler, **options)


class Window:
    """The window of a loop with `accelerator.accumulate(model)`: its `backward` takes the place of the accelerator's.

    Where the accelerator lets gradients travel, the window ends: its sum is then brought to what it averages over,
    before you clip. The last window of the loader may be short. The loss has one denominator; for several, give whole
    windows to `backward` of this module.

    Args:
        accelerator: whose `accumulate` the loop uses.
        *models: as `accelerator.prepare` returned them. Parameters that the losses reach outside of them, such as a
            temperature, are brought to the true denominator too.
        batch_norm: "micro" lets each micro-batch normalise by itself; None refuses BatchNorm in training mode.
        **unserved: options of `wb.backward`, none of which a loop that shows losses alone can serve.

    Attributes:
        loss: the true loss of the last window, over all ranks; None before its end.

    Raises:
        TypeError: for any of those; for `verify` with what is proven where.
        InexactError: where Accelerate's back end makes the step itself; it is named. In the first window, for BatchNorm
            layers that run with the statistics of a micro-batch, and for hooks that step within the backward.

    Example:
        >>> accelerator = accelerate.Accelerator(cpu=True)
        >>> model = accelerator.prepare(torch.nn.Linear(3, 1))
        >>> window = Window(accelerator, model)
        >>> with accelerator.accumulate(model):
        ...     window.backward(wb.mean(model(torch.randn(4, 3)).square()))
    """

    def __init__(
        self,
        accelerator: accelerate.Accelerator,
        *models: nn.Module,
        batch_norm: Literal["micro"] | None = None,
        **unserved: Any,
    ) -> None:
        refuse_unserved("Window", batch_norm, unserved)
        _refuse(accelerator)
        if not models:
            raise TypeError("Window has no model. Pass what accelerator.prepare returned: Window(accelerator, model).")
        self.loss: Tensor | None = None
        self._accelerator, self._models = accelerator, models
        self._boundary = Boundary()
        self._first = FirstWindow({"batch_norm": batch_norm}, 'Choose Window(..., batch_norm="micro") (as usual)')
        self._between = Between(
            "Clip, step and zero under: if accelerator.sync_gradients; add a second loss to the first."
        )
        self._reached: dict[int, Tensor] = {}
        self._open = False
        self._step = 0

    def backward(self, returned: Any) -> None:
        """Go back from what a loss function returned: any form that `wb.backward` knows.

        Raises:
            LossError: for a bare number, terms with different denominators, or a second loss of one micro-batch.
            InexactError: in the first window, for what makes micro-batches depend on the cut; where gradients or
                parameters have been changed since the micro-batch before.
        """
        accelerator = self._accelerator
        steps = accelerator.gradient_accumulation_steps
        if accelerator.step and accelerator.step == self._step:
            raise LossError(
                f"backward was called twice for micro-batch {self._step} of accelerator.accumulate, and each call "
                "would be taken for a micro-batch of its own. Add the losses, window.backward(wb.mean(a) + "
                "wb.mean(b)); for several models that step by themselves, make a Window for each."
            )
        self._step = accelerator.step
        self._between.look()
        if not self._open:
            self._first.begin(self._models, steps * accelerator.num_processes)
            self._open = True
        share = self._boundary.share(returned, steps)
        self._first.look(share)
        self._reached.update((id(leaf), leaf) for leaf in leaves_of([share]))
        accelerator.backward(share * steps)  # which divides by them
        self.loss = self._close() if accelerator.sync_gradients else None
        if self._open:
            self._between.note(p for model in self._models for p in model.parameters())

    def _close(self) -> Tensor:
        """Bring the gradients of the models, and of all that the losses reached, to the window's denominator."""
        inside = {id(p): p for model in self._models for p in model.parameters()}
        reached: dict[int, Tensor] = {**inside, **self._reached}
        self._reached, self._open = {}, False
        return self._boundary.close(list(reached.values()))


def _refuse(accelerator: accelerate.Accelerator) -> None:
    kind = accelerator.distributed_type.name
    if kind not in SERVED:
        raise InexactError(
            f"distributed_type={kind} makes or shards the step itself. Served are {', '.join(SERVED)}: one process, or "
            "DistributedDataParallel."
        )
