"""Shards are read as plain data: whatever their files say, nothing of it runs."""

from __future__ import annotations

import os
import pickle
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from wholebatch.train import RunError, shards

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Trap:
    """Runs a command when it is unpickled."""

    def __init__(self, call: Any = os.mkdir, argument: str = "trapped") -> None:
        self.call, self.argument = call, argument

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call, (self.argument,)


def trained(value: float = 0.0) -> tuple[nn.Module, AdamW]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = AdamW(model.parameters(), lr=0.1)
    (model(torch.full((1, 3), value)).sum()).backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Shards of one process, in a folder where a trap can be seen to have run."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "checkpoint"
    path.mkdir()
    shards.write(path, *trained(1.0), 7)
    return path


def test_what_was_written_is_read_with_its_step(folder: Path) -> None:
    model, optimizer = trained(2.0)
    assert shards.read(folder, model, optimizer) == 7
    expected, theirs = trained(1.0)
    assert torch.equal(model.weight, expected.weight)
    for name, parameter in model.named_parameters():
        moments = theirs.state[expected.get_parameter(name)]
        assert all(torch.equal(value, moments[key]) for key, value in optimizer.state[parameter].items())
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)


@pytest.mark.parametrize(
    ("crafted", "named"),
    [
        (Trap(), "posix.mkdir|nt.mkdir"),
        (Trap(eval, "__import__('os').mkdir('trapped')"), "builtins.eval"),
        (Trap(torch.load, "trap.pt"), "torch.serialization.load"),
        (Trap(getattr, "x"), "builtins.getattr"),
    ],
    ids=["a command", "eval", "another pickle", "getattr"],
)
def test_a_description_that_would_run_something_is_refused_and_runs_nothing(
    folder: Path, crafted: Trap, named: str
) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(crafted))
    with pytest.raises(RunError, match=rf"\.metadata cannot be read: it names ({named}), .*was not run"):
        shards.read(folder, *trained())
    assert not Path("trapped").exists()


def test_the_trap_would_run(folder: Path) -> None:
    """The twin: Python's own unpickler, which torch uses, runs it."""
    pickle.loads(pickle.dumps(Trap()))
    assert Path("trapped").exists()


def test_a_value_that_would_run_something_is_refused_and_runs_nothing(folder: Path) -> None:
    described = shards.describe(folder)
    key = next(index for index in described.storage_data if index.fqn == "optimizer.param_groups.0.lr")
    buffer = BytesIO()
    torch.save(Trap(), buffer)
    (folder / "crafted").write_bytes(buffer.getvalue())
    info = described.storage_data[key]
    info.relative_path, info.offset, info.length = "crafted", 0, len(buffer.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(described))
    with pytest.raises(RunError, match="cannot be loaded into this model"):
        shards.read(folder, *trained())
    assert not Path("trapped").exists()


def test_files_outside_of_the_checkpoint_are_not_read(folder: Path) -> None:
    described = shards.describe(folder)
    next(iter(described.storage_data.values())).relative_path = "../elsewhere"
    (folder / ".metadata").write_bytes(pickle.dumps(described))
    with pytest.raises(RunError, match=r"names files outside of the checkpoint, the first '\.\./elsewhere'"):
        shards.read(folder, *trained())


@pytest.mark.parametrize("content", [b"", b"\x80", b"garbage", pickle.dumps(3), pickle.dumps(None)[:-1]], ids=repr)
def test_a_damaged_description_is_said(folder: Path, content: bytes) -> None:
    (folder / ".metadata").write_bytes(content)
    with pytest.raises(RunError, match=r"\.metadata cannot be read"):
        shards.read(folder, *trained())


def test_shards_of_another_model_are_refused(folder: Path) -> None:
    other = nn.Sequential(nn.Linear(3, 2))
    with pytest.raises(RunError, match="cannot be loaded into this model"):
        shards.read(folder, other, AdamW(other.parameters()))
