"""Lightning and Fabric with the gradient of the whole window.

Lightning's own loop divides each micro-batch's loss by `accumulate_grad_batches`, also in a short last window, and
whatever the loss averages over. The callback below undoes that and divides once, at the boundary, before the clip.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import Unpack

import wholebatch as wb
from wholebatch.batch.sizes import Size
from wholebatch.errors import InexactError, LossError
from wholebatch.integrations.foreign_loop import Boundary, world
from wholebatch.integrations.watching import Between, FirstWindow, refuse_unserved
from wholebatch.loss.terms import read
from wholebatch.options import Options

if TYPE_CHECKING or importlib.util.find_spec("lightning") is not None:
    import lightning
    from lightning import Fabric
else:  # the same under its older name, installed without the other
    import pytorch_lightning as lightning
    from lightning_fabric import Fabric

_ENDING: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
"""Trainers that have been set up with the callback; their tuners run trials without it."""

FAR = 64
"""How many nodes may stand between a share and what goes back."""

SERVED = ("SingleDeviceStrategy", "DDPStrategy")


class Exact(lightning.Callback):
    """Make `accumulate_grad_batches` exact for a module whose `training_step` returns `whole(self, ...)`.

    At the boundary, before clipping, the window's gradients are brought to what the window averages over, on all ranks:
    uneven micro-batches, a short last window, a `GradientAccumulationScheduler`, all by the same rule.

    Args:
        log: the name under which each window's true loss is logged; None for no log.
        batch_norm: "micro" lets each micro-batch normalise by itself; None refuses BatchNorm in training mode.
        **unserved: options of `wb.backward`, none of which a loop that shows losses alone can serve.

    Raises:
        TypeError: for any of those; for `verify` with what is proven where.
        InexactError: on the start of training, under a strategy or a module that makes the step itself; in the first
            window, for LBFGS, and for BatchNorm layers that run with the statistics of a micro-batch.
        LossError: at the first boundary, if `training_step` returned a bare number.

    Example:
        >>> trainer = lightning.Trainer(accumulate_grad_batches=8, callbacks=[Exact()])  # doctest: +SKIP
    """

    def __init__(
        self, log: str | None = "train_loss", batch_norm: Literal["micro"] | None = None, **unserved: Any
    ) -> None:
        refuse_unserved("Exact", batch_norm, unserved)
        self._log = log
        self._boundary: Boundary | None = None
        self._first = FirstWindow({"batch_norm": batch_norm}, 'Choose Exact(batch_norm="micro") (as usual)')
        self._between = Between(
            "Clip by gradient_clip_val= or in configure_gradient_clipping, and change gradients in "
            "on_before_optimizer_step."
        )
        self._open = False
        self._share: Tensor | None = None

    def setup(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        """Let the trainer be known as one that ends its windows, also while a tuner has put its callbacks away."""
        _ENDING[trainer] = True
        # Callbacks before this one would see gradients without their denominator, such as those that log norms.
        loop: Any = trainer
        loop.callbacks = [self, *(callback for callback in loop.callbacks if callback is not self)]

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Refuse what cannot be exact, and begin."""
        _refuse(trainer.strategy)
        if not pl_module.automatic_optimization:
            raise InexactError(
                f"{type(pl_module).__name__} goes back and steps itself (automatic_optimization = False), so Exact() "
                "sees no window of it. Leave the callback out, and go back by `backward(self, self, loss_fn, batch)` "
                "of this module in the place of manual_backward."
            )
        self._boundary = Boundary()

    def on_train_batch_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin a micro-batch."""
        self._share = None

    def on_before_backward(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, loss: Tensor
    ) -> None:
        """Refuse what would act on the window before its end, or go back beside the share."""
        self._between.look()
        if self._share is not None and self._share.grad_fn is not None and not _leads_to(loss, self._share.grad_fn):
            raise LossError(
                f"The training_step of {type(pl_module).__name__} returns whole(...) with something beside it that has "
                "a gradient of its own, whose denominator is not known. Say what that averages over, and put it "
                "inside: whole(self, wb.mean(a) + 0.1 * wb.mean(b)); terms with different denominators need the "
                "window whole (`backward` of this module)."
            )

    def on_after_backward(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Note how the micro-batch leaves the gradients."""
        self._share = None  # LBFGS asks for another one
        self._between.note(pl_module.parameters())

    def on_before_optimizer_step(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Bring the window to its true denominator."""
        self._open = False
        if getattr(trainer.precision_plugin, "scaler", None) is None:  # which has unscaled the gradients by now
            self._between.look()
        self._between.over()
        if self._boundary is not None:
            loss = self._boundary.close(pl_module.parameters())
            if self._log is not None:
                pl_module.log(self._log, loss, prog_bar=True, batch_size=1)

    def share(self, module: lightning.LightningModule, returned: Any, micro_batches: int) -> Tensor:
        """Return the number from which Lightning goes back, which it will divide by `micro_batches`.

        Its value is the loss of this micro-batch, its gradient that of the micro-batch's share.
        """
        if self._boundary is None:
            raise LossError("No training has started, so there is no window. Call whole(self, ...) in training_step.")
        if micro_batches > 1 and any(isinstance(each, torch.optim.LBFGS) for each in module.trainer.optimizers):
            raise InexactError(
                f"LBFGS calls training_step again for the last of {micro_batches} micro-batches alone. Accumulate "
                "nothing under it (accumulate_grad_batches=1), or use manual optimization and `backward` of this "
                "module inside of its closure."
            )
        if self._share is not None:
            raise LossError(
                f"whole(...) was called twice for one micro-batch of {type(module).__name__}, and each call would be "
                "taken for a micro-batch of its own. Add the losses inside: whole(self, wb.mean(a) + wb.mean(b))."
            )
        if not self._open:
            self._first.begin([module], micro_batches * world())
            self._open = True
        share = self._boundary.share(returned, micro_batches)
        self._first.look(share)
        self._share = share * micro_batches + (share * (1 - micro_batches)).detach()
        return self._share


def whole(module: lightning.LightningModule, returned: Any) -> Tensor:
    """Return what `training_step` has to return for a loss that states what it averages over.

    Its value is the loss of the micro-batch alone, so it may be logged; its gradient is that of its share of the
    window's. In validation and tests, and while a tuner looks for a learning rate or a batch size, it is that loss.

    Args:
        module: the module itself.
        returned: any form that `wb.backward` knows, with one denominator; for several, see `backward`.

    Raises:
        LossError: for a bare number, terms with different denominators, or a trainer without `Exact`.
    """
    trainer: Any = module.trainer
    found = [callback for callback in trainer.callbacks if isinstance(callback, Exact)]
    if not trainer.training or (not found and trainer in _ENDING):
        answer = read(returned, rows=1)
        return torch.stack([term.value for term in ({} if answer is None else answer.terms).values()]).sum()
    if not found:
        raise LossError(
            f"whole(...) gives {type(module).__name__} a share of a window, and nothing ends the window. Add the "
            "callback: Trainer(..., callbacks=[Exact()])."
        )
    return found[0].share(module, returned, trainer.accumulate_grad_batches)


def backward(
    owner: lightning.LightningModule | Fabric,
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Any],
    batch: Any,
    micro_batch_size: Size = None,
    **options: Unpack[Options],
) -> wb.Result:
    """Leave the gradient of a whole batch, or of a window: `wb.backward` under Fabric, or in manual optimization.

    Takes the place of `fabric.backward` and `fabric.no_backward_sync`, or of `manual_backward`. Gradients travel once;
    the scaler of 16-bit precision is the owner's. Call it once a step, then clip, step and zero as ever.

    Args:
        owner: the `Fabric` that set the model up, or a LightningModule with `automatic_optimization = False`.
        model: as `fabric.setup` returned it; in a LightningModule, the module itself.
        loss_fn: as of `wb.backward`.
        batch: as of `wb.backward`; `wb.windows(loader, k)` makes windows.
        micro_batch_size: as of `wb.backward`.
        **options: as of `wb.backward`.

    Raises:
        InexactError: under a strategy that makes or shards the step itself.

    Example:
        >>> fabric = lightning.Fabric(accelerator="cpu")
        >>> model = fabric.setup(torch.nn.Linear(3, 1))
        >>> backward(fabric, model, lambda model, x: model(x).square(), torch.randn(10, 3), 4).micro_batches
        3
    """
    strategy: Any = owner.strategy if isinstance(owner, Fabric) else owner.trainer.strategy
    outer: Any
    _refuse(strategy)
    if isinstance(owner, Fabric):
        precision, outer = strategy.precision, model
        model = _Bare(_wrapper_in(model) or outer.module, precision)
    else:
        precision, outer = strategy.precision_plugin, strategy.model
    inner = _wrapper_in(outer) or model
    scaler = getattr(precision, "scaler", None)

    def loss_of(wrapped: nn.Module, micro_batch: Any) -> Any:
        return loss_fn(model, micro_batch)

    return wb.backward(inner, loss_of, batch, micro_batch_size, scaler=scaler, **options)


class _Bare(nn.Module):
    """A module under Fabric's precision, without Fabric's demand that `fabric.backward` be the one to go back."""

    def __init__(self, inner: nn.Module, precision: Any) -> None:
        super().__init__()
        self._inner, self._precision = inner, precision

    def __getattr__(self, name: str) -> Any:
        inner = self._modules["_inner"]
        return inner if name == "_inner" else getattr(getattr(inner, "module", inner), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._precision.convert_input((args, kwargs))
        with self._precision.forward_context():
            output = self._inner(*args, **kwargs)
        return self._precision.convert_output(output)


def _leads_to(loss: Tensor, share: Node) -> bool:
    """Tell whether all of a graph goes back through one node."""
    nodes = [] if loss.grad_fn is None else [loss.grad_fn]
    seen = set(nodes)
    for node in nodes:  # which grows meanwhile
        new = [each for each, _ in node.next_functions if each is not None and each not in seen]
        if node is share or node == share:
            continue
        if not node.next_functions or len(nodes) > FAR:
            return False
        seen.update(new)
        nodes += new
    return True


def _wrapper_in(module: nn.Module) -> nn.Module | None:
    return next((inner for inner in module.modules() if isinstance(inner, DistributedDataParallel)), None)


def _refuse(strategy: Any) -> None:
    name = type(strategy).__name__
    if name not in SERVED:
        raise InexactError(
            f"strategy {name} makes, divides or shards the step itself. Served are {', '.join(SERVED)}: one process a "
            "device, one device or several."
        )
