"""What was seen of a training loop: the events in their order, as plain data that can travel between ranks."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from torch import Tensor

from wholebatch.verify.source_line import Site


@dataclasses.dataclass(frozen=True)
class TracedTerm:
    """One summand of a loss, as the autograd graph tells it: ``factor * reduction(items)``.

    reduction: "mean" divides by its own items, "sum" by nothing, "opaque" could not be read.
    target: the one number that all entries are compared with, None where there are several.
    factor: everything that the reduction was multiplied by afterwards; `factors` are its parts, outermost first.
    items: the weight that this term averages or sums over: rows, tokens that are not ignored, weights.
    total: how many entries there were, ignored ones included.
    paired: every row's class is its own position among the rows: in-batch negatives.
    """

    path: str
    name: str
    reduction: str
    factor: float
    factors: tuple[float, ...]
    items: float
    total: float
    paired: bool = False
    target: float | None = None

    @property
    def per_item(self) -> float:
        """What one item's loss is multiplied by in this micro-batch."""
        return self.factor / self.items if self.reduction == "mean" and self.items else self.factor


@dataclasses.dataclass
class Event:
    """Something that the loop did; `order` counts events, `site` is the user's line."""

    kind: ClassVar[str] = "event"
    order: int = -1
    site: Site | None = None
    seconds: float = 0.0


@dataclasses.dataclass
class Forward(Event):
    """An outermost call of a module that has parameters.

    path: where in the user's code; module: its number in `Trace.modules`; after: the forwards whose output it took.
    inputs: which memory its tensors show, see `lineage.Rows`. batch: the loader that gave the last batch before it,
    and the number of that batch.
    """

    kind: ClassVar[str] = "forward"
    model: str = ""
    path: str = ""
    module: int = -1
    after: tuple[int, ...] = ()
    inputs: tuple[tuple[int, int, int], ...] = ()
    batch: tuple[int, int] | None = None
    rows: int | None = None
    shape: tuple[int, ...] = ()
    training: bool = True
    grad: bool = True
    wrapper: str | None = None
    sync: bool | None = None
    random: bool = False
    labels: float | None = None
    batch_norms: tuple[str, ...] = ()


@dataclasses.dataclass
class Backward(Event):
    """One call of backward. `pending` parameters had a gradient before it, `touched` ones received one.

    weights: a number that changes whenever a parameter does.
    before, after: a sample of the gradients (all of a small model's), None when too much was kept already.
    sync: whether DDP was set to reduce while it ran; dtype: the shortest format among the gradients.
    path: where in the user's code; forwards: those that the graph leads to.
    call: the function of this library that ran all of it, "" for a backward of torch; rows: how many that call ran.
    """

    kind: ClassVar[str] = "backward"
    began: int = -1
    path: str = ""
    forwards: tuple[int, ...] = ()
    call: str = ""
    rows: int | None = None
    value: float | None = None
    scaled: bool = False
    terms: tuple[TracedTerm, ...] = ()
    pending: frozenset[int] = frozenset()
    touched: frozenset[int] = frozenset()
    changed: bool = False
    weights: int = 0
    sync: bool | None = None
    dtype: str = ""
    before: Tensor | None = None
    after: Tensor | None = None


@dataclasses.dataclass
class OptimizerStep(Event):
    """One step of an optimizer: the gradients as it found them, after clipping, and those it missed."""

    kind: ClassVar[str] = "step"
    began: int = -1
    optimizer: int = -1
    pending: frozenset[int] = frozenset()
    missing: frozenset[int] = frozenset()
    in_backward: bool = False
    norm: float | None = None
    sample: Tensor | None = None


@dataclasses.dataclass
class ZeroGrad(Event):
    """``zero_grad`` of an optimizer or a module."""

    kind: ClassVar[str] = "zero_grad"
    parameters: frozenset[int] = frozenset()


@dataclasses.dataclass
class Clip(Event):
    """A call that clips gradients; `norm` before the clip, where the function tells it."""

    kind: ClassVar[str] = "clip"
    parameters: frozenset[int] = frozenset()
    bound: float = 0.0
    norm: float | None = None
    sample: Tensor | None = None


@dataclasses.dataclass
class Scaler(Event):
    """A call of a GradScaler: `call` is "unscale_", "step" or "update"."""

    kind: ClassVar[str] = "scaler"
    call: str = ""
    optimizer: int = -1
    scale: float = 1.0
    stepped: bool = True


@dataclasses.dataclass
class Schedule(Event):
    """A step of a learning-rate scheduler."""

    kind: ClassVar[str] = "schedule"
    scheduler: int = -1
    optimizer: int = -1
    name: str = ""
    lrs: tuple[float, ...] = ()


@dataclasses.dataclass
class Average(Event):
    """A weight average that took in the parameters."""

    kind: ClassVar[str] = "average"
    name: str = ""
    parameters: frozenset[int] = frozenset()


@dataclasses.dataclass
class Collective(Event):
    """A collective called from Python (DDP's own reductions are told by `Forward.sync`)."""

    kind: ClassVar[str] = "collective"
    name: str = ""
    bytes: int = 0


@dataclasses.dataclass
class Epoch(Event):
    """A data loader was started ("start") or came to its end ("end")."""

    kind: ClassVar[str] = "epoch"
    what: str = "start"
    loader: int = -1
    length: int | None = None


@dataclasses.dataclass
class Optimizer:
    """An optimizer as seen: its class and the numbers of its parameters."""

    name: str
    parameters: frozenset[int]


@dataclasses.dataclass
class Trace:
    """Everything that one process saw. `complete` is true when the script came to its own end.

    modules: the numbers of the parameters of each module that was called.
    """

    events: list[Event] = dataclasses.field(default_factory=list)
    optimizers: dict[int, Optimizer] = dataclasses.field(default_factory=dict)
    modules: list[frozenset[int]] = dataclasses.field(default_factory=list)
    names: list[str] = dataclasses.field(default_factory=list)
    numels: list[int] = dataclasses.field(default_factory=list)
    sampled: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
    rank: int = 0
    world: int = 1
    complete: bool = False
    error: str | None = None
    error_site: Site | None = None
    watched_seconds: float = 0.0

    def of(self, kind: type[Event]) -> list[Any]:
        """Return the events of one kind, in order."""
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def steps(self) -> int:
        """How many optimizer steps were seen."""
        return len(self.of(OptimizerStep))
