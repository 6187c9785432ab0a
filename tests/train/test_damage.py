"""Every file of a run folder, damaged in every way: the run goes on rightly, or says in one line what is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from wholebatch.cli import main
from wholebatch.train import run as running
from wholebatch.train.signals import Request

FLAGS = ["--no-proof", "--width=4", "--layers=1", "--heads=1", "--context=16", "--batch-size=4", "--steps=4"]
FLAGS += ["--save-every=2", "--warmup=1", "--device=cpu", "--held-out=.3", "--max-tokens=100"]

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def middle(path: Path) -> None:
    """Change one bit in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def edge(path: Path, place: int) -> None:
    """Change the first or the last byte to one that is no UTF-8."""
    content = bytearray(path.read_bytes())
    content[place] = 0xFF
    path.write_bytes(content)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "emptied": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "cut at the end": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "first byte": lambda path: edge(path, 0),
    "middle bit": middle,
    "last byte": lambda path: edge(path, -1),
    "deleted": Path.unlink,
    "a folder": folder,
}
PLAIN = ("config.yaml", "metrics.jsonl", "checkpoint/checkpoint.json", "checkpoint/model.safetensors")
FILES = {
    "ddp": (*PLAIN, "checkpoint/state.pt"),
    "fsdp": ("checkpoint/checkpoint.json", "checkpoint/state.pt", "checkpoint/.metadata", "checkpoint/__0_0.distcp"),
}


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def begun(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after three of its four steps, and beside it the same run at its end."""
    path = tmp_path_factory.mktemp(request.param)
    (path / "texts.txt").write_text("\n".join("word " * (1 + i % 3) + str(i) for i in range(20)))
    flags = [*FLAGS, "--data", str(path / "texts.txt"), "--parallel", request.param, "--out", str(path / "run")]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Request, "asked", property(lambda self: len(lines(path / "run")) == 3))
        assert main(["train", *flags]) == 128 + running.SIGTERM
    shutil.copytree(path / "run", path / "whole")
    assert main(["train", "--resume", str(path / "whole")]) == 0
    return path


def lines(run: Path) -> list[str]:
    path = run / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def outcome(run: Path) -> tuple[Any, list[Any]]:
    """What the last step left, and the losses that were told."""
    checkpoint = json.loads((run / "checkpoint" / "checkpoint.json").read_text())
    summary = json.loads((run / "summary.json").read_text())
    return (checkpoint["step"], summary["held_out_after"]), [json.loads(line)["loss"] for line in lines(run)]


@pytest.mark.parametrize("file", [*dict.fromkeys(file for files in FILES.values() for file in files)])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_run_goes_on_rightly_or_says_in_one_line_why_not(
    begun: Path, tmp_path: Path, file: str, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(begun / "run", run)
    if not (run / file).exists():
        pytest.skip("checkpoints of the other kind have it")
    DAMAGES[damage](run / file)
    status = main(["train", "--resume", str(run)])
    said = capsys.readouterr()
    assert not (run / "lock").exists()
    if status == 0:
        whole, losses = outcome(begun / "whole")
        found, told = outcome(run)
        assert found == whole and told[-1] == losses[-1]
        assert file == "metrics.jsonl" or damage in ("last byte", "cut at the end")
        assert told == losses or "metrics.jsonl is damaged" in said.out
    else:
        assert status == 1
        assert said.err.startswith("wholebatch: ") and said.err.count("\n") == 1, said.err
        assert Path(file).name in said.err or str(run) in said.err


def test_a_run_that_is_whole_goes_on(begun: Path, tmp_path: Path) -> None:
    """The twin: without damage nothing is said, and every file of the folder is among those that are damaged above."""
    run = tmp_path / "run"
    shutil.copytree(begun / "run", run)
    there = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    assert there <= {*FILES["ddp"], *FILES["fsdp"]}
    assert main(["train", "--resume", str(run)]) == 0
    assert outcome(run) == outcome(begun / "whole")
