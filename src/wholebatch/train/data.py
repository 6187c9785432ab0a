"""Read texts from files, a row each, and hold some of them out.

Every error names the file, and the line where there is one.
"""

from __future__ import annotations

import hashlib
import io
import json
import reprlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from wholebatch.train.errors import DataError
from wholebatch.train.extras import require

T = TypeVar("T")

JSON_LINES = (".jsonl", ".ndjson")
TEXT_FILES = (".txt", ".text", ".md", ".rst", *JSON_LINES, ".parquet")
"""What is read from a folder; a file that is named itself may end otherwise and is then plain text."""


def read_texts(path: Path, column: str = "text", rows: str = "lines") -> list[str]:
    """Read every row of a file, or of all text files under a folder in the order of their paths.

    Args:
        path: plain text, `.jsonl`, `.parquet`, or a folder of those.
        column: which column of JSON lines or Parquet holds the text.
        rows: "lines" or "paragraphs" of plain text; blank lines are no rows.

    Raises:
        DataError: for a missing or empty file, a line that is no JSON, a missing column, or a value that is no text.
    """
    texts = [text for file in _files(path) for text in _of_file(file, column, rows)]
    if not texts:
        raise DataError(f"{path} holds no text: there is no row that is not blank.")
    return texts


def held_out(rows: Sequence[T], share: float, content: Callable[[T], bytes]) -> tuple[list[T], list[T]]:
    """Split rows into those to train on and those held out, by a hash of their content.

    The same row is always on the same side, whatever stands around it, so equal rows never sit on both.

    Returns:
        The training rows and the held-out rows, each in the order given; neither is empty.

    Raises:
        DataError: if there are fewer than two distinct rows.
    """
    places = [_place(content(row)) for row in rows]
    if len(set(places)) < 2:
        raise DataError(f"{len(rows)} rows of {len(set(places))} kind cannot be split: give at least two that differ.")
    limit, last = max(share, min(places)), max(places)  # at least one row on either side
    sides: tuple[list[T], list[T]] = ([], [])
    for row, place in zip(rows, places, strict=True):
        sides[place <= limit and place < last].append(row)
    return sides


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield number and text of each line that is not blank.

    Raises:
        DataError: for a file that is not there or empty, or bytes that are no UTF-8; names the line.
    """
    content = read_bytes(path)
    # Split at newlines only: str.splitlines would also end a row at a form feed, and lines would be miscounted.
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        try:
            text = line.decode("utf-8").rstrip("\r")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path}, line {number}: byte {line[error.start : error.start + 1]!r} is no UTF-8. Convert the file, "
                "for example with: iconv -t UTF-8."
            ) from None
        if text.strip():
            yield number, text


def read_bytes(path: Path) -> bytes:
    """Return a file's content.

    Raises:
        DataError: if it cannot be read, or is empty.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None
    if not content.strip():
        raise DataError(f"{path} is empty.")
    return content


def _place(content: bytes) -> float:
    """A number from 0 to 1 that depends on the content alone."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") / 2**64


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.rglob("*") if file.suffix.lower() in TEXT_FILES and file.is_file())
    if not found:
        raise DataError(f"{path} holds no text file. Known endings: {', '.join(TEXT_FILES)}.")
    return found


def _of_file(path: Path, column: str, rows: str) -> Iterator[str]:
    ending = path.suffix.lower()
    if ending in JSON_LINES:
        return _of_json_lines(path, column)
    if ending == ".parquet":
        return _of_parquet(path, column)
    return _paragraphs(path) if rows == "paragraphs" else (line for _, line in read_lines(path))


def _paragraphs(path: Path) -> Iterator[str]:
    """Yield runs of lines between blank lines."""
    lines: list[str] = []
    last = 0
    for number, line in read_lines(path):
        if lines and number > last + 1:
            yield "\n".join(lines)
            lines = []
        lines.append(line)
        last = number
    yield "\n".join(lines)


def _of_json_lines(path: Path, column: str) -> Iterator[str]:
    for number, line in read_lines(path):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}, line {number}: {_clipped(line)} is not JSON: {error}.") from None
        except RecursionError:
            raise DataError(f"{path}, line {number}: {_clipped(line)} is JSON nested too deeply to be read.") from None
        if not isinstance(record, dict):
            raise DataError(f"{path}, line {number}: {_clipped(line)} is no object with columns.")
        if column not in record:
            raise DataError(_no_column(f"{path}, line {number}", column, list(record)))
        if not isinstance(record[column], str):
            raise DataError(
                f"{path}, line {number}: column '{column}' holds {_clipped(record[column])}, which is no text."
            )
        yield _encodable(record[column], f"{path}, line {number}: column '{column}'")


def _encodable(text: str, where: str) -> str:
    """Return a text that has bytes; JSON can name halves of a character, which have none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise DataError(
            f"{where} holds {half}, half of a surrogate pair, which is no character. Whatever wrote the file cut a "
            "character in two: write it again, or remove the line."
        ) from None
    return text


def _of_parquet(path: Path, column: str) -> Iterator[str]:
    content = io.BytesIO(read_bytes(path))
    parquet = require("pyarrow.parquet", "parquet", "Reading Parquet")
    try:
        file: Any = parquet.ParquetFile(content)
        if column not in file.schema_arrow.names:
            raise DataError(_no_column(str(path), column, file.schema_arrow.names))
        values = file.read(columns=[column])[column].to_pylist()
    except (ValueError, OSError) as error:  # pyarrow's own errors are both
        raise error if isinstance(error, DataError) else DataError(f"{path} is not Parquet: {error}") from None
    for number, value in enumerate(values, 1):
        if not isinstance(value, str):
            raise DataError(f"{path}, row {number}: column '{column}' holds {value!r}, which is no text.")
        yield value


def _no_column(where: str, column: str, present: list[str]) -> str:
    there = ", ".join(map(repr, present)) or "none"
    return f"{where}: there is no column '{column}', only {there}. Name the one that holds the text: --column NAME."


def _clipped(value: Any) -> str:
    text = value if isinstance(value, str) else reprlib.repr(value)
    shown = text if len(text) <= 60 else f"{text[:57]}..."
    return repr(shown) if isinstance(value, str) else shown
