"""Padded batches: where the real tokens lie, and how a micro-batch is trimmed to its own longest row."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from wholebatch.batch.tree import BatchTree, Leaf
from wholebatch.errors import SplitError

KNOWN = ("input_ids", "token_type_ids", "inputs_embeds")
"""Keys of what follows the mask by name: its filling may be any value, also one that stands at real positions."""

MANY = 8
"""So many positions of one value that stands nowhere else are no chance."""


class Padding:
    """Where the real tokens of a padded batch lie, and which of its tensors follow them.

    Row i has its tokens at positions ``starts[i] <= p < stops[i]`` of ``width``; a row without any keeps one
    position. What follows them: the mask, and each tensor (rows, width, ...); the last two dimensions of masks. If
    nobody named these, all of them must be mere filling where rows are padded, else nothing is trimmed: a tensor
    of another length may be as wide by chance, and a loss may count what the model's mask hides.

    Args:
        tree: the batch, with rows.
        mask: the key of its (rows, width) mask, or of the (rows,) lengths of rows padded on the right.
        names: the keys of the tensors that follow the mask; None to find them.

    Raises:
        SplitError: if there is no such mask, nothing follows it, or a named tensor does not.

    Example:
        >>> ids, mask = torch.tensor([[5, 0, 0], [6, 7, 0]]), torch.tensor([[1, 0, 0], [1, 1, 0]])
        >>> tree = BatchTree({"ids": ids, "mask": mask})
        >>> Padding(tree, "mask").lengths
        [1, 2]
    """

    def __init__(self, tree: BatchTree, mask: str, names: Sequence[str] | None = None) -> None:
        self._names = names
        self._mask = _find_mask(tree, mask)
        values = torch.as_tensor(self._mask.value)
        self.width = values.shape[1] if values.dim() == 2 else self._width_from_lengths(tree, values)
        self._axes = {leaf.path: axes for leaf in tree.leaves if (axes := self._axes_of(leaf))}
        if not self._axes.keys() - {self._mask.path}:
            raise SplitError(
                f"Rows are {self.width} wide by the mask {self._mask}, but no tensor is: "
                f"{', '.join(map(str, tree.leaves))}. Name those that follow it: wb.Tokens(..., length=(...))."
            )
        starts, self.stops = _extents(values)
        # A model that counts positions itself counts the padding on the left as well: without it they would shift.
        positions = any(leaf.key == "position_ids" and leaf.path in self._axes for leaf in tree.leaves)
        self.starts = starts if positions else [0] * len(starts)
        if names is None:
            self._keep_what_is_no_filling(tree)

    @property
    def lengths(self) -> list[int]:
        """What each row asks of the width of its micro-batch."""
        one_side = len(set(self.stops)) == 1
        first = self.starts if one_side else [min(self.starts)] * len(self.stops)
        return [stop - start for start, stop in zip(first, self.stops, strict=True)]

    def trim(self, rows: Sequence[int]) -> Callable[[Leaf, Any], Any]:
        """Return what trims the leaves of a micro-batch of these rows to its own longest row; tensors become views."""
        inside = slice(min(self.starts[row] for row in rows), max(self.stops[row] for row in rows))

        def trimmed(leaf: Leaf, cut: Any) -> Any:
            axes = self._axes.get(leaf.path, ())
            if not axes or inside == slice(0, self.width):
                return cut
            return cut[tuple(inside if axis in axes else slice(None) for axis in range(max(axes) + 1))]

        return trimmed

    def _width_from_lengths(self, tree: BatchTree, lengths: Tensor) -> int:
        """The width of the first named tensor; else what the longest row needs."""
        named = [leaf for leaf in tree.leaves if self._is_named(leaf) and len(leaf.shape) > 1]
        return named[0].shape[1] if named else int(lengths.max())

    def _is_named(self, leaf: Leaf) -> bool:
        return self._names is not None and (leaf.path in self._names or leaf.key in self._names)

    def _axes_of(self, leaf: Leaf) -> tuple[int, ...]:
        """The dimensions of a leaf that run along the length; none if it does not follow the mask."""
        named = self._is_named(leaf)
        found = self._names is None and leaf.rows is not None
        if not leaf.is_array or not (named or found or leaf is self._mask):
            return ()
        axes = _length_axes(leaf, self.width)
        if named and not axes:
            raise SplitError(
                f"length= names {leaf}, but rows are {self.width} wide by the mask {self._mask}. "
                f"Leave {leaf.key!r} out: only tensors (rows, length, ...) that follow the mask are trimmed with it."
            )
        return axes

    def _keep_what_is_no_filling(self, tree: BatchTree) -> None:
        """Trim nothing if one of the tensors holds something where rows are padded."""
        place = torch.arange(self.width)
        starts, stops = torch.tensor(self.starts)[:, None], torch.tensor(self.stops)[:, None]
        padded = (place < starts) | (place >= stops)
        if not padded.any():
            return
        # Positions may run on into the padding: nothing there is read by them.
        doubtful = [leaf for leaf in tree.leaves if self._axes.get(leaf.path) and leaf.key != "position_ids"]
        doubtful = [leaf for leaf in doubtful if leaf is not self._mask]
        inputs = [leaf for leaf in doubtful if self._axes[leaf.path] == (1,) and not leaf.key.endswith("labels")]
        alone = len(inputs) == 1  # the mask must belong to something
        kept = next((leaf for leaf in doubtful if not self._follows(leaf, padded, alone)), None)
        if kept is not None:
            self.starts, self.stops = [0] * len(self.starts), [self.width] * len(self.stops)
            warnings.warn(
                f"Nothing is trimmed: {kept.path!r} is as wide as {self._mask.path!r}, but nothing shows that it is "
                "mere filling where that says that rows are padded. It may follow another length, or count there. Name "
                f"the tensors that follow the mask, with or without it: wb.Tokens(..., length={tuple(self._axes)}).",
                stacklevel=2,
            )

    def _follows(self, leaf: Leaf, padded: Tensor, alone: bool) -> bool:
        """Whether a leaf holds nothing where rows are padded, as far as can be seen."""
        axes = self._axes[leaf.path]
        return _is_filling(leaf, padded, alone) if axes == (1,) else _hides_padding(leaf, padded, axes)


def _find_mask(tree: BatchTree, name: str) -> Leaf:
    flat = [leaf for leaf in tree.leaves if leaf.is_array and leaf.rows is not None and len(leaf.shape) <= 2]
    found = [leaf for leaf in flat if leaf.path == name] + [leaf for leaf in flat if leaf.key == name]
    if not found:
        raise SplitError(
            "Tokens are counted by the mask of a padded batch, but there is no (rows, length) mask and no (rows,) "
            f"lengths {name!r} among {', '.join(map(str, tree.leaves))}. Name yours: wb.Tokens(..., mask='lengths'). "
            "Or give a list of samples with collate=."
        )
    return found[0]


def _length_axes(leaf: Leaf, width: int) -> tuple[int, ...]:
    """Which dimensions run along the length: the last two may in a mask (rows, heads, L, L), else the second."""
    shape = leaf.shape
    if len(shape) > 2 and ("mask" in leaf.key or getattr(leaf.value, "dtype", None) is torch.bool):
        return tuple(axis for axis in range(max(1, len(shape) - 2), len(shape)) if shape[axis] == width)
    return (1,) if len(shape) > 1 and shape[1] == width else ()


def _extents(mask: Tensor) -> tuple[list[int], list[int]]:
    """The first position of each row and the one behind its last."""
    if mask.dim() == 1:
        return [0] * len(mask), mask.long().clamp(min=1).tolist()
    if mask.shape[1] == 0:
        return [0] * len(mask), [0] * len(mask)
    real = (mask != 0).int()
    starts = real.argmax(1)  # the first of several equal ones
    stops = mask.shape[1] - real.flip(1).argmax(1)
    return starts.tolist(), stops.masked_fill(real.sum(1) == 0, 1).tolist()


def _is_filling(leaf: Leaf, padded: Tensor, alone: bool) -> bool:
    """Whether a leaf holds one value throughout the padding, and that value is no content.

    Of labels it is one that no label has; of weights and masks, 0. What else is as wide may be so by chance, and a few
    padded positions may hold one value by chance: then it must be a value that stands at no real position.
    """
    values = torch.as_tensor(leaf.value)
    padded = padded.to(values.device)
    filling = values[divmod(int(padded.flatten().int().argmax()), padded.shape[1])]
    spread = padded[(...,) + (None,) * filling.dim()]
    # Filled anew and compared: several times faster than picking out what is padded.
    if not torch.equal(torch.where(spread, filling, values), values):
        return False
    if leaf.key.endswith("labels"):
        return bool((filling < 0).all())
    if "mask" in leaf.key or "weight" in leaf.key:
        return not bool(filling.any())
    if alone or leaf.key in KNOWN:
        return True
    elsewhere = ((values == filling) & ~spread).flatten(2).all(2) if filling.dim() else (values == filling) & ~spread
    return not bool(elsewhere.any()) and (bool((filling <= 0).all()) or int(padded.sum()) >= MANY)


def _hides_padding(leaf: Leaf, padded: Tensor, axes: tuple[int, ...]) -> bool:
    """Whether a mask (rows, ..., L, L) or (rows, ..., 1, L) says one thing of padded positions, for all real ones."""
    values = torch.as_tensor(leaf.value)
    last = values.dim() - 1
    if last not in axes or (last - 1 not in axes and values.shape[last - 1] != 1 and last > 1):
        return False  # as wide by chance: a picture, attention to something of another length
    padded = padded.to(values.device)
    between = (slice(None),) + (None,) * (last - 1)
    hidden = padded[between]
    if last - 1 in axes:
        hidden = hidden & ~padded[(slice(None),) + (None,) * (last - 2) + (slice(None), None)]
    hidden = hidden.expand(values.shape)
    chosen = values[hidden]
    return chosen.numel() == 0 or bool((chosen == chosen[0]).all())
