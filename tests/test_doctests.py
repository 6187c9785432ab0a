"""The examples in the docstrings run and show what they say."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest
import torch

import wholebatch as wb

SOURCE = Path(__file__).parents[1] / "src"
EXTRAS = {"accelerate", "lightning", "matplotlib", "pyarrow", "sklearn", "transformers", "ultralytics"}


def module_names() -> list[str]:
    files = sorted((SOURCE / "wholebatch").rglob("*.py"))
    names = [".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__") for path in files]
    return [name for name in names if name != "wholebatch.__main__"]


@pytest.mark.parametrize("name", module_names())
def test_the_examples_of_a_module_run(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as missing:
        if missing.name not in EXTRAS:
            raise
        pytest.skip(f"{name} needs {missing.name}")
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    known = {**vars(module), "torch": torch, "wb": wb}
    for example in doctest.DocTestFinder(exclude_empty=True).find(module, globs=known):
        report: list[str] = []
        doctest.DocTestRunner(optionflags=flags).run(example, out=report.append)
        assert not report, "".join(report)


def has_example(thing: object) -> bool:
    own = thing.__doc__ or ""
    return ">>>" in own or any(">>>" in (getattr(member, "__doc__", "") or "") for member in vars(thing).values())


@pytest.mark.parametrize(
    "name", ["backward", "Step", "windows", "mean", "total", "from_mean", "Mean", "once", "Tokens"]
)
def test_a_name_that_everybody_uses_has_an_example(name: str) -> None:
    assert has_example(getattr(wb, name))
