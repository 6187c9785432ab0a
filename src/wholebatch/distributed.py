"""What a program on several ranks calls by name besides `backward` and `Step`, which serve ranks by themselves.

`DealtBatches` deals the rows of each batch out to ranks, `Pipeline` runs a model whose parts lie on several ranks, and
`shares` tells an engine with a backward of its own what to multiply each loss with.
"""

from __future__ import annotations

from wholebatch.batch.dealing import DealtBatches
from wholebatch.gradient.pipeline import Pipeline
from wholebatch.ranks.sharing import Shares, shares

__all__ = ["DealtBatches", "Pipeline", "Shares", "shares"]
