"""Trimming padded batches: the same values at every real position, and hands off whatever is no padding."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import wholebatch as wb
from tests.oracle import assert_differs, assert_same_gradient, whole_batch
from wholebatch.batch.padding import Padding
from wholebatch.batch.tree import BatchTree
from wholebatch.batch.window import micro_batches_of
from wholebatch.errors import SplitError


class Attention(nn.Module):
    """One layer of masked attention over embedded tokens, with learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(11, 8), nn.Embedding(32, 8)
        self.mix, self.head = nn.Linear(8, 24), nn.Linear(8, 11)
        self.double()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor | None = None) -> Tensor:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None]
        hidden = self.tokens(input_ids) + self.places(position_ids)
        query, key, value = self.mix(hidden).chunk(3, -1)
        seen = attention_mask[:, None, :].bool() | torch.eye(input_ids.shape[1], dtype=torch.bool)
        return self.head(F.scaled_dot_product_attention(query, key, value, attn_mask=seen))


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> wb.LossSum:
    inputs = {key: batch[key] for key in batch if key != "labels"}
    return wb.losses.token_classification(model(**inputs), batch["labels"])


def reference_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    inputs = {key: batch[key] for key in batch if key != "labels"}
    return F.cross_entropy(model(**inputs).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


def padded(lengths: list[int], left: bool = False, positions: bool = False, width: int = 0) -> dict[str, Tensor]:
    width = max(*lengths, width)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    mask = mask.flip(1) if left else mask
    ids = torch.randint(1, 11, mask.shape)
    batch = {"input_ids": ids * mask, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}
    if positions:
        batch["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    return batch


LENGTHS = st.lists(st.integers(1, 20), min_size=1, max_size=9)


@settings(max_examples=40)
@given(LENGTHS, st.integers(1, 80), st.booleans(), st.integers(0, 24))
def test_trimming_leaves_the_gradient_of_the_whole_batch(
    lengths: list[int], budget: int, left: bool, width: int
) -> None:
    model, batch = Attention(), padded(lengths, left, positions=True, width=width)
    result = wb.backward(model, loss_fn, batch, wb.Tokens(budget, overhead=0))
    assert result.rows == len(lengths)
    assert_same_gradient(model, whole_batch(model, reference_loss, batch))


@settings(max_examples=60)
@given(LENGTHS, st.integers(1, 80), st.booleans(), st.booleans(), st.integers(0, 24))
def test_a_micro_batch_holds_every_real_token_and_is_no_wider_than_its_longest_row(
    lengths: list[int], budget: int, left: bool, positions: bool, width: int
) -> None:
    batch = padded(lengths, left, positions, width)
    tokens = 0
    for micro_batch in micro_batches_of(batch, wb.Tokens(budget)):
        cut = micro_batch.load()
        rows = batch["input_ids"][list(micro_batch.index)]
        assert {value.shape for value in cut.values()} == {(micro_batch.rows, micro_batch.longest)}
        for ours, whole in zip(cut["input_ids"], rows, strict=True):
            assert ours[ours != 0].tolist() == whole[whole != 0].tolist()
        tokens += int(cut["attention_mask"].sum())
        if positions or not left:
            assert micro_batch.longest == max(lengths[row] for row in micro_batch.index)
            assert micro_batch.size == sum(lengths[row] for row in micro_batch.index)
            assert micro_batch.rows == 1 or cut["input_ids"].numel() <= budget
    assert tokens == sum(lengths)


def test_padding_on_the_left_stays_without_positions() -> None:
    batch = padded([2, 9, 5], left=True)
    assert [micro_batch.load()["input_ids"].shape[1] for micro_batch in micro_batches_of(batch, wb.Tokens(9))] == [
        9,
        9,
        9,
    ]
    model = Attention()
    wb.backward(model, loss_fn, batch, wb.Tokens(9))
    assert_same_gradient(model, whole_batch(model, reference_loss, batch))


def test_left_padding_trimmed_without_positions_would_be_wrong() -> None:
    model, batch = Attention(), padded([2, 9, 5], left=True)
    narrow = [{key: value[row : row + 1, 9 - n :] for key, value in batch.items()} for row, n in enumerate([2, 9, 5])]
    wb.backward(model, loss_fn, wb.Window(narrow))
    assert_differs(model, whole_batch(model, reference_loss, batch))


def test_a_hole_in_the_mask_is_no_padding() -> None:
    mask = torch.tensor([[1, 0, 0, 1, 0, 0], [1, 1, 0, 0, 0, 0]])
    ids = torch.tensor([[5, 6, 7, 8, 0, 0], [1, 2, 0, 0, 0, 0]])
    padding = Padding(BatchTree({"ids": ids, "mask": mask}), "mask")
    assert (padding.lengths, padding.starts, padding.width) == ([4, 2], [0, 0], 6)


def test_a_row_without_tokens_keeps_one_position() -> None:
    batch = padded([3, 2])
    for value, filling in zip(batch.values(), (0, 0, -100), strict=True):
        value[1] = filling
    assert Padding(BatchTree(batch), "attention_mask").lengths == [3, 1]
    for value, filling in zip(batch.values(), (0, 0, -100), strict=True):
        value[0] = filling
    assert [micro_batch.load()["input_ids"].shape for micro_batch in micro_batches_of(batch, wb.Tokens(9))] == [(2, 1)]


def test_rows_without_positions_stay_together() -> None:
    empty = {"input_ids": torch.zeros(2, 0), "attention_mask": torch.zeros(2, 0)}
    assert [micro_batch.load()["input_ids"].shape for micro_batch in micro_batches_of(empty, wb.Tokens(9))] == [(2, 0)]


def test_everything_that_runs_along_the_length_is_trimmed_and_nothing_else() -> None:
    batch = {
        **padded([2, 6, 4]),
        "inputs_embeds": padded([2, 6, 4])["attention_mask"][..., None] * torch.ones(3),
        "square_mask": torch.ones(3, 6, 6),
        "head_mask": torch.ones(3, 2, 6, 6),
        "broadcast_mask": torch.ones(3, 1, 1, 6),
        "seen": torch.ones(3, 6, 6, dtype=torch.bool),
        "features": torch.zeros(3, 5),
        "text": ["a", "b", "c"],
        "table": torch.ones(9, 6),
    }
    shapes = [
        {key: tuple(value.shape) for key, value in micro_batch.load().items() if key != "text"}
        for micro_batch in micro_batches_of(batch, wb.Tokens(1), whole=("table",))
    ]
    assert [shape["input_ids"] for shape in shapes] == [(1, 6), (1, 4), (1, 2)]
    assert shapes[1] == {
        "input_ids": (1, 4), "attention_mask": (1, 4), "labels": (1, 4), "inputs_embeds": (1, 4, 3),
        "square_mask": (1, 4, 4), "head_mask": (1, 2, 4, 4), "broadcast_mask": (1, 1, 1, 4), "seen": (1, 4, 4),
        "features": (1, 5), "table": (9, 6),
    }  # fmt: skip


def test_embeddings_as_wide_as_the_rows_are_long_keep_their_width() -> None:
    batch = {**padded([2, 6]), "inputs_embeds": padded([2, 6])["attention_mask"][..., None] * torch.ones(6)}
    assert [micro_batch.load()["inputs_embeds"].shape for micro_batch in micro_batches_of(batch, wb.Tokens(6))] == [
        (1, 6, 6),
        (1, 2, 6),
    ]


def test_trimmed_tensors_are_views() -> None:
    batch = padded([2, 6, 4])
    longest = micro_batches_of(batch, wb.Tokens(1))[1].load()["input_ids"]
    assert longest.untyped_storage().data_ptr() == batch["input_ids"].untyped_storage().data_ptr()


@pytest.mark.parametrize(
    "other",
    [
        {"labels": torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4]])},  # targets of a translation, by chance as wide
        {"labels": torch.tensor([[1, 2, 0, 0], [1, 2, 3, 4]])},  # labels that count where rows are padded
        {"classes": torch.tensor([[0, 1, 0, 1], [1, 0, 0, 0]])},  # four classes, not four positions
    ],
    ids=["translation", "counted", "classes"],
)
def test_what_is_no_padding_is_never_trimmed(other: dict[str, Tensor]) -> None:
    batch = {key: value for key, value in padded([2, 4]).items() if key != "labels"} | other
    with pytest.warns(UserWarning, match=r"Nothing is trimmed: .* Name the tensors"):
        micro_batches = micro_batches_of(batch, wb.Tokens(1))
    assert [micro_batch.load()["input_ids"].shape for micro_batch in micro_batches] == [(1, 4), (1, 4)]
    for name, kept in [(("input_ids",), 4), (("input_ids", *other), 2)]:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            micro_batches = micro_batches_of(batch, wb.Tokens(1, length=name))
        shapes = [
            {key: micro_batch.load()[key].shape[1] for key in ("input_ids", *other)} for micro_batch in micro_batches
        ]
        assert shapes[-1] == {"input_ids": 2, **dict.fromkeys(other, kept)}


def test_a_loss_that_counts_padding_keeps_its_gradient() -> None:
    model, batch = Attention(), padded([2, 7, 5])
    batch["labels"] = batch["input_ids"].clone()
    with pytest.warns(UserWarning, match="'labels' is as wide as 'attention_mask'"):
        wb.backward(model, loss_fn, batch, wb.Tokens(7))
    assert_same_gradient(model, whole_batch(model, reference_loss, batch))


def test_rows_can_be_given_with_their_lengths() -> None:
    x = torch.tensor([[5, 6, 0, 0, 0], [7, 8, 9, 0, 0], [1, 0, 0, 0, 0]])
    batch = (x, torch.tensor([2.0, 3.0, 1.0]))
    micro_batches = [micro_batch.load() for micro_batch in micro_batches_of(batch, wb.Tokens(1, length="0", mask="1"))]
    assert [(micro_batch[0].tolist(), micro_batch[1].tolist()) for micro_batch in micro_batches] == [
        ([[7, 8, 9]], [3]),
        ([[5, 6]], [2]),
        ([[1]], [1]),
    ]
    tight = {"x": x[:, :3], "lengths": batch[1]}
    assert [micro_batch.longest for micro_batch in micro_batches_of(tight, wb.Tokens(1, mask="lengths"))] == [3, 2, 1]
    with pytest.raises(SplitError, match=r"Rows are 3 wide by the mask 'lengths' \(3,\), but no tensor is"):
        micro_batches_of({"x": x, "lengths": batch[1]}, wb.Tokens(1, mask="lengths"))


def test_a_named_tensor_that_goes_whole_is_trimmed_too() -> None:
    batch = {**padded([2, 4]), "position_ids": torch.arange(4)[None]}
    named = wb.Tokens(1, length=("input_ids", "labels", "position_ids"))
    shapes = [
        micro_batch.load()["position_ids"].tolist()
        for micro_batch in micro_batches_of(batch, named, whole=("position_ids",))
    ]
    assert shapes == [[[0, 1, 2, 3]], [[0, 1]]]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (
            wb.Tokens(8, mask="pad"),
            r"no \(rows, length\) mask and no \(rows,\) lengths 'pad' among 'input_ids' \(2, 4\)",
        ),
        (wb.Tokens(8, mask="square"), "no .rows, length. mask"),
        (wb.Tokens(8, length="features"), r"length= names 'features' \(2, 3\), but rows are 4 wide"),
        (wb.Tokens(8, length="nothing"), "Rows are 4 wide .* but no tensor is"),
        (wb.Tokens(8, length=len), "is for single samples, but this batch is padded already"),
        (wb.Tokens(8, packed=True), "is for single samples, but this batch is padded already"),
    ],
    ids=["no mask", "square", "width", "name", "function", "packed"],
)
def test_what_is_missing_is_named(tokens: Any, message: str) -> None:
    batch = {**padded([2, 4]), "features": torch.zeros(2, 3), "square": torch.ones(2, 4, 4)}
    with pytest.raises(SplitError, match=message):
        micro_batches_of(batch, tokens)


def with_other(key: str, other: Tensor, mask: Tensor) -> dict[str, Tensor]:
    return {
        "input_ids": torch.arange(1, 9) * mask,
        "attention_mask": mask,
        "labels": mask - 101 * (1 - mask),
        key: other,
    }


ONE_PADDED = (torch.arange(8) < torch.tensor([8, 7, 8])[:, None]).long()
UNSURE: dict[str, dict[str, Tensor]] = {
    "another sequence, one position padded": with_other("decoder_input_ids", torch.arange(24).view(3, 8), ONE_PADDED),
    "patches, one position padded": with_other("patches", torch.arange(72.0).view(3, 8, 3), ONE_PADDED),
    "weights that count in the padding": with_other("loss_weights", torch.ones(3, 8), ONE_PADDED),
    "the mask of another sequence": with_other("decoder_attention_mask", torch.ones(3, 8), ONE_PADDED),
    "classes, of which the last are rare": with_other("classes", torch.eye(3, 8), ONE_PADDED),
    "pixels": with_other("pixel_mask", torch.ones(3, 5, 8), ONE_PADDED),
    "attention to a padded position": with_other("cross_mask", torch.eye(8).repeat(3, 1, 1).flip(1), ONE_PADDED),
    "attention over another length": with_other("cross_mask", torch.ones(3, 1, 5, 8), ONE_PADDED),
}


@pytest.mark.parametrize("name", UNSURE)
def test_what_cannot_be_shown_to_be_filling_is_not_trimmed(name: str) -> None:
    with pytest.warns(UserWarning, match=r"Nothing is trimmed: .* Name the tensors"):
        micro_batches = micro_batches_of(UNSURE[name], wb.Tokens(1))
    assert [micro_batch.load()["input_ids"].shape for micro_batch in micro_batches] == [(1, 8)] * 3


def causal(mask: Tensor) -> Tensor:
    """An additive mask (rows, 1, L, L), as models make it."""
    seen = mask[:, None, None, :].bool() & torch.ones(8, 8).tril().bool()
    return torch.where(seen, 0.0, torch.finfo(torch.float32).min)


SHORT = (torch.arange(8) < torch.tensor([8, 3, 2])[:, None]).long()
SURE: dict[str, dict[str, Tensor]] = {
    "targets, filled with what stands nowhere else": with_other(
        "targets", torch.arange(1, 9) * SHORT - (1 - SHORT), SHORT
    ),
    "ids of characters": with_other("characters", torch.arange(1, 9) * SHORT, SHORT),
    "a mask of the loss": with_other("loss_mask", SHORT * torch.tensor([0, 1] * 4), SHORT),
    "an additive causal mask": with_other("causal_mask", causal(SHORT), SHORT),
    "the only sequence": {"tokens": torch.full((3, 8), 7), "attention_mask": SHORT},
}


@pytest.mark.parametrize("name", SURE)
def test_what_is_shown_to_be_filling_is_trimmed(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        micro_batches = micro_batches_of(SURE[name], wb.Tokens(1))
    assert [micro_batch.load()["attention_mask"].shape for micro_batch in micro_batches] == [(1, 8), (1, 3), (1, 2)]
