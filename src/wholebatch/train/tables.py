"""Read rows to classify: a CSV of numbers, a folder of images, or scikit-learn's digits."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from wholebatch.train.data import read_lines
from wholebatch.train.errors import DataError
from wholebatch.train.extras import require

LARGEST = torch.finfo(torch.float32).max
IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")


class LabelledRow(NamedTuple):
    """One row to classify: its features, a vector or an image (channels, height, width), and its class number."""

    features: Tensor
    label: int


@dataclass(frozen=True)
class Table:
    """Rows of one shape, and the names of their classes in the order of their numbers."""

    samples: list[LabelledRow]
    classes: list[str]


def read_table(path: Path | None, label: str, image_size: int) -> Table:
    """Read a CSV file, a folder of images, or without a path scikit-learn's digits.

    Args:
        path: a `.csv` with one header line, or a folder with one subfolder of images a class.
        label: the column of the CSV that holds the class; all others are numbers.
        image_size: height and width that images are brought to.

    Raises:
        DataError: for anything in the files that cannot be used; names the file and the line.
    """
    if path is None:
        return read_digits()
    table = read_images(path, image_size) if path.is_dir() else read_csv(path, label)
    if len(table.classes) < 2:
        raise DataError(f"{path} holds one class only, {table.classes[0]!r}: there is nothing to tell apart.")
    return table


def read_csv(path: Path, label: str) -> Table:
    """Read numbers and a class from each line of a CSV.

    Raises:
        DataError: for a missing label column, a line with too many or too few fields, or text in a number column.
    """
    lines = read_lines(path)
    _, header = next(lines)
    names = _names(header, label, path)
    rows = [_numbers_and_class(line, names, label, f"{path}, line {number}") for number, line in lines]
    if not rows or len(names) < 2:
        raise DataError(f"{path} holds {len(rows)} rows of {len(names) - 1} features. Give at least one of each.")
    return _table(rows)


def read_images(folder: Path, size: int) -> Table:
    """Read images, the name of whose subfolder is their class, as red, green and blue from -1 to 1.

    Raises:
        DataError: if there is no image in a subfolder, or one cannot be read.
    """
    image = require("PIL.Image", "examples", "Reading images")
    paths = [path for path in sorted(folder.glob("*/*")) if path.suffix.lower() in IMAGES]
    if not paths:
        example = folder / "cat" / "1.png"
        raise DataError(f"{folder} holds no images in subfolders. Give one subfolder a class, such as {example}.")
    rows = []
    for path in paths:
        try:
            with image.open(path) as file:
                pixels = file.convert("RGB").resize((size, size)).tobytes()
        except (OSError, ValueError, SyntaxError) as error:  # pillow raises each of these for a broken image
            raise DataError(f"{path} is not an image that can be read: {error}.") from None
        # A bytearray, because torch warns of memory that cannot be written.
        flat = torch.frombuffer(bytearray(pixels), dtype=torch.uint8)
        rows.append((flat.view(size, size, 3).permute(2, 0, 1).float() / 127.5 - 1, path.parent.name))
    return _table(rows)


def read_digits() -> Table:
    """Return scikit-learn's 1,797 handwritten digits as images (1, 8, 8) from -1 to 1."""
    digits = require("sklearn.datasets", "examples", "Classifying the built-in digits").load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
    return _table([(image, str(label)) for image, label in zip(images, digits.target, strict=True)])


def standardise(train: Sequence[LabelledRow], rows: Sequence[LabelledRow]) -> list[LabelledRow]:
    """Give each feature of vectors mean 0 and deviation 1 over the training rows; images stay as they are.

    Raises:
        DataError: for a feature whose values are too large to be added up in float32.
    """
    if not rows or rows[0].features.dim() != 1:
        return list(rows)
    features = torch.stack([sample.features for sample in train])
    mean, deviation = features.mean(0), features.std(0, correction=0).clamp(min=1e-6)
    scaled = [LabelledRow((sample.features - mean) / deviation, sample.label) for sample in rows]
    beyond = (~torch.stack([sample.features for sample in scaled]).isfinite().all(0)).nonzero().flatten().tolist()
    if beyond:
        largest = float(features[:, beyond[0]].abs().max())
        raise DataError(
            f"Number column {beyond[0] + 1} holds values up to {largest:.3g}, whose sum or distance is beyond float32 "
            f"({LARGEST:.2g}). Scale the column, or take its logarithm."
        )
    return scaled


def content(sample: LabelledRow) -> bytes:
    """Return what decides on which side of the split a row falls."""
    return sample.features.numpy().tobytes()


def _table(rows: Sequence[tuple[Tensor, str]]) -> Table:
    classes = sorted({name for _, name in rows})
    number = {name: index for index, name in enumerate(classes)}
    return Table([LabelledRow(features, number[name]) for features, name in rows], classes)


def _names(header: str, label: str, path: Path) -> list[str]:
    names = _fields(header, f"{path}, line 1")
    if label not in names:
        present = ", ".join(map(repr, names))
        raise DataError(f"{path}, line 1: there is no column '{label}', only {present}. Name the class: --label NAME.")
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise DataError(f"{path}, line 1: the column '{twice[0]}' comes twice. Give every column its own name.")
    return names


def _numbers_and_class(line: str, names: Sequence[str], label: str, where: str) -> tuple[Tensor, str]:
    values = _fields(line, where)
    if len(values) != len(names):
        raise DataError(f"{where}: {len(values)} fields where the header has {len(names)}.")
    row = dict(zip(names, values, strict=True))
    kind = row.pop(label)
    return torch.tensor([_number(value, where, name) for name, value in row.items()]), kind


def _fields(line: str, where: str) -> list[str]:
    try:
        return [field.strip() for field in next(csv.reader([line]))]
    except csv.Error as error:
        raise DataError(
            f"{where}: the line is no CSV: {error}. A field of numbers is short: look for a quote that is not closed, "
            "or a line that ends in a carriage return alone."
        ) from None


def _number(value: str, where: str, column: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        shown = value if len(value) <= 60 else f"{value[:57]}..."
        raise DataError(f"{where}: column '{column}' holds {shown!r}, which is no number. Mend or remove the line.")
    if abs(number) > LARGEST:
        raise DataError(
            f"{where}: column '{column}' holds {value}, and float32 ends at {LARGEST:.2g}. Scale the column, or take "
            "its logarithm."
        )
    return number
