"""Mistakes in what the program was given: each message names the file, and the line where there is one."""

from __future__ import annotations

import errno

from wholebatch.errors import WholeBatchError


class ConfigError(WholeBatchError):
    """A setting is unknown, misspelt, contradicts another, or cannot be met."""


class DataError(WholeBatchError):
    """A data file is missing, empty, or holds something that is not what was asked for."""


class RunError(WholeBatchError):
    """A run folder or its checkpoint cannot be used as it is, or cannot be written."""


def remedy(error: BaseException) -> str:
    """Return what helps against a file that could not be written: more room, or else what its error names."""
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    # safetensors tells the system's error in words alone.
    return "Make room" if full or "No space left" in str(error) else "Mend that"
