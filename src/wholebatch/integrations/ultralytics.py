"""Ultralytics trainers whose step is the whole window's: boxes, oriented or not, masks, poses, and classification.

The trainer's own loop stays: it draws micro-batches, warms up, steps, validates and saves. Its forward and backward of
each micro-batch are put off, by a hook on the model and a criterion that stands before the model's own; when the loop
steps, the whole window is run, and each part of the loss is divided by what it is divided by for the whole window: the
sum of the target scores, or the anchors that hold an object.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal, TypeVar, cast

import torch
from torch import Tensor, nn
from typing_extensions import Unpack
from ultralytics.engine.trainer import BaseTrainer
from ultralytics.utils.loss import (
    E2ELoss,
    v8ClassificationLoss,
    v8DetectionLoss,
    v8OBBLoss,
    v8PoseLoss,
    v8SegmentationLoss,
)

import wholebatch as wb
from wholebatch.batch.window import Window
from wholebatch.errors import InexactError
from wholebatch.loss.terms import LossSum, from_mean, total
from wholebatch.model.state import State
from wholebatch.options import Options

T = TypeVar("T", bound=BaseTrainer)

PER_ANCHOR: dict[type, tuple[int, ...]] = {
    v8DetectionLoss: (),
    v8OBBLoss: (),
    v8SegmentationLoss: (1,),
    v8PoseLoss: (1, 2),
}
"""Losses that are served, and which of their parts (masks; key points and whether they are seen) are divided by the
anchors that hold an object. All others are divided by the sum of the target scores."""


def exact(trainer: type[T], flush: Literal["end", "never"] = "end", **options: Unpack[Options]) -> type[T]:
    """Return a subclass of an Ultralytics trainer whose window is one batch; give it to `trainer=`.

    A window of `nbs / batch` micro-batches then has the gradient of one batch of as many images: each branch of the
    detection loss divided by the target scores of the whole window, masks and poses by its anchors with an object (by a
    counting pass, where there are several), classification by its images, once. `batch_norm` has to be chosen, as every
    YOLO has such layers.

    Args:
        trainer: `DetectionTrainer`, `OBBTrainer`, `SegmentationTrainer`, `PoseTrainer`, `ClassificationTrainer`, or a
            subclass.
        flush: "end" steps over what is left at the end of the last epoch, before it is validated and saved; "never"
            drops it, as Ultralytics does.
        **options: as of `wb.backward`.

    Raises:
        InexactError: at the start of training, for a loss or a setting that is not served; it is named.

    Example:
        >>> from ultralytics.models.yolo.detect import DetectionTrainer
        >>> exact(DetectionTrainer, batch_norm="exact").__name__
        'ExactDetectionTrainer'
    """
    settings = {"_options": options, "_flush": flush}
    return cast("type[T]", type(f"Exact{trainer.__name__}", (_WholeWindow, trainer), settings))


class _Later:
    """A criterion that puts a micro-batch off where the model was told to, and leaves the rest to the model's own."""

    def __init__(self, own: Any, at_epoch_end: Callable[[], None]) -> None:
        self.own, self._at_epoch_end = own, at_epoch_end
        self.shown = {name: torch.zeros(()) for name in _names(own)}

    def __call__(self, preds: Any, batch: Any) -> Any:
        if preds is not _Later:
            return self.own(preds, batch)
        return torch.zeros((), device=batch["img"].device, requires_grad=True), dict(self.shown)

    def update(self) -> None:
        """End the epoch, then let the weights of the branches change for the next."""
        self._at_epoch_end()
        getattr(self.own, "update", int)()


class _WholeWindow(BaseTrainer):
    """The steps of a window; stands above the trainer."""

    _options: ClassVar[Options] = {}
    _flush: ClassVar[str] = "end"
    _batches: list[dict[str, Any]]
    _shown: tuple[int, int]
    _later: _Later
    _hook: Any

    def run_callbacks(self, event: str) -> None:
        """Begin and end with the trainer's own events."""
        if event == "on_train_start":
            self._begin()
        super().run_callbacks(event)
        if event == "on_train_end":
            self._hook.remove()
            self.model.criterion = self._later.own

    def preprocess_batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Keep the micro-batch as it was drawn, until its window runs."""
        self._batches.append(batch)
        return batch

    def optimizer_step(self) -> None:
        """Leave the whole window's gradient, then clip, step and average as ever."""
        batches, self._batches = self._batches, []
        if batches:
            before = State(self.model)
            result = self._run(batches, self._options, frozenset())
            few = frozenset(name for name, items in cast("dict[str, Tensor]", result.items).items() if items < 1)
            if few:  # a window with next to no target is divided by 1, as the trainer's own batch would be
                self.optimizer.zero_grad()
                before.restore()
                result = self._run(batches, self._options, few)
            self.loss = result.loss
            self._show(result.metrics, len(batches))
        super().optimizer_step()

    def _begin(self) -> None:
        _refuse(self)
        if getattr(self.model, "criterion", None) is None:
            self.model.criterion = self.model.init_criterion()
        _refuse_loss(self.model.criterion, str(self.args.task))
        self._batches, self._shown = [], (-1, 0)
        self._later = self.model.criterion = _Later(self.model.criterion, self._end_epoch)
        self._hook = self.model.register_forward_pre_hook(_put_off, with_kwargs=True)

    def _end_epoch(self) -> None:
        if self.epoch + 1 >= self.epochs and self._batches and self._flush == "end":
            self.optimizer_step()

    def _run(self, batches: list[dict[str, Any]], options: Options, few: frozenset[str]) -> wb.Result:
        images = sum(len(batch["img"]) for batch in batches)
        scaler = self.scaler if self.scaler.is_enabled() else None
        kind = torch.bfloat16 if self.args.amp == "bf16" else torch.float16

        def loss_fn(model: Any, batch: dict[str, Any]) -> Any:
            with torch.autocast(self.device.type, dtype=kind, enabled=bool(self.amp)):
                batch = super(_WholeWindow, self).preprocess_batch(dict(batch))
                return _terms(self._later.own, model(batch["img"]), batch, images, few)

        self._hook.remove()  # exact BatchNorm runs the model's own code, which a hook would change
        try:
            return wb.backward(self.model, loss_fn, Window(batches), scaler=scaler, **options)
        finally:
            self._hook = self.model.register_forward_pre_hook(_put_off, with_kwargs=True)

    def _show(self, metrics: dict[str, Tensor], micro_batches: int) -> None:
        """Let the loop show the mean over this epoch's windows."""
        if self._shown[0] != self.epoch:
            self._shown = self.epoch, 0
        before = self._shown[1]
        whole, past = before + micro_batches, self._later.shown
        mean = {name: (past[name] * before + value.float() * micro_batches) / whole for name, value in metrics.items()}
        self._shown = self.epoch, whole
        self.tloss = self.loss_items = self._later.shown = mean


def _put_off(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Tell the model that predictions are there already, where the loop asks it for the loss of a micro-batch."""
    asked = model.training and args and isinstance(args[0], dict) and not kwargs
    return (args, {"preds": _Later}) if asked else None


def _terms(criterion: Any, preds: Any, batch: dict[str, Any], images: int, few: Iterable[str]) -> Any:
    """Return a micro-batch's terms by branch and denominator, and what the loop shows of them."""
    if isinstance(criterion, v8ClassificationLoss):
        term = from_mean(criterion(preds, batch)[0], len(batch["img"]))
        return {"one": term}, {"loss": term}
    if not isinstance(criterion, E2ELoss):
        branches = {"one": (criterion, criterion.parse_output(preds), 1.0)}
    else:
        preds = criterion.one2many.parse_output(preds)
        branches = {
            "many": (criterion.one2many, preds["one2many"], criterion.o2m),
            "one": (criterion.one2one, preds["one2one"], criterion.o2o),
        }
    terms: dict[str, Any] = {}
    metrics: dict[str, LossSum] = {}
    for name, (branch, predictions, weight) in branches.items():
        loss, scores, anchors = _branch(branch, predictions, batch)
        of_anchors = PER_ANCHOR[type(branch)]
        of_scores = [place for place in range(len(loss)) if place not in of_anchors]
        for key, count, places in ((name, scores, of_scores), (f"{name} anchors", anchors, list(of_anchors))):
            if places:
                divided = total if key in few else functools.partial(_divided, count)
                terms[key] = images * weight * divided(loss[places].sum())
                metrics |= {_names(branch)[place]: divided(loss[place].detach()) for place in places}
    return terms, {name: metrics[name] for name in _names(criterion)}


def _divided(count: Tensor, loss: Tensor) -> LossSum:
    """Undo the division of a micro-batch's loss by its own count, or by 1 where that is smaller."""
    return LossSum(loss * count.clamp(min=1), count)


def _branch(criterion: Any, preds: Any, batch: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Return a branch's losses, and what they were divided by: target scores, and anchors that hold an object."""
    if isinstance(preds.get("proto"), tuple):
        raise InexactError(
            f"{type(criterion).__name__} has a semantic branch, which it leaves out for a micro-batch without objects "
            "and not for a batch with some. Train a model without it (yolo11n-seg.yaml)."
        )
    seen: list[tuple[Tensor, Tensor]] = []
    hook = criterion.assigner.register_forward_hook(lambda module, given, found: seen.append((found[2], found[3])))
    try:
        loss = criterion(preds, batch)[0]
    finally:
        hook.remove()
    scores, anchors = (each.detach().sum().to(loss.dtype) for each in seen[0])
    return loss / len(batch["img"]), scores, anchors


def _names(criterion: Any) -> tuple[str, ...]:
    if isinstance(criterion, v8ClassificationLoss):
        return ("loss",)
    return tuple(getattr(criterion, "one2one", criterion).loss_names)


def _refuse(trainer: Any) -> None:
    refused = {
        "several devices": trainer.world_size > 1,
        "compile": bool(trainer.args.compile),
        "distill_model": getattr(trainer.args, "distill_model", None) is not None,
    }
    for name in (name for name, on in refused.items() if on):
        raise InexactError(f"{type(trainer).__name__} cannot make a step exact with {name}. Train without it.")


def _refuse_loss(criterion: Any, task: str) -> None:
    branches = [criterion.one2many, criterion.one2one] if isinstance(criterion, E2ELoss) else [criterion]
    for kind in (type(branch) for branch in branches):
        if kind not in (*PER_ANCHOR, v8ClassificationLoss):
            raise InexactError(
                f"What {kind.__name__} of the task {task!r} averages over is not known here. Served are "
                f"{', '.join(each.__name__ for each in (*PER_ANCHOR, v8ClassificationLoss))}: detection, segmentation, "
                "poses and oriented boxes up to YOLO11, detection and oriented boxes of YOLO26, and classification."
            )
