"""Leave no trace: what a trainer counts, keeps and logs is as it was after it has been asked for a loss."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

LONGEST = 10_000  # entries of a container that is looked into; what is longer is data, not a record
DEEPEST = 4


class Kept:
    """The attributes of some objects and what the containers among them hold, to be gone back to.

    Containers keep their identity, so that who holds one sees it restored. Objects in them are left alone.

    Args:
        owners: objects with attributes: a trainer, the modules of a model.

    Example:
        >>> class Trainer: pass
        >>> trainer = Trainer()
        >>> trainer.step, trainer.metrics = 3, {"train": [1.0]}
        >>> kept = Kept(trainer)
        >>> trainer.step += 1; trainer.metrics["train"].append(2.0)
        >>> kept.restore()
        >>> trainer.step, trainer.metrics
        (3, {'train': [1.0]})
    """

    def __init__(self, *owners: object) -> None:
        self._attributes = [(owner, dict(vars(owner))) for owner in owners]
        held = [value for _, attributes in self._attributes for value in attributes.values()]
        self._contents = [(each, each.copy()) for value in held for each in _containers(value, DEEPEST)]

    def restore(self) -> None:
        """Go back to the moment of the snapshot; attributes that came later go."""
        for container, saved in self._contents:
            if isinstance(container, list):
                container[:] = saved
            else:
                container.clear()
                _fill(container, saved)
        for owner, attributes in self._attributes:
            now = vars(owner)
            for name in now.keys() - attributes.keys():
                del now[name]
            now.update(attributes)


def _containers(value: Any, depth: int) -> Iterator[Any]:
    if not isinstance(value, (dict, list, set, deque)) or len(value) > LONGEST or not depth:
        return
    yield value
    for inner in value.values() if isinstance(value, dict) else value:
        yield from _containers(inner, depth - 1)


def _fill(container: Any, saved: Any) -> None:
    if isinstance(container, deque):
        container.extend(saved)
    else:
        container.update(saved)
