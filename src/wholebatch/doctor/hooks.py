"""Put the recorder's ears on torch: its own global hooks first, temporary replacements where it has none."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Iterable, Iterator
from types import GeneratorType
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
from torch.utils.hooks import RemovableHandle

from wholebatch.doctor.own_calls import around_library
from wholebatch.doctor.patching import Listener, PatchedCall, Wrapping
from wholebatch.doctor.recorder import Recorder
from wholebatch.doctor.trace import Average, Collective, Epoch, Schedule, ZeroGrad
from wholebatch.model.origin import OWN
from wholebatch.verify.source_line import site_of

COLLECTIVES = ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor", "reduce", "broadcast", "all_gather")


@contextlib.contextmanager
def installed(recorder: Recorder) -> Iterator[None]:
    """Watch from here to the end of the context; leave torch as it was found, whatever happens."""
    wrapping = Wrapping()
    with contextlib.ExitStack() as stack:
        stack.callback(wrapping.restore)
        for handle in module_hooks(recorder) + optimizer_hooks(recorder):
            stack.callback(handle.remove)
        for install in INSTALL:
            install(recorder, wrapping)
        stack.enter_context(warnings_in_their_place())
        stack.callback(recorder.switch.off)
        yield


def module_hooks(recorder: Recorder) -> list[Any]:
    """Hear every forward."""

    def leave(module: Any, args: Any, *rest: Any) -> None:
        if torch.compiler.is_compiling():
            return
        # After an error in the forward torch leaves the keyword arguments out.
        recorder.leave_module(module, args, rest[0] if len(rest) == 2 else {}, rest[-1])

    def enter(module: Any, args: Any) -> None:
        if torch.compiler.is_compiling():  # a trace of the model, with tensors that hold nothing
            return
        recorder.switch.off()
        recorder.enter_module(module, args)

    return [
        register_module_forward_pre_hook(enter),
        _Forgotten(register_module_forward_hook(leave, with_kwargs=True, always_call=True)),
    ]


class _Forgotten:
    """The handle of a global forward hook with keyword arguments, forgotten as a whole when it is removed.

    Torch's own handle (2.0 to 2.13) leaves the hook's number behind among those with keyword arguments, whereupon
    every compiled module warns of global hooks for the rest of the process.
    """

    def __init__(self, handle: RemovableHandle) -> None:
        self.handle = handle

    def remove(self) -> None:
        self.handle.remove()
        torch.nn.modules.module._global_forward_hooks_with_kwargs.pop(self.handle.id, None)


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

    def backward(call: PatchedCall) -> Any:
        recorder.switch.off()
        roots = call.given(0, "tensors")
        if recorder.call is not None:
            recorder.call.listen(roots)
        event = recorder.begin_backward(roots)
        try:
            return call.run()
        finally:
            recorder.end_backward(event)
            recorder.switch.on()

    wrapping.function(torch.autograd, "backward", backward)


def around_gradients(recorder: Recorder, wrapping: Wrapping) -> None:
    """Hear what is done to gradients: clearing and clipping."""

    def zero(call: PatchedCall) -> Any:
        owner = call.given(0, "self")
        own = (
            owner.parameters()
            if isinstance(owner, torch.nn.Module)
            else (p for group in owner.param_groups for p in group["params"])
        )
        numbers = recorder.parameters.numbers
        recorder.add(ZeroGrad(parameters=frozenset(numbers[id(p)] for p in own if id(p) in numbers)))
        with recorder.switch.aside():
            return call.run()

    wrapping.method(torch.optim.Optimizer, "zero_grad", zero)
    wrapping.method(torch.nn.Module, "zero_grad", zero)
    around_clips(recorder, wrapping)


def around_clips(recorder: Recorder, wrapping: Wrapping) -> None:
    """Hear clipping; the outermost call where one clip is made of others."""
    running: list[Any] = []

    def listener(bound: str) -> Listener:
        def clip(call: PatchedCall) -> Any:
            limit = number(call.given(1, bound))
            given = call.given(0, "parameters")
            if running or limit is None or not isinstance(given, Iterable):
                return call.run()  # a part of another clip, or a call that torch refuses
            with recorder.switch.aside():
                event = recorder.clipped(parameters_of(call, given), limit)
                running.append(event)
                try:
                    norm = call.run()
                finally:
                    running.pop()
            event.norm = float(norm) if type(norm) is Tensor else None
            recorder.add(event)
            return norm

        return clip

    for name, bound in (
        ("clip_grad_norm_", "max_norm"),
        ("clip_grad_value_", "clip_value"),
        ("clip_grads_with_norm_", "max_norm"),
    ):
        wrapping.function(torch.nn.utils, name, listener(bound))


def parameters_of(call: PatchedCall, given: Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters that a call was given, and give it them again where looking uses them up."""
    listed = [given] if isinstance(given, Tensor) else list(given)
    if isinstance(given, GeneratorType):
        call.exchange(0, "parameters", (parameter for parameter in listed))  # torch warns of an empty generator
    elif isinstance(given, Iterator):
        call.exchange(0, "parameters", listed)
    return listed


def number(value: Any) -> float | None:
    """Return an argument as a number, None where it is none."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def around_scaler(recorder: Recorder, wrapping: Wrapping) -> None:
    """Hear a GradScaler."""

    def scale(call: PatchedCall) -> Any:
        scaled, scaler = call.run(), call.given(0, "self")
        if scaler.is_enabled():
            # Any other iterable comes back as an iterator, which belongs to the caller.
            for tensor in scaled if isinstance(scaled, (list, tuple)) else [scaled]:
                if isinstance(tensor, Tensor):
                    recorder.note_scaled(tensor)
        return scaled

    def listener(name: str) -> Listener:
        def called(call: PatchedCall) -> Any:
            scaler = call.given(0, "self")
            before, held = len(recorder.trace.events), scaler.get_scale()
            optimizer = call.given(1, "optimizer") if name != "update" else None
            try:
                return call.run()
            finally:
                if scaler.is_enabled():
                    recorder.scaler_called(name, optimizer, held, before)

        return called

    wrapping.method(GradScaler, "scale", scale)
    for name in ("unscale_", "step", "update"):
        wrapping.method(GradScaler, name, listener(name))


def around_schedules(recorder: Recorder, wrapping: Wrapping) -> None:
    """Hear learning-rate schedulers, the outermost of nested ones, not the step that each makes at birth."""
    running: list[Any] = []

    def step(call: PatchedCall) -> Any:
        scheduler = call.given(0, "self")
        born = getattr(scheduler, "_step_count", 1) == 0
        running.append(scheduler)
        try:
            return call.run()
        finally:
            running.pop()
            if not running and not born:
                lrs = tuple(float(group["lr"]) for group in scheduler.optimizer.param_groups)
                name, optimizer = type(scheduler).__name__, id(scheduler.optimizer)
                recorder.add(Schedule(scheduler=id(scheduler), optimizer=optimizer, name=name, lrs=lrs))

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

    def begin(call: PatchedCall) -> Any:
        iterator, loader = call.run(), call.given(0, "self")
        lengths[id(iterator)] = length_of(loader)
        recorder.add(Epoch(what="start", loader=id(loader), length=length_of(loader)))
        return iterator

    def draw(call: PatchedCall) -> Any:
        iterator = call.given(0, "self")
        try:
            batch = call.run()
        except StopIteration:
            recorder.add(Epoch(what="end", loader=id(iterator), length=lengths.get(id(iterator))))
            raise
        recorder.drawn(id(iterator), batch)
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

    def listener(name: str) -> Listener:
        def called(call: PatchedCall) -> Any:
            given = (*call.args, *call.kwargs.values())
            sizes = [value.numel() * value.element_size() for value in given if isinstance(value, Tensor)]
            recorder.add(Collective(name=name, bytes=max(sizes, default=0)))
            return call.run()

        return called

    for name in COLLECTIVES:
        wrapping.function(dist, name, listener(name))


def around_averages(recorder: Recorder, wrapping: Wrapping) -> None:
    """Hear torch's own weight averages."""

    def update(call: PatchedCall) -> Any:
        model = call.given(1, "model")
        known = recorder.parameters.numbers
        own = (
            frozenset(known[id(p)] for p in model.parameters() if id(p) in known) if model is not None else frozenset()
        )
        recorder.add(Average(name=type(call.given(0, "self")).__name__, parameters=own))
        with recorder.switch.aside():
            return call.run()

    wrapping.method(swa_utils.AveragedModel, "update_parameters", update)


@contextlib.contextmanager
def warnings_in_their_place() -> Iterator[None]:
    """Let warnings that name a file of the doctor name the user's line: it only stands between that and torch."""
    kept = warnings.showwarning

    def show(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
        site = site_of(inspect.currentframe()) if filename.startswith(f"{OWN}/doctor") else None
        if site is not None:
            filename, lineno = site.file, site.line
        kept(message, category, filename, lineno, file, line)

    warnings.showwarning = show
    try:
        yield
    finally:
        if warnings.showwarning is show:
            warnings.showwarning = kept


INSTALL = (
    around_backward,
    around_gradients,
    around_scaler,
    around_schedules,
    around_loaders,
    around_ranks,
    around_averages,
    around_library,
)
