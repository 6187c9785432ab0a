"""``python -m wholebatch`` is the program `wholebatch`."""

from __future__ import annotations

import sys

from wholebatch.cli import main

if __name__ == "__main__":
    sys.exit(main())
