"""Hooks that read gradients on their way: what they are shown must be the gradient's share, not a provisional one."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.nn.modules import module as modules

from wholebatch.survey import Survey

EVERYWHERE = ("_global_backward_hooks", "_global_backward_pre_hooks")
"""Where torch keeps the hooks of all modules."""


def gradients_are_read(survey: Survey, parameters: Iterable[Tensor]) -> bool:
    """Tell whether hooks of modules or parameters see gradients while they flow.

    Per-sample clipping, curvature factors and measures of noise read them there. A hook on the graph's own nodes shows
    nowhere.
    """
    return (
        any(getattr(modules, name, None) for name in EVERYWHERE)
        or any(m._backward_hooks or m._backward_pre_hooks for m in (*survey.modules, *survey.outside))
        or any(parameter._backward_hooks for parameter in parameters)
    )
