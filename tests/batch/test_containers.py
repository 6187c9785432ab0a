"""Batches of a class of their own: made anew of fewer rows by what they offer, and only read."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import wholebatch as wb
from tests.oracle import assert_differs, assert_same_gradient, gradients_of, whole_batch
from wholebatch.batch.tree import move, rows_of, take
from wholebatch.errors import SplitError


class Instances:
    """Knows its length, and lets itself be sliced."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields
        self.n = len(self)

    def __len__(self) -> int:
        return len(self.fields["x"])

    def __getitem__(self, index: Any) -> Instances:
        return type(self)(**{name: value[index] for name, value in self.fields.items()})

    def __getattr__(self, name: str) -> Any:
        if name == "fields":
            raise AttributeError(name)
        return self.fields[name]


class OnlySlices(Instances):
    def __getitem__(self, index: Any) -> Instances:
        if not isinstance(index, slice):
            raise TypeError("slices only")
        return super().__getitem__(index)


class Selecting(OnlySlices):
    def index_select(self, index: list[int]) -> Instances:
        return type(self)(**{name: value[index] for name, value in self.fields.items()})


class Attributes:
    """Keeps what its constructor takes."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y, self.n = x, y, len(x)


class Slots:
    __slots__ = ("n", "x", "y")

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y, self.n = x, y, len(x)


class ReadOnly(Mapping[str, Any]):
    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.held, self.n = {"x": x, "y": y}, len(x)

    x = property(lambda self: self.held["x"])
    y = property(lambda self: self.held["y"])

    def __getitem__(self, key: str) -> Any:
        return self.held[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)


class Counting(dict[str, Any]):
    """Counts when it is made, as an attribute."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.n = len(self["x"])

    x = property(lambda self: self["x"])
    y = property(lambda self: self["y"])


class Keeping(collections.UserDict[str, Any]):
    @functools.cached_property
    def n(self) -> int:
        return len(self["x"])

    x = property(lambda self: self["x"])
    y = property(lambda self: self["y"])


@dataclasses.dataclass
class Made:
    x: torch.Tensor
    y: torch.Tensor
    n: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.n = len(self.x)


@dataclasses.dataclass
class Cached:
    x: torch.Tensor
    y: torch.Tensor

    @functools.cached_property
    def n(self) -> int:
        return len(self.x)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    x: torch.Tensor
    y: torch.Tensor
    n: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", len(self.x))


@dataclasses.dataclass
class Sliced:
    """A dataclass that is cut by its own slices."""

    fields: dict[str, torch.Tensor]

    x = property(lambda self: self.fields["x"])
    y = property(lambda self: self.fields["y"])
    n = property(lambda self: len(self))

    def __len__(self) -> int:
        return len(self.fields["x"])

    def __getitem__(self, index: Any) -> Sliced:
        return Sliced({name: value[index] for name, value in self.fields.items()})


def attrs_class() -> Any:
    attrs = pytest.importorskip("attrs")

    @attrs.define
    class Defined:
        x: torch.Tensor
        _y: torch.Tensor
        n: int = attrs.field(init=False)

        def __attrs_post_init__(self) -> None:
            self.n = len(self.x)

        y = property(lambda self: self._y)

    return Defined


def pydantic_class() -> Any:
    pydantic = pytest.importorskip("pydantic")

    class Model(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)
        x: Any
        y: Any

        @functools.cached_property
        def n(self) -> int:
            return len(self.x)

    return Model


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(911)
    return torch.randn(10, 3).double(), torch.randn(10, 1).double()


def made(name: str) -> Any:
    x, y = rows()
    makers: dict[str, Any] = {
        "slices": lambda: Instances(x=x, y=y),
        "slices and index_select": lambda: Selecting(x=x, y=y),
        "attributes": lambda: Attributes(x, y),
        "slots": lambda: Slots(x, y),
        "a mapping to read": lambda: ReadOnly(x, y),
        "a dict that counts": lambda: Counting(x=x, y=y),
        "a user dict with a cache": lambda: Keeping(x=x, y=y),
        "a dataclass that counts": lambda: Made(x, y),
        "a dataclass with a cache": lambda: Cached(x, y),
        "frozen with slots": lambda: Frozen(x=x, y=y),
        "a dataclass with slices": lambda: Sliced({"x": x, "y": y}),
        "attrs": lambda: attrs_class()(x, y),
        "pydantic": lambda: pydantic_class()(x=x, y=y),
    }
    return makers[name]()


OWN = (
    "slices", "slices and index_select", "attributes", "slots", "a mapping to read", "a dict that counts",
    "a user dict with a cache", "a dataclass that counts", "a dataclass with a cache", "frozen with slots",
    "a dataclass with slices", "attrs", "pydantic",
)  # fmt: skip


def sum_over_its_own_count(model: nn.Module, batch: Any) -> wb.LossSum:
    return wb.LossSum((model(batch.x) - batch.y).square().sum(), batch.n)


@pytest.mark.parametrize("size", [1, 4, 7, 10])
@pytest.mark.parametrize("name", OWN)
def test_a_batch_of_its_own_class_knows_what_is_true_of_its_own_rows(name: str, size: int) -> None:
    batch, model = made(name), nn.Linear(3, 1).double()
    assert batch.n == 10, "looked at before, as a log line does"
    x, y = batch.x, batch.y
    before = x.clone(), y.clone()

    reference = whole_batch(model, lambda model, pair: (model(pair[0]) - pair[1]).square().mean(), (x, y))
    result = wb.backward(model, sum_over_its_own_count, batch, micro_batch_size=size)
    assert (result.rows, float(result.items[0])) == (10, 10.0)
    assert_same_gradient(model, reference)
    assert batch.x is x and batch.y is y, "the batch itself is only read"
    assert (torch.equal(x, before[0]), torch.equal(y, before[1]), batch.n) == (True, True, 10)


def test_a_shallow_copy_with_its_caches_would_count_all_rows() -> None:
    batch, model = made("a dataclass with a cache"), nn.Linear(3, 1).double()
    assert batch.n == 10
    halves = [copy.copy(batch), copy.copy(batch)]
    for half, where in zip(halves, (slice(0, 5), slice(5, 10)), strict=True):
        half.x, half.y = batch.x[where], batch.y[where]
    reference = whole_batch(model, lambda model, pair: (model(pair.x) - pair.y).square().mean(), batch)
    wb.backward(model, sum_over_its_own_count, wb.Window(halves))
    assert_differs(model, reference)


@pytest.mark.parametrize("name", [name for name in OWN if name not in ("attributes", "slots")])
def test_it_may_lie_in_dicts_lists_and_windows(name: str) -> None:
    batch, model = made(name), nn.Linear(3, 1).double()
    reference = whole_batch(model, lambda model, pair: (model(pair[0]) - pair[1]).square().mean(), (batch.x, batch.y))
    for tree, find in (
        ({"own": batch, "id": list(range(10))}, lambda micro_batch: micro_batch["own"]),
        ([batch, torch.arange(10)], lambda micro_batch: micro_batch[0]),
        (wb.Window([batch]), lambda micro_batch: micro_batch),
    ):
        model.zero_grad()
        wb.backward(
            model, lambda model, micro_batch, find=find: sum_over_its_own_count(model, find(micro_batch)), tree, 4
        )
        assert_same_gradient(model, reference)


@pytest.mark.parametrize("name", OWN)
def test_rows_may_be_taken_in_any_order(name: str) -> None:
    batch = made(name)
    micro_batch = take(batch, [7, 0, 3])
    assert type(micro_batch) is type(batch)
    assert torch.equal(micro_batch.x, batch.x[[7, 0, 3]])
    assert (micro_batch.n, rows_of(micro_batch)) == (3, 3)


def test_what_can_only_be_sliced_is_not_taken_in_another_order() -> None:
    batch = OnlySlices(x=torch.zeros(5, 2), y=torch.zeros(5))
    assert rows_of(take(batch, slice(1, 3))) == 2
    with pytest.raises(SplitError, match=r"gives slices of itself, but not the rows .*collate="):
        take(batch, [3, 0])


def test_a_namespace_is_cut_like_a_dict() -> None:
    micro_batch = take({"b": types.SimpleNamespace(x=torch.arange(4), name="a")}, slice(0, 2))["b"]
    assert (type(micro_batch), micro_batch.x.tolist(), micro_batch.name) == (types.SimpleNamespace, [0, 1], "a")


@dataclasses.dataclass
class Halved:
    """Changes what it is given."""

    x: torch.Tensor

    def __post_init__(self) -> None:
        self.x = self.x / 2


@dataclasses.dataclass
class HalvedAndCounted(Halved):
    n: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.n = len(self.x)


@dataclasses.dataclass
class Scaled:
    x: torch.Tensor
    scale: dataclasses.InitVar[float] = 1.0

    def __post_init__(self, scale: float) -> None:
        self.x = self.x * scale


@dataclasses.dataclass
class Normalised:
    """Computes a number for each row from all rows, which is right for the whole batch only."""

    reward: torch.Tensor
    advantage: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.advantage = (self.reward - self.reward.mean()) / self.reward.std()


def test_what_a_constructor_does_to_the_rows_is_not_done_twice() -> None:
    assert take(Halved(torch.tensor([2.0, 4.0, 6.0])), slice(0, 2)).x.tolist() == [1.0, 2.0]
    assert take(Scaled(torch.tensor([2.0, 4.0, 6.0]), 3.0), slice(0, 2)).x.tolist() == [6.0, 12.0]
    with pytest.raises(SplitError, match=r"HalvedAndCounted .*'n' cannot be computed anew.*Give a dict.*wb\.Window"):
        take(HalvedAndCounted(torch.tensor([2.0, 4.0, 6.0])), slice(0, 2))


def test_rows_that_were_computed_from_all_rows_are_cut_and_not_computed_anew() -> None:
    batch = Normalised(torch.tensor([1.0, 2.0, 6.0, 7.0]))
    assert torch.equal(take(batch, slice(0, 2)).advantage, batch.advantage[:2])
    assert not torch.equal(Normalised(batch.reward[:2]).advantage, batch.advantage[:2])


class Table:
    """Holds rows, and cannot be cut."""

    def __init__(self, rows: int) -> None:
        self.table = torch.zeros(rows, 3)


class Graphs:
    """Slices of it are lists."""

    def __init__(self, graphs: list[Any]) -> None:
        self.graphs = graphs

    def __len__(self) -> int:
        return len(self.graphs)

    def __getitem__(self, index: Any) -> Any:
        return self.graphs[index]


@pytest.mark.parametrize("held", [Table(6), Graphs([object()] * 6)], ids=lambda held: type(held).__name__)
def test_an_object_that_may_hold_the_rows_and_cannot_be_cut_is_refused(held: Any) -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(SplitError, match=r"'held' \w+ holds 6 entries.*whole=\('held',\).*collate="):
        wb.backward(
            model, lambda model, micro_batch: model(micro_batch["x"]), {"x": torch.zeros(6, 2), "held": held}, 2
        )
    assert set(gradients_of(model).values()) == {None}
    assert take({"x": torch.zeros(6), "held": held}, slice(0, 2), whole=("held",))["held"] is held
    assert take({"x": torch.zeros(5), "held": held}, slice(0, 2))["held"] is held


class Stubborn(dict[str, Any]):
    def __init__(self, path: str) -> None:
        super().__init__(x=torch.zeros(4, 2))
        self.path = path


def test_a_mapping_that_cannot_be_made_anew_is_refused_with_the_way_out() -> None:
    batch = Stubborn("file")
    with pytest.raises(SplitError, match=r"Stubborn\({...}\) does not hold what it is given.*Give dict\(batch\)"):
        take(batch, slice(0, 2))
    assert take(dict(batch), slice(0, 2))["x"].shape == (2, 2)
    assert type(move(batch, "meta")) is Stubborn, "all rows are all rows: what else it knows stays true"
    assert batch["x"].device.type == "cpu"


class Bag(list[Any]):
    def __init__(self, entries: Sequence[Any]) -> None:
        super().__init__(entries)
        self.n = len(self)


class Strict(list[Any]):
    def __init__(self, first: Any, *others: Any) -> None:
        super().__init__([first, *others])


class Words(Sequence[str]):
    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, place: Any) -> Any:
        return self.words[place]


class Late(NamedTuple):
    x: torch.Tensor
    n: int = 0


def test_sequences_of_their_own_class_stay_of_it() -> None:
    batch = {"x": torch.zeros(3), "bag": Bag("abc"), "words": Words("abc"), "pair": Late(torch.zeros(3))}
    micro_batch = take(batch, slice(1, 3))
    assert (type(micro_batch["bag"]), micro_batch["bag"].n, list(micro_batch["bag"])) == (Bag, 2, ["b", "c"])
    assert (type(micro_batch["words"]), list(micro_batch["words"])) == (Words, ["b", "c"])
    assert type(micro_batch["pair"]) is Late
    with pytest.raises(SplitError, match=r"A Strict cannot be made of 2 of its 3 entries.*list\(batch\)"):
        take({"x": torch.zeros(3), "strict": Strict("a", "b", "c")}, slice(1, 3))


def test_what_was_set_later_and_cannot_depend_on_rows_is_kept() -> None:
    batch = Counting(x=torch.zeros(4), y=torch.zeros(4))
    batch.task, batch.total = "sums", 4
    micro_batch = take(batch, slice(0, 2))
    assert micro_batch.task == "sums"
    assert not hasattr(micro_batch, "total")


def test_an_object_whose_contents_go_whole_is_left_as_it_is() -> None:
    settings = Halved(torch.tensor(1.0))
    batch = {"x": torch.zeros(4), "settings": settings, "table": Made(torch.zeros(3), torch.zeros(3))}
    micro_batch = take(batch, slice(0, 2), whole=("table",))
    assert micro_batch["settings"] is settings
    assert micro_batch["table"] is batch["table"]
