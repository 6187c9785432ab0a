"""Lists of tensors: what can only be fields is cut, what may be one entry a row is refused with the call for each."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import wholebatch as wb
from tests.oracle import assert_differs, assert_same_gradient, gradients_of, whole_batch
from wholebatch.batch.tree import rows_of, take
from wholebatch.errors import SplitError


class Sample(NamedTuple):
    x: torch.Tensor
    label: int


@dataclasses.dataclass
class Scene:
    image: torch.Tensor
    name: str


def tensors(count: int, *shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [(torch.arange(torch.Size(shape).numel()) % 7).reshape(shape).to(dtype) for _ in range(count)]


FIELDS: dict[str, tuple[Any, int]] = {
    "inputs and targets of one shape": (tensors(2, 8, 1), 8),
    "inputs and targets on a line": (tensors(2, 8), 8),
    "images to images": (tensors(2, 8, 3, 4, 4), 8),
    "token ids and their labels": (tensors(2, 8, 5, dtype=torch.long), 8),
    "a triplet": (tensors(3, 8, 5), 8),
    "images and classes": ([torch.zeros(8, 3, 4, 4), torch.zeros(8, dtype=torch.long)], 8),
    "as many as rows, but of two kinds": ([torch.zeros(2, 3), torch.zeros(2, dtype=torch.long)], 2),
    "four of different kinds": ([*tensors(3, 8, 5, dtype=torch.long), torch.zeros(8)], 8),
    "observations, actions and rewards": ([*tensors(2, 8, 5), *tensors(2, 8, 1), torch.zeros(8, 2)], 8),
    "a single one": (tensors(1, 8, 5), 8),
    "eight crops beside labels": ([tensors(8, 6, 3, 4, 4), torch.zeros(6, dtype=torch.long)], 6),
    "hidden states beside labels": ({"states": tuple(tensors(5, 8, 4)), "labels": torch.zeros(8)}, 8),
    "keys and values beside ids": ({"past": [tuple(tensors(2, 6, 2, 3, 4))] * 5, "ids": torch.zeros(6, 1)}, 6),
    "questions and answers": ([{"ids": torch.zeros(8, 5), "mask": torch.zeros(8, 5)} for _ in range(2)], 8),
    "alike, but said to be fields": (tuple(tensors(4, 8)), 8),
    "as many as rows, but said to be fields": (tuple(tensors(4, 4, 2)), 4),
    "alike, with names": ({"a": dict(zip("abcd", tensors(4, 4, 2), strict=True))}, 4),
}


@pytest.mark.parametrize("name", FIELDS)
def test_fields_are_cut_at_their_rows(name: str) -> None:
    batch, rows = FIELDS[name]
    assert rows_of(batch) == rows
    assert rows_of(take(batch, slice(0, rows - 1))) == rows - 1


def test_the_list_of_a_loaders_default_collate_function_is_fields() -> None:
    torch.manual_seed(901)
    model, x = nn.Linear(1, 1).double(), torch.randn(11, 1).double()
    loader = DataLoader(TensorDataset(x, x.square()), batch_size=11)
    (batch,) = loader
    assert type(batch) is list

    def errors(model: nn.Module, pair: Any) -> torch.Tensor:
        return F.mse_loss(model(pair[0]), pair[1], reduction="none")

    reference = whole_batch(model, lambda model, pair: errors(model, pair).mean(), batch)
    for size in (1, 2, 3, 11):
        model.zero_grad()
        wb.backward(model, errors, batch, micro_batch_size=size)
        assert_same_gradient(model, reference)


def test_a_last_short_batch_that_is_not_cut_needs_no_word() -> None:
    for rows in (1, 2, 3):
        batch = tensors(2, rows, 1)
        assert rows_of(batch) == rows
        assert take(batch, range(rows)) is batch


SAMPLES: dict[str, Any] = {
    "sequences": tensors(4, 8, dtype=torch.long),
    "as many sequences as tokens": tensors(8, 8, dtype=torch.long),
    "images": tensors(6, 3, 8, 8),
    "images of different sizes": [torch.zeros(3, n, n) for n in (8, 9, 10, 11)],
    "fewer channels than images": tensors(3, 2, 8, 8),
    "features": [{"x": torch.zeros(8), "z": torch.zeros(8)} for _ in range(5)],
    "features with labels": [{"x": torch.zeros(8), "y": torch.tensor(1)} for _ in range(2)],
    "pairs": [(torch.zeros(8), 1) for _ in range(3)],
    "a tuple of pairs": tuple((torch.zeros(8), torch.tensor(1)) for _ in range(3)),
    "named pairs": [Sample(torch.zeros(8), 1) for _ in range(2)],
    "records": [Scene(torch.zeros(3, 8, 8), "a") for _ in range(2)],
    "candidates beside as many queries": {"query": torch.zeros(4, 4), "candidates": tensors(4, 4, 4)},
    "recordings beside as many targets": {"wave": [torch.zeros(2, n) for n in (40, 64)], "y": torch.zeros(2)},
    "images beside as many targets": {"image": tuple(torch.zeros(3, n, n) for n in (8, 9, 10)), "y": torch.zeros(3)},
    "images and boxes": (tuple(tensors(2, 3, 8, 8)), tuple({"boxes": torch.zeros(3, 4)} for _ in range(2))),
    "micro-batches": [{"x": torch.zeros(4, 3), "y": torch.zeros(4)} for _ in range(4)],
}


@pytest.mark.parametrize("name", SAMPLES)
def test_what_may_be_one_entry_a_row_is_never_cut_through(name: str) -> None:
    model = nn.Linear(8, 1)
    with pytest.raises(SplitError, match=r"(?s)collate=.*wb\.Window\(batch\)"):
        wb.backward(model, lambda model, micro_batch: pytest.fail("it was cut"), SAMPLES[name], micro_batch_size=1)
    assert set(gradients_of(model).values()) == {None}


def images(same: bool) -> list[torch.Tensor]:
    return [torch.zeros(3, 6 if same else 6 + n % 3, 7) for n in range(7)]


DETECTION: dict[str, Any] = {
    "lists": (
        images(False),
        [{"labels": torch.arange(1 + n % 3), "boxes": torch.zeros(1 + n % 3, 4)} for n in range(7)],
    ),
    "names": {"images": images(False), "targets": [{"labels": torch.arange(1 + n % 3)} for n in range(7)]},
    "zipped, one label each": (tuple(images(True)), tuple({"labels": torch.tensor(n)} for n in range(7))),
    "images beside labels": {"image": images(True), "label": torch.zeros(7)},
}


@pytest.mark.parametrize("name", DETECTION)
def test_images_beside_their_targets_are_told_of_samples_and_of_nothing_else(name: str) -> None:
    with pytest.raises(SplitError, match=r"one entry a row\. Give the samples themselves.*collate=") as caught:
        rows_of(DETECTION[name])
    assert "whole=" not in str(caught.value) and "offsets" not in str(caught.value)


def test_images_beside_their_targets_are_exact_as_samples() -> None:
    torch.manual_seed(903)
    model = nn.Conv2d(3, 2, 3).double()
    pictures = [image.double() + torch.randn(3, *image.shape[1:]).double() for image in images(False)]
    samples = list(zip(pictures, DETECTION["lists"][1], strict=True))

    def boxes(model: nn.Module, batch: Any) -> torch.Tensor:
        seen = [(model(image).sum((1, 2))[0], target["labels"]) for image, target in zip(*batch, strict=True)]
        return torch.cat([(value - labels).square() for value, labels in seen])

    together = tuple(zip(*samples, strict=True))
    reference = whole_batch(model, lambda model, batch: boxes(model, batch).mean(), together)
    wb.backward(model, boxes, samples, 3, collate=lambda rows: tuple(zip(*rows, strict=True)))
    assert_same_gradient(model, reference)
    model.zero_grad()
    for start in (0, 3, 6):
        rows = samples[start : start + 3]
        (boxes(model, tuple(zip(*rows, strict=True))).mean() / 3).backward()
    assert_differs(model, reference)


def test_a_list_that_may_be_either_is_told_both_calls() -> None:
    with pytest.raises(SplitError) as caught:
        rows_of(tensors(4, 8, dtype=torch.long))
    assert str(caught.value) == (
        "The batch is a list of 4 Tensors of shape (8,): these may be 4 fields of 8 rows each, or 4 rows, and cut in "
        "the wrong way they would give another gradient without a word. Say which. Fields: tuple(batch). Rows: give "
        "samples with collate=, which makes a micro-batch of some of them (collate=list keeps a list); a list of "
        "micro-batches as wb.Window(batch)."
    )


def test_a_list_inside_of_a_batch_is_given_names_or_goes_whole() -> None:
    batch = {"x": torch.zeros(4, 2), "tables": tensors(4, 4, 3)}
    with pytest.raises(SplitError, match=r"'tables' is a list of 4 .*\{'a': ..., 'b': ...\}, .*whole=\('tables',\)"):
        take(batch, slice(0, 2))
    whole = take(batch, slice(0, 2), whole=("tables",))["tables"]
    assert [id(table) for table in whole] == [id(table) for table in batch["tables"]]
    named = {**batch, "tables": dict(enumerate(batch["tables"]))}
    assert take(named, slice(0, 2))["tables"][3].shape == (2, 3)


def test_sequences_given_as_samples_are_exact_and_cut_through_they_are_not() -> None:
    """Four sequences of eight tokens: cut through, 16 predictions of 28 would be left."""
    torch.manual_seed(902)
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9)).double()
    samples = [torch.randint(0, 9, (8,)) for _ in range(4)]

    def next_token(model: nn.Module, rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([F.cross_entropy(model(row[:-1]), row[1:], reduction="none") for row in rows])

    reference = whole_batch(model, lambda model, rows: next_token(model, rows).mean(), samples)
    with pytest.raises(SplitError):
        wb.backward(model, next_token, samples, micro_batch_size=2)
    wb.backward(model, next_token, samples, micro_batch_size=2, collate=list)
    assert_same_gradient(model, reference)

    model.zero_grad()
    for start in range(0, 8, 2):
        (next_token(model, [row[start : start + 2] for row in samples]).sum() / 16).backward()
    assert_differs(model, reference)


def test_samples_in_one_micro_batch_or_in_a_window_run_as_they_are() -> None:
    samples = tensors(4, 8, dtype=torch.long)
    model = nn.Embedding(9, 1)
    said: list[Any] = []

    def loss(model: nn.Module, rows: Any) -> torch.Tensor:
        said.append(rows)
        return torch.cat([model(row)[:, 0] for row in rows])

    wb.backward(model, loss, samples)
    wb.backward(model, loss, wb.Window([samples[:2], samples[2:]]))
    assert said[0] is samples
    assert [len(rows) for rows in said[-2:]] == [2, 2]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors take no notes")
@pytest.mark.parametrize("kind", ["class weights", "a bug of another kind"])
def test_an_error_of_torchs_names_the_leaf_that_should_have_gone_whole(kind: str) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Any:
        logits = model(batch["x"] if kind == "class weights" else batch["x"][:, 1:])
        values = F.cross_entropy(logits, batch["y"], batch["w"], reduction="none")
        return wb.mean(values / batch["w"][batch["y"]], batch["w"][batch["y"]])

    batch = {"x": torch.randn(10, 4), "y": torch.arange(10), "w": torch.rand(10) + 0.5}
    model = nn.Linear(4, 10)
    with pytest.raises(RuntimeError) as caught:
        wb.backward(model, loss_fn, batch, 4)
    notes = getattr(caught.value, "__notes__", [])
    assert [("whole=('w',)" in note) for note in notes] == ([True] if kind == "class weights" else [])
    assert model.weight.grad is None
    if kind == "class weights":
        assert wb.check(model, loss_fn, batch, 4, whole=("w",)).ok
