"""What is left where one row alone does not fit: to keep less of it, in the order of what that costs."""

from __future__ import annotations

from types import TracebackType

from torch import nn

from wholebatch.batch.sizes import WAYS, Auto
from wholebatch.model.checkpointing import Checkpointed, checkpointed
from wholebatch.tiling.blocks import Tiled, tiled


class BelowRow:
    """Runs a model in the ways that an `Auto` size has found while a window lasts, and finds further ones.

    A window that changes its way in between is as exact as before: each way has the same value and gradient.

    Args:
        auto: remembers the way.
        model: whose blocks keep less.
    """

    def __init__(self, auto: Auto, model: nn.Module) -> None:
        self._auto, self._model = auto, model
        self._blocks: Checkpointed | None = None
        self._is_in = False

    def __enter__(self) -> BelowRow:
        self._is_in = True
        self._engage()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._release()
        self._is_in = False

    def deepen(self) -> bool:
        """Go on to the next way that this model has; tell whether there was one."""
        before = self._auto.way
        while self._is_in and self._auto.way < len(WAYS) - 1:
            self._release()
            self._auto.way += 1
            if self._engage():
                return True
        self._release()
        self._auto.way = before
        self._engage()
        return False

    def _engage(self) -> bool:
        """Run the model in the way that was found; tell whether it can."""
        ways = WAYS[self._auto.way]
        try:
            if "checkpointing" in ways:
                self._blocks = checkpointed(self._model)
            if "tiles" in ways:
                self._tiles().resume()
        except ValueError:  # it has no such blocks, or its user has seen to them
            self._release()
            return False
        return True

    def _tiles(self) -> Tiled:
        """What has been tried once is not tried in every window."""
        kept = self._auto.tiles
        if kept is None or kept[0] is not self._model:
            handle = tiled(self._model)
            handle.pause()
            self._auto.tiles = self._model, handle
            return handle
        found: Tiled = kept[1]
        return found

    def _release(self) -> None:
        kept = self._auto.tiles
        if kept is not None:
            kept[1].pause()
        if self._blocks is not None:
            self._blocks.remove()
            self._blocks = None
