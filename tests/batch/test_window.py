"""Windows from a loader, and micro-batches from a batch: every row exactly once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import wholebatch as wb
from tests.oracle import assert_differs, assert_same_gradient, whole_batch
from wholebatch.batch.tree import take
from wholebatch.batch.window import MicroBatch, micro_batches_of
from wholebatch.errors import SplitError


def loaded(micro_batches: list[MicroBatch]) -> list[Any]:
    return [micro_batch.load() for micro_batch in micro_batches]


def samples_of(*lengths: int) -> list[torch.Tensor]:
    return [torch.full((length,), row + 1) for row, length in enumerate(lengths)]


def collate(samples: list[torch.Tensor]) -> torch.Tensor:
    return pad_sequence(samples, batch_first=True)


@given(st.integers(0, 30), st.integers(1, 7))
def test_windows_hold_every_micro_batch_once_in_order(number: int, k: int) -> None:
    gathered = list(wb.windows(iter(range(number)), k))
    assert list(itertools.chain.from_iterable(gathered)) == list(range(number))
    assert all(type(window) is wb.Window for window in gathered)
    assert all(len(window) == k for window in gathered[:-1])
    assert all(1 <= len(window) <= k for window in gathered[-1:])


@given(st.integers(0, 30), st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_a_ramp_loses_no_micro_batch(number: int, schedule: list[int]) -> None:
    gathered = list(wb.windows(range(number), schedule))
    by_function = list(wb.windows(range(number), lambda window: schedule[min(window, len(schedule) - 1)]))
    assert gathered == by_function
    assert list(itertools.chain.from_iterable(gathered)) == list(range(number))
    expected = [*schedule, *itertools.repeat(schedule[-1], number)]
    assert all(len(window) == size for window, size in zip(gathered[:-1], expected, strict=False))


def test_nothing_beyond_a_window_is_read_before_it_is_used() -> None:
    read = []

    def loader() -> Iterator[int]:
        for number in range(5):
            read.append(number)
            yield number

    gathered = wb.windows(loader(), 2)
    assert read == []
    assert (next(gathered), read) == ([0, 1], [0, 1])
    assert (next(gathered), read) == ([2, 3], [0, 1, 2, 3])
    assert (list(gathered), read) == ([[4]], [0, 1, 2, 3, 4])


def test_a_schedule_is_asked_only_for_windows_that_exist() -> None:
    assert list(wb.windows(range(5), [2, 3].__getitem__)) == [[0, 1], [2, 3, 4]]


def test_a_loader_without_length_serves_every_epoch() -> None:
    loader = DataLoader(torch.arange(10), batch_size=2)
    for _ in range(2):
        assert [len(window) for window in wb.windows(loader, 3)] == [3, 2]


@pytest.mark.parametrize("k", [0, -1, [], [2, 0]], ids=str)
def test_a_window_holds_at_least_one_micro_batch(k: Any) -> None:
    with pytest.raises(ValueError, match=r"at least (1|one)"):
        wb.windows(range(3), k)


@pytest.mark.parametrize("k", [2.0, True, "2", None, [2, 1.5]], ids=str)
def test_the_size_of_a_window_is_a_whole_number(k: Any) -> None:
    with pytest.raises(TypeError, match="must be a whole number"):
        wb.windows(range(3), k)


def test_a_schedule_that_says_nonsense_is_named_with_its_window() -> None:
    gathered = wb.windows(range(9), lambda window: 2 - window)
    assert [next(gathered), next(gathered)] == [[0, 1], [2]]
    with pytest.raises(ValueError, match="window 2 is 0"):
        next(gathered)


def test_a_part_of_a_window_is_a_window() -> None:
    window = wb.Window(["a", "b", "c"])
    assert type(window[1:]) is wb.Window
    assert (window[1:], window[0], repr(window)) == (["b", "c"], "a", "Window of 3")


@given(st.integers(0, 20), st.integers(1, 7))
def test_every_row_goes_to_exactly_one_micro_batch_in_order(rows: int, size: int) -> None:
    micro_batches = micro_batches_of({"x": torch.arange(rows), "name": [str(row) for row in range(rows)]}, size)
    assert [row for micro_batch in loaded(micro_batches) for row in micro_batch["x"].tolist()] == list(range(rows))
    assert [row for micro_batch in loaded(micro_batches) for row in micro_batch["name"]] == [
        str(row) for row in range(rows)
    ]
    assert [micro_batch.rows for micro_batch in micro_batches] == [size] * (rows // size) + [rows % size] * (
        rows % size > 0
    )
    assert [micro_batch.size for micro_batch in micro_batches] == [micro_batch.rows for micro_batch in micro_batches]


def test_a_batch_without_size_is_one_micro_batch_and_itself() -> None:
    batch = {"x": torch.zeros(6, 2)}
    (micro_batch,) = micro_batches_of(batch)
    assert micro_batch.load() is batch
    assert (micro_batch.rows, micro_batch.size, repr(micro_batch)) == (6, 6.0, "Micro-batch(rows=6, size=6)")


@pytest.mark.parametrize("batch", [object(), "text", {"x": torch.zeros(3), "boxes": torch.zeros(7, 4)}, None])
def test_what_has_no_certain_rows_can_run_whole_and_counts_as_one(batch: Any) -> None:
    (micro_batch,) = micro_batches_of(batch)
    assert micro_batch.load() is batch
    assert (micro_batch.rows, micro_batch.halves()) == (1, None)
    with pytest.raises(SplitError):
        micro_batches_of(batch, 2)


def test_a_window_runs_as_it_is() -> None:
    window = wb.Window([{"x": torch.zeros(3, 1)}, {"x": torch.zeros(2, 1)}])
    micro_batches = micro_batches_of(window)
    assert [micro_batch.load() is given for micro_batch, given in zip(micro_batches, window, strict=True)] == [
        True,
        True,
    ]
    assert [micro_batch.rows for micro_batch in micro_batches] == [3, 2]


def test_a_window_with_a_size_is_cut_further_and_never_joined() -> None:
    window = wb.Window([torch.arange(3), torch.arange(3, 5)])
    assert [micro_batch.tolist() for micro_batch in loaded(micro_batches_of(window, 2))] == [[0, 1], [2], [3, 4]]
    assert [micro_batch.tolist() for micro_batch in loaded(micro_batches_of(window, 100))] == [[0, 1, 2], [3, 4]]


def test_an_uncountable_micro_batch_makes_every_one_count_the_same() -> None:
    window = wb.Window([{"x": torch.zeros(16)}, {"x": torch.zeros(16), "boxes": torch.zeros(7, 4)}])
    assert [micro_batch.size for micro_batch in micro_batches_of(window)] == [1, 1]


def test_an_empty_window_and_a_batch_of_no_rows_have_no_micro_batches() -> None:
    assert micro_batches_of(wb.Window([])) == []
    for size in (None, 2, wb.Tokens(8)):
        assert micro_batches_of({"input_ids": torch.zeros(0, 4), "attention_mask": torch.zeros(0, 4)}, size) == []
        assert micro_batches_of([], size, collate=collate) == []


def test_samples_are_cut_first_and_each_micro_batch_collated_by_itself() -> None:
    micro_batches = micro_batches_of(samples_of(2, 5, 1, 1), 2, collate=collate)
    assert [micro_batch.tolist() for micro_batch in loaded(micro_batches)] == [
        [[1, 1, 0, 0, 0], [2, 2, 2, 2, 2]],
        [[3], [4]],
    ]
    (whole,) = micro_batches_of(samples_of(2, 5), collate=collate)
    assert whole.load().shape == (2, 5)


def test_a_window_of_samples_is_collated_micro_batch_by_micro_batch() -> None:
    window = wb.Window([samples_of(2, 5, 1), samples_of(3)])
    assert [micro_batch.load().shape for micro_batch in micro_batches_of(window, collate=collate)] == [(3, 5), (1, 3)]
    assert [micro_batch.load().shape for micro_batch in micro_batches_of(window, 2, collate=collate)] == [
        (2, 5),
        (1, 1),
        (1, 3),
    ]


@given(st.lists(st.integers(1, 9), max_size=12), st.integers(1, 40), st.booleans())
def test_under_tokens_every_sample_is_collated_exactly_once(lengths: list[int], budget: int, packed: bool) -> None:
    together = torch.cat if packed else collate
    micro_batches = micro_batches_of(samples_of(*lengths), wb.Tokens(budget, packed=packed), collate=together)
    seen = sorted(int(row) for micro_batch in micro_batches for row in micro_batch.load().unique() if row)
    assert seen == list(range(1, len(lengths) + 1))
    assert sum(micro_batch.size for micro_batch in micro_batches) == sum(lengths)
    for micro_batch in micro_batches:
        assert micro_batch.load().numel() == micro_batch.held
        assert micro_batch.rows == 1 or micro_batch.held <= budget


def test_packed_micro_batches_are_filled_to_the_budget() -> None:
    lengths = [1] * 50 + [10] * 5
    micro_batches = micro_batches_of(samples_of(*lengths), wb.Tokens(25, packed=True), collate=torch.cat)
    assert [micro_batch.held for micro_batch in micro_batches] == [25, 25, 25, 25]
    assert len(micro_batches_of(samples_of(*lengths), wb.Tokens(25), collate=collate)) > 4


def test_texts_without_collate_are_cut_by_a_given_length() -> None:
    texts = ["a", "bbbbbbbb", "cc", "dddddddd"]
    assert loaded(micro_batches_of(texts, wb.Tokens(20, length=len, overhead=0))) == [
        ["bbbbbbbb", "dddddddd"],
        ["cc"],
        ["a"],
    ]


def test_auto_cuts_by_what_it_found() -> None:
    auto = wb.Auto(4)
    assert [micro_batch.rows for micro_batch in micro_batches_of(torch.zeros(6), auto)] == [4, 2]
    auto.shrink()
    assert [micro_batch.rows for micro_batch in micro_batches_of(torch.zeros(6), auto)] == [2, 2, 2]
    samples = samples_of(8, 8, 8, 8)
    by_tokens = wb.Auto(wb.Tokens(32))
    assert [micro_batch.rows for micro_batch in micro_batches_of(samples, by_tokens, collate=collate)] == [4]
    by_tokens.shrink()
    assert [micro_batch.rows for micro_batch in micro_batches_of(samples, by_tokens, collate=collate)] == [2, 2]


@given(st.integers(1, 9))
def test_halving_down_to_rows_keeps_each_row_once_and_in_order(rows: int) -> None:
    def split(micro_batch: MicroBatch) -> list[MicroBatch]:
        halves = micro_batch.halves()
        return [micro_batch] if halves is None else [*split(halves[0]), *split(halves[1])]

    (micro_batch,) = micro_batches_of(torch.arange(rows), rows)
    assert [row.tolist() for row in loaded(split(micro_batch))] == [[row] for row in range(rows)]


def test_the_halves_of_a_trimmed_micro_batch_are_trimmed_again() -> None:
    mask = (torch.arange(6) < torch.tensor([2, 6, 3])[:, None]).long()
    (micro_batch,) = micro_batches_of({"input_ids": mask, "attention_mask": mask}, wb.Tokens(100, overhead=1e6))
    halves = micro_batch.halves()
    assert halves is not None
    assert [half.load()["input_ids"].shape for half in halves] == [(2, 6), (1, 3)]
    assert [half.size for half in halves] == [8, 3]


@pytest.mark.parametrize("size", [4.0, True, "auto", [4], torch.tensor(4.0)], ids=str)
def test_a_size_is_a_whole_number(size: Any) -> None:
    with pytest.raises(TypeError, match=r"micro_batch_size is .*micro_batch_size=4, or wb.Tokens\(8192\)"):
        micro_batches_of(torch.zeros(8), size)


@pytest.mark.parametrize("size", [0, -4])
def test_a_size_is_positive(size: int) -> None:
    with pytest.raises(ValueError, match=f"micro_batch_size is {size}, but must be at least 1"):
        micro_batches_of(torch.zeros(8), size)


def test_whole_numbers_of_other_kinds_are_sizes() -> None:
    assert [micro_batch.rows for micro_batch in micro_batches_of(torch.zeros(6), np.int64(4))] == [4, 2]
    assert [micro_batch.rows for micro_batch in micro_batches_of(torch.zeros(6), torch.tensor(4))] == [4, 2]


@pytest.mark.parametrize(
    "batch", [{"x": torch.zeros(4)}, torch.zeros(4), "text", iter([1, 2])], ids=lambda b: type(b).__name__
)
def test_collate_wants_a_list_of_samples(batch: Any) -> None:
    with pytest.raises(SplitError, match=r"the batch is a .*DataLoader\(..., collate_fn=list\)"):
        micro_batches_of(batch, 2, collate=collate)


def test_leaves_are_not_named_where_samples_are_cut() -> None:
    with pytest.raises(SplitError, match="Leave one out"):
        micro_batches_of(samples_of(1, 2), 1, collate=collate, whole=("labels",))


def test_a_name_that_is_not_there_is_an_error_without_a_size_too() -> None:
    with pytest.raises(SplitError, match="names nothing"):
        micro_batches_of({"x": torch.zeros(4)}, whole=("y",))


def test_what_is_done_to_a_micro_batch_does_not_reach_the_next_time_it_is_loaded() -> None:
    first, _ = micro_batches_of({"x": torch.arange(4), "y": torch.arange(4)}, 2)
    first.load().pop("y")
    assert set(first.load()) == {"x", "y"}


@pytest.mark.parametrize("rows", [range(-2, 0), [-2, -1]])
def test_row_numbers_below_zero_are_no_empty_micro_batch(rows: Any) -> None:
    assert take(["a", "b", "c"], rows) == ["b", "c"]
    with pytest.raises(IndexError):
        take(torch.arange(3), rows)


def test_one_batch_is_no_window() -> None:
    with pytest.raises(TypeError, match=r"dict with 'x'.*micro_batch_size=4.*wb\.Window\(\[batch\]\)"):
        wb.Window({"x": torch.zeros(4)})


def test_a_number_in_the_loaders_place_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match=r"wb\.windows\(loader, 8\)"):
        wb.windows(8, [1, 2])  # type: ignore[arg-type, call-overload]


GROWING = pytest.param(lambda window: window + 1, id="growing")


@pytest.mark.parametrize("k", [1, 2, 3, 5, pytest.param([1, 2, 4], id="listed"), GROWING])
@pytest.mark.parametrize("last", ["apply", "drop"])
@pytest.mark.parametrize("number", [0, 1, 6, 7])
def test_the_number_of_windows_is_known_where_that_of_micro_batches_is(number: int, last: Any, k: Any) -> None:
    assert len(wb.windows(range(number), k, last)) == len(list(wb.windows(iter(range(number)), k, last)))
    with pytest.raises(TypeError, match="no len"):
        len(wb.windows(iter(range(number)), k))


def test_a_short_last_window_is_dropped_only_if_that_is_said() -> None:
    assert list(wb.windows(range(5), 2, last="drop")) == [[0, 1], [2, 3]]
    assert list(wb.windows(range(4), 2, last="drop")) == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match=r"last='ignore' .*\"apply\", or \"drop\""):
        wb.windows(range(5), 2, last="ignore")  # type: ignore[arg-type]


def test_none_in_a_window_that_is_cut_says_what_none_means() -> None:
    window = wb.Window([{"x": torch.zeros(4, 1)}, None])
    with pytest.raises(SplitError, match=r"it is None, which only a loss function returns.*if batch is not None"):
        micro_batches_of(window, 2)
    assert micro_batches_of(window)[1].load() is None


@pytest.mark.parametrize(
    "given",
    [
        {"graph": object(), "y": torch.zeros(0)},
        {"path": "image.png", "boxes": torch.zeros(0, 4)},
        {"images": torch.zeros(4, 3, 8, 8), "boxes": torch.zeros(0, 4)},
        {"image": (object(), "image.png"), "targets": []},
        [{"boxes": torch.zeros(0, 4)}, object()],
    ],
    ids=["graph", "path", "images", "nothing countable", "list"],
)
def test_a_micro_batch_without_countable_rows_counts_and_runs(given: Any) -> None:
    window = wb.Window([{"x": torch.zeros(3, 1)}, given])
    assert [micro_batch.load() for micro_batch in micro_batches_of(window)][1] is given
    model, ran = torch.nn.Linear(1, 1), []

    def loss(model: torch.nn.Module, micro_batch: Any) -> wb.LossSum:
        ran.append(micro_batch)
        return wb.mean(model(torch.ones(2, 1)))

    assert wb.backward(model, loss, window).micro_batches == 2
    assert ran[-1] is given


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_nested_tensors_are_cut_by_the_lengths_that_they_know(layout: Any, packed: bool) -> None:
    torch.manual_seed(941)
    lengths = [3, 7, 2, 5, 1, 4]
    rows = [torch.randn(length, 5).double() for length in lengths]
    batch = {"x": torch.nested.nested_tensor(rows, layout=layout), "id": torch.arange(6)}
    size = wb.Tokens(9, packed=packed, overhead=0)
    micro_batches = micro_batches_of(batch, size)
    assert sorted(row for micro_batch in micro_batches for row in micro_batch.load()["id"].tolist()) == list(range(6))
    assert all(micro_batch.held <= 9 for micro_batch in micro_batches)
    assert [len(row) for row in micro_batches[0].load()["x"].unbind()] == [
        lengths[row] for row in micro_batches[0].index
    ]

    def loss(model: torch.nn.Module, micro_batch: Any) -> wb.LossSum:
        return wb.mean(torch.cat([model(row).square() for row in micro_batch["x"].unbind()]))

    model = torch.nn.Linear(5, 1).double()
    reference = whole_batch(model, lambda model, rows: model(torch.cat(rows)).square().mean(), rows)
    wb.backward(model, loss, batch, size)
    assert_same_gradient(model, reference)

    model.zero_grad()
    for micro_batch in micro_batches:
        (loss(model, micro_batch.load()).value / len(micro_batches)).backward()
    assert_differs(model, reference)
    with pytest.raises(SplitError, match="is for single samples"):
        micro_batches_of(batch, wb.Tokens(9, length=len))
