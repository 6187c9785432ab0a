"""The plain reading of the mathematics: the whole batch's gradient, in double precision, with nothing clever.

One forward and one backward over all rows, on a copy of the model. The fast code is held against this.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.batch import Nest, join, move, rows_of
from wholebatch.errors import LossError, SplitError
from wholebatch.loss import Answer, Mean, read
from wholebatch.reach import reach_of
from wholebatch.state import State
from wholebatch.window import Window, pieces_of

LossFunction = Callable[[Any, Any], Any]
Gradients = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Reference:
    """What the whole batch says.

    Attributes:
        loss: one number, in the precision of the reference.
        gradients: by parameter name, zeros where nothing arrived; those of tensors that only the loss function
            names are called ``loss_fn[0]`` and so on.
        pieces: in how many pieces it was computed: 1, or as many as were given, or one a row where the whole did not
            fit into memory. In more than one, rows can't meet.
        items: each term's denominator over the batch.
    """

    loss: Tensor
    gradients: Gradients
    pieces: int
    items: tuple[float, ...]


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
    ``Reference.pieces`` says so.

    Args:
        model: plain or wrapped in ``DistributedDataParallel``; one process.
        loss_fn: follows the return contract of :mod:`wholebatch.loss`; over a whole batch a plain mean (a tensor
            without dimensions) is understood too.
        batch: any nest with rows, or a :class:`Window`, whose micro-batches are joined where their shapes allow it
            and run one by one where not.
        dtype: the precision of the reading.
        whole: names of leaves that have no rows.
        collate: makes a batch of a list of samples.

    Returns:
        Loss and gradients of the whole batch.

    Raises:
        LossError: if the loss function says nothing, or a plain mean of several pieces.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1)
        >>> answer = whole_gradient(model, lambda model, x: model(x).square(), torch.randn(6, 2))
        >>> answer.pieces, answer.gradients["weight"].dtype
        (1, torch.float64)
    """
    pieces = whole_pieces(batch, whole, collate)
    if len(pieces) > 1:
        return plain_gradient(model, loss_fn, pieces, dtype=dtype)
    try:
        return plain_gradient(model, loss_fn, pieces, dtype=dtype)
    except torch.OutOfMemoryError:
        rows = [piece.load() for piece in pieces_of(batch, 1, whole=whole, collate=collate)]
        return plain_gradient(model, loss_fn, rows, dtype=dtype)


def whole_pieces(batch: Any, whole: Sequence[str], collate: Callable[[list[Any]], Any] | None) -> list[Any]:
    """Return the batch as one piece; the micro-batches of a window that can't be joined as they are."""
    pieces = [piece.load() for piece in pieces_of(batch, None, whole=whole, collate=collate)]
    if not isinstance(batch, Window) or len(pieces) < 2:
        return pieces
    try:
        return [join(pieces, whole)]
    except (SplitError, RuntimeError, ValueError, TypeError):  # padded to different lengths
        return pieces


def plain_gradient(
    model: nn.Module, loss_fn: LossFunction, pieces: Sequence[Any], *, dtype: torch.dtype = torch.float64
) -> Reference:
    """Return the gradient of pieces taken together: count every denominator first, then add up the shares."""
    twin = in_dtype(unwrapped(model), dtype)
    device = next((parameter.device for parameter in twin.parameters()), None)
    batches = [move(cast(piece, dtype), device) for piece in pieces]
    targets = named_targets(twin, model, loss_fn)
    state = State(twin)
    with set_aside(targets.values()):
        counts = count(twin, loss_fn, batches) if len(batches) > 1 else {}
        state.restore()
        loss = torch.zeros((), dtype=dtype)
        for batch in batches:
            share, counts = share_of(read_whole(loss_fn(twin, batch), batch, len(batches)), counts, len(batches))
            if share is not None:
                torch.autograd.backward(share)
                loss += share.detach().to("cpu", dtype)
        gradients = {name: held(tensor, dtype) for name, tensor in targets.items()}
    state.restore_random()
    return Reference(loss, gradients, len(batches), tuple(counts.values()))


def named_targets(twin: nn.Module, model: nn.Module, loss_fn: LossFunction) -> dict[str, Tensor]:
    """Return all that receives a gradient: the twin's parameters, and what only the loss function names."""
    own = {id(parameter) for parameter in model.parameters()}
    outer = [leaf for leaf in reach_of(loss_fn).leaves if id(leaf) not in own]
    named = {name: parameter for name, parameter in twin.named_parameters() if parameter.requires_grad}
    return {**named, **{f"loss_fn[{place}]": leaf for place, leaf in enumerate(outer)}}


@contextmanager
def set_aside(tensors: Any) -> Iterator[None]:
    """Clear gradients for a while, and put back what was there."""
    kept = [(tensor, tensor.grad) for tensor in tensors]
    for tensor, _ in kept:
        tensor.grad = None
    try:
        yield
    finally:
        for tensor, gradient in kept:
            tensor.grad = gradient


def held(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy of a gradient on the host, zeros where there is none."""
    gradient = tensor.grad if tensor.grad is not None else torch.zeros_like(tensor)
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    return dense.detach().to("cpu", dtype.to_complex() if dense.is_complex() else dtype, copy=True)


def count(model: nn.Module, loss_fn: LossFunction, batches: Sequence[Any]) -> dict[Any, float]:
    """Return every term's denominator over all pieces, by a forward of each whose graph is dropped."""
    counts: dict[Any, float] = {}
    for batch in batches:
        answer = read_whole(loss_fn(model, batch), batch, len(batches))
        for key, term in answer.terms.items() if answer is not None else ():
            counts[key] = counts.get(key, 0.0) + float(term.count)
    return counts


def read_whole(returned: Any, batch: Any, pieces: int) -> Answer | None:
    """Read an answer; over one piece a number without dimensions is the whole batch's loss."""
    if pieces == 1 and isinstance(returned, Tensor) and returned.dim() == 0:
        return Answer({(0, 0): Mean(returned, 1.0)}, {}, named=False)
    return read(returned, rows_or_one(batch))


def rows_or_one(batch: Any) -> int:
    """Return the rows of a batch, 1 where it has none."""
    try:
        return rows_of(batch)
    except SplitError:
        return 1


def share_of(answer: Answer | None, counts: dict[Any, float], pieces: int) -> tuple[Tensor | None, dict[Any, float]]:
    """Return a piece's share of the loss, each term divided by the items of the whole batch.

    A sum (`total`) is divided by nothing, a value that exists once by the pieces that repeat it.
    """
    if answer is None:
        return None, counts
    if pieces == 1:
        counts = {key: float(term.count) for key, term in answer.terms.items()}
    shares = []
    for key, term in answer.terms.items():
        divisor = {"one": 1.0, "once": float(pieces)}.get(term.kind, counts[key])
        if divisor:
            shares.append(term.weight * term.total / divisor)
    share = sum(shares) if shares else None
    if isinstance(share, Tensor) and not share.requires_grad:
        raise LossError("The loss has no gradient: nothing in it depends on a trainable parameter.")
    return (share if isinstance(share, Tensor) else None), counts


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the user's own module out of ``DistributedDataParallel``."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def twin_of(model: nn.Module) -> nn.Module:
    """Return a copy of a model without gradients, whose parameters have the hooks that a plain copy would lose."""
    twin = copy.deepcopy(model)
    twin.zero_grad(set_to_none=True)
    for parameter, own in zip(twin.parameters(), model.parameters(), strict=True):
        for hook in hooks_of(own) if parameter.requires_grad else ():
            parameter.register_hook(hook)  # type: ignore[no-untyped-call]
    return twin


def hooks_of(tensor: Tensor) -> list[Callable[[Tensor], Tensor | None]]:
    """Return what ``register_hook`` has put on a tensor, in order."""
    return list((getattr(tensor, "_backward_hooks", None) or {}).values())


def in_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a copy of a model with every parameter and buffer of real numbers in ``dtype``, without gradients."""
    twin = twin_of(model)
    for tensor in (*twin.parameters(), *twin.buffers()):
        if not tensor.is_meta:
            tensor.data = as_dtype(tensor.data, dtype)
    return twin


def cast(nest: Any, dtype: torch.dtype) -> Any:
    """Return a nest with its real numbers in ``dtype``."""
    return Nest(nest).map(lambda leaf: as_dtype(leaf.value, dtype))


def as_dtype(value: Any, dtype: torch.dtype) -> Any:
    """Return a tensor of real numbers in ``dtype``, a complex one in its complex kin, anything else as it is."""
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return value
    return value.to(dtype.to_complex() if value.is_complex() else dtype)
