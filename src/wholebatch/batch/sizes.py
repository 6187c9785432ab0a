"""Where a batch is cut: by rows, by tokens with the least modelled time, or by what memory has allowed so far."""

from __future__ import annotations

import itertools
import math
import operator
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from numbers import Real
from typing import Any, TypeAlias

import torch
from torch import Tensor

from wholebatch.amounts import shown, whole_number
from wholebatch.batch.leaf_kinds import Nested
from wholebatch.batch.tree import BatchTree, Leaf
from wholebatch.errors import SplitError

Length: TypeAlias = "Callable[[Any], int] | str | Sequence[str] | None"
Size: TypeAlias = "int | Tokens | Auto | None"

WAYS: tuple[tuple[str, ...], ...] = ((), ("tiles",), ("checkpointing",), ("checkpointing", "tiles"))
"""How less of one row is kept, in the order of what it costs: `wholebatch.tiled`, `wholebatch.checkpointed`, both."""

OVERHEAD_TOKENS = 67.0
LONGEST_STRETCH = 1024


@dataclass(frozen=True)
class Cost:
    """The modelled time of n rows padded to length L: ``overhead + linear * n*L + quadratic * n*L*L``.

    Args:
        overhead: what a micro-batch costs besides its tokens; in tokens, if ``linear`` is 1.
        linear: what a padded token costs.
        quadratic: what attention adds for each pair of tokens in a row.

    Example:
        >>> Cost(overhead=10)(rows=4, longest=8)
        42.0
    """

    overhead: float = OVERHEAD_TOKENS
    linear: float = 1.0
    quadratic: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not is_number(value):
                raise TypeError(f"Cost({name}={shown(value)}): a time is a number, such as Cost(overhead=67.0).")
            if not 0 <= value < math.inf:
                raise ValueError(f"Cost({name}={value}): a micro-batch takes a finite time, and never less than none.")

    def __call__(self, rows: int, longest: int) -> float:
        """Return the modelled time of one micro-batch."""
        return self.overhead + rows * self.row(longest)

    def row(self, longest: int) -> float:
        """What one row costs in a micro-batch that is padded to ``longest``."""
        return float(self.linear * longest + self.quadratic * longest * longest)

    @classmethod
    def fit(cls, shapes: Sequence[tuple[int, int]], seconds: Sequence[float]) -> Cost:
        """Fit the three numbers to measured times by relative least squares, none of them negative.

        Minimises ``sum((modelled / measured - 1)^2)`` exactly: of all sets of non-zero numbers, the best.

        Args:
            shapes: (rows, longest) of each measured micro-batch; about ten of different proportions are enough.
            seconds: how long each took.

        Returns:
            The cost in seconds.

        Raises:
            ValueError: for unequal numbers of shapes and times, none at all, or one that is not positive.

        Example:
            >>> cost = Cost.fit([(1, 8), (2, 8), (4, 8)], [0.3, 0.4, 0.6])
            >>> round(cost.overhead, 6), round(cost(rows=8, longest=8), 6)
            (0.2, 1.0)
        """
        if not seconds or len(shapes) != len(seconds) or min(min(seconds), *map(min, shapes)) <= 0:
            raise ValueError(
                f"The shapes {shapes} and times {seconds} cannot be fitted. Give each (rows, longest) a positive time."
            )
        columns = torch.tensor([[1.0, n * longest, n * longest**2] for n, longest in shapes], dtype=torch.float64)
        return cls(*_non_negative_fit(columns / torch.tensor(seconds, dtype=torch.float64)[:, None]).tolist())


def plan(lengths: Sequence[int], budget: int, cost: Cost | None = None) -> list[list[int]]:
    """Cut rows into micro-batches of at most ``budget`` padded tokens so that the modelled time is least.

    Minimises the sum of ``cost(n, L)`` over the micro-batches (n rows, longest row L) under ``n*L <= budget``, over all
    partitions of the rows. Some optimal partition is contiguous in the order of lengths (giving each micro-batch the
    next rows of that order makes no micro-batch longer), and on that order the micro-batches obey the quadrangle
    inequality: each start of a micro-batch is the best one for one stretch of ends. So a queue of stretches finds the
        optimum
    in O(n log n), nearly all of it for the sorting. A row longer than the budget gets a micro-batch of its own.

    Args:
        lengths: of each row, in tokens.
        budget: the padded tokens that a micro-batch may hold.
        cost: the model; one token per token and 67 per micro-batch if None.

    Returns:
        The row numbers of each micro-batch, ascending; the micro-batch with the longest row first.

    Example:
        >>> plan([5, 90, 6, 100], budget=200)
        [[1, 3], [0, 2]]
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    ends = _best_ends([max(1, lengths[row]) for row in order], budget, cost or Cost())
    return [sorted(order[start:end]) for start, end in itertools.pairwise([0, *ends])]


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Fill micro-batches of at most ``budget`` real tokens, longest row first, each into the first micro-batch that
    holds it.

    The number of micro-batches is at most 11/9 of the least possible, plus one (first fit, decreasing); that least
    number is hard to find. A row longer than the budget gets a micro-batch of its own.

    Returns:
        The row numbers of each micro-batch, ascending; the micro-batch with the longest row first.

    Example:
        >>> pack([5, 90, 6, 100], budget=105)
        [[0, 3], [1, 2]]
    """
    micro_batches: list[list[int]] = [[] for _ in lengths]  # as many as can be needed, all empty
    leaves = 1 << (len(lengths) - 1).bit_length()
    # A binary tree, its root at 1: the most room in any micro-batch below. The first micro-batch with room is found in
    # O(log n).
    room = [budget] * (2 * leaves)
    for row in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        length = min(max(1, lengths[row]), budget)
        place = 1
        while place < leaves:
            place = 2 * place + (room[2 * place] < length)
        micro_batches[place - leaves].append(row)
        room[place] -= length
        while place > 1:
            place //= 2
            room[place] = max(room[2 * place], room[2 * place + 1])
    return [sorted(micro_batch) for micro_batch in micro_batches if micro_batch]


@dataclass(frozen=True)
class Tokens:
    """Cut by tokens: each micro-batch holds at most ``budget`` padded tokens, rows times longest row.

    Rows are sorted by length and cut where the modelled time is least (`plan`), the longest first, so that memory
    trouble shows at once. The gradient is that of the whole batch all the same; dropout and other draws fall in
    another order. A row longer than the budget runs alone.

    *Samples with* ``collate=``: ``length`` is a function of a sample, or a key of it; if None, the length of
    ``input_ids``, else of the longest 1-d tensor or sequence in the sample.

    *A padded batch*: ``mask`` names its (rows, L) mask, or its (rows,) lengths. Every micro-batch is trimmed to its own
    longest row: the mask, each tensor (rows, L, ...), and masks (rows, ..., L, L) on both sides. Trimming is exact if
    masked positions count neither in the model nor in the loss, which `check` shows. Padding on the left is trimmed
    only if ``position_ids`` come with the batch, since positions would shift. A tensor that is not seen to hold mere
    filling where rows are padded (labels: a negative value) may follow another length, or count there: then nothing
    is trimmed, and a warning says so. ``length=("input_ids", "labels")`` names the tensors that follow the mask and
    settles it. A mask on a GPU costs one host synchronisation.

    *Nested tensors* know their lengths: rows are cut by these, and nothing is trimmed.

    Args:
        budget: padded tokens a micro-batch may hold; under ``packed``, real ones.
        length: see above.
        mask: the key of a padded batch's mask or lengths.
        packed: ``collate`` puts rows one behind the other without padding: count the sum of the lengths.
        overhead: what a micro-batch costs besides its tokens, in tokens. 67 was measured on a CPU with 7 M parameters;
            a GPU bound by launches has some thousand.
        cost: a measured model (`Cost.fit`) in the place of ``overhead``.

    Raises:
        TypeError: for a budget that is no whole number, and for anything of another type than said.
        ValueError: for a budget below 1.

    Example:
        >>> rows = [torch.ones(n) for n in (2, 60, 3, 64)]
        >>> collate = lambda samples: torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)
        >>> model = torch.nn.Linear(1, 1)
        >>> loss_fn = lambda model, x: wb.mean(model(x[..., None]).squeeze(-1), weights=x != 0)
        >>> wb.backward(model, loss_fn, rows, wb.Tokens(128, length=len), collate=collate).micro_batches
        2
    """

    budget: int
    length: Length = None
    _: KW_ONLY
    mask: str = "attention_mask"
    packed: bool = False
    overhead: float = OVERHEAD_TOKENS
    cost: Cost | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", whole_number(self.budget, "Tokens(budget)", "wb.Tokens(8192)"))
        Cost(overhead=self.overhead)  # refuses what is no overhead
        named = [self.length] if isinstance(self.length, str) else self.length
        if named is not None and not callable(named) and not _are_names(named):
            raise TypeError(
                f"Tokens(length) is {shown(self.length)}, but must be a function of a sample, or name keys: "
                f'wb.Tokens({self.budget}, length=len), or length="input_ids".'
            )
        if not isinstance(self.mask, str):
            raise TypeError(
                f"Tokens(mask) is {shown(self.mask)}, but must be the key of the mask or the lengths in the batch: "
                f'wb.Tokens({self.budget}, mask="attention_mask").'
            )
        if not isinstance(self.cost, (Cost, type(None))):
            raise TypeError(
                f"Tokens(cost) is {shown(self.cost)}, but must be a Cost, as Cost.fit returns; a bare number of "
                "tokens a micro-batch is overhead=."
            )

    @property
    def names(self) -> tuple[str, ...] | None:
        """The keys named in ``length``; None if it is a function, or nothing."""
        if self.length is None or callable(self.length):
            return None
        return (self.length,) if isinstance(self.length, str) else tuple(self.length)

    def plan(self, lengths: Sequence[int]) -> list[list[int]]:
        """Cut rows of these lengths: row numbers of each micro-batch, the micro-batch with the longest row first."""
        if self.packed:
            return pack(lengths, self.budget)
        return plan(lengths, self.budget, self.cost or Cost(overhead=self.overhead))

    def filled(self, lengths: Sequence[int], order: Sequence[int]) -> list[list[int]]:
        """Fill micro-batches one after the other with rows in a given order: row numbers of each, ascending.

        Example:
            >>> Tokens(12).filled([5, 9, 6, 1], order=[0, 2, 3, 1])
            [[0, 2], [3], [1]]
        """
        micro_batches: list[list[int]] = []
        longest = held = 0
        for row in order:
            length = max(1, lengths[row])
            longest, held = max(longest, length), held + length
            holds = held if self.packed else longest * (len(micro_batches[-1]) + 1 if micro_batches else 1)
            if not micro_batches or holds > self.budget:
                micro_batches.append([])
                longest = held = length
            micro_batches[-1].append(row)
        return [sorted(micro_batch) for micro_batch in micro_batches]

    def lengths(self, samples: Iterable[Any]) -> list[int]:
        """Return the length of each sample in tokens.

        Raises:
            SplitError: for a sample whose length cannot be known; says how to give it.
        """
        return [self._length(sample) for sample in samples]

    def jagged_lengths(self, tree: BatchTree) -> list[int] | None:
        """Return the length of each row of a batch of nested tensors, which knows them; None if there is none.

        The longest counts where several run along the rows; ``length`` names those that do.
        """
        jagged = [leaf for leaf in tree.leaves if isinstance(leaf.kind, Nested) and leaf.rows is not None]
        named = [leaf for leaf in jagged if self.names is None or {leaf.key, leaf.path} & set(self.names)]
        lines = [[len(row) for row in leaf.value.unbind()] for leaf in named]
        return [max(each) for each in zip(*lines, strict=True)] if lines else None

    def _length(self, sample: Any) -> int:
        if callable(self.length):
            return operator.index(self.length(sample))
        leaves = BatchTree(sample).leaves
        names = self.names or ("input_ids",)
        found = [leaf for leaf in leaves if leaf.key in names and leaf.rows is not None]
        lines = [leaf for leaf in leaves if _is_line(leaf)] if self.names is None else []
        if not found and not lines:
            raise SplitError(
                f"How many tokens a sample has cannot be known: it holds {', '.join(map(str, leaves))}, and no "
                f"{' or '.join(map(repr, names))}. Say it: wb.Tokens({self.budget}, length=lambda sample: ...)."
            )
        return max(leaf.shape[0] for leaf in found or lines)


class Auto:
    """Start with a size, and let memory decide: the size is halved when a micro-batch runs out of memory, and
    remembered.

    After a quiet stretch of windows a size larger by a quarter is tried again, never one beyond ``start``. Each
    failure doubles the stretch, so that a size that does not fit is tried ever more rarely. Where one row alone does
    not fit, less of it is kept: in tiles of its positions, with checkpointed blocks, or both, while a window lasts.

    Args:
        start: rows, or `Tokens`.

    Attributes:
        failures: how often memory has run out.
        way: what is done below a row, the number of one of `WAYS`; 0 where rows fit as they are.
        tiles: the model that runs over tiles, with what undoes it, where that was tried.

    Raises:
        TypeError: for a start that is neither.
        ValueError: for a start below 1.

    Example:
        >>> auto = wb.Auto(64)
        >>> auto.shrink()
        32
        >>> auto
        Auto(64, now 32)
    """

    def __init__(self, start: int | Tokens) -> None:
        if not isinstance(start, Tokens):
            start = whole_number(start, "Auto(start)", "wb.Auto(64)")
        self.start: int | Tokens = start
        self._limit = self._most
        self._stretch = 8
        self._quiet = self.failures = self.way = 0
        self.tiles: tuple[Any, Any] | None = None

    def __repr__(self) -> str:
        return f"Auto({self.start!r}, now {self._limit})"

    @property
    def size(self) -> int | Tokens:
        """The size to cut with now: rows, or `Tokens` with the budget found."""
        return replace(self.start, budget=self._limit) if isinstance(self.start, Tokens) else self._limit

    @property
    def shrunk(self) -> bool:
        """Whether memory has run out on a larger size."""
        return self._limit < self._most

    @property
    def _most(self) -> int:
        return self.start.budget if isinstance(self.start, Tokens) else self.start

    def shrink(self, failed: int | None = None) -> int | Tokens:
        """Take note that a micro-batch ran out of memory, and return the smaller size.

        Args:
            failed: what the micro-batch held (rows, or padded tokens), where that was less than the size.
        """
        # Memory may have run out on less than the size: on a last micro-batch, or after others have taken their share.
        self._limit = -(-min(self._limit, failed or self._limit) // 2)  # the larger half, of which one is tried next
        self._quiet = 0
        self.failures += 1
        self._stretch = min(2 * self._stretch, LONGEST_STRETCH)
        return self.size

    def rest(self) -> int | Tokens:
        """Take note of a window without trouble, and return the size for the next: now and then a larger one."""
        self._quiet += 1
        if self._quiet >= self._stretch:
            self._quiet = 0
            self._limit = min(self._most, self._limit + max(1, self._limit // 4))
        return self.size

    def state_dict(self) -> dict[str, int]:
        """Return what was found, as plain numbers."""
        return {"limit": self._limit, "stretch": self._stretch, "quiet": self._quiet, "way": self.way}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from what was found before; a smaller ``start`` than then keeps its word.

        Raises:
            ValueError: if a number is missing or out of range.
        """
        earlier: Any = state
        if isinstance(earlier, Mapping):
            earlier = {"way": 0, **earlier}  # a version before knew no ways
        numbers = {name: whole_entry(earlier, name) for name in self.state_dict()}
        if (
            numbers["limit"] < 1
            or numbers["stretch"] < 1
            or numbers["quiet"] < 0
            or numbers["way"] not in range(len(WAYS))
        ):
            raise ValueError(f"{shown(state)} is no state of Auto. Load what its state_dict() returned.")
        self._limit = min(self._most, numbers["limit"])
        self._stretch, self._quiet, self.way = numbers["stretch"], numbers["quiet"], numbers["way"]


def is_number(value: Any) -> bool:
    """Tell whether a value is a real number; True and False are none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def whole_entry(state: Any, name: str) -> int:
    """Return the whole number under a name in a loaded state; -1 if there is none, or no state."""
    found = state.get(name) if isinstance(state, Mapping) else None
    return found if isinstance(found, int) else -1


def _are_names(value: Any) -> bool:
    return isinstance(value, Sequence) and bool(value) and all(isinstance(name, str) for name in value)


def _is_line(leaf: Leaf) -> bool:
    """Whether a leaf is a tensor of one dimension, or a sequence of numbers."""
    return len(leaf.shape) == 1 and (leaf.is_array or all(isinstance(entry, (int, float)) for entry in leaf.value))


def _best_ends(longest: Sequence[int], budget: int, cost: Cost) -> list[int]:
    """Where the micro-batches of rows in descending order end, at least modelled time."""
    count = len(longest)
    per_row = [cost.row(length) for length in longest]
    reach = [start + max(1, budget // length) for start, length in enumerate(longest)]
    least = [0.0] * (count + 1)  # time of the rows before this end
    origin = [0] * (count + 1)  # where the last micro-batch before this end starts

    def takes_over(old: int, new: int) -> int:
        """The first end from which a micro-batch that starts at ``new`` beats one that starts at ``old``."""
        gain = per_row[old] - per_row[new]
        deficit = (least[new] - new * per_row[new]) - (least[old] - old * per_row[old])
        if deficit >= gain * reach[old]:
            return reach[old] + 1
        return max(new + 1, int(deficit // gain) + 1) if deficit > 0 else new + 1

    # (start, the first end for which it is best), both rising: a later start pads less, and reaches further, so once
    # it is better it stays better.
    stretches: deque[tuple[int, int]] = deque([(0, 1)])
    for end in range(1, count + 1):
        while len(stretches) > 1 and stretches[1][1] <= end:
            stretches.popleft()
        start = origin[end] = stretches[0][0]
        least[end] = least[start] + cost.overhead + (end - start) * per_row[start]
        if end < count:
            while stretches and takes_over(stretches[-1][0], end) <= max(stretches[-1][1], end + 1):
                stretches.pop()
            stretches.append((end, takes_over(stretches[-1][0], end) if stretches else end + 1))
    return _traced_back(origin)


def _traced_back(origin: Sequence[int]) -> list[int]:
    """All ends of micro-batches, from where each last micro-batch starts."""
    ends = []
    end = len(origin) - 1
    while end:
        ends.append(end)
        end = origin[end]
    return ends[::-1]


def _non_negative_fit(columns: Tensor) -> Tensor:
    """The non-negative x that brings ``columns @ x`` nearest to ones; of equally good ones, that with most zeros."""
    numbers = range(columns.shape[1])
    kept = itertools.chain.from_iterable(itertools.combinations(numbers, size) for size in (1, 2, 3))
    candidates = [x for x in (_fit(columns, list(some)) for some in kept) if bool((x >= 0).all())]
    return min(candidates, key=lambda x: round(float((columns @ x - 1).norm()), 9))


def _fit(columns: Tensor, kept: list[int]) -> Tensor:
    """Least squares with all entries but some held at zero; the columns are brought to one scale for it."""
    scale = columns[:, kept].norm(dim=0)
    ones = columns.new_ones(len(columns), 1)
    x = columns.new_zeros(columns.shape[1])
    x[kept] = torch.linalg.lstsq(columns[:, kept] / scale, ones, driver="gelsd").solution[:, 0] / scale
    return x
