"""The first window proves itself: nothing is believed that has not been seen to add up.

Whatever people keep in closures, classes and hooks, one thing shows it: the same rows, once whole and once in two
parts, must give the same gradient, the same loss, the same items. Tried once for a model, a loss function and a set of
options, before anything of the window itself runs:

1. Choose a micro-batch with two rows or more, and cut it unevenly (:mod:`~wholebatch.first_window.sample`).
2. Run it whole and take its parts away again, each row with draws of its own (:mod:`~wholebatch.first_window.trial`).
3. Where something remains, find out what explains it, and refuse (:mod:`~wholebatch.first_window.verdict`).

It costs two forwards and backwards over one micro-batch, and leaves no trace. In later windows only what a loss is made
of is noted: a micro-batch with operations that were not tried is tried too (:mod:`~wholebatch.first_window.proof`).
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from wholebatch.batch.window import MicroBatch, Window
from wholebatch.errors import OwnFault
from wholebatch.first_window.cut_leaves import USER_ERRORS
from wholebatch.first_window.identity import identity_of, state_of
from wholebatch.first_window.proof import Proof, Unlike
from wholebatch.first_window.quiet import quietly
from wholebatch.first_window.sample import samples_of, split
from wholebatch.first_window.trial import Trial
from wholebatch.first_window.verdict import Judge, NotTried

logger = logging.getLogger("wholebatch")
logger.addHandler(logging.NullHandler())  # nothing is printed unless the user sets logging up

PROVEN: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, Proof]] = weakref.WeakKeyDictionary()
"""What has been said of each model's windows, for as long as the model lives."""


def proven(
    new_trial: Callable[[], Trial], batch: Any, micro_batches: Sequence[MicroBatch], splits: bool = False
) -> Unlike:
    """Try a window's first micro-batch whole and in parts, unless that has been done; say in words what was shown.

    Args:
        new_trial: of the window's model and loss function, on ranks that are entered already; nothing of it travels.
            What it has copied goes with it.
        batch: as the caller gave it.
        micro_batches: the micro-batches it was cut into.
        splits: whether a single micro-batch, too, may be split on the way.

    Returns:
        What was shown, or what could not be tried and why; it takes note of what losses are made of, and tries those
        micro-batches too that are made of something else.

    Raises:
        InexactError: if the parts do not add up to the whole, with the cause.
        LossError: if what a loss averages over cannot be known.
    """
    proof = _proof_of(new_trial(), batch, micro_batches, splits)
    return Unlike(proof, lambda micro_batch: _attempted(new_trial(), batch, micro_batches, micro_batch))


def _proof_of(trial: Trial, batch: Any, micro_batches: Sequence[MicroBatch], splits: bool) -> Proof:
    when = trial.options.get("verify", "first")
    if when == "never":
        return Proof('not verified: verify="never"')
    if len(micro_batches) < 2 and not splits:
        return Proof("not verified: one micro-batch, in which nothing is cut")
    if any(is_lazy(parameter) for parameter in trial.model_info.parameters):
        # what a forward with fixed draws initialises would stay so: rows of equal weights, which never part
        return Proof("not verified: parameters are made by the first forward, so the next window is tried")
    known = PROVEN.setdefault(trial.model_info.model, {})
    key = identity_of(trial.functions, trial.options, batch), state_of(trial.model_info)
    if when == "first" and key in known:
        return known[key]
    try:
        with quietly():
            known[key] = _shown(trial, batch, micro_batches)
    except OwnFault as fault:
        known[key] = Proof(_own(trial, fault))
    except NotTried as reason:
        known[key] = Proof(f"not verified: {reason}")
        _warn(trial, known[key].said)
    return known[key]


def _shown(trial: Trial, batch: Any, micro_batches: Sequence[MicroBatch]) -> Proof:
    if trial.ranks.per_micro_batch or trial.ranks.meets:
        raise NotTried("every forward is a collective here, in which all ranks have to take part")
    try:
        samples = list(samples_of(batch, micro_batches, trial.options))
    except (*USER_ERRORS, MemoryError) as error:  # the window will meet it too, and deal with it
        raise NotTried(f"its rows could not be put together ({type(error).__name__}: {error!s:.200})") from error
    if not samples:
        raise NotTried("no micro-batch has two rows that can be told apart")
    judge = Judge(trial, batch, micro_batches)
    said = judge.judge(samples)
    return Proof(said, shown=True, cut=judge.tried)


def _attempted(trial: Trial, batch: Any, micro_batches: Sequence[MicroBatch], unlike: MicroBatch) -> str:
    """Try one micro-batch more, which is unlike those that were tried."""
    others = [micro_batch for micro_batch in micro_batches if micro_batch is not unlike]
    if isinstance(batch, Window) and len(batch) == len(micro_batches):
        batch = Window([unlike.cut(unlike.index), *(each.cut(each.index) for each in others)])
    try:
        with quietly():
            if unlike.rows > 1:
                own = [split(unlike.cut, unlike.index, "rows")]
                return Judge(trial, batch, [unlike, *others]).judge(own)
            return _shown(trial, batch, [unlike, *others]).said
    except OwnFault as fault:
        return _own(trial, fault)
    except NotTried as reason:
        said = f"not verified: a micro-batch is made of operations that were not in what was tried, and {reason}"
        _warn(trial, said)
        return said


def _warn(trial: Trial, said: str) -> None:
    logger.warning("%s is %s", type(trial.model_info.model).__name__, said)


def _own(trial: Trial, fault: OwnFault) -> str:
    """Say that something of ours has failed, in words and to the logger."""
    said = f"not verified: {fault}"
    logger.error("%s is %s", type(trial.model_info.model).__name__, said, exc_info=fault.__cause__)
    return said
