"""Packages that only some runs need: imported when their door is opened, and named where they are missing."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from wholebatch.train.errors import ConfigError

# Each beside the name under which it is installed.
NEEDED = {"numpy": "numpy", "rich": "rich", "safetensors": "safetensors", "tyro": "tyro", "yaml": "PyYAML"}


def require_program() -> None:
    """Look for everything that a run needs, before it begins.

    Raises:
        ConfigError: with the command that installs what is missing.
    """
    missing = [name for module, name in NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise ConfigError(
            f"Training runs need {', '.join(missing)}, which the library alone does without. Install what they need "
            'with: pip install "wholebatch[train]".'
        )


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
