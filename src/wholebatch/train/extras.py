"""Packages that only some runs need: imported when their door is opened, and named where they are missing."""

from __future__ import annotations

import importlib
from typing import Any

from wholebatch.train.errors import ConfigError


def require(module: str, extra: str, purpose: str) -> Any:
    """Import a module, or say which extra brings it.

    Raises:
        ConfigError: if it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{purpose} needs {module.split('.')[0]}, which is not here ({error}). Install it with: "
            f'pip install "wholebatch[{extra}]".'
        ) from None
