"""The docstrings of the standard library: found, kept, and found again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from wholebatch.train import DataError, corpus


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "library"
    (folder / "package" / "test").mkdir(parents=True)
    (folder / "one.py").write_text(
        '"""A module."""\nclass C:\n    """A class."""\n    def f(self):\n        """A method."""\n'
    )
    (folder / "package" / "two.py").write_text('async def g():\n    "A coroutine."\n    def h():\n        "Inside."\n')
    (folder / "package" / "again.py").write_text('"""A module."""\n')
    (folder / "package" / "test" / "three.py").write_text('"""Left out."""\n')
    (folder / "broken.py").write_text("def (:\n")
    return folder


def test_every_docstring_is_found_once_and_tests_are_left_out(sources: Path) -> None:
    assert corpus.harvest(sources) == ["A class.", "A coroutine.", "A method.", "A module.", "Inside."]


def test_a_library_without_sources_is_refused_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--data FILE_OR_FOLDER"):
        corpus.harvest(tmp_path)


def test_the_harvest_is_kept_and_read_the_next_time(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(corpus.sysconfig, "get_paths", lambda: {"stdlib": str(sources)})
    first = corpus.docstrings()
    monkeypatch.setattr(corpus, "harvest", lambda folder: pytest.fail("harvested twice"))
    assert corpus.docstrings() == first


@pytest.mark.parametrize("damage", ["", "{", "7"], ids=["emptied", "cut off", "something else"])
def test_a_damaged_cache_is_written_anew(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(corpus.sysconfig, "get_paths", lambda: {"stdlib": str(sources)})
    first = corpus.docstrings()
    (cache,) = corpus.cache_folder().iterdir()
    cache.write_text(damage)
    assert corpus.docstrings() == first
    assert json.loads(cache.read_text()) == first


def test_without_a_place_for_a_cache_the_harvest_goes_on(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(corpus.sysconfig, "get_paths", lambda: {"stdlib": str(sources)})
    assert len(corpus.docstrings()) == 5


def test_this_python_has_thousands_of_docstrings_of_very_uneven_length() -> None:
    found = corpus.harvest(Path(corpus.sysconfig.get_paths()["stdlib"]))
    lengths = sorted(map(len, found))
    assert len(found) == len(set(found)) > 3000
    assert lengths[-1] > 10 * lengths[len(lengths) // 2]
