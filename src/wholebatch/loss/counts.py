"""Numbers that are counts or divisors: known on the host or still on their device, and in which precision."""

from __future__ import annotations

import math
from typing import TypeAlias

import torch
from torch import Tensor

Count: TypeAlias = "Tensor | float"


def is_half(tensor: Tensor) -> bool:
    """Tell whether a tensor has fewer than 32 bits a number."""
    return tensor.is_floating_point() and tensor.element_size() < 4


def precise(device: torch.device) -> torch.dtype:
    """Name the widest floating-point type of a device."""
    return torch.float32 if device.type == "mps" else torch.float64


def tensor_of(number: Count, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a number as a tensor of a device."""
    return torch.as_tensor(number, dtype=dtype).to(device)


def power_of_two(number: Count) -> Count:
    """Round up to a power of two of at least 1: a divisor that costs no digit."""
    if isinstance(number, Tensor):
        power = torch.exp2(torch.ceil(torch.log2(number.abs().clamp(min=1.0))))
        return torch.where(power.isfinite(), power, 1.0)
    return 2.0 ** math.ceil(math.log2(max(abs(number), 1.0))) if math.isfinite(number) else 1.0
