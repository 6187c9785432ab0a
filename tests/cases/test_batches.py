"""How a batch is cut: rows stay together whatever holds them, and what is no row goes whole."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import wholebatch as wb
from tests.oracle import assert_differs, assert_same_gradient, gradients_of, whole_batch


def weighted(model: nn.Module, batch: Any) -> torch.Tensor:
    """One loss a row, weighted by what the list says."""
    weights = torch.tensor([1.0 + number for number in batch["ids"]]).double()
    return model(batch["x"]).squeeze(-1).pow(2) * weights


def mixed_batch() -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(51)
    rows = torch.arange(10).double()[:, None].repeat(1, 2) / 10
    texts = [f"t{row}" * (row + 1) for row in range(10)]
    return nn.Linear(2, 1).double(), {"x": rows, "ids": list(range(10)), "text": texts}


@pytest.mark.parametrize("size", [1, 3, 4, 10, 16])
def test_tensors_and_lists_of_one_batch_are_cut_at_the_same_rows(size: int) -> None:
    """RLinf/RLinf#1500: tensors cut 4, 4, 2 and lists 4, 3, 3 give rows the labels of others."""
    model, batch = mixed_batch()
    micro_batches: list[Any] = []

    def loss(model: nn.Module, micro_batch: Any) -> torch.Tensor:
        micro_batches.append(micro_batch)
        return weighted(model, micro_batch)

    result = wb.backward(model, loss, batch, micro_batch_size=size)
    reference = whole_batch(mixed_batch()[0], lambda model, batch: weighted(model, batch).mean(), batch)
    assert_same_gradient(model, reference)
    assert [row for micro_batch in micro_batches for row in micro_batch["ids"]] == list(range(10))
    assert [text for micro_batch in micro_batches for text in micro_batch["text"]] == batch["text"]
    for micro_batch in micro_batches:
        assert micro_batch["x"][:, 0].mul(10).round().int().tolist() == list(micro_batch["ids"])
        assert 0 < len(micro_batch["ids"]) <= size
    assert result.micro_batches == len(micro_batches) == -(-10 // size)

    naive, _ = mixed_batch()
    for rows, ids in zip(batch["x"].chunk(3), ([0, 1, 2, 3], [4, 5, 6], [7, 8, 9]), strict=True):
        together = min(len(rows), len(ids))
        (weighted(naive, {"x": rows[:together], "ids": ids[:together]}).sum() / 10).backward()
    assert_differs(naive, reference)


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    y: torch.Tensor
    name: str = "ten letters"[:10]


class Named(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


def containers() -> dict[str, Any]:
    """One batch of ten rows in many clothes, with things beside it that are no rows."""
    torch.manual_seed(301)
    x, y = torch.randn(10, 3).double(), torch.randn(10).double()
    scalar, factor = torch.tensor(2.0).double(), 1.5
    return {
        "tuple": (x, y),
        "list": [x, y],
        "dict": {"x": x, "y": y},
        "ordered": collections.OrderedDict(x=x, y=y),
        "default": collections.defaultdict(list, x=x, y=y),
        "user dict": collections.UserDict(x=x, y=y),
        "named tuple": Named(x, y),
        "dataclass": Record(x, y),
        "nested": {"in": (x, {"deep": [y]}), "n": 10},
        "scalars": {"x": x, "y": y, "temperature": scalar, "factor": factor, "none": None, "flag": True},
        "a string as long as the batch": {"x": x, "y": y, "split": "ten-rows!!"},
        "bytes as long as the batch": {"x": x, "y": y, "raw": b"0123456789"},
        "a tuple of labels": {"x": x, "y": y, "names": tuple("abcdefghij")},
    }


def find(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets out of any of the clothes."""
    if isinstance(batch, (dict, collections.UserDict)):
        if "in" in batch:
            return batch["in"][0], batch["in"][1]["deep"][0]
        return batch["x"], batch["y"]
    return (batch.x, batch.y) if isinstance(batch, Record) else (batch[0], batch[1])


def row_errors(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = find(batch)
    return (model(x).squeeze(-1) - y).square()


@pytest.mark.parametrize("clothes", containers())
def test_a_batch_may_wear_any_clothes(clothes: str) -> None:
    batch = containers()[clothes]
    torch.manual_seed(302)
    model = nn.Linear(3, 1).double()
    kinds: list[Any] = []

    def loss(model: nn.Module, micro_batch: Any) -> torch.Tensor:
        kinds.append(micro_batch)
        return row_errors(model, micro_batch)

    reference = whole_batch(model, lambda model, rows: row_errors(model, rows).mean(), find(batch))
    result = wb.backward(model, loss, batch, micro_batch_size=4)
    assert_same_gradient(model, reference)
    assert (result.rows, result.micro_batches) == (10, 3)
    for micro_batch in kinds:
        assert type(micro_batch) is type(batch)
        for name in ("temperature", "factor", "none", "flag", "split", "raw"):
            if isinstance(batch, dict) and name in batch:
                assert micro_batch[name] is batch[name] or micro_batch[name] == batch[name]
        if isinstance(batch, dict) and "names" in batch:
            assert len(micro_batch["names"]) == len(micro_batch["x"])
        if isinstance(batch, Record):
            assert micro_batch.name == batch.name


def test_a_tokenizer_s_batch_is_no_single_leaf() -> None:
    """`BatchEncoding` is not a dict and keeps attributes of its own."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(303)
    model = nn.Embedding(9, 1).double()
    ids, mask = torch.randint(0, 9, (7, 4)), torch.arange(4) < torch.tensor([4, 1, 2, 3, 1, 1, 4])[:, None]
    batch = transformers.BatchEncoding({"input_ids": ids, "attention_mask": mask})

    def loss(model: nn.Module, micro_batch: Any) -> Any:
        assert isinstance(micro_batch, transformers.BatchEncoding)
        return wb.mean(model(micro_batch.input_ids).squeeze(-1).square(), weights=micro_batch.attention_mask)

    reference = whole_batch(model, lambda model, rows: model(rows[0]).squeeze(-1).square()[rows[1]].mean(), (ids, mask))
    wb.backward(model, loss, batch, micro_batch_size=3)
    assert_same_gradient(model, reference)


def test_leaves_that_only_look_like_rows_go_whole_when_they_are_named() -> None:
    """Class weights as long as the batch: cut, they would be wrong or fail."""
    torch.manual_seed(304)
    model, x, labels = nn.Linear(3, 6).double(), torch.randn(6, 3).double(), torch.randint(0, 6, (6,))
    batch = {"x": x, "labels": labels, "weights": torch.rand(6).double()}

    def loss(model: nn.Module, micro_batch: Any) -> Any:
        assert len(micro_batch["weights"]) == 6
        return wb.losses.cross_entropy(model(micro_batch["x"]), micro_batch["labels"], weight=micro_batch["weights"])

    def plain(model: nn.Module, whole: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(whole["x"]), whole["labels"], weight=whole["weights"])

    reference = whole_batch(model, plain, batch)
    wb.backward(model, loss, batch, micro_batch_size=4, whole=("weights",))
    assert_same_gradient(model, reference)


def test_leaves_that_disagree_are_refused_by_name_and_nothing_has_run() -> None:
    model = nn.Linear(3, 1).double()
    batch = {"x": torch.randn(8, 3).double(), "y": torch.randn(7).double(), "extra": list(range(8))}
    calls: list[Any] = []
    with pytest.raises(wb.SplitError, match=r"(?s)'x'.*8.*'y'.*7.*whole="):
        wb.backward(model, lambda model, micro_batch: calls.append(micro_batch), batch, micro_batch_size=4)
    assert calls == []
    assert set(gradients_of(model).values()) == {None}


def test_samples_are_collated_micro_batch_by_micro_batch() -> None:
    """A list of samples with `collate`: each micro-batch is padded to its own longest row only."""
    torch.manual_seed(305)
    model = nn.Embedding(9, 1).double()
    samples = [torch.randint(0, 9, (length,)) for length in (2, 9, 1, 3, 3, 5, 1)]
    widths: list[int] = []

    def collate(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        lengths = torch.tensor([len(row) for row in rows])
        padded = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        widths.append(padded.shape[1])
        return padded, torch.arange(padded.shape[1]) < lengths[:, None]

    def loss(model: nn.Module, micro_batch: Any) -> Any:
        return wb.mean(model(micro_batch[0]).squeeze(-1).square(), weights=micro_batch[1])

    reference = whole_batch(model, lambda model, rows: model(torch.cat(rows)).square().mean(), samples)
    result = wb.backward(model, loss, samples, micro_batch_size=2, collate=collate, verify="never")
    assert_same_gradient(model, reference)
    assert (widths, result.rows) == ([9, 3, 5, 1], 7)


@pytest.mark.parametrize("budget", [9, 16, 64])
def test_a_token_budget_cuts_where_it_likes_and_changes_nothing(budget: int) -> None:
    torch.manual_seed(306)
    model = nn.Embedding(9, 1).double()
    lengths = torch.tensor([2, 8, 1, 3, 3, 5, 1, 7, 2])
    mask = torch.arange(8) < lengths[:, None]
    ids = torch.randint(1, 9, (9, 8)).masked_fill(~mask, 0)
    batch = {"input_ids": ids, "attention_mask": mask.long(), "row": torch.arange(9)}
    rows: list[int] = []

    def loss(model: nn.Module, micro_batch: Any) -> Any:
        assert micro_batch["input_ids"].numel() <= budget
        rows.extend(micro_batch["row"].tolist())
        return wb.mean(model(micro_batch["input_ids"]).squeeze(-1).square(), weights=micro_batch["attention_mask"])

    reference = whole_batch(model, lambda model, rows: model(rows[0])[rows[1]].square().mean(), (ids, mask))
    wb.backward(model, loss, batch, micro_batch_size=wb.Tokens(budget))
    assert_same_gradient(model, reference)
    assert sorted(rows) == list(range(9))


def test_a_batch_without_rows_is_refused() -> None:
    with pytest.raises(wb.SplitError):
        wb.backward(nn.Linear(3, 1), lambda model, micro_batch: None, {"name": "x", "n": 3}, micro_batch_size=2)


def test_the_batch_itself_is_left_alone() -> None:
    model, batch = mixed_batch()
    before = batch["x"].clone(), list(batch["ids"]), list(batch["text"])
    wb.backward(model, weighted, batch, micro_batch_size=3)
    assert torch.equal(batch["x"], before[0])
    assert (batch["ids"], batch["text"]) == before[1:]
    assert not batch["x"].requires_grad
