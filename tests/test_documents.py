"""Every Python block of the README and of the documentation runs, every example shows what it promises."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

import wholebatch as wb

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)
FRAMEWORKS = ("accelerate", "lightning", "transformers", "ultralytics")


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    line: int


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for found in FENCE.finditer(text):
        yield Block(found[1], found[2], text.count("\n", 0, found.start(2)))


def side(diff: str, sign: str) -> str:
    """One side of a diff: the lines that both share and those of one sign."""
    return "".join(line[1:] for line in diff.splitlines(keepends=True) if line[0] in (" ", sign))


def reader() -> dict[str, object]:
    """What somebody who reads the page already has: a model, an optimizer, a loader of whole batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    rows = [{"x": torch.randn(16, 6).double(), "y": torch.randint(3, (16,))} for _ in range(3)]
    return {
        "__name__": "reader",
        "torch": torch,
        "nn": nn,
        "F": nn.functional,
        "wb": wb,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loader": rows,
        "batch": rows[0],
        "k": 3,
    }


def run(page: Path, sign: str = "+") -> dict[str, object]:
    """Run a page from top to bottom as one program; of a diff, one side."""
    names = reader()
    for block in blocks(page):
        text = side(block.text, sign) if block.language == "diff" else block.text
        if block.language in ("python", "diff"):
            exec(compile("\n" * block.line + text, str(page), "exec"), names)
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_blocks_of_a_page_run(page: Path) -> None:
    for framework in FRAMEWORKS:
        if any(
            re.search(rf"^(from|import) (wholebatch\.integrations\.)?{framework}\b", b.text, re.M) for b in blocks(page)
        ):
            pytest.importorskip(framework)
    run(page)


def test_there_is_a_block_to_run() -> None:
    assert sum(block.language in ("python", "diff") for block in blocks(ROOT / "README.md")) >= 2


def diffs() -> list[str]:
    return [block.text for block in blocks(ROOT / "README.md") if block.language == "diff"]


def test_the_diffs_of_the_readme_take_out_more_than_they_put_in() -> None:
    assert [[sum(line.startswith(sign) for line in diff.splitlines()) for sign in "-+"] for diff in diffs()] == [
        [7, 5],
        [2, 1],
    ]


def trained(sign: str) -> dict[str, torch.Tensor]:
    """What the accumulating loop of the README makes of unlike micro-batches and a short end."""
    names = reader()
    defined = next(block.text for block in blocks(ROOT / "README.md") if block.language == "python")
    exec(compile(defined, "README.md", "exec"), names)
    batch = names["loader"][0]  # type: ignore[index]
    parts = [(0, 6), (6, 8), (8, 15), (15, 16)]
    names["loader"] = [{name: rows[a:b] for name, rows in batch.items()} for a, b in parts]
    exec(compile(side(diffs()[0], sign), "README.md", "exec"), names)
    return names["model"].state_dict()  # type: ignore[attr-defined, no-any-return]


def by_whole_batches() -> dict[str, torch.Tensor]:
    names = reader()
    model, optimizer, batch = names["model"], names["optimizer"], names["loader"][0]  # type: ignore[index]
    for a, b in [(0, 15), (15, 16)]:  # three micro-batches, and the one that is left
        optimizer.zero_grad()  # type: ignore[attr-defined]
        nn.functional.cross_entropy(model(batch["x"][a:b]), batch["y"][a:b]).backward()  # type: ignore[operator]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # type: ignore[attr-defined]
        optimizer.step()  # type: ignore[attr-defined]
    return model.state_dict()  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize(("sign", "right"), [("+", True), ("-", False)])
def test_the_changed_accumulating_loop_of_the_readme_steps_with_whole_batches(sign: str, right: bool) -> None:
    found, meant = trained(sign), by_whole_batches()
    assert all(torch.allclose(found[name], meant[name], rtol=1e-12, atol=1e-12) for name in meant) is right


def test_both_sides_of_the_readme_diff_train_the_same_parameters() -> None:
    plain, ours = (run(ROOT / "README.md", sign)["model"].state_dict() for sign in "-+")
    start = reader()["model"].state_dict()
    assert all(torch.allclose(plain[name], ours[name], rtol=1e-12, atol=1e-12) for name in start)
    assert not any(torch.equal(plain[name], start[name]) for name in start)


# The last line that an example prints; the number in it, where there is one, is an error and bounded.
EXAMPLES = {
    "loop": (r"gradient error (\S+)$", 2e-6),
    "whole_batch": (r"wholebatch +(\S+)$", 2e-6),
    "language_model": (r"gradient error (\S+)$", 2e-6),
    "several_losses": (r"gradient error (\S+)$", 2e-6),
    "contrastive": (r"gradient error (\S+)$", 2e-6),
    "batch_dice": (r"gradient error (\S+)$", 1e-5),
    "resnet_exact_batchnorm": (r"gradient error (\S+)$", 1e-5),
    "gan": (r"largest difference of the parameters (\S+)$", 1e-5),
    "accelerate_loop": (r"gradient error (\S+)$", 2e-6),
    "hf_trainer": (r"exact\(Trainer\) gradient error (\S+)$", 2e-6),
    "lightning_module": (r"gradient error (\S+)$", 2e-6),
    "yolo": (r"(\S+) steps for 36 images, none dropped$", 10),
}


def test_every_example_is_in_the_table() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_short(name: str) -> None:
    assert len((ROOT / "examples" / f"{name}.py").read_text().splitlines()) < 60


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_shows_what_it_promises(name: str) -> None:
    program = ROOT / "examples" / f"{name}.py"
    used = [
        framework for framework in FRAMEWORKS if re.search(rf"^(from|import) {framework}\b", program.read_text(), re.M)
    ]
    for framework in used:
        pytest.importorskip(framework)
    command = [sys.executable, *([] if used else ["-W", "error"]), str(program)]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert shown.returncode == 0, shown.stderr
    pattern, bound = EXAMPLES[name]
    found = re.search(pattern, shown.stdout.strip())
    assert found, shown.stdout
    assert float(found[1]) <= bound, shown.stdout


def test_the_changelog_has_a_place_for_numbers_that_change() -> None:
    assert "### Numbers change" in (ROOT / "CHANGELOG.md").read_text()


def test_the_contributing_page_is_short() -> None:
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) < 60
