"""`wholebatch train`: a small trainer that keeps the promise of the library from the first step to the last.

Usable from Python too: ``train(Config(data=Path("notes"), steps=100))``.
"""

from __future__ import annotations

from wholebatch.train.extras import require_program

try:
    from wholebatch.train.config import Config
    from wholebatch.train.errors import ConfigError, DataError, RunError
    from wholebatch.train.run import Outcome, train
finally:  # names all that is missing, not only what these imports came upon: some is needed late in a run
    require_program()

__all__ = ["Config", "ConfigError", "DataError", "Outcome", "RunError", "train"]
