"""Loaders that write micro-batches into the memory of earlier ones are found out; sharing memory is no fault."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import wholebatch as wb
from tests.oracle import assert_differs, assert_same_gradient, whole_batch
from wholebatch.errors import SplitError


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(931)
    return torch.randn(12, 5).double(), torch.randint(0, 3, (12,))


def parts() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    x, y = rows()
    return zip(x.split(3), y.split(3), strict=True)


def one_place() -> Iterator[Any]:
    x, y = torch.empty(3, 5).double(), torch.empty(3, dtype=torch.long)
    for new_x, new_y in parts():
        yield x.copy_(new_x), y.copy_(new_y)


def a_ring_of_two() -> Iterator[Any]:
    places = itertools.cycle([torch.empty(3, 5).double() for _ in range(2)])
    for (new_x, new_y), x in zip(parts(), places, strict=False):
        yield x.copy_(new_x), new_y


def one_array() -> Iterator[Any]:
    x, y = np.empty((3, 5)), np.empty(3, dtype=np.int64)
    for new_x, new_y in parts():
        x[:], y[:] = new_x, new_y
        yield torch.from_numpy(x), torch.from_numpy(y)


def one_tensor_over_an_array() -> Iterator[Any]:
    array = np.empty((3, 5))
    x = torch.from_numpy(array)  # torch does not notice when the array is written into
    for new_x, new_y in parts():
        array[:] = new_x
        yield x, new_y


def one_dict() -> Iterator[Any]:
    batch: dict[int, torch.Tensor] = {}
    for new_x, new_y in parts():
        batch[0], batch[1] = new_x, new_y
        yield batch


def overlapping_views() -> Iterator[Any]:
    long = torch.empty(4, 5).double()
    for number, (new_x, new_y) in enumerate(parts()):
        x = long[number % 2 : number % 2 + 3]
        yield x.copy_(new_x), new_y


LOADERS: list[Callable[[], Iterator[Any]]] = [
    one_place, a_ring_of_two, one_array, one_tensor_over_an_array, one_dict, overlapping_views,
]  # fmt: skip


def losses(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


@pytest.mark.parametrize("loader", LOADERS, ids=lambda loader: loader.__name__)
def test_a_loader_that_writes_into_the_same_memory_is_refused_and_copies_are_exact(loader: Any) -> None:
    model = nn.Linear(5, 3).double()
    reference = whole_batch(model, lambda model, batch: losses(model, batch).mean(), rows())
    with pytest.raises(
        SplitError, match=r"Micro-batch \d .* overwritten .*copy\.deepcopy\(batch\) for batch in loader"
    ):
        next(wb.windows(loader(), 4))
    (window,) = wb.windows((copy.deepcopy(batch) for batch in loader()), 4)
    wb.backward(model, losses, window)
    assert_same_gradient(model, reference)

    model.zero_grad()
    wb.backward(model, losses, wb.Window(loader()))  # a window that nobody has watched
    assert_differs(model, reference)


def test_one_micro_batch_a_window_may_lie_where_the_last_one_lay() -> None:
    assert [len(window) for window in wb.windows(one_place(), 1)] == [1, 1, 1, 1]


def test_a_buffer_of_samples_that_is_emptied_is_found_out() -> None:
    def loader() -> Iterator[list[torch.Tensor]]:
        buffer: list[torch.Tensor] = []
        for row in rows()[0]:
            buffer.append(row)
            if len(buffer) == 3:
                yield buffer
                buffer.clear()

    with pytest.raises(SplitError, match="overwritten"):
        list(wb.windows(loader(), 2))


SHARED: dict[str, Callable[[], Any]] = {
    "views of one tensor": lambda: rows()[0].split(3),
    "overlapping views": lambda: rows()[0].unfold(0, 4, 2).unbind(),
    "the same batch again": lambda: [{"x": rows()[0]}] * 4,
    "constants beside": lambda: [{"x": part, "weight": CONSTANT, "map": ARRAY, "names": NAMES} for part in parts()],
    "no numbers": lambda: [torch.full((3,), float("nan"))] * 4,
    "empty": lambda: [torch.zeros(0, 3), {}, [], None],
    "a loader of torch": lambda: DataLoader(TensorDataset(*rows()), batch_size=3),
    "bits and bytes": lambda: [torch.ones(3, dtype=torch.bool), torch.tensor(1j), torch.ones(3, 2).to_sparse()] * 2,
}
CONSTANT, ARRAY, NAMES = torch.rand(5), np.ones((2, 2)), ["a", "b", "c"]


@pytest.mark.parametrize("name", SHARED)
def test_memory_that_is_merely_shared_is_no_fault(name: str) -> None:
    loader = SHARED[name]()
    gathered = [micro_batch for window in wb.windows(loader, 4) for micro_batch in window]
    assert len(gathered) == len(list(loader))


def test_a_change_anywhere_in_much_memory_is_found_out() -> None:
    place = torch.zeros(64, 3, 100, 100)

    def loader() -> Iterator[torch.Tensor]:
        for number in range(2):
            place[number * 32 :].fill_(number + 1)
            yield place

    with pytest.raises(SplitError, match="overwritten"):
        list(wb.windows(loader(), 2))
