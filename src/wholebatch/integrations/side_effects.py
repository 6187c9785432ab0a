"""Leave no trace: what a trainer counts, keeps and logs is as it was after it has been asked for a loss."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

LONGEST = 10_000  # entries of a container that is looked into; what is longer is data, not a record
DEEPEST = 4
PLAIN = (bool, int, float, str, bytes, type(None), list, dict, set, deque)


class Kept:
    """The attributes of some objects and what the containers among them hold, to be gone back to.

    Containers keep their identity, so that who holds one sees it restored. Objects in them are left alone.

    Args:
        *owners: objects with attributes: a trainer, the modules of a model.
        sharded: modules whose parameters an engine puts in and takes out (FSDP, DeepSpeed): of these only what is
            public and no tensor is kept, so that the engine finds its own book as it wrote it.

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

    def __init__(self, *owners: object, sharded: Iterable[object] = ()) -> None:
        books = [(owner, _of_its_own) for owner in sharded]
        self._attributes = [(owner, chosen(owner), chosen) for owner, chosen in [*((o, _all) for o in owners), *books]]
        held = [value for _, attributes, _ in self._attributes for value in attributes.values()]
        self._contents = [(each, each.copy()) for value in held for each in _containers(value, DEEPEST)]

    def restore(self) -> None:
        """Go back to the moment of the snapshot; attributes that came later go."""
        for container, saved in self._contents:
            if isinstance(container, list):
                container[:] = saved
            else:
                container.clear()
                _fill(container, saved)
        for owner, attributes, chosen in self._attributes:
            for name in chosen(owner).keys() - attributes.keys():
                del vars(owner)[name]
            vars(owner).update(attributes)


def _all(owner: object) -> dict[str, Any]:
    return dict(vars(owner))


def _of_its_own(owner: object) -> dict[str, Any]:
    """Return what a user's module counts: leave out private names, tensors, groups of processes, handles."""
    return {name: value for name, value in vars(owner).items() if isinstance(value, PLAIN) and not name.startswith("_")}


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
