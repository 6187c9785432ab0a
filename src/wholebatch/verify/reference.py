"""The plain reading of the mathematics: the whole batch's gradient, in double precision, with nothing clever.

One forward and one backward over the untouched batch, on a copy of the model. The fast code is held against this, so
nothing here cuts, joins, trims or counts by the code that `backward` uses.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.batch.window import Window, micro_batches_of
from wholebatch.errors import LossError, own_faults_apart
from wholebatch.loss.terms import LossSum, Terms
from wholebatch.model.inspection import unwrapped
from wholebatch.model.references import reach_of
from wholebatch.model.state import State
from wholebatch.verify.copies import Widening, as_dtype, copied
from wholebatch.verify.gluing import Unlike, glued, rows_in

LossFunction = Callable[[Any, Any], Any]
Gradients = dict[str, Tensor]
Counts = dict[Any, float]


@dataclasses.dataclass(frozen=True)
class Reference:
    """What the whole batch says.

    Attributes:
        loss: one number, in the precision of the reference.
        gradients: by parameter name, zeros where nothing arrived; those of tensors that only the loss function
            reaches are called ``loss_fn[0]`` and so on.
        micro_batches: in how many micro-batches it was computed: 1, or as many as were given, or one a row where the
            whole did not fit into memory. In more than one, rows can't meet.
        counts: each term's denominator over the batch, by its name or number and its place within that.
        missing: the names of those that no gradient has reached.
        shapes: of the values that each term of the first micro-batch was made of, where these say it.
        size: the sum of the terms' absolute values, by which a loss of cancelling terms is measured.
        buffers: where those of real numbers and the counters stand afterwards.
    """

    loss: Tensor
    gradients: Gradients
    micro_batches: int
    counts: Counts
    missing: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...] | None, ...] = ()
    size: float = 0.0
    buffers: dict[str, Tensor] = dataclasses.field(default_factory=dict)

    @property
    def items(self) -> tuple[float, ...]:
        """Each term's denominator over the batch."""
        return tuple(self.counts.values())


class OtherName(Exception):
    """The loss function reaches the model by another name than its argument, so no copy can take its place."""


def whole_gradient(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    *,
    dtype: torch.dtype = torch.float64,
    whole: Sequence[str] = (),
    collate: Callable[[list[Any]], Any] | None = None,
) -> Reference:
    """Return the gradient of the whole batch by one forward and one backward, leaving everything as it was.

    The model is copied and brought to ``dtype``, and so are the real numbers of the batch. Random state, buffers and
    gradients of the original are untouched. Where memory does not suffice, one row runs at a time and
    ``Reference.micro_batches`` says so.

    Args:
        model: plain or wrapped in ``DistributedDataParallel``; one process.
        loss_fn: follows the return contract of :mod:`wholebatch.loss.terms`; over a whole batch a plain mean (a tensor
            without dimensions) is understood too.
        batch: anything that the loss function takes, or a :class:`Window`, whose micro-batches are joined where their
            shapes allow it and run one by one where not.
        dtype: the precision of the reading.
        whole: names of leaves that have no rows.
        collate: makes a batch of a list of samples.

    Returns:
        Loss and gradients of the whole batch.

    Raises:
        LossError: if the loss function says nothing, or a plain mean of several micro-batches.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1)
        >>> answer = whole_gradient(model, lambda model, x: model(x).square(), torch.randn(6, 2))
        >>> answer.micro_batches, answer.gradients["weight"].dtype
        (1, torch.float64)
    """
    micro_batches = whole_micro_batches(batch, whole, collate)
    if len(micro_batches) > 1:
        return plain_gradient(model, loss_fn, micro_batches, dtype=dtype)
    try:
        return plain_gradient(model, loss_fn, micro_batches, dtype=dtype)
    except torch.OutOfMemoryError:
        rows = [micro_batch.load() for micro_batch in micro_batches_of(batch, 1, whole=whole, collate=collate)]
        return plain_gradient(model, loss_fn, rows, dtype=dtype)


def whole_micro_batches(batch: Any, whole: Sequence[str], collate: Callable[[list[Any]], Any] | None) -> list[Any]:
    """Return the batch as one micro-batch, untouched; the micro-batches of a window that can't be joined as they
    are.
    """
    micro_batches = list(batch) if isinstance(batch, Window) else [batch]
    if collate is not None:
        samples = [sample for micro_batch in micro_batches for sample in micro_batch]
        return [collate(samples)] if samples else []
    if len(micro_batches) < 2:
        return [micro_batch for micro_batch in micro_batches if rows_in(micro_batch, whole) != 0]
    try:
        return [glued(micro_batches, whole)]
    except Unlike:  # padded to different lengths
        return micro_batches


def plain_gradient(
    model: nn.Module,
    loss_fn: LossFunction,
    micro_batches: Sequence[Any],
    *,
    dtype: torch.dtype = torch.float64,
    outside: list[Tensor] | None = None,
    in_place: bool = False,
    as_is: bool = False,
    observe: Callable[[nn.Module], AbstractContextManager[Any]] = nullcontext,
) -> Reference:
    """Return the gradient of micro-batches taken together: count every denominator first, then add up the shares.

    Args:
        outside: the tensors besides the model's that are known to receive gradients; those found are appended.
        in_place: use the model itself in its own precision, where no copy can take its place; its buffers are put
            back, and so are gradients.
        as_is: leave every number of the copy in its own precision, as a model may be of several.
        observe: a context around the reading, given the model that is read.

    Raises:
        OtherName: if gradients reach the model itself, and a copy was to receive them.
    """
    plain = unwrapped(model)
    precision = None if in_place or as_is else dtype
    twin = plain if in_place else in_dtype(plain, precision)
    device = next((parameter.device for parameter in twin.parameters()), None)
    batches = [_copy(micro_batch, precision, device) for micro_batch in micro_batches]
    reading = _Reading(twin, model, loss_fn, batches, [] if outside is None else outside)
    state = State(twin)
    try:
        with own_faults_apart(), Widening(), observe(twin):
            return reading.read(dtype, state)
    finally:
        state.restore_random()
        if in_place:
            state.restore_buffers()


def _copy(micro_batch: Any, dtype: torch.dtype | None, device: torch.device | None) -> Any:
    """Copy a micro-batch; what no copy can be made of is read as it is, in its own precision."""
    try:
        return copied(micro_batch, dtype, device)
    except (AttributeError, LookupError, TypeError, RuntimeError, ValueError):
        if dtype is not None:
            raise
        return micro_batch


class _Wrapped(nn.Module):
    """Stands where a wrapper stood, for loss functions that reach through it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class _Reading:
    """One reading: its micro-batches, the tensors that receive gradients, the denominators."""

    def __init__(
        self,
        twin: nn.Module,
        model: nn.Module,
        loss_fn: LossFunction,
        batches: list[Any],
        outside: list[Tensor],
    ) -> None:
        self.twin, self.loss_fn, self.batches = twin, loss_fn, batches
        self.called = _Wrapped(twin) if isinstance(model, nn.parallel.DistributedDataParallel) else twin
        self.of_twin = {id(parameter) for parameter in twin.parameters()}
        self.of_model = {id(parameter) for parameter in model.parameters()} - self.of_twin
        self.outside = outside
        self.aside: list[tuple[Tensor, Tensor | None]] = []
        named = [leaf for leaf in reach_of(loss_fn).leaves if id(leaf) not in self.of_model | self.of_twin]
        self._take_in(twin.parameters())
        self._take_in(self.outside)
        self.take_outside(named)

    def read(self, dtype: torch.dtype, state: State) -> Reference:
        """Go forward and backward once a micro-batch; where there are several, all are counted beforehand."""
        try:
            counts: Counts | None = None
            if len(self.batches) != 1:
                counts = self.counted()
                state.restore()
            loss, size, shapes = torch.zeros((), dtype=dtype), 0.0, None
            for batch in self.batches:
                terms = self.terms_of(batch)
                counts = _added({}, terms) if counts is None else counts
                shapes = tuple(term.shape for term in terms.values()) if shapes is None else shapes
                shares = self.shares(terms, counts)
                if shares:
                    self.backward(torch.stack([share.to(shares[0].device) for share in shares]).sum())
                loss += sum(share.detach().to("cpu", dtype) for share in shares)
                size += sum(abs(float(share.detach())) for share in shares)
            return self.reference(dtype, loss, counts or {}, shapes or (), size)
        finally:
            for tensor, gradient in self.aside:
                tensor.grad = gradient

    def terms_of(self, batch: Any) -> dict[Any, PlainTerm]:
        """Run the loss function and read its answer; over one micro-batch a number is the whole batch's loss."""
        return terms_in(self.loss_fn(self.called, batch), bare=len(self.batches) == 1)

    def counted(self) -> Counts:
        """Return every term's denominator over all micro-batches, by a forward of each whose graph is dropped."""
        counts: Counts = {}
        for batch in self.batches:
            counts = _added(counts, self.terms_of(batch))
        return counts

    def shares(self, terms: Mapping[Any, PlainTerm], counts: Mapping[Any, float]) -> list[Tensor]:
        """Divide each term by the items of the whole batch; a sum by nothing, what exists once by its repetitions."""
        shares = []
        for key, term in terms.items():
            divisor = {"one": 1.0, "once": float(len(self.batches))}.get(term.kind, counts[key])
            if divisor:
                shares.append(term.total / divisor)
        return shares

    def backward(self, share: Tensor) -> None:
        """Go back, once it is known where gradients will arrive."""
        if not share.requires_grad:
            raise LossError("The loss has no gradient: nothing in it depends on a trainable parameter.")
        leaves = [leaf for leaf in leaves_below(share) if id(leaf) not in self.of_twin]
        if any(id(leaf) in self.of_model for leaf in leaves):
            raise OtherName
        # what the loss function has made for itself, such as inputs of a gradient penalty, is another each time
        self.take_outside([leaf for leaf in leaves if isinstance(leaf, nn.Parameter)])
        torch.autograd.backward(share)

    def take_outside(self, leaves: Sequence[Tensor]) -> None:
        """Note tensors outside of the model that receive gradients, and set aside what they hold."""
        known = {id(leaf) for leaf in self.outside}
        new = [leaf for leaf in leaves if id(leaf) not in known]
        self.outside += new
        self._take_in(new)

    def _take_in(self, tensors: Any) -> None:
        for tensor in tensors:
            self.aside.append((tensor, tensor.grad))
            tensor.grad = None

    def reference(
        self, dtype: torch.dtype, loss: Tensor, counts: Counts, shapes: tuple[Any, ...], size: float
    ) -> Reference:
        """Collect what has arrived."""
        targets = named_targets(self.twin, self.outside)
        gradients = {name: held(tensor, dtype) for name, tensor in targets.items()}
        missing = tuple(name for name, tensor in targets.items() if tensor.grad is None)
        return Reference(loss, gradients, len(self.batches), counts, missing, shapes, size, buffers_of(self.twin))


@dataclasses.dataclass(frozen=True)
class PlainTerm:
    """One term of a loss: its weighted sum, and what that is to be divided by."""

    total: Tensor
    count: float
    kind: str
    shape: tuple[int, ...] | None


def _added(counts: Counts, terms: Mapping[Any, PlainTerm]) -> Counts:
    """Add what one micro-batch counts; 1 for a sum and for what exists once."""
    known = {
        key: 1.0 if term.kind in ("one", "once") else counts.get(key, 0.0) + term.count for key, term in terms.items()
    }
    return {**counts, **known}


def terms_in(returned: Any, bare: bool = False) -> dict[Any, PlainTerm]:
    """Read what a loss function returned, by the letter of the contract.

    Args:
        bare: whether a tensor without dimensions is understood, as the loss of all there is.

    Raises:
        LossError: for what the contract does not know.
    """
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping):
        returned = returned[0]
    if returned is None:
        return {}
    named = returned.items() if isinstance(returned, Mapping) else [(0, returned)]
    return {(name, place): term for name, value in named for place, term in enumerate(_terms_of(value, bare))}


def _terms_of(value: Any, bare: bool) -> list[PlainTerm]:
    if isinstance(value, Terms):
        return [_stated(part) for part in value.parts]
    if isinstance(value, Tensor) and (value.dim() or bare):
        total = value.sum(dtype=torch.float32) if value.element_size() < 4 else value.sum()
        return [PlainTerm(total, float(value.numel()) if value.dim() else 1.0, "values", tuple(value.shape))]
    kind = "a tensor without dimensions" if isinstance(value, Tensor) else type(value).__name__
    raise LossError(
        f"The loss function returned {kind} for one of several micro-batches; what it averages over cannot be known. "
        "Return the values, or wb.from_mean(loss, items=n)."
    )


def _stated(part: LossSum) -> PlainTerm:
    shape = tuple(part.source) if part.kind == "shape" and isinstance(part.source, torch.Size) else None
    return PlainTerm(part.total * part.weight, float(part.count), part.kind, shape)


def leaves_below(output: Tensor) -> list[Tensor]:
    """List the leaf tensors that a backward from an output would reach."""
    waiting, seen, leaves = [output.grad_fn], set(), []
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            leaves.append(leaf)
        waiting += [following for following, _ in node.next_functions]
    return leaves


def named_targets(model: nn.Module, outside: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return all that receives a gradient: the model's parameters, and what only the loss function reaches."""
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {**named, **{f"loss_fn[{place}]": leaf for place, leaf in enumerate(outside)}}


def held(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy of a gradient on the host, zeros where there is none."""
    gradient = tensor.grad if tensor.grad is not None else torch.zeros_like(tensor)
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    return dense.detach().to("cpu", dtype.to_complex() if dense.is_complex() else dtype, copy=True)


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of a model's buffers on the host, in double precision; without those that are no numbers."""
    named = {name: buffer for name, buffer in model.named_buffers() if not buffer.is_meta and not buffer.is_complex()}
    return {name: buffer.detach().to("cpu", torch.float64, copy=True) for name, buffer in named.items()}


def rows_or_one(batch: Any) -> int:
    """Return the rows of a batch, 1 where it has none."""
    return rows_in(batch) or 1


def twin_of(model: nn.Module) -> nn.Module:
    """Return a copy of a model without gradients, whose parameters have the hooks that a plain copy would lose."""
    twin = copy.deepcopy(model)
    return _like(twin, model)


def _like(twin: nn.Module, model: nn.Module) -> nn.Module:
    twin.zero_grad(set_to_none=True)
    for parameter, own in zip(twin.parameters(), model.parameters(), strict=True):
        for hook in hooks_of(own) if parameter.requires_grad else ():
            parameter.register_hook(hook)
    return twin


def hooks_of(tensor: Tensor) -> list[Callable[[Tensor], Tensor | None]]:
    """Return what ``register_hook`` has put on a tensor, in order."""
    return list((getattr(tensor, "_backward_hooks", None) or {}).values())


def in_dtype(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Return a copy of a model with all its real numbers in ``dtype``, plain attributes too, without gradients."""
    twin = _like(copied(model, dtype), model)
    for tensor in (*twin.parameters(), *twin.buffers()):
        if not tensor.is_meta:
            tensor.data = as_dtype(tensor.data, dtype)
    return twin
