"""Mistakes in what the program was given: each message names the file, and the line where there is one."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

from wholebatch.errors import WholeBatchError

NOTHING = 1 << 16
"""Bytes left on a disk that is full: less than any file of a checkpoint asks for at once."""


class ConfigError(WholeBatchError):
    """A setting is unknown, misspelt, contradicts another, or cannot be met."""


class DataError(WholeBatchError):
    """A data file is missing, empty, or holds something that is not what was asked for."""


class RunError(WholeBatchError):
    """A run folder or its checkpoint cannot be used as it is, or cannot be written."""


def remedy(error: BaseException, folder: Path) -> str:
    """Return what helps against a file that could not be written: more room, or else what its error names.

    Args:
        error: of the system, or of a library that passes it on in words of its own.
        folder: where the file was to be, with what was written of it still there.
    """
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    full = full or "No space left" in str(error)  # safetensors tells the system's error in words alone
    return "Make room" if full or shutil.disk_usage(folder).free < NOTHING else "Mend that"
