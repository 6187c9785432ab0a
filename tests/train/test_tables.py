"""Rows to classify from CSV files and images, and every mistake with its file and line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from wholebatch.train import DataError
from wholebatch.train.tables import LabelledRow, read_csv, read_digits, read_images, read_table, standardise


def csv(folder: Path, text: str) -> Path:
    path = folder / "rows.csv"
    path.write_text(text)
    return path


def test_a_csv_gives_numbers_and_classes_in_the_order_of_their_names(tmp_path: Path) -> None:
    table = read_csv(csv(tmp_path, 'width,kind,height\n1,"b, wide",2\n\n3.5e1, a ,-4\n'), "kind")
    assert table.classes == ["a", "b, wide"]
    assert [(sample.features.tolist(), sample.label) for sample in table.samples] == [([1, 2], 1), ([35, -4], 0)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "rows.csv is empty"),
        ("a,label\n", "rows.csv holds 0 rows of 1 features"),
        ("label\nx\n", "rows.csv holds 1 rows of 0 features"),
        ("a,b\n1,2\n", "rows.csv, line 1: there is no column 'label', only 'a', 'b'"),
        ("a,label\n1,x\ntall,y\n", "rows.csv, line 3: column 'a' holds 'tall', which is no number"),
        ("a,label\n1,x\n\n,y\n", "rows.csv, line 4: column 'a' holds '', which is no number"),
        ("a,label\nnan,x\n", "rows.csv, line 2: column 'a' holds 'nan', which is no number"),
        ("a,label\n1,x,2\n", "rows.csv, line 2: 3 fields where the header has 2"),
        ("a,label\n1,x\n2,x\n", "rows.csv holds one class only, 'x'"),
        ("a,label\n1,x\n" + '"' + "2" * 200_000 + ",y\n", "rows.csv, line 3: the line is no CSV: field larger than"),
        ("a,label\n1,x\n1e200,y\n", "rows.csv, line 3: column 'a' holds 1e200, and float32 ends at 3.4e+38"),
        ("a,label\n1,x\n-1e39,y\n", "rows.csv, line 3: column 'a' holds -1e39, and float32 ends"),
        ("a,label\n1,x\n" + "y" * 500 + ",y\n", "holds '" + "y" * 57 + "...', which is no number"),
    ],
)
def test_a_mistake_in_a_csv_is_named_with_its_line(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(DataError) as refused:
        read_table(csv(tmp_path, text), "label", image_size=4)
    assert expected in str(refused.value)


def test_images_are_read_by_the_name_of_their_folder(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for kind, colour in {"red": (255, 0, 0), "blue": (0, 0, 255)}.items():
        (tmp_path / kind).mkdir()
        image.new("RGB", (6, 5), colour).save(tmp_path / kind / "one.png")
    (tmp_path / "red" / "notes.txt").write_text("no image")
    table = read_images(tmp_path, size=4)
    assert table.classes == ["blue", "red"]
    blue, red = (sample.features for sample in table.samples)
    assert red.shape == (3, 4, 4)
    assert torch.equal(red[:, 0, 0], torch.tensor([1.0, -1.0, -1.0]))
    assert torch.equal(blue[:, 3, 3], torch.tensor([-1.0, -1.0, 1.0]))


def test_pixels_keep_their_places(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "a").mkdir()
    picture = image.new("RGB", (3, 3))
    picture.putpixel((2, 0), (255, 255, 255))
    picture.save(tmp_path / "a" / "one.png")
    (sample,) = read_images(tmp_path, size=3).samples
    assert sample.features[0].argmax() == 2


def test_a_broken_image_and_a_folder_without_images_are_named(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    with pytest.raises(DataError, match="holds no images in subfolders"):
        read_images(tmp_path, size=4)
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"cat/1\.png is not an image that can be read"):
        read_images(tmp_path, size=4)


def test_digits_are_small_images_of_ten_classes() -> None:
    pytest.importorskip("sklearn")
    table = read_digits()
    assert len(table.samples) == 1797
    assert table.classes == [str(digit) for digit in range(10)]
    assert table.samples[0].features.shape == (1, 8, 8)
    assert -1 <= table.samples[0].features.min() < table.samples[0].features.max() <= 1


def test_features_are_standardised_by_the_training_rows_alone() -> None:
    train = [LabelledRow(torch.tensor([value, 7.0]), 0) for value in (1.0, 3.0)]
    held = [LabelledRow(torch.tensor([5.0, 7.0]), 0)]
    assert [sample.features.tolist() for sample in standardise(train, train)] == [[-1, 0], [1, 0]]
    assert standardise(train, held)[0].features.tolist() == [3, 0]


def test_values_that_cannot_be_added_up_in_float32_are_refused_and_not_turned_into_nan() -> None:
    rows = [LabelledRow(torch.tensor([1.0, value]), 0) for value in (3e38, 2.9e38)]
    with pytest.raises(DataError, match=r"Number column 2 holds values up to 3e\+38, whose sum or distance is beyond"):
        standardise(rows, rows)
    apart = [LabelledRow(torch.tensor([1.0, value]), 0) for value in (-1e38, 1e38)]
    assert [sample.features.tolist() for sample in standardise(apart, apart)] == [[0, -1], [0, 1]]
