"""`wholebatch train`: a small trainer that keeps the promise of the library from the first step to the last.

Usable from Python too: ``train(Config(data=Path("notes"), steps=100))``.
"""

from __future__ import annotations

from wholebatch.train.extras import require_program

require_program()

from wholebatch.train.config import Config  # noqa: E402
from wholebatch.train.errors import ConfigError, DataError, RunError  # noqa: E402
from wholebatch.train.run import Outcome, train  # noqa: E402

__all__ = ["Config", "ConfigError", "DataError", "Outcome", "RunError", "train"]
