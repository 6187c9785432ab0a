"""Numbers as people write them, and as they read them."""

from __future__ import annotations

import operator
import re
from typing import Any

POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def bytes_in(amount: Any, name: str = "memory") -> int:
    """Read a number of bytes: ``2 * 2**30``, "2GiB", "1.5 GB", "500000".

    Args:
        amount: a whole number, or one in words.
        name: what it is called where it was given.

    Raises:
        TypeError: for what is neither.
        ValueError: for words that are no number of bytes, and for less than one.

    Example:
        >>> bytes_in("2GiB"), bytes_in("1.5 kB"), bytes_in(800)
        (2147483648, 1500, 800)
    """
    if isinstance(amount, str):
        found = re.fullmatch(r"(\d+(?:\.\d*)?)\s*([KMGT]?)(i?)B?", amount.strip(), re.IGNORECASE)
        size = 0 if found is None else int(float(found[1]) * (1024 if found[3] else 1000) ** POWERS[found[2].upper()])
    else:
        size = _whole(amount, name)
    if size < 1:
        raise ValueError(f"{name} is {amount!r:.80}; it must be a number of bytes such as 2GiB, 800MiB or 1.5GB.")
    return size


def in_bytes(number: float) -> str:
    """Return bytes as "812 MiB" or "1.4 GiB"; small ones as "3.2 MiB".

    Example:
        >>> in_bytes(2**31), in_bytes(3.25 * 2**20)
        ('2.0 GiB', '3.2 MiB')
    """
    mebibytes = number / 2**20
    if mebibytes >= 1024:
        return f"{mebibytes / 1024:.1f} GiB"
    return f"{mebibytes:.0f} MiB" if mebibytes >= 10 else f"{mebibytes:.1f} MiB"


def whole_number(value: Any, name: str, example: str) -> int:
    """Return a whole number of at least 1 as a plain int; NumPy's are whole numbers too.

    Raises:
        TypeError: for a bool, a float, a string, anything else.
        ValueError: for less than 1.
    """
    if not _is_whole(value):
        raise TypeError(f"{name} is {shown(value)}, but must be a whole number: {example}.")
    number = operator.index(value)
    if number < 1:
        raise ValueError(f"{name} is {number}, but must be at least 1: {example}.")
    return number


def _is_whole(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, bool)


def shown(value: Any) -> str:
    """Write a value of any size down in one line, with its type."""
    written = " ".join(repr(value).split())
    return f"{written if len(written) <= 60 else written[:57] + '...'}, of type {type(value).__name__}"


def _whole(amount: Any, name: str) -> int:
    whole = int(amount) if isinstance(amount, float) and amount.is_integer() else amount  # 8e9 is a number of bytes too
    try:
        if isinstance(whole, bool):
            raise TypeError
        return operator.index(whole)
    except TypeError:
        raise TypeError(
            f"{name} is {amount!r:.80}, of type {type(amount).__name__}; pass a number of bytes: "
            f'{name}=2 * 2**30, or {name}="2GiB".'
        ) from None
