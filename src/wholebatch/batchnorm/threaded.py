"""All micro-batches of a batch at once, each in a thread of its own, from one meeting of rows to the next.

For models that no graph can be made of: their own Python runs, unchanged. Exact as the stages are, but nothing is
computed twice, so the graphs of all micro-batches stay in memory. The threads take turns, micro-batch by micro-batch:
one runs, the others wait, so draws come in the order in which stages make them.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from wholebatch.batchnorm.gradient_tap import GradientTap
from wholebatch.batchnorm.model_call import ModelCall
from wholebatch.batchnorm.operations import BatchNorm, Operation, Statistic, arguments_of
from wholebatch.batchnorm.tensor_store import TensorStore
from wholebatch.errors import InexactError


class _Stopped(BaseException):
    """Ends a thread whose result nobody waits for any more."""


class _ModelThread:
    """One micro-batch on its way through the model, in a thread that runs only when it is told to."""

    def __init__(self, model: nn.Module, call: ModelCall, buffers: Mapping[int, str]) -> None:
        self.answer: Any = None
        self.request: tuple[Operation, Tensor, tuple[Any, ...]] | None = None
        self._model, self._call, self._buffers = model, call, buffers
        self._reply: Tensor | None = None
        self._go, self._rest = threading.Semaphore(0), threading.Semaphore(0)
        self._ending = False
        self._settings = (torch.get_num_threads(), torch.is_grad_enabled())
        self._end: Future[None] = Future()
        # The end of a program waits for no thread that nobody can tell to end any more.
        self._thread = threading.Thread(target=self._walk, daemon=True)

    def resume(self, reply: Tensor | None = None) -> None:
        """Let the micro-batch go on to its next meeting, or to the end."""
        self._reply, self.request = reply, None
        if self._thread.ident is None:
            self._thread.start()
        self._go.release()
        self._rest.acquire()
        if self._end.done():
            self._end.result()  # raises what the model raised

    def end(self) -> None:
        """Tell the thread to end, wherever it stands."""
        self._ending = True
        self._go.release()

    def join(self) -> None:
        """Wait until it has ended: it may run the model until then."""
        if self._thread.ident is not None:
            self._thread.join()

    def meet(self, operation: Operation, x: Tensor, operands: tuple[Any, ...]) -> Tensor:
        """Wait for the others; called in the micro-batch's own thread."""
        self.request = operation, x, operands
        self._wait()
        assert self._reply is not None  # whoever resumes a request replies to it
        return self._reply

    def _wait(self) -> None:
        self._rest.release()
        self._sleep()

    def _sleep(self) -> None:
        if not self._ending:  # else the model has caught what ended it, and goes on
            self._go.acquire()
        if self._ending:
            raise _Stopped

    def _walk(self) -> None:
        threads, grad = self._settings
        with _Told(self._end, self._rest):
            self._sleep()
            torch.set_num_threads(threads)
            with torch.set_grad_enabled(grad), self._call.ambient(), _Meetings(self, self._buffers):
                self.answer = self._model(*self._call.args, **self._call.kwargs)


class _Told:
    """Tells how a thread has ended, whatever ended it: nobody else hears what is raised in there."""

    def __init__(self, end: Future[None], rest: threading.Semaphore) -> None:
        self._end, self._rest = end, rest

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None:
            self._end.set_result(None)
        else:
            self._end.set_exception(error)
        self._rest.release()
        return True


class _Meetings(TorchFunctionMode):
    """Brings BatchNorm with batch statistics before all micro-batches, whichever layer calls it."""

    def __init__(self, walker: _ModelThread, buffers: Mapping[int, str]) -> None:
        super().__init__()
        self._walker, self._buffers = walker, buffers

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at every operation of the model."""
        given = arguments_of(function, args, kwargs or {})
        if given is None or not given["training"]:
            return function(*args, **(kwargs or {}))
        mean, variance = (self._buffers.get(id(given[name])) for name in ("running_mean", "running_var"))
        running = (mean, variance) if mean is not None and variance is not None else None
        operation = BatchNorm(given["eps"], given["momentum"], running)
        return self._walker.meet(operation, given["input"], (given["weight"], given["bias"]))


class ThreadedExecutor:
    """Runs the micro-batches of one batch side by side; takes the place of the engine of stages.

    Args:
        model: whose own code runs.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.store = TensorStore()
        self.calls: Sequence[ModelCall] = ()
        self.answers: list[Any] = []
        self.gradients: dict[tuple[int, int], Tensor] = {}
        self.meetings: list[tuple[Operation, Statistic]] = []
        self.anchor = torch.zeros((), requires_grad=True)
        self.after: Mapping[str, Tensor] = {}

    def forward(self, calls: Sequence[ModelCall]) -> None:
        """Bring all micro-batches through the model."""
        self.calls, before = calls, self._buffers()
        names = {id(buffer): name for name, buffer in self.model.named_buffers()}
        walkers = [_ModelThread(self.model, call, names) for call in calls]
        replies: Sequence[Tensor | None] = [None] * len(walkers)
        try:
            self._turns(walkers, replies)
            while any(walker.request is not None for walker in walkers):
                replies = self._meet(walkers)
                self._turns(walkers, replies)
            self.answers = [walker.answer for walker in walkers]
            self.after = self._buffers()
        finally:
            for walker in walkers:
                walker.end()
            for walker in walkers:
                walker.join()
            self._write(before)

    def output(self, index: int) -> Any:
        """Return the model's answer for a micro-batch."""
        leaves, form = pytree.tree_flatten(self.answers[index])
        heard = [self._listen(leaf, partial(self._collect, (index, i))) for i, leaf in enumerate(leaves)]
        return pytree.tree_unflatten(heard, form)

    def fail(self) -> None:
        """Nobody else waits."""

    def restart(self) -> None:
        """Forget the gradients that have come back to the answers."""
        self.gradients.clear()

    def backward(self) -> None:
        """Bring all gradients back from the answers, in one pass over the joint graph."""
        leaves = [pytree.tree_leaves(answer) for answer in self.answers]
        told = [(leaves[micro_batch][place], gradient) for (micro_batch, place), gradient in self.gradients.items()]
        if told:
            outputs, seeds = zip(*told, strict=True)
            torch.autograd.backward(outputs, seeds)

    @torch.no_grad()
    def commit(self) -> None:
        """Write running statistics and other buffers, once."""
        self._write(self.after)
        buffers = dict(self.model.named_buffers())
        for operation, statistic in self.meetings:
            operation.commit(statistic, buffers)

    def _turns(self, walkers: Sequence[_ModelThread], replies: Sequence[Tensor | None]) -> None:
        """Let one micro-batch after another go on to its next meeting, each with the same buffers."""
        before, afterwards = self._buffers(), []
        for walker, reply in zip(walkers, replies, strict=True):
            self._write(before)
            walker.resume(reply)
            afterwards.append(self._buffers())
        met = [walker.request[0] for walker in walkers if walker.request is not None]
        if len(met) not in (0, len(walkers)) or len(set(met)) > 1:
            raise InexactError(
                f"The micro-batches take different ways through the model: {len(met)} of {len(walkers)} came to an "
                f"operation in which rows meet, with {len(set(met))} different settings."
            )
        for name, value in afterwards[0].items():
            if any(not torch.equal(other[name], value) for other in afterwards[1:]):
                raise InexactError(
                    f"Buffer {name!r} is updated from the rows of each micro-batch (its values differ after "
                    f"{len(walkers)} of them), and what the whole batch would have made of it is not known."
                )

    def _meet(self, walkers: Sequence[_ModelThread]) -> list[Tensor]:
        """Apply the operation that all micro-batches have come to with the statistic of all of them."""
        requests = [walker.request for walker in walkers if walker.request is not None]
        operation = requests[0][0]
        statistic = _shared(operation, [x for _, x, _ in requests])
        self.meetings.append((operation, pytree.tree_map(_detached, statistic)))
        return [operation.apply(x, statistic, *operands) for _, x, operands in requests]

    def _listen(self, leaf: Any, hear: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.requires_grad:
            return leaf
        return cast("Any", GradientTap).apply(self.anchor, leaf.detach(), hear)

    def _collect(self, place: tuple[int, int], gradient: Tensor) -> None:
        held = self.gradients.get(place)
        self.gradients[place] = gradient if held is None else held + gradient

    def _buffers(self) -> dict[str, Tensor]:
        return {name: buffer.detach().clone() for name, buffer in self.model.named_buffers()}

    @torch.no_grad()
    def _write(self, values: Mapping[str, Tensor]) -> None:
        for name, buffer in self.model.named_buffers():
            buffer.copy_(values[name])


def _shared(operation: Operation, xs: Sequence[Tensor]) -> Statistic:
    """Make the statistic of all micro-batches, with one graph that leads back to each."""
    statistic = operation.merge([operation.partial(x.detach()) for x in xs])
    tensors = cast("Any", _Shared).apply(operation, statistic, *xs)
    fields = iter(tensors)
    return tuple(next(fields) if isinstance(field, Tensor) else field for field in statistic)


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


class _Shared(torch.autograd.Function):
    """A statistic as a function of all micro-batches; its gradient is pulled back to each."""

    @staticmethod
    def forward(ctx: Any, operation: Operation, statistic: Statistic, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.operation, ctx.statistic = operation, statistic
        ctx.save_for_backward(*xs)
        return tuple(field.clone() for field in statistic if isinstance(field, Tensor))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        told = iter(gradients)
        gradient = [next(told) if isinstance(field, Tensor) else None for field in ctx.statistic]
        return None, None, *(ctx.operation.pull(x, ctx.statistic, gradient) for x in ctx.saved_tensors)
