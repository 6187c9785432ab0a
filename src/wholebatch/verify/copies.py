"""Copies of anything, with its tensors in another precision: found by copying, so in whatever class they lie."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree


def copied(value: Any, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Any:
    """Copy a nest of any classes, its real numbers in ``dtype`` and its tensors on ``device``.

    Nothing is taken apart or built anew: ``copy.deepcopy`` finds the tensors, and each class copies itself as it
    likes. A tensor with a graph of its own keeps it.

    Args:
        value: a batch, a model, or anything else that can be copied.
        dtype: of real numbers; complex ones come in its complex kin; None leaves all as they are.
        device: None leaves tensors where they are.

    Example:
        >>> copied({"x": torch.zeros(2), "n": 3}, torch.float64)
        {'x': tensor([0., 0.], dtype=torch.float64), 'n': 3}
    """
    with _Copying(dtype, device):
        return _copy(value)


def tensors_in(value: Any) -> list[Tensor]:
    """List the tensors of a nest of any classes; none where it can't be copied.

    Example:
        >>> len(tensors_in({"x": torch.zeros(2), "more": [torch.zeros(1)]}))
        2
    """
    found: list[Tensor] = []
    try:
        with _Listing(found):
            _copy(value)
    except (AttributeError, LookupError, TypeError, RuntimeError, ValueError):
        return []
    return found


def _copy(value: Any) -> Any:
    """Copy by ``copy.deepcopy``; a container that answers for attributes it has not is copied by what it holds."""
    try:
        return copy.deepcopy(value)
    except (AttributeError, LookupError, TypeError):
        if not isinstance(value, (dict, list, tuple)):
            raise
    if isinstance(value, tuple):
        return type(value)(map(_copy, value)) if not hasattr(value, "_fields") else type(value)(*map(_copy, value))
    kind: Any = type(value)
    new = kind.__new__(kind)
    for name, held in (vars(value) if type(value) not in (dict, list) else {}).items():
        object.__setattr__(new, name, _copy(held))
    if isinstance(value, dict):
        dict.update(new, {key: _copy(held) for key, held in dict.items(value)})
    else:
        list.extend(new, map(_copy, value))
    return new


class _Copying(TorchFunctionMode):
    """Answers whoever asks a tensor for a copy of itself."""

    def __init__(self, dtype: torch.dtype | None, device: torch.device | None) -> None:
        super().__init__()
        self.dtype, self.device = dtype, device

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not Tensor.__deepcopy__ or not self._changes(args[0]):
            return function(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            new = as_dtype(tensor, self.dtype).to(self.device or tensor.device)
            if new.grad_fn is None:
                new = (new.clone() if new is tensor else new).detach().requires_grad_(tensor.requires_grad)
            memo[id(tensor)] = new
        return memo[id(tensor)]

    def _changes(self, tensor: Tensor) -> bool:
        """Tell whether the copy is another than torch would make: one in another place, or of what it refuses.

        A jagged tensor that torch copies has the sizes of the old one and offsets of its own, and no backward.
        """
        elsewhere = self.device is not None and tensor.device != self.device
        refused = tensor.grad_fn is not None or tensor.is_nested
        return elsewhere or refused or as_dtype(tensor, self.dtype) is not tensor


class _Listing(TorchFunctionMode):
    """Notes who is asked for a copy of itself."""

    def __init__(self, found: list[Tensor]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not Tensor.__deepcopy__:
            return function(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            self.found.append(tensor)
            memo[id(tensor)] = tensor
        return tensor


class Widening(TorchFunctionMode):
    """Lets a computation in double precision meet tensors that nobody has widened.

    A criterion's weights, a table that the loss function closes over, a mask made on the way: where torch refuses an
    operation whose real numbers are of several precisions, they are all brought to the widest.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            return function(*args, **kwargs)
        except RuntimeError:
            dtypes = {leaf.dtype for leaf in pytree.tree_leaves((args, kwargs)) if _is_real(leaf)}
            if len(dtypes) < 2 or getattr(function, "__name__", "").endswith("_"):
                raise
        widest = max(dtypes, key=lambda dtype: dtype.itemsize)
        args, kwargs = pytree.tree_map(lambda leaf: as_dtype(leaf, widest), (args, kwargs))
        return function(*args, **kwargs)


def as_dtype(value: Any, dtype: torch.dtype | None) -> Any:
    """Return a tensor of real numbers in ``dtype``, a complex one in its complex kin, anything else as it is."""
    if dtype is None or not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return value
    return value.to(dtype.to_complex() if value.is_complex() else dtype)


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
