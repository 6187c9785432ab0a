"""The one oracle: the whole batch's gradient by one plain forward and backward in float64.

Nothing of the library is used here. What a test trained is held against what plain torch gives for the undivided
batch, by one number: the norm of the difference over the norm of the reference, all parameters together.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

TOLERANCES = {
    torch.float64: 1e-12,
    torch.complex128: 1e-12,
    torch.float32: 2e-6,
    torch.complex64: 2e-6,
    torch.float16: 1e-3,
    torch.bfloat16: 1e-2,
}

Gradients = dict[str, torch.Tensor | None]


@dataclasses.dataclass(frozen=True)
class Reference:
    """What one plain backward gave: the loss, the gradients by parameter name, and the copy that was used."""

    loss: torch.Tensor
    gradients: Gradients
    model: nn.Module


def whole_batch(model: nn.Module, loss: Callable[[nn.Module, Any], torch.Tensor], batch: Any) -> Reference:
    """Take one forward and one backward over `batch` in float64, on a copy; the model itself is left alone.

    `loss(model, batch)` returns the scalar that is meant, written down in plain torch.
    """
    twin = to_float64(copy.deepcopy(unwrapped(model)))
    twin.zero_grad(set_to_none=True)
    value = loss(twin, to_float64(batch))
    value.backward()
    return Reference(value.detach(), gradients_of(twin), twin)


def to_float64(value: Any) -> Any:
    """Return `value` (a module, a tensor, or a nest of them) with every real or complex number in double precision."""
    return in_precision(value, torch.float64)


def in_precision(value: Any, dtype: torch.dtype) -> Any:
    """Return `value` with every real number in `dtype` and every complex one in its complex kin; modules in place."""
    if isinstance(value, nn.Module):
        for owned in value.modules():
            for name, tensor in [*owned.named_parameters(recurse=False), *owned.named_buffers(recurse=False)]:
                if not tensor.is_meta:
                    getattr(owned, name).data = in_precision(tensor.data, dtype)
        return value
    if isinstance(value, torch.Tensor):
        wide = dtype.to_complex() if value.is_complex() else dtype
        return value.to(wide) if value.is_complex() or value.is_floating_point() else value
    if isinstance(value, Mapping):
        changed = {key: in_precision(item, dtype) for key, item in value.items()}
        return changed if type(value) is dict else type(value)(changed)
    if isinstance(value, (list, tuple)):
        return type(value)(in_precision(item, dtype) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return type(value)(**in_precision(fields, dtype))
    return value


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the user's own module out of `DistributedDataParallel`."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def gradients_of(model: nn.Module) -> Gradients:
    """Return a copy of every parameter's gradient by name, dense and whole; None where there is none."""
    return {
        name: None if parameter.grad is None else _dense(parameter.grad)
        for name, parameter in unwrapped(model).named_parameters()
    }


def parameters_of(model: nn.Module) -> Gradients:
    """Return a copy of every parameter by name, dense and whole."""
    return {name: _dense(parameter) for name, parameter in unwrapped(model).named_parameters() if not parameter.is_meta}


def relative_error(result: nn.Module | Gradients, reference: Reference | nn.Module | Gradients) -> float:
    """Return norm(result - reference) / norm(reference) over all parameters, in float64.

    A gradient that only one side has counts as its own difference from zero. If the reference is zero everywhere, the
    absolute norm of the difference is returned.
    """
    ours, theirs = _gradients(result), _gradients(reference)
    assert ours.keys() == theirs.keys(), f"different parameters: {sorted(ours.keys() ^ theirs.keys())}"
    difference, size = [torch.zeros(())], [torch.zeros(())]
    for name, expected in theirs.items():
        found = ours[name]
        if expected is not None:
            size.append(_norm(expected))
        if expected is not None or found is not None:
            difference.append(_norm(_minus(found, expected)))
    error, norm = _norm(torch.stack(difference)).item(), _norm(torch.stack(size)).item()
    return error / norm if norm else error


def assert_same_gradient(
    result: nn.Module | Gradients, reference: Reference | nn.Module | Gradients, tol: float | None = None
) -> None:
    """Fail unless every gradient is there, finite, and equal to the reference within the tolerance of its dtype."""
    ours, theirs = _gradients(result), _gradients(reference)
    for name in theirs.keys() & ours.keys():
        found, expected = ours[name], theirs[name]
        assert (found is None) == (expected is None), (
            f"{name!r} has {'no gradient' if found is None else 'a gradient'}, the whole batch gives it "
            f"{'none' if expected is None else 'one'}"
        )
        assert found is None or bool(torch.isfinite(found).all()), f"the gradient of {name!r} is not finite: {found}"
    limit = tolerance(ours) if tol is None else tol
    error = relative_error(ours, theirs)
    assert error <= limit, f"the gradient is {error:.3g} away from the whole batch's, allowed is {limit:.3g}"


def assert_differs(
    result: nn.Module | Gradients, reference: Reference | nn.Module | Gradients, by: float = 1e-3
) -> None:
    """Fail unless `assert_same_gradient` fails, and by no hair's breadth: the twin that proves a test can tell."""
    with pytest.raises(AssertionError):
        assert_same_gradient(result, reference)
    error = relative_error(result, reference)
    assert not error < by, f"the twin is only {error:.3g} away from the whole batch's gradient"


def assert_same_parameters(
    result: nn.Module | Gradients, reference: nn.Module | Gradients, tol: float | None = None
) -> None:
    """Fail unless every parameter equals the reference's within the tolerance of its dtype."""
    ours, theirs = _parameters(result), _parameters(reference)
    limit = tolerance(ours) if tol is None else tol
    error = relative_error(ours, theirs)
    assert error <= limit, f"the parameters are {error:.3g} away, allowed is {limit:.3g}"


def tolerance(gradients: Gradients) -> float:
    """Return the largest tolerance among the dtypes at hand."""
    return max((TOLERANCES[gradient.dtype] for gradient in gradients.values() if gradient is not None), default=0.0)


def _gradients(source: Reference | nn.Module | Gradients) -> Gradients:
    if isinstance(source, Reference):
        return source.gradients
    return gradients_of(source) if isinstance(source, nn.Module) else source


def _parameters(source: nn.Module | Gradients) -> Gradients:
    return parameters_of(source) if isinstance(source, nn.Module) else source


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    whole: Callable[[], torch.Tensor] | None = getattr(tensor, "full_tensor", None)  # DTensor, where torch has it
    tensor = tensor if whole is None else whole()
    return tensor.to_dense() if tensor.is_sparse else tensor.clone()


def _minus(found: torch.Tensor | None, expected: torch.Tensor | None) -> torch.Tensor:
    if found is None or expected is None:
        alone = expected if found is None else found
        assert alone is not None
        return to_float64(alone)
    return to_float64(found) - to_float64(expected)


def _norm(tensor: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(to_float64(tensor))
