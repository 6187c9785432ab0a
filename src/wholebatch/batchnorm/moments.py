"""Count, mean and squared deviations of each channel, and how those of several micro-batches become those of the
whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from wholebatch.loss.counts import Count


class Moments(NamedTuple):
    """The first two moments of every channel over some rows.

    Merging never subtracts large squares from each other: sums of squares in float32 lose 16 % of the variance
    where the mean is a thousand standard deviations (facts: Chan, Golub and LeVeque, "Updating Formulae and a
    Pairwise Algorithm for Computing Sample Variances", 1979).

    Attributes:
        number: values in each channel.
        mean: (channels,), in float32 or better.
        deviations: (channels,), sum of the squared distances to the mean.
    """

    number: Count
    mean: Tensor
    deviations: Tensor

    @property
    def variance(self) -> Tensor:
        """The mean squared distance, which BatchNorm divides by."""
        return self.deviations / self.number

    @property
    def unbiased(self) -> Tensor:
        """The variance that BatchNorm keeps as its running variance; not finite for a single value, as in torch."""
        return self.deviations / (self.number - 1)


def moments_of(values: Tensor) -> Moments:
    """Take the moments of values of shape (rows, channels, ...)."""
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    # The same kernel as nn.BatchNorm's: four times as fast as torch.var_mean over leading dimensions on a CPU.
    mean, variance = torch.batch_norm_update_stats(wide, None, None, 0.0)
    count = float(values.numel() // max(values.shape[1], 1))
    return Moments(count, mean, variance * count)


def merged(parts: Sequence[Moments]) -> Moments:
    """Merge the moments of disjoint micro-batches into those of all their rows together."""
    if len(parts) == 1:
        return parts[0]
    count = sum(part.number for part in parts)
    origin = parts[0].mean
    mean = origin + _sum([(part.mean - origin) * (part.number / count) for part in parts])
    apart = [(part.mean - mean).square() * part.number for part in parts]
    return Moments(count, mean, _sum([part.deviations for part in parts]) + _sum(apart))


def _sum(terms: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(terms)).sum(0)
