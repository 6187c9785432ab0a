"""Operations in which rows meet, over micro-batches, exactly; and what runs a window where none do.

Mostly none do: each micro-batch runs by itself (:mod:`~wholebatch.batchnorm.plain`). Else a model is captured as a
graph (:mod:`~wholebatch.batchnorm.capture`), cut at every operation whose result for one row depends on other rows
(:mod:`~wholebatch.batchnorm.partition`), and run stage by stage for all micro-batches
(:mod:`~wholebatch.batchnorm.executor`). An operation is a small protocol (:mod:`~wholebatch.batchnorm.operations`), and
:mod:`~wholebatch.batchnorm.window` puts all this under a loss function that knows nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from wholebatch.batch.window import MicroBatch
from wholebatch.batchnorm.normalising import nothing_normalises
from wholebatch.batchnorm.plain import PlainWindow
from wholebatch.errors import InexactError
from wholebatch.model.inspection import ModelInfo, unwrapped
from wholebatch.options import Options
from wholebatch.ranks.agreement import Ranks


def window_for(
    model_info: ModelInfo,
    loss_fn: Callable[[Any, Any], Any],
    micro_batches: Sequence[MicroBatch],
    options: Options,
    ranks: Ranks,
    splits: bool = False,
) -> PlainWindow:
    """Say what runs the micro-batches of a window: each by itself, or so that BatchNorm sees the whole batch.

    Args:
        splits: whether micro-batches may be split on the way.

    Raises:
        InexactError: for what stages cannot serve.
    """
    choice = options.get("batch_norm") or ""
    alone = ranks.world == 1 or choice == "exact-per-rank"
    short = bool(options.get("offload"))
    if not choice.startswith("exact") or (len(micro_batches) < 2 and alone and not splits):
        return PlainWindow(model_info, loss_fn, ranks, short)
    _refuse(model_info.model, choice, len(micro_batches), alone, splits)
    if ranks.world == 1 and micro_batches and nothing_normalises(model_info, loss_fn, micro_batches[0]):
        return PlainWindow(model_info, loss_fn, ranks, short)
    return _stages(model_info, loss_fn, choice, ranks, alone, short)


def _stages(
    model_info: ModelInfo, loss_fn: Callable[[Any, Any], Any], choice: str, ranks: Ranks, alone: bool, short: bool
) -> PlainWindow:
    """Run all micro-batches from one operation in which rows meet to the next."""
    # Only here: capturing loads torch.export, which takes seconds and which few models need.
    from wholebatch.batchnorm.executor import Executor
    from wholebatch.batchnorm.statistics_sync import Alone, statistics_over
    from wholebatch.batchnorm.tensor_store import HostTensorStore, TensorStore
    from wholebatch.batchnorm.threaded import ThreadedExecutor
    from wholebatch.batchnorm.window import WholeWindow

    model = unwrapped(model_info.model)
    if choice == "exact-lock-step":
        return WholeWindow(model_info, loss_fn, ranks, ThreadedExecutor(model))
    nowhere = model_info.device == torch.device("cpu")  # no other memory to go to, but time to make things twice
    store = HostTensorStore() if short and not nowhere else TensorStore()
    sharing = Alone() if alone else statistics_over(ranks)
    return WholeWindow(model_info, loss_fn, ranks, Executor(model, store, sparing=short and nowhere, ranks=sharing))


def _refuse(model: nn.Module, choice: str, micro_batches: int, alone: bool, splits: bool) -> None:
    if splits:
        raise InexactError(
            f"batch_norm={choice!r} keeps all {micro_batches} micro-batches as they are, and "
            f"micro_batch_size=Auto(...) would "
            "split some of them on the way. Give a number of rows or Tokens(...)."
        )
    if any(hasattr(module, "set_requires_gradient_sync") for module in model.modules()):
        raise InexactError(
            f"batch_norm={choice!r} runs parts of the model one by one, for which fully_shard gathers no parameters. "
            "Wrap the model in DistributedDataParallel."
        )
    if choice == "exact-lock-step" and not alone:
        raise InexactError(f'batch_norm={choice!r} serves one process, not several ranks. Choose "exact".')
