"""Accelerate's loops with the gradient of the whole window: given whole, or gathered by `accelerator.accumulate`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import accelerate
from torch import Tensor, nn
from typing_extensions import Unpack

import wholebatch as wb
from wholebatch.errors import InexactError
from wholebatch.integrations.boundary import Boundary
from wholebatch.options import Options
from wholebatch.sizes import Size

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
            f"accelerator.accumulate holds this step back until {accelerator.gradient_accumulation_steps} blocks have "
            "run, but a whole window is a step. Call backward outside of accelerator.accumulate."
        )
    return wb.backward(model, loss_fn, batch, micro_batch_size, scaler=accelerator.scaler, **options)


class Window:
    """The window of a loop with `accelerator.accumulate(model)`: its `backward` takes the place of the accelerator's.

    Where the accelerator lets gradients travel, the window ends: its sum is then brought to what it averages over,
    before you clip. The last window of the loader may be short. The loss has one denominator; for several, give whole
    windows to `backward` of this module.

    Args:
        accelerator: whose `accumulate` the loop uses.
        model: as `accelerator.prepare` returned it.

    Attributes:
        loss: the true loss of the last window, over all ranks; None before its end.

    Raises:
        InexactError: where Accelerate's back end makes the step itself; it is named.

    Example:
        >>> accelerator = accelerate.Accelerator(cpu=True)
        >>> model = accelerator.prepare(torch.nn.Linear(3, 1))
        >>> window = Window(accelerator, model)
        >>> with accelerator.accumulate(model):
        ...     window.backward(wb.mean(model(torch.randn(4, 3)).square()))
    """

    def __init__(self, accelerator: accelerate.Accelerator, model: nn.Module) -> None:
        _refuse(accelerator)
        self.loss: Tensor | None = None
        self._accelerator, self._model = accelerator, model
        self._boundary = Boundary()

    def backward(self, returned: Any) -> None:
        """Go back from what a loss function returned: any form that `wb.backward` knows.

        Raises:
            LossError: for a bare number, or terms with different denominators.
        """
        accelerator = self._accelerator
        steps = accelerator.gradient_accumulation_steps
        share = self._boundary.share(returned, steps)
        accelerator.backward(share * steps)  # which divides by them
        self.loss = self._boundary.close(self._model.parameters()) if accelerator.sync_gradients else None


def _refuse(accelerator: accelerate.Accelerator) -> None:
    kind = accelerator.distributed_type.name
    if kind not in SERVED:
        raise InexactError(
            f"distributed_type={kind} makes or shards the step itself. Served are {', '.join(SERVED)}: one process, or "
            "DistributedDataParallel."
        )
