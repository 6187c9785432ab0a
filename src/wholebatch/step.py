"""One exact optimizer step a window: clip, check, update, schedule and zero, each once and in the right order."""

from __future__ import annotations

import inspect
import math
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from typing_extensions import Unpack

from wholebatch.batch.sizes import Auto, Size, is_number, whole_entry
from wholebatch.errors import LossError, NonFiniteError, plainly
from wholebatch.gradient.coupled import CoupledLoss, accumulate_coupled, checked_for_all_rows
from wholebatch.gradient.result import Pending, Result
from wholebatch.gradient.separable import accumulate
from wholebatch.loss.counts import precise, tensor_of
from wholebatch.loss.terms import LossFunction
from wholebatch.model.flat_gradients import Buffers
from wholebatch.model.gradients import GradientAccumulator, all_or_nothing
from wholebatch.noise_scale import NoiseScale
from wholebatch.options import STEP, Options, checked, checked_scaler

VERSION = 1
"""Of the state dict's layout."""


@dataclass(frozen=True)
class StepResult(Result):
    """What one step did, besides what its loss function said.

    Attributes:
        grad_norm: 2-norm of the whole batch's gradient before the clip, over the optimizer's parameters, in the
            precision in which the optimizer gets it.
        stepped: whether the optimizer stepped.
        reason: why not, if it did not.
        lrs: the learning rates of this step, one a parameter group.
    """

    grad_norm: float
    stepped: bool
    reason: str | None
    lrs: list[float]


STEPS: weakref.WeakSet[Step] = weakref.WeakSet()
"""All that live: of the parameters of their optimizers, each is another one's business."""


class Step:
    """Take one optimizer step a call, with the gradient of the whole batch.

    In this order: the micro-batches, one reduction over ranks, one clip, the check for finite values, the optimizer,
    the scaler's update, then the schedulers and ``after_step`` if the optimizer really stepped, and
    ``zero_grad(set_to_none=True)``; gradients that somebody keeps in a buffer stay there, as zeros. Waits for the
    device once, at the end of the window. Only the optimizer's own parameters are clipped, stepped and zeroed; what
    the window added to others is taken back.

    Args:
        model: as for :func:`wholebatch.backward`.
        optimizer: any that steps without a closure.
        loss_fn: as for :func:`wholebatch.backward`, or a :class:`CoupledLoss` loss over all rows.
        micro_batch_size: rows, ``Tokens(...)``, ``Auto(...)``, or None.
        max_grad_norm: clip the gradient of the whole batch to this 2-norm.
        scheduler: one or several, stepped once a real step.
        scaler: a ``GradScaler``; an infinite gradient then skips the step and lowers the scale.
        after_step: callables without arguments, such as an EMA's update, called after each real step; or one.
        on_nonfinite: without a scaler, "raise" on a loss or norm that is not finite, or "skip" the step.
        **options: see :class:`wholebatch.options.Options`.

    Raises:
        TypeError: for an optimizer that needs a closure, a scheduler that needs a metric, or something else in the
            place of an argument.
        ValueError: for a ``max_grad_norm`` that is not positive.

    Example:
        >>> import torch, wholebatch as wb
        >>> model = torch.nn.Linear(3, 1)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> step = wb.Step(model, sgd, lambda model, x: model(x).square(), micro_batch_size=4)
        >>> step(torch.randn(10, 3)).stepped
        True
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: LossFunction | CoupledLoss,
        micro_batch_size: Size = None,
        *,
        max_grad_norm: float | None = None,
        scheduler: Any = None,
        scaler: GradScaler | None = None,
        after_step: Sequence[Callable[[], object]] | Callable[[], object] = (),
        on_nonfinite: Literal["raise", "skip"] = "raise",
        **options: Unpack[Options],
    ) -> None:
        _refuse_arguments(optimizer, max_grad_norm, on_nonfinite)
        self.model, self.optimizer, self.loss_fn = model, optimizer, loss_fn
        self.micro_batch_size, self.max_grad_norm = micro_batch_size, max_grad_norm
        self.schedulers = _schedulers(scheduler)
        self.scaler = checked_scaler(scaler)
        self.after_step = _without_arguments(after_step)
        self.on_nonfinite = on_nonfinite
        self.options = checked(options, STEP)
        if isinstance(loss_fn, CoupledLoss):
            checked_for_all_rows(options)
        self.windows = self.steps = self.rows = 0
        self._others: list[str] = []
        STEPS.add(self)

    @plainly
    def __call__(self, batch: Any) -> StepResult:
        """Run one window and step if it can be stepped.

        Args:
            batch: a batch, or a :class:`Window` of micro-batches.

        Returns:
            What the window's loss function said, the norm of its gradient, and whether it was stepped.

        Raises:
            NonFiniteError: if the loss or the norm is not finite, unless a scaler or ``on_nonfinite="skip"`` deals
                with it; the gradient then stays in ``.grad``, and nothing else has changed. After any other error,
                until the optimizer has begun to write, everything is as before the call.
        """
        taken = all_or_nothing(lambda gradients: self._run(batch, gradients))
        if taken.stepped and self.steps == 1:
            self._warn_of_spare(taken.without_gradient)
            self._warn_of_others()
        return taken

    def state_dict(self) -> dict[str, Any]:
        """Return counters, the scaler's state and the sizes found; plain values that any format can hold."""
        size = self.micro_batch_size
        return {
            "version": VERSION,
            "counters": {"windows": self.windows, "steps": self.steps, "rows": self.rows},
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "size": size.state_dict() if isinstance(size, Auto) else None,
            "noise_scale": None if self.noise_scale is None else self.noise_scale.state_dict(),
        }

    @property
    def noise_scale(self) -> NoiseScale | None:
        """What measures the gradient's noise, if it was given."""
        return self.options.get("noise_scale")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that :meth:`state_dict` returned.

        Raises:
            ValueError: if it was written by a newer version, is no such state, or has a scaler where this step has
                none; nothing has changed then.
        """
        counters = _counters(state)
        if (state["scaler"] is None) != (self.scaler is None):
            here, there = ("no", "a") if self.scaler is None else ("a", "no")
            raise ValueError(
                f"The state was saved with {there} scaler and this step has {here} scaler; build it alike."
            )
        if state["size"] is not None and isinstance(self.micro_batch_size, Auto):
            self.micro_batch_size.load_state_dict(state["size"])
        if state.get("noise_scale") is not None and self.noise_scale is not None:
            self.noise_scale.load_state_dict(state["noise_scale"])
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        self.windows, self.steps, self.rows = counters

    def _warn_of_spare(self, names: Sequence[str]) -> None:
        """Say once, after the first step, which of the optimizer's parameters have got no gradient."""
        mine = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        spare = {name for name, p in self.model.named_parameters() if id(p) in mine} if names else set()
        names = [name for name in names if name in spare]
        if not names:
            return
        warnings.warn(
            f"{len(names)} parameters got no gradient from the first window (first: {', '.join(names[:3])}); all are "
            "in result.without_gradient. If they should learn, look for a detach(), a checkpoint with "
            "use_reentrant=True around inputs without gradient, or a part that the loss does not use; else freeze "
            "them: parameter.requires_grad_(False).",
            stacklevel=4,  # above what shortens errors
        )

    def _warn_of_others(self) -> None:
        """Say once, after the first step, whose gradients are not this optimizer's, so that another finds none."""
        if not self._others:
            return
        warnings.warn(
            f"{len(self._others)} parameters of the model get a gradient and are in no step's optimizer (first: "
            f"{', '.join(self._others[:3])}): what the window adds to them is taken back, and another optimizer that "
            "steps after this one finds nothing. For several optimizers call wb.backward, and clip, step and clear "
            "with each. What is not to learn here needs no gradient: parameter.requires_grad_(False).",
            stacklevel=4,  # above what shortens errors
        )

    def _run(self, batch: Any, gradients: GradientAccumulator) -> StepResult:
        buffers = Buffers(self.optimizer, first=not self.steps)
        taken = self._take(batch, gradients, buffers)
        try:
            if taken.stepped:
                self._follow()
        finally:  # the step has been taken, whatever those who follow it do
            buffers.clear()
            gradients.open = False
            self.windows, self.steps = self.windows + 1, self.steps + taken.stepped
            self.rows += taken.rows
        return taken

    def _take(self, batch: Any, gradients: GradientAccumulator, buffers: Buffers) -> StepResult:
        """Run the window, and let the optimizer step if it can be stepped."""
        mine = [p for group in self.optimizer.param_groups for p in group["params"]]
        free = [] if self.steps else self._in_no_step()
        pending = self._accumulate(batch, mine, gradients)
        self._others = [name for name, p in free if gradients.take(p) is not None]
        ours = {id(p) for p in mine}
        gradients.drop(keep=lambda parameter: id(parameter) in ours)
        if gradients.rounds or not gradients.clean:
            pending.merge()
        norm, loss, alive = self._read(pending)
        pending.alive = float(alive)
        lrs = [float(group["lr"]) for group in self.optimizer.param_groups]
        reason = self._refusal(pending, norm, loss, alive)
        if reason is None:
            self._update(pending, norm, buffers)
        elif alive and self.scaler is not None:
            pending.finish()
            self._scaled(self.scaler, self.scaler.update)
        return StepResult(**vars(pending.result), grad_norm=norm, stepped=reason is None, reason=reason, lrs=lrs)

    def _in_no_step(self) -> list[tuple[str, Tensor]]:
        """List the model's parameters that are in no step's optimizer, and that nobody has given a gradient."""
        served = {id(p) for step in STEPS for group in step.optimizer.param_groups for p in group["params"]}
        return [(name, p) for name, p in self.model.named_parameters() if id(p) not in served and p.grad is None]

    def _accumulate(self, batch: Any, mine: Sequence[Tensor], gradients: GradientAccumulator) -> Pending:
        size, loss, rest = self.micro_batch_size, self.loss_fn, self.options
        if isinstance(loss, CoupledLoss):
            return accumulate_coupled(self.model, loss, batch, size, gradients, scaler=self.scaler, also=mine, **rest)
        return accumulate(self.model, loss, batch, size, gradients, scaler=self.scaler, also=mine, **rest)

    def _read(self, pending: Pending) -> tuple[float, float, bool]:
        """Learn the gradient's norm, the loss and whether there were items: the one wait for the device."""
        loss = pending.result.loss
        wide = precise(loss.device)
        norm = pending.gradients.norm(loss.device).to(wide) * tensor_of(pending.coefficient, loss.device, wide).abs()
        if self.scaler is not None:
            norm = norm / self.scaler.scale(torch.ones((), device=loss.device))
        told = [norm, loss, pending.alive, *pending.flags.values]
        numbers = torch.stack([tensor_of(number, loss.device, wide) for number in told]).tolist()
        pending.flags.settle(numbers[3:])
        return numbers[0], numbers[1], bool(numbers[2])

    def _refusal(self, pending: Pending, norm: float, loss: float, alive: bool) -> str | None:
        if not alive:
            nothing = "no items: the window holds nothing to learn from"
            silent = "no loss: loss_fn returned None for every micro-batch"
            return nothing if pending.result.terms else silent
        if not pending.gradients.held():
            raise LossError(
                f"None of the optimizer's {len(pending.gradients.parameters)} parameters has received a gradient from "
                "this window. Build the optimizer from the parameters of the model that the loss is computed with."
            )
        if math.isfinite(norm) and (math.isfinite(loss) or self.scaler is not None):
            return None
        if self.scaler is not None:
            return "non-finite gradient: the scaler lowers its scale"
        text = f"the loss of this window is {loss:g} and the norm of its gradient {norm:g}"
        if self.on_nonfinite == "skip":
            return f"non-finite: {text}"
        pending.finish()
        pending.gradients.open = False  # it stays, to be looked at
        raise NonFiniteError(
            f"{text[0].upper()}{text[1:]}{_first_non_finite(pending)}. The optimizer has not stepped, and the gradient "
            'stays in .grad. Call optimizer.zero_grad() and go on, pass on_nonfinite="skip", or a scaler for fp16.'
        )

    def _update(self, pending: Pending, norm: float, buffers: Buffers) -> None:
        pending.finish(1.0 if self.max_grad_norm is None else min(1.0, self.max_grad_norm / (norm + 1e-6)))
        if self.scaler is None:
            self._step(buffers)
        else:
            self._scaled(self.scaler, lambda: self._step(buffers))

    def _step(self, buffers: Buffers) -> None:
        buffers.hand_over()
        self.optimizer.step()

    def _scaled(self, scaler: GradScaler, work: Callable[[], object]) -> None:
        """Unscale, and do what follows; if that fails, the scaler forgets that it has unscaled, but not its scale."""
        done = False
        try:
            scaler.unscale_(self.optimizer)
            work()
            done = True
        finally:
            if not done:
                scaler.update(scaler.get_scale())

    def _follow(self) -> None:
        """Do what comes after a real step."""
        if self.scaler is not None:
            self.scaler.update()
        for scheduler in self.schedulers:
            scheduler.step()
        for call in self.after_step:
            call()


def _counters(state: Any) -> list[int]:
    """Read windows, steps and rows out of a state that has all its parts."""
    if not isinstance(state, Mapping):
        raise TypeError(f"state is {type(state).__name__}; pass what state_dict() of a wb.Step returned.")
    if state.get("version") != VERSION:
        raise ValueError(f"This state has layout {state.get('version')!r}; this version reads {VERSION}.")
    counters = [whole_entry(state.get("counters"), name) for name in ("windows", "steps", "rows")]
    if min(counters) < 0 or not {"scaler", "size"} <= state.keys():
        raise ValueError(
            f"This state has {sorted(map(str, state))} with the counters {state.get('counters')!r}, which is no state "
            "of a step. Load what step.state_dict() returned, whole."
        )
    return counters


def _refuse_arguments(optimizer: object, max_grad_norm: float | None, on_nonfinite: str) -> None:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError(
            "LBFGS evaluates the loss several times a step, which wb.Step cannot. Give it a closure: "
            "optimizer.step(lambda: (optimizer.zero_grad(), wb.backward(model, loss_fn, batch).loss)[1])."
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        several = isinstance(optimizer, (list, tuple, dict))
        raise TypeError(
            f"optimizer is {type(optimizer).__name__}; pass a torch.optim.Optimizer."
            + " For several call wb.backward, and clip, step and clear with each." * several
        )
    if max_grad_norm is not None and not is_number(max_grad_norm):
        raise TypeError(
            f"max_grad_norm is {max_grad_norm!r:.80}, of type {type(max_grad_norm).__name__}; pass a number: "
            "max_grad_norm=1.0."
        )
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(f"max_grad_norm={max_grad_norm} would erase the gradient. Pass a positive norm, or None.")
    if on_nonfinite not in ("raise", "skip"):
        raise ValueError(f'on_nonfinite={on_nonfinite!r} is not known. Choose "raise" or "skip".')


def _schedulers(scheduler: Any) -> list[Any]:
    schedulers = list(scheduler) if isinstance(scheduler, (list, tuple)) else [] if scheduler is None else [scheduler]
    for each in schedulers:
        if isinstance(each, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise TypeError("ReduceLROnPlateau steps on a metric, once an evaluation: call it outside of wb.Step.")
        if not callable(getattr(each, "step", None)):
            raise TypeError(
                f"scheduler is {type(each).__name__}, which has no step(). Pass one of torch.optim.lr_scheduler."
            )
    return schedulers


def _without_arguments(given: Any) -> list[Callable[[], object]]:
    calls: list[Any] = [given] if callable(given) else list(given) if isinstance(given, Sequence) else [given]
    for call in calls:
        if not callable(call):
            raise TypeError(
                f"after_step has {call!r:.80}, of type {type(call).__name__}, which cannot be called. Pass functions "
                "without arguments: after_step=[lambda: ema.update(model)]."
            )
        try:
            inspect.signature(call).bind()
        except TypeError as error:
            raise TypeError(
                f"after_step calls {getattr(call, '__name__', call)!r} without arguments, but it has a {error}. "
                "Wrap it: after_step=[lambda: ema.update(model)]."
            ) from None
        except ValueError:  # built-in callables have no signature to read
            continue
    return list(calls)


def _first_non_finite(pending: Pending) -> str:
    for i, totals in enumerate(pending.losses):
        if not all(math.isfinite(float(total)) for total in totals):
            return f"; the first loss that is not finite is that of micro-batch {i} of {len(pending.losses)}"
    return ""
