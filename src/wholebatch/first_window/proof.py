"""What has been proven of a model's windows, and what their losses were made of when it was.

A branch that a task's name, a stage of training or another criterion chooses shows in the graph: operations follow one
another there that did not in anything that was tried. A micro-batch in which they do is tried too, whatever chose the
branch and wherever that is kept. What a loss is made of is known by its graph's end, where each operation stands
beside those it takes its values from; how often, and how large, is no matter.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from torch import Tensor

from wholebatch.batch.window import MicroBatch
from wholebatch.loss.terms import ParsedLoss
from wholebatch.model.reached import Step

ATTEMPTS = 16
"""How often one kind of window is tried anew: losses that are made of something else again and again are not."""


@dataclass
class Proof:
    """What was shown of windows of one kind.

    Attributes:
        said: it, in words.
        shown: whether anything was; else there is nothing that other micro-batches could be unlike to.
        cut: what made the micro-batch that was tried.
        parts: of which losses were seen to be made: the names of steps, and of terms; nothing before the first window
            has run.
        attempts: how many micro-batches have been tried since.
    """

    said: str
    shown: bool = False
    cut: object = None
    parts: set[Hashable] = field(default_factory=set)
    attempts: int = 0


class Unlike:
    """Notes what the losses of one window are made of, and finds the micro-batches that no proof speaks of.

    Args:
        proof: of windows of this kind.
        attempt: tries a micro-batch; returns in words what was shown.
    """

    def __init__(self, proof: Proof, attempt: Callable[[MicroBatch], str]) -> None:
        self._proof, self._attempt = proof, attempt
        self._seen: dict[int, tuple[MicroBatch, set[Hashable]]] = {}

    @property
    def said(self) -> str:
        """What is shown of the window."""
        return self._proof.said

    def note(self, micro_batch: MicroBatch | None, answer: ParsedLoss | None, steps: set[Step]) -> None:
        """Note of which steps the loss of a micro-batch is made, and of which terms that count.

        Args:
            micro_batch: None where other ranks still have some.
            answer: None where several functions encode, each of which is noted.
            steps: of its graph.
        """
        if not self._proof.shown or micro_batch is None:
            return
        parts: set[Hashable] = {(one.__name__, other.__name__) for one, other in steps}
        terms = {} if answer is None else answer.terms
        parts.update(key for key, term in terms.items() if isinstance(term.weight, Tensor) or term.weight)
        self._seen.setdefault(id(micro_batch), (micro_batch, set()))[1].update(parts)

    def finish(self) -> None:
        """Try each micro-batch that is made of steps unlike those before; what was tried itself is like them.

        Raises:
            InexactError, LossError: as the proof of the first window does.
        """
        proof, seen = self._proof, list(self._seen.values())
        alone = all(micro_batch.rows < 2 for micro_batch, _ in seen)
        if not proof.parts and seen:
            tried = [each for each in seen if each[0].cut == proof.cut] or seen
            proof.parts |= max(tried, key=lambda each: each[0].rows)[1]  # the first of equals
        for micro_batch, parts in seen:
            # One row of a ragged window takes other operations, such as after a squeeze, and cannot be parted.
            if parts <= proof.parts or (micro_batch.rows < 2 and not alone):
                continue
            if proof.attempts == ATTEMPTS:
                proof.said = "not verified: the losses of a window are made of other operations again and again"
            else:
                proof.attempts += 1
                proof.said = self._attempt(micro_batch)
            proof.parts |= parts
        self._seen.clear()
