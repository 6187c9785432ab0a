"""Operations in which rows meet, over micro-batches, exactly.

A model is captured as a graph (:mod:`~wholebatch.staged.capture`), cut at every operation whose result for one row
depends on other rows (:mod:`~wholebatch.staged.program`), and run stage by stage for all micro-batches
(:mod:`~wholebatch.staged.engine`). An operation is a small protocol (:mod:`~wholebatch.staged.operations`).
"""

from __future__ import annotations
