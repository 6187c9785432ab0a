"""Operations in which rows meet, over micro-batches, exactly.

A model is captured as a graph (:mod:`~wholebatch.staged.capture`), cut at every operation whose result for one row
depends on other rows (:mod:`~wholebatch.staged.program`), and run stage by stage for all micro-batches
(:mod:`~wholebatch.staged.engine`). An operation is a small protocol (:mod:`~wholebatch.staged.operations`), and
:mod:`~wholebatch.staged.window` puts all this under a loss function that knows nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from wholebatch.errors import InexactError
from wholebatch.options import Options
from wholebatch.sync import Ranks
from wholebatch.window import Piece

if TYPE_CHECKING:
    from wholebatch.staged.window import WholeWindow


def window_for(
    model: nn.Module, loss_fn: Callable[[Any, Any], Any], pieces: Sequence[Piece], options: Options, ranks: Ranks
) -> WholeWindow | None:
    """Say what runs the pieces of a window if BatchNorm shall see the whole batch; None if they are run as usual.

    Raises:
        InexactError: for options that stages cannot serve.
    """
    if options.get("batch_norm") != "exact" or (len(pieces) < 2 and ranks.world == 1):
        return None
    if any(hasattr(module, "set_requires_gradient_sync") for module in model.modules()):
        raise InexactError(
            'batch_norm="exact" calls parts of the model one by one, which fully_shard cannot gather parameters for. '
            "Wrap the model in DistributedDataParallel."
        )
    # Only here: capturing loads torch.export, which takes seconds and which few models need.
    from wholebatch.staged.ranks import statistics_over
    from wholebatch.staged.shelf import HostShelf, Shelf
    from wholebatch.staged.window import WholeWindow

    shelf = HostShelf() if options.get("offload") else Shelf()
    return WholeWindow(model, loss_fn, shelf=shelf, ranks=statistics_over(ranks))
