"""Texts from files: every kind that is read, and every mistake with its file and line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wholebatch.train import DataError
from wholebatch.train.data import held_out, read_texts


def written(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def refusal(path: Path, **how: str) -> str:
    with pytest.raises(DataError) as refused:
        read_texts(path, **how)
    return str(refused.value)


def test_a_text_file_has_a_row_a_line_and_blank_lines_are_none(tmp_path: Path) -> None:
    path = written(tmp_path, "a.txt", "\ufefffirst\r\n\n  \n  second\nthird")
    assert read_texts(path) == ["first", "  second", "third"]


def test_a_text_file_has_a_row_a_paragraph_if_asked(tmp_path: Path) -> None:
    path = written(tmp_path, "a.txt", "\none\ntwo\n\n\nthree\n")
    assert read_texts(path, rows="paragraphs") == ["one\ntwo", "three"]


def test_a_line_ends_at_a_newline_and_nowhere_else(tmp_path: Path) -> None:
    assert read_texts(written(tmp_path, "a.txt", "one\u2028still one\x0cstill\ntwo")) == [
        "one\u2028still one\x0cstill",
        "two",
    ]


def test_json_lines_give_the_named_column(tmp_path: Path) -> None:
    path = written(tmp_path, "a.jsonl", '{"body": "one\\ntwo", "id": 1}\n\n{"body": "three"}\n')
    assert read_texts(path, column="body") == ["one\ntwo", "three"]


def test_parquet_gives_the_named_column(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"body": ["one", "two"], "id": [1, 2]}), path)
    assert read_texts(path, column="body") == ["one", "two"]
    assert "there is no column 'text', only 'body', 'id'" in refusal(path)
    assert "row 1: column 'id' holds 1, which is no text" in refusal(path, column="id")


def test_a_folder_gives_all_its_text_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    written(tmp_path, "b.md", "last")
    written(tmp_path, "a/z.jsonl", json.dumps({"text": "first"}))
    written(tmp_path, "a/picture.png", b"\x89PNG")
    assert read_texts(tmp_path) == ["first", "last"]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", "", "a.txt is empty"),
        ("a.txt", " \n\n", "a.txt is empty"),
        ("a.jsonl", "", "a.jsonl is empty"),
        ("a.parquet", "", "a.parquet is empty"),
        ("a.parquet", "no parquet", "a.parquet is not Parquet"),
        ("a.txt", b"fine\n\xff\xfe\n", "a.txt, line 2: byte b'\\xff' is no UTF-8"),
        ("a.jsonl", '{"text": "a"}\n{"text": \n', "a.jsonl, line 2: '{\"text\": ' is not JSON"),
        ("a.jsonl", '{"text": "a"}\n\n["text"]\n', "a.jsonl, line 3: '[\"text\"]' is no object with columns"),
        ("a.jsonl", '{"body": "a", "id": 1}\n', "a.jsonl, line 1: there is no column 'text', only 'body', 'id'"),
        ("a.jsonl", '{"text": 7}\n', "a.jsonl, line 1: column 'text' holds 7, which is no text"),
        ("a.jsonl", '{"text": "a"}\n{"text": "b\\ud83d"}\n', "a.jsonl, line 2: column 'text' holds \\ud83d, half of a"),
        ("a.jsonl", "[" * 200_000 + "\n", "a.jsonl, line 1: '[[[[["),
        ("a.jsonl", '{"text": ' + "[" * 200_000 + "\n", "...' is JSON nested too deeply to be read"),
        (
            "a.jsonl",
            '{"text": [' + "1, " * 10_000 + "1]}\n",
            "column 'text' holds [1, 1, 1, 1, 1, 1, ...], which is no",
        ),
    ],
)
def test_a_mistake_is_named_with_its_file_and_line(
    tmp_path: Path, name: str, content: str | bytes, expected: str
) -> None:
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    path = written(tmp_path, name, content)
    assert refusal(path).startswith(str(tmp_path))
    assert expected in refusal(path)


def test_a_pair_of_surrogates_is_one_character(tmp_path: Path) -> None:
    """The twin: JSON names characters beyond 16 bits so."""
    assert read_texts(written(tmp_path, "a.jsonl", '{"text": "\\ud83d\\ude00"}\n')) == ["\U0001f600"]


def test_a_file_that_is_not_there_and_a_folder_without_text_are_refused(tmp_path: Path) -> None:
    assert "none.txt cannot be read: No such file" in refusal(tmp_path / "none.txt")
    assert "holds no text file. Known endings: .txt" in refusal(tmp_path)


@given(st.lists(st.text(max_size=8), min_size=2, unique=True), st.floats(0.01, 0.99))
def test_a_row_is_held_out_by_its_content_alone(rows: list[str], share: float) -> None:
    train, held = held_out(rows, share, str.encode)
    assert train and held
    assert sorted(train + held) == sorted(rows)
    again = held_out([*reversed(rows), *rows], share, str.encode)
    assert set(again[0]) == set(train) and set(again[1]) == set(held)


def test_about_the_asked_share_is_held_out() -> None:
    _, held = held_out([str(number) for number in range(10_000)], 0.05, str.encode)
    assert 400 < len(held) < 600


def test_rows_that_are_all_alike_cannot_be_split() -> None:
    with pytest.raises(DataError, match="3 rows of 1 kind"):
        held_out(["a", "a", "a"], 0.5, str.encode)
