"""Leaves that refer to rows by their place are named, with what mends it, wherever a micro-batch then does not fit."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import assert_differs, assert_same_gradient, whole_batch
from torch import Tensor, nn

import wholebatch as wb

D, ROWS = torch.float64, 12


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(20, 5, mode="mean").double(), nn.Linear(5, 3).double()

    def forward(self, words: Tensor, offsets: Tensor) -> Tensor:
        return self.out(self.bag(words, offsets))


def words(count: int, offsets: Tensor) -> dict[str, Tensor]:
    return {"words": torch.randint(0, 20, (count,)), "offsets": offsets}


def bagged(model: Any, batch: Any) -> Tensor:
    return model(batch["words"], batch["offsets"]).square().mean(1)


def convolved(model: Any, batch: Any) -> Tensor:
    return model(batch["edges"] @ torch.tanh(batch["edges"] @ batch["x"])).square().mean(1)


def gathered(model: Any, batch: Any) -> Tensor:
    hidden = torch.tanh(batch["x"] + batch["x"][batch["edges"]].sum(1))
    return model(hidden + hidden[batch["edges"]].sum(1)).square().mean(1)


def across(model: Any, batch: Any) -> Tensor:
    one, other = batch["edges"]
    return (model(batch["x"][one]) - batch["x"][other][:, :3]).square().mean(1)


def graph(edges: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"x": torch.randn(ROWS, 5, dtype=D), "edges": edges}


def linear() -> nn.Module:
    return nn.Linear(5, 3).double()


DENSE, PAIRS = torch.rand(ROWS, ROWS, dtype=D), torch.arange(2 * ROWS).reshape(ROWS, 2) % ROWS
TWO_LISTS = torch.arange(30).reshape(2, 15) % ROWS

REFERRING: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Any], Tensor], Any, dict[str, Any], str]] = {
    "offsets": (Bag, bagged, words(30, torch.arange(0, 24, 2)), {}, r"'offsets' .* looks like offsets"),
    "offsets of words that go whole": (
        Bag,
        bagged,
        words(30, torch.arange(0, 24, 2)),
        {"whole": ("words",)},
        r"'offsets' .* looks like offsets",
    ),
    "an adjacency matrix": (
        linear,
        convolved,
        graph(torch.rand(ROWS, ROWS, dtype=D)),
        {},
        r"'edges' .* both dimensions",
    ),
    "a sparse one": (
        linear,
        convolved,
        graph(DENSE.to_sparse()),
        {},
        r"'edges' .* both dimensions",
    ),
    "edges as places": (
        linear,
        gathered,
        graph(PAIRS),
        {},
        r"places of 12 rows",
    ),
    "edges of another length": (
        linear,
        gathered,
        graph(TWO_LISTS),
        {},
        "places of 12 rows",
    ),
}


@pytest.mark.parametrize("name", REFERRING)
def test_what_refers_to_rows_by_their_place_is_named(name: str) -> None:
    make, loss_fn, batch, options, words = REFERRING[name]
    with pytest.raises((RuntimeError, LookupError, ValueError)) as caught:
        wb.backward(make(), loss_fn, batch, 4, **options)
    said = " ".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert "wb.Window([...])" in said and "collate=" in said
    assert re.search(words, said), said


def test_graphs_that_are_complete_in_themselves_are_right_as_a_window() -> None:
    graphs = [graph(torch.rand(ROWS, ROWS, dtype=D)), graph(torch.rand(ROWS, ROWS, dtype=D))]
    model, everything = (
        linear(),
        {
            "x": torch.cat([each["x"] for each in graphs]),
            "edges": torch.block_diag(*(each["edges"] for each in graphs)),
        },
    )
    reference = whole_batch(model, lambda m, b: convolved(m, b).mean(), everything)
    wb.backward(model, convolved, wb.Window(graphs))
    assert_same_gradient(model, reference)
    model.zero_grad()
    for rows in (slice(0, 6), slice(6, 12)):  # what is left of the graphs where they are cut
        left = {"x": everything["x"][rows], "edges": everything["edges"][rows, rows]}
        (convolved(model, left).mean() / 2).backward()
    assert_differs(model, reference)


@pytest.mark.parametrize("name", REFERRING)
def test_a_check_names_it_too(name: str) -> None:
    make, loss_fn, batch, options, words = REFERRING[name]
    try:
        said = str(wb.check(make(), loss_fn, batch, 4, **options))
    except wb.WholeBatchError as error:
        said = str(error)
    assert re.search(words, said), said


def test_labels_of_rows_that_fit_are_no_places() -> None:
    batch = {"x": torch.randn(ROWS, 5, dtype=D), "y": torch.arange(ROWS) // 4}
    assert wb.backward(linear(), lambda m, b: F.cross_entropy(m(b["x"]), b["y"], reduction="none"), batch, 4).rows == 12


def test_sequences_one_behind_the_other_and_rows_behind_time_are_named() -> None:
    lengths = torch.tensor([3, 1, 2, 5])
    flat = {"x": torch.zeros(4, 2), "lengths": lengths, "targets": torch.zeros(11, dtype=torch.long)}
    with pytest.raises(wb.SplitError, match=r"'lengths' .* adds up to 11.*collate="):
        wb.backward(linear(), gathered, flat, 2)
    with pytest.raises(wb.SplitError, match=r"'x' \(7, 4, 5\) has 4 on its second dimension.*transpose\(0, 1\)"):
        wb.backward(linear(), gathered, {"x": torch.zeros(7, 4, 5), "y": torch.zeros(4)}, 2)
    samples = [(torch.zeros(3, 4), {"boxes": torch.zeros(boxes, 4)}) for boxes in (1, 2, 3)]
    with pytest.raises(wb.SplitError, match=r"one entry a row.*collate="):
        wb.backward(linear(), gathered, tuple(zip(*samples, strict=True)), 2)
