"""Hooks that read gradients on their way: what they are shown must be the gradient's share, not a provisional one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as modules

from wholebatch.model.inspection import ModelInfo

EVERYWHERE = ("_global_backward_hooks", "_global_backward_pre_hooks")
"""Where torch keeps the hooks of all modules."""


KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Where torch keeps the hooks of one module."""


def has_hooks(module: nn.Module) -> bool:
    """Tell whether anything listens to a module."""
    return any(vars(module).get(kind) for kind in KINDS)


def hooks_that_read(model_info: ModelInfo, parameters: Iterable[Tensor]) -> list[Callable[..., Any]]:
    """List the hooks of modules and parameters that see gradients while they flow.

    Per-sample clipping, curvature factors and measures of noise read them there. A hook on the graph's own nodes shows
    nowhere.
    """
    found = [hooks for name in EVERYWHERE if (hooks := getattr(modules, name, None))]
    for module in (*model_info.modules, *model_info.outside):
        found += [hooks for hooks in (module._backward_hooks, module._backward_pre_hooks) if hooks]
    found += [parameter._backward_hooks for parameter in parameters if parameter._backward_hooks]
    return [hook for hooks in found for hook in hooks.values()]
