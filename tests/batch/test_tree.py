"""Taking batches apart and putting them together: every kind of nest, and refusal where rows are not certain."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import types
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence, unpack_sequence
from torch.utils.data import DataLoader

from wholebatch.batch.tree import join, move, rows_of, take
from wholebatch.errors import SplitError


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    scale: float = 2.0
    seen: int = dataclasses.field(default=0, init=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: Any


@dataclasses.dataclass
class Counted:
    x: Any
    made: int = 0

    def __post_init__(self) -> None:
        self.made += 1


class Named(collections.OrderedDict):
    pass


def same(left: Any, right: Any) -> bool:
    """Equal in types, structure and values."""
    if type(left) is not type(right):
        return False
    if isinstance(left, (torch.Tensor, np.ndarray)):
        return left.shape == right.shape and left.dtype == right.dtype and bool((left == right).all())
    if isinstance(left, collections.abc.Mapping):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if dataclasses.is_dataclass(left):
        fields = [field.name for field in dataclasses.fields(left)]
        return all(same(getattr(left, name), getattr(right, name)) for name in fields)
    return bool(left == right)


def tensors(rows: int) -> st.SearchStrategy[torch.Tensor]:
    shapes = st.lists(st.integers(0, 3), max_size=2)
    return shapes.map(lambda shape: torch.arange(rows * int(np.prod(shape))).reshape(rows, *shape))


def per_row(rows: int) -> st.SearchStrategy[Any]:
    texts = st.lists(st.text(max_size=3), min_size=rows, max_size=rows)
    return st.one_of(
        tensors(rows), tensors(rows).map(lambda t: t.numpy()), texts, texts.map(tuple), st.just(list(range(rows)))
    )


WHOLE = st.one_of(st.none(), st.text(max_size=3), st.floats(allow_nan=False), st.just(torch.tensor(3.0)), st.booleans())


def trees(rows: int) -> st.SearchStrategy[Any]:
    """Structures of structures; a tuple or list of fields holds a tensor and something else: it is no list of rows."""
    leaves = st.one_of(per_row(rows), WHOLE)

    def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        fields = st.tuples(tensors(rows), inner, inner, st.none())
        return st.one_of(
            st.dictionaries(st.sampled_from("abc"), inner, min_size=1),
            fields,
            fields.map(list),
            st.builds(Pair, inner, inner),
            st.builds(Frozen, inner),
            st.builds(Slotted, inner),
            inner.map(lambda value: Named(a=value)),
            inner.map(lambda value: collections.UserDict(a=value)),
        )

    return st.tuples(tensors(rows), st.recursive(leaves, containers, max_leaves=6))


@given(st.data(), st.integers(1, 6))
def test_cutting_and_joining_is_the_identity(data: st.DataObject, rows: int) -> None:
    batch = data.draw(trees(rows))
    cuts = sorted(data.draw(st.sets(st.integers(1, rows - 1)))) if rows > 1 else []
    ends = list(itertools.pairwise([0, *cuts, rows]))
    micro_batches = [take(batch, slice(start, end)) for start, end in ends]
    assert [rows_of(micro_batch) for micro_batch in micro_batches] == [end - start for start, end in ends]
    assert same(join(micro_batches), batch)


@given(st.data(), st.integers(1, 6))
def test_rows_are_taken_in_the_order_asked_for(data: st.DataObject, rows: int) -> None:
    batch = data.draw(trees(rows))
    index = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=8))
    assert same(take(batch, index), join([take(batch, slice(row, row + 1)) for row in index]))


def test_a_slice_is_a_view_and_what_has_no_rows_is_the_same_object() -> None:
    x, table = torch.zeros(4, 2), object()
    micro_batch = take({"x": x, "table": table, "deep": {"temperature": torch.tensor(1.0)}}, [1, 2])
    assert micro_batch["x"].data_ptr() == x[1:].data_ptr()
    assert micro_batch["table"] is table


def test_all_rows_are_the_batch_itself() -> None:
    batch = {"x": torch.zeros(4, 2), "name": list("abcd")}
    assert take(batch, slice(0, 4)) is batch
    assert take(batch, range(4)) is batch


def test_the_gradient_of_an_input_goes_through_the_cut() -> None:
    x = torch.ones(4, 2, requires_grad=True)
    take({"x": x}, [0, 3])["x"].sum().backward()
    assert x.grad is not None
    assert x.grad[:, 0].tolist() == [1, 0, 0, 1]


def test_types_are_kept_with_all_they_hold() -> None:
    default = collections.defaultdict(list, x=torch.arange(3))
    micro_batch = take((default, types.MappingProxyType({"x": torch.arange(3)}), Counted(torch.arange(3))), slice(1, 3))
    assert micro_batch[0].default_factory is list
    assert list(default["x"]) == [0, 1, 2], "the batch itself is left alone"
    assert isinstance(micro_batch[1], types.MappingProxyType)
    assert (micro_batch[2].x.tolist(), micro_batch[2].made) == ([1, 2], 1), "no constructor runs a second time"


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (["a", "b", "c"], ["a", "b"]),
        ([[1, 2], [3], [4, 5]], [[1, 2], [3]]),
        ([{"text": "a"}, {"text": "b"}, {"text": "c"}], [{"text": "a"}, {"text": "b"}]),
        ((["a", "b", "c"], [0, 1, 0]), (["a", "b"], [0, 1])),
        ({"text": ["a", "b", "c"], "k": 3}, {"text": ["a", "b"], "k": 3}),
        ({"pairs": (("a", 1), ("b", 2), ("c", 3))}, {"pairs": (("a", 1), ("b", 2))}),
        (range(3), [0, 1]),
        ({"d": collections.deque("abc")}, {"d": ["a", "b"]}),
    ],
    ids=["texts", "ids", "records", "fields", "mapping", "pairs", "range", "deque"],
)
def test_sequences_without_tensors_are_rows(batch: Any, expected: Any) -> None:
    assert rows_of(batch) == 3
    assert take(batch, slice(0, 2)) == expected


def test_a_list_of_tensors_is_a_structure() -> None:
    first, second = take([torch.arange(4), torch.zeros(4, 2)], slice(0, 2))
    assert (len(first), second.shape) == (2, (2, 2))


def test_texts_numbers_and_sizes_are_no_rows() -> None:
    batch = {"x": torch.zeros(2, 3), "name": "ab", "raw": b"ab", "size": torch.Size([5, 5, 5]), "n": 2}
    assert rows_of(batch) == 2
    micro_batch = take(batch, slice(0, 1))
    assert {key: micro_batch[key] for key in ("name", "raw", "size", "n")} == {
        k: batch[k] for k in ("name", "raw", "size", "n")
    }


def test_a_disagreement_lists_every_leaf_and_the_way_out() -> None:
    with pytest.raises(SplitError) as caught:
        rows_of({"inputs": torch.zeros(32, 128), "labels": torch.zeros(31, 128), "ids": list(range(32))})
    assert str(caught.value) == (
        "The batch's tensors disagree on the number of rows: 'inputs' (32, 128) has 32, 'labels' (31, 128) has 31, "
        "'ids' list (32,) has 32. Give every tensor the same first dimension, or name those that go whole: "
        "whole=('labels',)."
    )


@pytest.mark.parametrize("short", [["a"] * 9, ("a", "b"), np.zeros(9), {"deep": torch.zeros(1, 10)}])
def test_nothing_that_has_a_length_goes_whole_unasked(short: Any) -> None:
    with pytest.raises(SplitError, match="disagree"):
        take({"x": torch.zeros(10, 2), "short": short}, slice(0, 2))


def test_what_is_named_goes_whole() -> None:
    batch = {"x": torch.zeros(4, 2), "meta": {"table": torch.arange(7), "names": ["a", "b"]}, "y": torch.zeros(4)}
    micro_batch = take(batch, slice(0, 2), whole=("meta.table", "meta.names"))
    assert micro_batch["meta"]["table"] is batch["meta"]["table"]
    assert same(micro_batch, take(batch, slice(0, 2), whole=("meta",)))
    assert rows_of(batch, whole="meta") == 4
    assert same(join([micro_batch, take(batch, slice(2, 4), whole=("meta",))], whole=("meta",)), batch)


def test_naming_what_is_not_there_is_an_error() -> None:
    with pytest.raises(SplitError, match=r"whole='lables' names nothing .* The batch has 'x', 'labels'"):
        rows_of({"x": torch.zeros(4), "labels": torch.zeros(3)}, whole=("lables",))


@pytest.mark.parametrize("batch", [{}, "text", None, 3.0, {"a": "text", "b": torch.tensor(1.0)}, ("a", "b"), object()])
def test_a_batch_without_rows_is_an_error(batch: Any) -> None:
    with pytest.raises(SplitError, match="Nothing in the batch has rows"):
        rows_of(batch)


@pytest.mark.parametrize("batch", [iter([torch.zeros(2)]), DataLoader([1.0, 2.0])], ids=["a generator", "a loader"])
def test_what_yields_batches_is_no_batch_and_told_how_it_is_read(batch: Any) -> None:
    with pytest.raises(SplitError, match=r"has rows: .*for batch in loader.*wb\.windows\(loader, 8\).*collate="):
        rows_of(batch)


def test_a_list_of_targets_is_refused_and_collate_named() -> None:
    targets = [{"boxes": torch.zeros(3, 4)}, {"boxes": torch.zeros(1, 4)}]
    with pytest.raises(SplitError, match=r"'targets.0.boxes' \(3, 4\) has 3.* collate="):
        rows_of({"images": torch.zeros(2, 3, 8, 8), "targets": targets})


def test_a_long_disagreement_is_cut_short() -> None:
    with pytest.raises(SplitError, match="and 24 more"):
        rows_of({f"x{n}": torch.zeros(1 + n % 2) for n in range(40)})


def test_a_batch_of_no_rows_is_cut_to_nothing() -> None:
    batch = {"x": torch.zeros(0, 3), "name": []}
    assert rows_of(batch) == 0
    assert same(take(batch, []), batch)


def test_sparse_nested_and_packed_rows_are_cut_like_others() -> None:
    packed = pack_sequence([torch.ones(2), 2 * torch.ones(3), 3 * torch.ones(1)], enforce_sorted=False)
    nested = torch.nested.as_nested_tensor([torch.ones(2, 2), torch.zeros(3, 2), torch.ones(1, 2)], layout=torch.jagged)
    batch = {"sparse": torch.eye(3).to_sparse(), "packed": packed, "nested": nested}
    assert rows_of(batch) == 3
    micro_batch = take(batch, [2, 1])
    assert micro_batch["sparse"].to_dense().tolist() == [[0, 0, 1], [0, 1, 0]]
    assert [row.tolist() for row in unpack_sequence(micro_batch["packed"])] == [[3], [2, 2, 2]]
    assert [len(row) for row in micro_batch["nested"].unbind()] == [1, 3]
    whole = join([take(batch, slice(0, 1)), take(batch, slice(1, 3))])
    assert [len(row) for row in unpack_sequence(whole["packed"])] == [2, 3, 1]
    assert [len(row) for row in whole["nested"].unbind()] == [2, 3, 1]


def test_rows_of_a_data_frame_are_rows() -> None:
    class Located:
        def __init__(self, rows: list[int]) -> None:
            self.rows, self.shape, self.iloc = rows, (len(rows), 1), rows

        def __len__(self) -> int:
            return len(self.rows)

        def __getitem__(self, key: Any) -> Any:
            raise KeyError(f"no column {key}")

    Located.shape = property(lambda self: (len(self.rows), 1), lambda self, value: None)  # type: ignore[assignment]
    assert take({"x": torch.zeros(3), "frame": Located([5, 6, 7])}, slice(1, 3))["frame"] == [6, 7]


def test_micro_batches_of_other_structure_are_not_joined() -> None:
    with pytest.raises(SplitError, match=r"Micro-batch 1 has the leaves \['y'\], micro-batch 0 has \['x'\]"):
        join([{"x": torch.zeros(1)}, {"y": torch.zeros(1)}])
    with pytest.raises(SplitError, match="0 micro-batches"):
        join([])


def test_keys_that_look_alike_are_kept_apart() -> None:
    batch = {1: torch.arange(2), "1": torch.arange(2) + 10}
    assert same(join([take(batch, slice(0, 1)), take(batch, slice(1, 2))]), batch)


def test_moving_nothing_returns_the_batch_itself() -> None:
    batch = {"x": torch.zeros(2), "more": [torch.zeros(1), "text"], "record": Frozen(torch.zeros(1))}
    assert move(batch, "cpu") is batch
    assert move(batch, None) is batch


def test_moving_reaches_every_tensor_and_leaves_the_batch_where_it_is() -> None:
    samples = [(torch.zeros(2), 3), (torch.zeros(5), 4)]
    packed = pack_sequence([torch.zeros(2)])
    batch = {"x": torch.zeros(2), "samples": samples, "record": Frozen(torch.zeros(1)), "table": {"name": "text"}}
    moved = move(batch, "meta")
    assert {moved["x"].device.type, moved["samples"][1][0].device.type, moved["record"].x.device.type} == {"meta"}
    assert (moved["samples"][1][1], moved["table"], batch["x"].device.type) == (4, {"name": "text"}, "cpu")
    assert move(packed, "cpu").data.device.type == "cpu"


def test_an_object_with_a_way_to_move_moves_as_a_copy() -> None:
    class Graph:
        device = "cpu"

        def to(self, device: torch.device) -> Graph:
            self.device = device.type
            return self

    graph = Graph()
    assert move({"graph": graph}, "meta")["graph"].device == "meta"
    assert graph.device == "cpu"


def test_a_module_in_a_batch_is_not_moved_behind_the_users_back() -> None:
    teacher = torch.nn.Linear(1, 1)
    assert move({"teacher": teacher, "x": torch.zeros(1)}, "meta")["teacher"] is teacher
    assert teacher.weight.device.type == "cpu"


def test_the_batches_of_hugging_face_are_cut_inside() -> None:
    transformers = pytest.importorskip("transformers")
    encoding = transformers.BatchEncoding({"input_ids": torch.arange(8).reshape(4, 2), "length": [2, 2, 2, 2]})
    micro_batch = take(encoding, [3, 0])
    assert type(micro_batch) is transformers.BatchEncoding
    assert micro_batch.input_ids.tolist() == [[6, 7], [0, 1]]
    assert encoding.input_ids.shape == (4, 2)
    output = transformers.modeling_outputs.CausalLMOutput(logits=torch.zeros(4, 2), hidden_states=(torch.zeros(4, 3),))
    half = take(output, slice(0, 2))
    assert type(half) is type(output)
    assert (half.logits.shape, half.hidden_states[0].shape, half.loss) == ((2, 2), (2, 3), None)
    assert same(join([half, take(output, slice(2, 4))]).logits, output.logits)


def test_the_words_of_other_rows_are_not_kept_with_a_micro_batch() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="a")
    encoding = fast(["a b", "b", "a"], padding=True, return_tensors="pt")
    assert encoding.word_ids(0) == [0, 1]
    with pytest.raises(ValueError, match="word_ids"):
        take(encoding, [1]).word_ids(0)
    assert take(encoding, [1])["input_ids"].tolist() == [[1, 0]]


def test_a_list_of_micro_batches_that_is_no_window_is_told_so() -> None:
    uneven = [torch.zeros(4, 3), torch.zeros(2, 3)]
    with pytest.raises(SplitError, match=r"wb\.Window\(batch\)"):
        rows_of(uneven)
    with pytest.raises(SplitError) as error:
        rows_of(tuple(uneven))
    assert "Window" not in str(error.value)


def test_boxes_of_all_images_are_told_that_they_belong_to_images() -> None:
    boxes = {"cls": torch.zeros(7, 1), "bboxes": torch.zeros(7, 4), "batch_idx": torch.zeros(7)}
    with pytest.raises(SplitError, match=r"'batch_idx' says which image.*collate=") as error:
        rows_of({"img": torch.zeros(4, 3, 8, 8), **boxes})
    assert "whole=" not in str(error.value)
