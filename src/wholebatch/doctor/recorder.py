"""Turn what the hooks report into events, in order, without touching anything of the loop."""

from __future__ import annotations

import gc
import inspect
import math
import time
import weakref
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from wholebatch.doctor.first_window import Exhibit
from wholebatch.doctor.graph import terms_of
from wholebatch.doctor.lineage import Rows, leaves, mark, marks_below, path_of
from wholebatch.doctor.parameters import Parameters
from wholebatch.doctor.trace import (
    Average,
    Backward,
    Clip,
    Collective,
    Event,
    Forward,
    Optimizer,
    OptimizerStep,
    Scaler,
    Trace,
)
from wholebatch.doctor.weight_averages import AverageSwitch, AverageWatch
from wholebatch.verify.source_line import site_of

BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)
IGNORED_LABEL = -100


class StopWatching(BaseException):
    """Enough steps were seen: the watched script ends here. No `Exception`, so that no loop swallows it."""


class OwnCall(Protocol):
    """A call of this library that is going on: its backwards are no events of the loop, but are told to it."""

    def listen(self, roots: Any) -> None:
        """Read what a backward begins from."""

    def close(self) -> None:
        """Note that the gradient of its window is complete."""


class Recorder:
    """What is known of the loop so far, and the methods by which the hooks add to it."""

    def __init__(self, steps: int = 0, exhibit: Exhibit | None = None) -> None:
        self.trace = Trace()
        self.parameters = Parameters()
        self.enough = steps
        self.started = time.perf_counter()
        self.depth = 0
        self.nested = 0
        self.inside_step = 0
        self.scaled: dict[int, weakref.ref[Tensor]] = {}
        self.ddp: dict[int, nn.Module] = {}
        self.forward: Forward | None = None
        self.random: list[Tensor] = []
        self.level: Tensor | None = None
        self.average_source: int | None = None
        self.switch = AverageSwitch(AverageWatch(self.number_of, self.averaged))
        self.hunted = False
        self.rows = Rows()
        self.batch: tuple[int, int] | None = None
        self.call: OwnCall | None = None
        self.exhibit = exhibit

    # Events

    def add(self, event: Event) -> None:
        """Append an event under the user's line that caused it."""
        if self.call is not None and not isinstance(event, Collective):
            self.call.close()  # what follows inside `wb.OptimizerStep` finds the window's gradient complete
        event.order = len(self.trace.events)
        event.seconds = time.perf_counter() - self.started
        if event.site is None:
            event.site = site_of(inspect.currentframe())
        self.trace.events.append(event)

    def stop_if_enough(self) -> None:
        """End the script once the asked number of steps has been seen whole."""
        if self.enough and self.trace.steps >= self.enough and not self.inside_step:
            raise StopWatching

    def number_of(self, tensor: Tensor) -> int | None:
        """Return the number of the parameter whose memory a tensor is."""
        if tensor.is_meta or tensor.layout != torch.strided:
            return None
        return self.parameters.storages.get(tensor.data_ptr())

    def averaged(self, source: int) -> None:
        """Note a weight average; only the first parameter seen in one counts, for all."""
        if self.inside_step:
            return
        if self.average_source is None:
            self.average_source = source
        if source == self.average_source:
            self.add(Average(name="weights", parameters=frozenset({source})))

    # Forward

    def enter_module(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Note the outermost call of a module with parameters."""
        self.depth += 1
        # Inside another module, or inside a backward or a call of this library, which is seen as one.
        if self.depth > 1 or self.nested or not readable(next(module.parameters(), None)):
            return
        self.stop_if_enough()
        frame = inspect.currentframe()
        self.forward = Forward(training=module.training, grad=torch.is_grad_enabled(), model=type(module).__name__)
        self.forward.module = self.parameters.add_module(module)
        self.forward.site, self.forward.path = site_of(frame), path_of(frame)
        self.forward.batch = self.batch
        self.forward.after = marks_below(tensor for _, tensor in leaves(args))
        self.random = random_states()
        if self.exhibit is not None:
            self.exhibit.forward_begins(module)

    def leave_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Note what kind of part ran, and close the event at the outermost one."""
        self.depth = max(self.depth - 1, 0)
        if self.forward is None:
            return
        if isinstance(module, BATCH_NORMS) and (module.training or module.running_mean is None):
            self.forward.batch_norms += (self.parameters.modules.get(id(module), type(module).__name__),)
        self.note_wrapper(self.forward, module)
        if self.depth == 0:
            finish_forward(self.forward, args, kwargs)
            self.forward.inputs = self.rows.of((args, kwargs))
            self.forward.after = self.forward.after or marks_below(tensor for _, tensor in leaves(kwargs))
            self.forward.random = any(not torch.equal(a, b) for a, b in zip(self.random, random_states(), strict=False))
            self.add(self.forward)
            mark(output, self.forward.order)
            if self.exhibit is not None:
                self.exhibit.forward_ends(args, kwargs, self.forward.random)
            self.forward = None

    def note_wrapper(self, event: Forward, module: nn.Module) -> None:
        """Remember that the model is spread over ranks, and whether this forward asks for a reduction."""
        if isinstance(module, nn.parallel.DistributedDataParallel):
            self.ddp[id(module)] = module
            event.wrapper = "ddp"
            event.model = type(module.module).__name__
            event.sync = bool(module.require_backward_grad_sync) and event.grad
        elif hasattr(module, "set_requires_gradient_sync"):
            event.wrapper = "fsdp"

    # Backward

    def begin_backward(self, root: Any) -> Backward | None:
        """Look at the loss and at the gradients before a backward; None when it runs inside another one."""
        if self.nested == 0:
            self.stop_if_enough()
        self.nested += 1
        if self.nested > 1:
            return None
        self.hunt_optimizers()
        self.note_rank()
        frame = inspect.currentframe()
        event = Backward(began=len(self.trace.events), site=site_of(frame), path=path_of(frame))
        self.read_loss(event, root)
        look = self.parameters.look()
        event.pending, event.changed, event.weights = look.pending, bool(look.changed), self.parameters.weights()
        event.before = self.sample_if(event.changed)
        event.sync = self.syncing()
        return event

    def read_loss(self, event: Backward, root: Any) -> None:
        """Fill in what the loss tells: its value, its terms, and the forwards that it comes from."""
        roots = [root] if isinstance(root, Tensor) else list(root) if isinstance(root, (list, tuple)) else []
        event.forwards = marks_below(roots)
        loss = roots[0] if len(roots) == 1 and isinstance(roots[0], Tensor) else None
        if loss is None or loss.numel() != 1 or loss.is_meta or loss.is_complex():
            return
        event.value = float(loss.detach().item())
        event.terms = terms_of(loss)
        scaled = self.scaled.pop(id(loss), None)
        event.scaled = scaled is not None and scaled() is loss

    def note_scaled(self, tensor: Tensor) -> None:
        """Remember that a scaler made this loss."""
        self.scaled[id(tensor)] = weakref.ref(tensor)

    def end_backward(self, event: Backward | None) -> None:
        """Look at the gradients after a backward."""
        self.nested -= 1
        if event is None:
            return
        event.touched = self.parameters.look(written=True).changed
        self.parameters.choose(event.touched)
        event.after = self.level = self.parameters.sample()
        event.dtype = self.dtype_of(event.touched)
        if self.exhibit is not None:
            self.exhibit.fresh = False
        self.add(event)

    def sample_if(self, changed: bool) -> Tensor | None:
        """Return the sampled gradients, the copy of the last look where nothing has changed since."""
        if changed or self.level is None:
            self.level = self.parameters.sample()
        return self.level

    def syncing(self) -> bool | None:
        """Tell whether DDP would reduce now; None without DDP."""
        return any(bool(module.require_backward_grad_sync) for module in self.ddp.values()) if self.ddp else None

    def dtype_of(self, touched: frozenset[int]) -> str:
        """Return the shortest format among the gradients that were just added to."""
        found = [self.parameters.gradient(number).dtype for number in touched]
        shortest = min(
            found, key=lambda dtype: torch.finfo(dtype).bits if dtype.is_floating_point else 64, default=None
        )
        return str(shortest).removeprefix("torch.") if shortest is not None else ""

    def note_rank(self) -> None:
        """Remember rank and number of ranks while the process group stands."""
        if dist.is_available() and dist.is_initialized():
            self.trace.rank, self.trace.world = dist.get_rank(), dist.get_world_size()

    def hunt_optimizers(self) -> None:
        """Find, once, the optimizers that exist when the first backward begins."""
        if not self.hunted:
            self.hunted = True
            found = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.optim.Optimizer)]
            for optimizer in found:
                self.meet_optimizer(optimizer)

    # Optimizers

    def meet_optimizer(self, optimizer: torch.optim.Optimizer) -> int:
        """Return the number of an optimizer, with its parameters met."""
        number = id(optimizer)
        prefix = f"{type(optimizer).__name__}.param_groups"
        numbers = frozenset(
            self.parameters.add(parameter, f"{prefix}[{g}][{p}]")
            for g, group in enumerate(getattr(optimizer, "param_groups", ()))
            for p, parameter in enumerate(group["params"])
            if parameter.requires_grad
        )
        self.trace.optimizers[number] = Optimizer(type(optimizer).__name__, numbers)
        return number

    def begin_step(self, optimizer: torch.optim.Optimizer) -> OptimizerStep:
        """Look at the gradients as the optimizer finds them."""
        if self.call is not None:
            self.call.close()
        self.inside_step += 1
        number = self.meet_optimizer(optimizer)
        event = OptimizerStep(began=len(self.trace.events), optimizer=number, in_backward=self.nested > 0)
        event.site = site_of(inspect.currentframe())
        self.look_at_step(event)
        return event

    def look_at_step(self, event: OptimizerStep) -> None:
        """Fill in which gradients are there, their norm and the sample."""
        look = self.parameters.look()
        own = self.trace.optimizers[event.optimizer].parameters
        event.pending = look.pending & own
        event.missing = frozenset(
            number for number in own - look.pending if self.parameters.tensors[number].grad is None
        )
        event.norm = self.parameters.norm(own)
        event.sample = self.sample_if(bool(look.changed))

    def end_step(self, event: OptimizerStep) -> None:
        """Close the event; a closure may have made the gradients meanwhile."""
        self.inside_step -= 1
        if any(isinstance(seen, Backward) for seen in self.trace.events[event.began :]):
            self.look_at_step(event)
        if self.exhibit is not None:
            self.exhibit.close(self.parameters)
        self.add(event)

    def clipped(self, parameters: list[Tensor], bound: float) -> Clip:
        """Look at the gradients just before they are clipped."""
        numbers = frozenset(self.parameters.add(parameter, "") for parameter in parameters)
        look = self.parameters.look()
        if self.exhibit is not None and not math.isinf(bound):
            self.exhibit.keep_gradient(self.parameters)
            self.exhibit.bound = bound
        return Clip(parameters=numbers & look.pending, bound=bound, sample=self.sample_if(bool(look.changed)))

    def drawn(self, loader: int, batch: Any) -> None:
        """Note that a data loader gave a batch, and keep it when the window is to be measured."""
        self.batch = (loader, 0 if self.batch is None else self.batch[1] + 1)
        if self.exhibit is not None:
            self.exhibit.drawn(batch)

    def scaler_called(self, call: str, optimizer: Any, scale: float, before: int) -> None:
        """Note a scaler's call; a step without a step of the optimizer inside was skipped."""
        number = id(optimizer) if optimizer is not None else -1
        stepped = any(
            isinstance(seen, OptimizerStep) and seen.optimizer == number for seen in self.trace.events[before:]
        )
        self.add(Scaler(call=call, optimizer=number, scale=scale, stepped=stepped or call != "step"))


def random_states() -> list[Tensor]:
    """Return copies of the states of torch's generators."""
    states = [torch.random.get_rng_state()]
    return [*states, torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else states


def readable(parameter: Tensor | None) -> bool:
    """Tell whether a module has parameters with memory of their own: those of a transform of `torch.func` have none."""
    return parameter is not None and not torch._C._functorch.is_functorch_wrapped_tensor(parameter)


def finish_forward(event: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Fill in rows, shape and labels from a module's inputs."""
    inputs = list(leaves((args, kwargs)))
    first = next((tensor for _, tensor in inputs if tensor.dim() > 0), None)
    if first is not None:
        event.rows, event.shape = int(first.shape[0]), tuple(first.shape)
    labels = next((tensor for name, tensor in inputs if name == "labels" and not tensor.is_floating_point()), None)
    if labels is not None:
        event.labels = float((labels != IGNORED_LABEL).sum().item())
