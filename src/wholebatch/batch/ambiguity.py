"""Lists of tensors: fields, each with all rows, or one entry a row? What is known, and when cutting is refused.

The default collate function of a ``DataLoader`` makes a list of fields, ``[inputs, labels]``; ``collate_fn=list`` makes
one of samples. Cut in the wrong way, samples lose their features, images their colour channels, and nothing shows it.
Such a list (a tuple too, but for the outermost one, which is fields) is read as **fields** if

- its entries differ in kind: in dtype, in the number of dimensions, or in what is behind the first of two; or
- other leaves of the batch have rows, as many as its entries have within, and not as many as there are entries; or
- there are no other leaves, and it has two or three entries, each with more rows than there are entries.

It is read as **samples**, and refused, if each entry holds a number or text of its own, such as a label. Anything else
may be either and is refused: as soon as its rows are counted, or, where both readings count the same, as it is cut.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wholebatch.batch.containers import fields_of
from wholebatch.batch.leaf_kinds import SCALARS, Array, Nested, Packed, kind_of
from wholebatch.errors import SplitError

FEW = 3
"""So many alike fields are usual: inputs and targets, an anchor with a positive and a negative."""

LOOKED_AT = 16
"""So many of the entries of an entry are compared."""


@dataclass(frozen=True, eq=False)
class Doubt:
    """A list whose entries are alike.

    Attributes:
        path: where it lies.
        value: the list.
        leaves: which of the batch's leaves are its own.
        samples: whether each entry holds a number or text of its own.
        even: whether entries of one or two dimensions agree in what is behind the first.
    """

    path: str
    value: Sequence[Any]
    leaves: range
    samples: bool
    even: bool

    @property
    def entries(self) -> int:
        """How many there are."""
        return len(self.value)

    def __str__(self) -> str:
        name = f"'{self.path}'" if self.path else "The batch"
        first = self.value[0]
        kind = f"of shape {tuple(first.shape)}" if hasattr(first, "shape") else "with the same contents"
        return f"{name} is a {type(self.value).__name__} of {self.entries} {type(first).__name__}s {kind}"


def doubt_about(path: str, value: Any, leaves: range) -> Doubt | None:
    """Say what is doubtful about a list or tuple that holds tensors; None if it can only be fields."""
    if len(value) < 2:
        return None
    outermost = path == "" and isinstance(value, tuple)
    if outermost and not isinstance(value[0], (list, tuple, Mapping)):
        return None  # the usual (inputs, labels)
    first, *others = map(_form, value)
    if not all(_alike(first, other, inside=True) for other in others):
        return None
    samples, even = _has_scalar(first), all(_alike(first, other) for other in others)
    return Doubt(path, value, leaves, samples, even) if samples or not outermost else None


def refuse_uncountable(doubts: Sequence[Doubt], rows: Sequence[int | None]) -> None:
    """Raise if fields and samples would count another number of rows.

    Args:
        doubts: of one batch.
        rows: of each of its leaves; those that have any agree.

    Raises:
        SplitError: names the call for each reading.
    """
    beside = _beside(doubts, rows)
    lengths = Counter(doubt.entries for doubt in doubts if doubt.path)
    for doubt in doubts:
        within = next((rows[place] for place in doubt.leaves if rows[place] is not None), None)
        if within is None:
            continue  # named to go whole
        if doubt.samples:
            raise SplitError(
                f"{doubt}, and each holds a number or text of its own: samples, one a row. Cut through, they would "
                f"lose what they hold. {ROWS}"
            )
        few = doubt.entries <= FEW and lengths[doubt.entries] <= 1  # two lists of one length: one entry a row in both
        if not beside and not few and doubt.even and doubt.entries != within:
            _refuse(doubt, within)


def refuse_uncertain(doubts: Sequence[Doubt], rows: Sequence[int | None]) -> None:
    """Raise before a cut if fields and samples count the same, or nearly the same, number of rows.

    Raises:
        SplitError: names the call for each reading.
    """
    refuse_uncountable(doubts, rows)
    beside = _beside(doubts, rows)
    for doubt in doubts:
        within = next((rows[place] for place in doubt.leaves if rows[place] is not None), None)
        if within is None or (not beside and not doubt.even):
            continue
        if doubt.entries == within or (not beside and doubt.entries > within):
            _refuse(doubt, within)


def _beside(doubts: Sequence[Doubt], rows: Sequence[int | None]) -> bool:
    """Whether leaves outside of all doubtful lists have rows."""
    inside = {place for doubt in doubts for place in doubt.leaves}
    return any(count is not None for place, count in enumerate(rows) if place not in inside)


ROWS = (
    "Give samples with collate=, which makes a micro-batch of some of them (collate=list keeps a list); a list of "
    "micro-batches as wb.Window(batch)."
)


def _refuse(doubt: Doubt, within: int) -> None:
    instead = (
        f"Fields: give them names, {{'a': ..., 'b': ...}}, or let them go whole, whole=({doubt.path!r},)."
        if doubt.path
        else "Fields: tuple(batch)."
    )
    raise SplitError(
        f"{doubt}: these may be {doubt.entries} fields of {within} rows each, or {doubt.entries} rows, and cut in the "
        f"wrong way they would give another gradient without a word. Say which. {instead} Rows: {ROWS[0].lower()}"
        f"{ROWS[1:]}"
    )


def _form(value: Any) -> Any:
    """What two entries must share to be alike: of tensors and arrays, the kind of their numbers and dimensions."""
    kind = kind_of(value)
    if isinstance(kind, (Array, Packed, Nested)):
        shape = kind.shape(value)
        return ("array", str(getattr(value, "dtype", "")), len(shape), shape[1:] if len(shape) <= 2 else None)
    fields = fields_of(value, outermost=False)
    if fields is not None:
        return {name: _form(item) for name, item in fields}
    if isinstance(value, (list, tuple)):
        forms = [_form(item) for item in value[:LOOKED_AT]]
        return forms if any(map(_has_array, forms)) else "entries"
    return "scalar" if isinstance(value, SCALARS) and value is not None else type(value)


def _alike(one: Any, other: Any, inside: bool = False) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        shared = one.keys() & other.keys()
        return bool(shared) and all(_alike(one[key], other[key], inside=True) for key in shared)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(_alike(a, b, inside=True) for a, b in zip(one, other, strict=True))
    if inside and isinstance(one, tuple) and isinstance(other, tuple):
        return one[:3] == other[:3]
    return bool(one == other)


def _has_array(form: Any) -> bool:
    parts = form.values() if isinstance(form, dict) else form if isinstance(form, list) else ()
    return isinstance(form, tuple) or any(map(_has_array, parts))


def _has_scalar(form: Any) -> bool:
    """Whether an entry that is a container holds a number or text, or a tensor without dimensions."""
    parts = form.values() if isinstance(form, dict) else form if isinstance(form, list) else ()
    return any(part == "scalar" or (isinstance(part, tuple) and part[2] == 0) or _has_scalar(part) for part in parts)
