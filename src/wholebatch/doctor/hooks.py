"""Put the recorder's ears on torch: its own global hooks first, temporary replacements where it has none."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import lr_scheduler, swa_utils
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from wholebatch.doctor.recorder import Recorder
from wholebatch.doctor.trace import Average, Collective, Epoch, Schedule, ZeroGrad
from wholebatch.doctor.wrapping import Wrapping

COLLECTIVES = ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor", "reduce", "broadcast", "all_gather")
Original = Callable[..., Any]


@contextlib.contextmanager
def installed(recorder: Recorder) -> Iterator[None]:
    """Watch from here to the end of the context; leave torch as it was found, whatever happens."""
    wrapping = Wrapping()
    with contextlib.ExitStack() as stack:
        stack.callback(wrapping.restore)
        for handle in module_hooks(recorder) + optimizer_hooks(recorder):
            stack.callback(handle.remove)
        for install in (around_backward, around_gradients, around_scaler, around_schedules, around_loaders):
            install(recorder, wrapping)
        around_ranks(recorder, wrapping)
        around_averages(recorder, wrapping)
        stack.callback(recorder.switch.off)
        yield


def module_hooks(recorder: Recorder) -> list[Any]:
    """Hear every forward."""

    def leave(module: Any, args: Any, *rest: Any) -> None:
        if torch.compiler.is_compiling():
            return
        # After an error in the forward torch leaves the keyword arguments out.
        recorder.leave_module(module, args, rest[0] if len(rest) == 2 else {})

    def enter(module: Any, args: Any) -> None:
        if torch.compiler.is_compiling():  # a trace of the model, with tensors that hold nothing
            return
        recorder.switch.off()
        recorder.enter_module(module, args)

    return [
        register_module_forward_pre_hook(enter),
        register_module_forward_hook(leave, with_kwargs=True, always_call=True),
    ]


def optimizer_hooks(recorder: Recorder) -> list[Any]:
    """Hear every optimizer step."""
    running: list[Any] = []

    def begin(optimizer: Any, args: Any, kwargs: Any) -> None:
        recorder.switch.off()
        running.append(recorder.begin_step(optimizer))

    def end(optimizer: Any, args: Any, kwargs: Any) -> None:
        recorder.end_step(running.pop())
        recorder.switch.on()

    return [register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(end)]


def around_backward(recorder: Recorder, wrapping: Wrapping) -> None:
    """Hear every backward: torch has no global hook for it (`Tensor.backward` calls this function too)."""

    def backward(original: Original, tensors: Any, *args: Any, **kwargs: Any) -> None:
        recorder.switch.off()
        event = recorder.begin_backward(tensors)
        try:
            original(tensors, *args, **kwargs)
        finally:
            recorder.end_backward(event)
            recorder.switch.on()

    wrapping.function(torch.autograd, "backward", backward)


def around_gradients(recorder: Recorder, wrapping: Wrapping) -> None:
    """Hear what is done to gradients: clearing and clipping."""

    def zero(original: Original, owner: Any, *args: Any, **kwargs: Any) -> None:
        groups = getattr(owner, "param_groups", None)
        own = owner.parameters() if groups is None else (p for group in groups for p in group["params"])
        numbers = recorder.parameters.numbers
        recorder.add(ZeroGrad(parameters=frozenset(numbers[id(p)] for p in own if id(p) in numbers)))
        with recorder.switch.aside():
            original(owner, *args, **kwargs)

    running: list[Any] = []

    def clip(original: Original, parameters: Any, bound: Any, *args: Any, **kwargs: Any) -> Any:
        if running:
            return original(parameters, bound, *args, **kwargs)
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        with recorder.switch.aside():
            event = recorder.clipped(given, float(bound))
            running.append(event)
            try:
                norm = original(given, bound, *args, **kwargs)
            finally:
                running.pop()
        event.norm = float(norm) if isinstance(norm, Tensor) and type(norm) is Tensor else None
        recorder.add(event)
        return norm

    wrapping.method(torch.optim.Optimizer, "zero_grad", zero)
    wrapping.method(torch.nn.Module, "zero_grad", zero)
    for name in ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_"):
        wrapping.function(torch.nn.utils, name, clip)


def around_scaler(recorder: Recorder, wrapping: Wrapping) -> None:
    """Hear a GradScaler."""

    def scale(original: Original, scaler: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        scaled = original(scaler, outputs, *args, **kwargs)
        if scaler.is_enabled():
            for tensor in [scaled] if isinstance(scaled, Tensor) else list(scaled):
                recorder.scaled[id(tensor)] = scaler.get_scale()
        return scaled

    def call(name: str) -> Callable[..., Any]:
        def around(original: Original, scaler: Any, *args: Any, **kwargs: Any) -> Any:
            before, held = len(recorder.trace.events), scaler.get_scale()
            optimizer = args[0] if args and name != "update" else kwargs.get("optimizer")
            try:
                return original(scaler, *args, **kwargs)
            finally:
                if scaler.is_enabled():
                    recorder.scaler_called(name, optimizer, held, before)

        return around

    wrapping.method(GradScaler, "scale", scale)
    for name in ("unscale_", "step", "update"):
        wrapping.method(GradScaler, name, call(name))


def around_schedules(recorder: Recorder, wrapping: Wrapping) -> None:
    """Hear learning-rate schedulers, the outermost of nested ones, not the step that each makes at birth."""
    running: list[Any] = []

    def step(original: Original, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        born = getattr(scheduler, "_step_count", 1) == 0
        running.append(scheduler)
        try:
            return original(scheduler, *args, **kwargs)
        finally:
            running.pop()
            if not running and not born:
                lrs = tuple(float(group["lr"]) for group in scheduler.optimizer.param_groups)
                recorder.add(Schedule(scheduler=id(scheduler), name=type(scheduler).__name__, lrs=lrs))

    for kind in [lr_scheduler.LRScheduler, *descendants(lr_scheduler.LRScheduler)]:
        if "step" in vars(kind):
            wrapping.method(kind, "step", step)


def descendants(kind: type) -> list[type]:
    """Return the subclasses of a class, all the way down."""
    children: list[type] = kind.__subclasses__()
    return [below for child in children for below in (child, *descendants(child))]


def around_loaders(recorder: Recorder, wrapping: Wrapping) -> None:
    """Hear where an epoch begins and ends."""
    lengths: dict[int, int | None] = {}

    def begin(original: Original, loader: Any) -> Any:
        iterator = original(loader)
        lengths[id(iterator)] = length_of(loader)
        recorder.add(Epoch(what="start", loader=id(loader), length=length_of(loader)))
        return iterator

    def draw(original: Original, iterator: Any) -> Any:
        try:
            batch = original(iterator)
        except StopIteration:
            recorder.add(Epoch(what="end", loader=id(iterator), length=lengths.get(id(iterator))))
            raise
        recorder.drawn(batch)
        return batch

    wrapping.method(DataLoader, "__iter__", begin)
    wrapping.method(_BaseDataLoaderIter, "__next__", draw)


def length_of(loader: Any) -> int | None:
    """Return a loader's number of batches, None where it has none."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def around_ranks(recorder: Recorder, wrapping: Wrapping) -> None:
    """Hear the collectives that are called from Python."""
    if not dist.is_available():
        return

    def around(name: str) -> Callable[..., Any]:
        def called(original: Original, *args: Any, **kwargs: Any) -> Any:
            sizes = [value.numel() * value.element_size() for value in args if isinstance(value, Tensor)]
            recorder.add(Collective(name=name, bytes=max(sizes, default=0)))
            return original(*args, **kwargs)

        return called

    for name in COLLECTIVES:
        wrapping.function(dist, name, around(name))


def around_averages(recorder: Recorder, wrapping: Wrapping) -> None:
    """Hear torch's own weight averages."""

    def update(original: Original, average: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.add(Average(name=type(average).__name__))
        with recorder.switch.aside():
            return original(average, *args, **kwargs)

    wrapping.method(swa_utils.AveragedModel, "update_parameters", update)
