"""What would make a window wrong and is known on the device alone, until somebody waits for the device anyway."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from wholebatch.errors import LossError


class _Flag(NamedTuple):
    """A truth value that should be false, and what is wrong if it is not."""

    value: Tensor
    words: Callable[[], str]


def is_on_host(flag: Tensor) -> bool:
    """Tell whether a truth value can be read without waiting for a device."""
    return flag.device.type == "cpu"


class Flags:
    """Collects truth values that must not hold: on the host at once, on a device when they can be read.

    Reading one from a device would make the host wait for it, micro-batch by micro-batch; so they are kept, and read
    together with the norm of the gradient, before anything is stepped, or where the next window begins
    (:mod:`~wholebatch.loss.earlier`).
    """

    def __init__(self) -> None:
        self._open: list[_Flag] = []

    def add(self, flag: Tensor, words: Callable[[], str]) -> None:
        """Raise if a truth value on the host holds; keep one on a device.

        Args:
            flag: on any device.
            words: says what is wrong; asked only where something is.

        Raises:
            LossError: with these words.
        """
        if not is_on_host(flag):
            self._open.append(_Flag(flag, words))
        elif bool(flag):
            raise LossError(words())

    @property
    def values(self) -> list[Tensor]:
        """The truth values that have not been read yet."""
        return [flag.value for flag in self._open]

    def settle(self, read: Sequence[float] | None = None) -> None:
        """Raise if one of the flags holds.

        Args:
            read: their values, where they were read together with others; else the device is waited for.

        Raises:
            LossError: with the words of the first that does.
        """
        if read is None:
            read = torch.stack([value.to("cpu") for value in self.values]).tolist() if self._open else []
        for flag, holds in zip(self._open, read, strict=True):
            if holds:
                raise LossError(flag.words())
        self._open.clear()
