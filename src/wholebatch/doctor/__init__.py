"""Is my training loop exact, and if not, why: watch it for a few steps, and read what it did.

``with wholebatch.doctor.watch() as seen: ...`` watches a loop in Python, ``wholebatch doctor script.py`` a program.
"""

from __future__ import annotations

from wholebatch.doctor.findings import Change, Finding
from wholebatch.doctor.report import Report
from wholebatch.doctor.trace import Trace
from wholebatch.doctor.watch import Seen, watch

__all__ = ["Change", "Finding", "Report", "Seen", "Trace", "watch"]
