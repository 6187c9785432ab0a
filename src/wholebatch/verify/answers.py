"""Whether a loss function answers alike when it is asked twice: what does not has a state, or draws by itself."""

from __future__ import annotations

import math
import pickle
import random
import sys
from typing import Any, NamedTuple

from torch import nn

from wholebatch.batch.window import MicroBatch
from wholebatch.errors import WholeBatchError
from wholebatch.loss.terms import LossFunction
from wholebatch.model.state import State
from wholebatch.verify import causes
from wholebatch.verify.copies import copied
from wholebatch.verify.explaining import FOREIGN
from wholebatch.verify.finding import Finding
from wholebatch.verify.reference import terms_in
from wholebatch.verify.running import Bench


class Answers(NamedTuple):
    """What two answers about the same rows show.

    Attributes:
        finding: a state that moves what is said.
        not_shown: why nothing can be compared; "" where it can.
        carried: what moves without being read.
    """

    finding: Finding | None = None
    not_shown: str = ""
    carried: tuple[str, ...] = ()


def asked_twice(
    stage: Bench, plain: nn.Module, loss_fn: LossFunction, micro_batch: MicroBatch, rounding: float
) -> Answers:
    """Run one micro-batch twice, draws held still, and leave everything as it was.

    Args:
        stage: on which the model is put back.
        plain: the model, without its wrapper.
        rounding: of a sum, relative.
    """
    try:
        start, others = State(plain, buffers=False), _other_draws()
        first = _number(plain, loss_fn, micro_batch)
        moved = stage.before.moved()
        again = _number(plain, loss_fn, micro_batch)
        drew = _other_draws() != others or any(each.kind == "generator" for each in moved)
        stage.back()
        _number(plain, loss_fn, micro_batch)
        start.restore_random()
        same_draws = _number(plain, loss_fn, micro_batch)
    except (*FOREIGN, WholeBatchError):  # `backward` will say it better
        return Answers()
    finally:
        stage.back()
    state = [each.name for each in moved if each.kind != "generator"]
    if not _apart(first, again, rounding):
        kinds = ("frozen parameter", "value", "tensor")
        return Answers(carried=tuple(each.name for each in moved if each.kind in kinds))
    if drew and (not state or not _apart(first, same_draws, rounding)):
        return Answers(
            not_shown="Draws that can't be held still (NumPy, Python's random, a generator of one's own): the same "
            f"rows give {first:.6g}, then {again:.6g}. Draw with torch, or with the batch, to have them compared."
        )
    if state:
        return Answers(causes.unstable(first, again, state))
    return Answers(
        not_shown=f"The same rows give {first:.6g}, then {again:.6g}, and nothing that was found explains it: draws of "
        "code of its own, or a state that nobody else can see."
    )


def _number(plain: nn.Module, loss_fn: LossFunction, micro_batch: MicroBatch) -> float:
    """Return one number that stands for all that the loss function says of a micro-batch."""
    device = next((parameter.device for parameter in plain.parameters()), None)
    terms = terms_in(loss_fn(plain, copied(micro_batch.load(), None, device)), bare=True)
    return sum(float(term.total.detach()) for term in terms.values())


def _apart(one: float, other: float, rounding: float) -> bool:
    """Tell whether two losses differ by more than the order of additions explains."""
    if math.isnan(one) and math.isnan(other):
        return False
    return not abs(one - other) <= 4 * rounding * max(abs(one), abs(other))


def _other_draws() -> bytes:
    """The random state that torch does not know."""
    numpy: Any = sys.modules.get("numpy")
    return pickle.dumps((random.getstate(), None if numpy is None else numpy.random.get_state()))
