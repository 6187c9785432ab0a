"""Operations in which rows meet, over micro-batches, exactly; and what runs a window where none do.

Mostly none do: each piece runs by itself (:mod:`~wholebatch.staged.plain`). Else a model is captured as a graph
(:mod:`~wholebatch.staged.capture`), cut at every operation whose result for one row depends on other rows
(:mod:`~wholebatch.staged.program`), and run stage by stage for all micro-batches (:mod:`~wholebatch.staged.engine`). An
operation is a small protocol (:mod:`~wholebatch.staged.operations`), and :mod:`~wholebatch.staged.window` puts all this
under a loss function that knows nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from wholebatch.errors import InexactError
from wholebatch.options import Options
from wholebatch.staged.normalising import nothing_normalises
from wholebatch.staged.plain import PlainWindow
from wholebatch.survey import Survey
from wholebatch.sync import Ranks
from wholebatch.window import Piece


def window_for(
    survey: Survey,
    loss_fn: Callable[[Any, Any], Any],
    pieces: Sequence[Piece],
    options: Options,
    ranks: Ranks,
    splits: bool = False,
) -> PlainWindow:
    """Say what runs the pieces of a window: each by itself, or so that BatchNorm sees the whole batch.

    Args:
        splits: whether pieces may be split on the way.

    Raises:
        InexactError: for what stages cannot serve.
    """
    choice = options.get("batch_norm") or ""
    alone = ranks.world == 1 or choice == "exact-per-rank"
    short = bool(options.get("offload"))
    if not choice.startswith("exact") or (len(pieces) < 2 and alone and not splits):
        return PlainWindow(survey, loss_fn, ranks, short)
    model = survey.model
    _refuse(model, choice, len(pieces), alone, splits)
    if ranks.world == 1 and pieces and nothing_normalises(survey, loss_fn, pieces[0]):
        return PlainWindow(survey, loss_fn, ranks, short)
    # Only here: capturing loads torch.export, which takes seconds and which few models need.
    from wholebatch.staged.engine import Engine
    from wholebatch.staged.lockstep import LockStep
    from wholebatch.staged.ranks import Alone, statistics_over
    from wholebatch.staged.shelf import HostShelf, Shelf
    from wholebatch.staged.window import WholeWindow, unwrapped

    if choice == "exact-lock-step":
        return WholeWindow(survey, loss_fn, ranks, LockStep(unwrapped(model)))
    nowhere = survey.device == torch.device("cpu")  # no other memory to go to, but time to make things twice
    shelf = HostShelf() if short and not nowhere else Shelf()
    sharing = Alone() if alone else statistics_over(ranks)
    engine = Engine(unwrapped(model), shelf, sparing=short and nowhere, ranks=sharing)
    return WholeWindow(survey, loss_fn, ranks, engine)


def _refuse(model: nn.Module, choice: str, pieces: int, alone: bool, splits: bool) -> None:
    if splits:
        raise InexactError(
            f"batch_norm={choice!r} keeps all {pieces} micro-batches as they are, and micro_batch_size=Auto(...) would "
            "split some of them on the way. Give a number of rows or Tokens(...)."
        )
    if any(hasattr(module, "set_requires_gradient_sync") for module in model.modules()):
        raise InexactError(
            f"batch_norm={choice!r} runs parts of the model one by one, for which fully_shard gathers no parameters. "
            "Wrap the model in DistributedDataParallel."
        )
    if choice == "exact-lock-step" and not alone:
        raise InexactError(f'batch_norm={choice!r} serves one process, not several ranks. Choose "exact".')
