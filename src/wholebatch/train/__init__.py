"""`wholebatch train`: a small trainer that keeps the promise of the library from the first step to the last.

Usable from Python too: ``train(Config(data=Path("notes"), steps=100))``.
"""

from __future__ import annotations

from wholebatch.train.config import Config
from wholebatch.train.errors import ConfigError, DataError, RunError
from wholebatch.train.run import Outcome, train

__all__ = ["Config", "ConfigError", "DataError", "Outcome", "RunError", "train"]
