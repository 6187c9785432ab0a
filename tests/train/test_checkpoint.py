"""Checkpoints are whole or not there, and say what is wrong with them."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from wholebatch.train import RunError, checkpoint


def model(value: float) -> nn.Module:
    linear = nn.Linear(3, 2)
    with torch.no_grad():
        linear.weight.fill_(value)
    return linear


def save(run: Path, value: float, step: int = 1) -> None:
    run.mkdir(exist_ok=True)
    about = {"step": step, "config": {"seed": 0}, "data": "abc"}
    checkpoint.save(run, model(value), {"numbers": torch.arange(3), "step": step}, about)


def weight(run: Path) -> float:
    found = checkpoint.read(run)
    assert found is not None
    restored = model(0.0)
    found.restore(restored)
    return next(restored.parameters())[0, 0].item()


def test_what_was_saved_is_restored(tmp_path: Path) -> None:
    save(tmp_path, 5.0, step=7)
    found = checkpoint.read(tmp_path)
    assert found is not None
    assert (found.step, found.config, found.data) == (7, {"seed": 0}, "abc")
    restored = model(0.0)
    state = found.restore(restored)
    assert torch.equal(next(restored.parameters()), torch.full((2, 3), 5.0))
    assert torch.equal(state["numbers"], torch.arange(3))


def test_a_run_without_a_checkpoint_has_none(tmp_path: Path) -> None:
    assert checkpoint.read(tmp_path) is None


def test_a_new_checkpoint_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    save(tmp_path, 1.0)
    save(tmp_path, 2.0)
    assert weight(tmp_path) == 2.0
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize("call", range(1, 12))
@pytest.mark.parametrize("name", ["fsync", "rename"])
def test_an_end_at_any_moment_leaves_one_that_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, call: int
) -> None:
    """A killed process runs no clean-up, so the error that stands for it must pass through untouched."""
    save(tmp_path, 1.0)
    calls = iter(range(1, 100))
    owner: Any = os if name == "fsync" else Path
    real = getattr(owner, name)

    def killed(*arguments: Any) -> Any:
        if next(calls) == call:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(owner, name, killed)
    try:
        save(tmp_path, 2.0)
    except KeyboardInterrupt:
        assert weight(tmp_path) in (1.0, 2.0)
    else:
        assert weight(tmp_path) == 2.0
    monkeypatch.undo()
    save(tmp_path, 3.0)
    assert weight(tmp_path) == 3.0
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize("moment", ["model.safetensors", "state.pt", "checkpoint.json"])
def test_a_full_disk_is_said_and_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    save(tmp_path, 1.0)
    real = os.open

    def full(path: Any, *arguments: Any, **options: Any) -> int:
        if Path(path).name == moment:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, *arguments, **options)

    monkeypatch.setattr(checkpoint.os, "open", full)
    full_disk = r"checkpoint of step 2 could not be written to .*: No space left on device\. .*Make room, then go on"
    with pytest.raises(RunError, match=full_disk):
        save(tmp_path, 2.0, step=2)
    monkeypatch.undo()
    assert weight(tmp_path) == 1.0
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_room_is_asked_for_only_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1.0)

    def refused(path: Any, *arguments: Any, **options: Any) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(checkpoint.os, "open", refused)
    with pytest.raises(RunError, match=r"could not be written to .*: Read-only file system\. .*Mend that, then go on"):
        save(tmp_path, 2.0, step=2)


@pytest.mark.parametrize(("free", "advice"), [(0, "Make room"), (1 << 30, "Mend that")], ids=["full", "not full"])
def test_what_torch_could_not_write_is_said_in_words_whatever_torch_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, advice: str
) -> None:
    """Torch counts what it wrote, and tells nothing of the system's error: the disk itself is asked."""

    def short(*arguments: Any) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 222208 vs 222160")

    monkeypatch.setattr(torch, "save", short)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=free))
    with pytest.raises(RunError, match=rf"run: not all of a file could be written\. .*{advice}, then go on"):
        save(tmp_path / "run", 2.0, step=2)


@pytest.mark.parametrize("name", ["model.safetensors", "state.pt"])
@pytest.mark.parametrize("damage", ["cut", "changed", "gone"])
def test_a_torn_file_is_named(tmp_path: Path, name: str, damage: str) -> None:
    save(tmp_path, 1.0)
    path = tmp_path / "checkpoint" / name
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(content[:-1] if damage == "cut" else content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(RunError, match=f"{name} .*the checkpoint is torn"):
        checkpoint.read(tmp_path)


@pytest.mark.parametrize(
    ("about", "expected"),
    [
        ("", "cannot be read"),
        ("[]", "is not a wholebatch checkpoint"),
        ('{"format": "somebody else"}', "is not a wholebatch checkpoint"),
        ('{"format": "wholebatch checkpoint", "version": 2}', "has version 2, and this wholebatch reads version 1"),
        ('{"format": "wholebatch checkpoint", "version": 1, "step": 1}', "says nothing of config, data, files"),
    ],
    ids=["torn", "a list", "foreign", "newer", "incomplete"],
)
def test_a_foreign_or_newer_checkpoint_is_refused(tmp_path: Path, about: str, expected: str) -> None:
    save(tmp_path, 1.0)
    (tmp_path / "checkpoint" / "checkpoint.json").write_text(about)
    with pytest.raises(RunError, match=r"checkpoint\.json") as refused:
        checkpoint.read(tmp_path)
    assert expected in str(refused.value)


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    with pytest.raises(RunError, match="or no checkpoint of wholebatch"):
        checkpoint.read(tmp_path)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    save(tmp_path, 1.0)
    found = checkpoint.read(tmp_path)
    assert found is not None
    with pytest.raises(RunError, match="cannot be loaded into this model"):
        found.restore(nn.Linear(4, 2))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("model.safetensors", "model.safetensors and state.pt are of different steps"),
        ("state.pt", "state.pt is of step 1, but checkpoint.json of step 2"),
    ],
)
def test_files_of_two_steps_are_not_mixed(tmp_path: Path, name: str, said: str) -> None:
    """As two writers of one folder would leave them: each file whole, and the hashes those of what lies there."""
    save(tmp_path / "one", 1.0, step=1)
    save(tmp_path / "two", 2.0, step=2)
    (tmp_path / "one" / "checkpoint" / name).replace(tmp_path / "two" / "checkpoint" / name)
    vouch(tmp_path / "two" / "checkpoint", name)
    with pytest.raises(RunError, match=rf"{said}: files of two checkpoints were mixed"):
        weight(tmp_path / "two")


def test_what_no_hash_vouches_for_is_not_loaded(tmp_path: Path) -> None:
    save(tmp_path, 1.0)
    about = tmp_path / "checkpoint" / "checkpoint.json"
    about.write_text(json.dumps({**json.loads(about.read_text()), "files": {}}))
    with pytest.raises(RunError, match="says files in a way that no checkpoint does"):
        checkpoint.read(tmp_path)


def test_a_killed_writer_leaves_nothing_once_the_run_goes_on(tmp_path: Path) -> None:
    save(tmp_path, 1.0)
    (tmp_path / "checkpoint").rename(tmp_path / "checkpoint.old")
    (tmp_path / "checkpoint.new.123").mkdir()
    checkpoint.recover(tmp_path)
    assert weight(tmp_path) == 1.0
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    (tmp_path / "checkpoint.old").mkdir()
    checkpoint.tidy(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def vouch(folder: Path, name: str) -> None:
    """Make the hash of a file anew, as whoever crafts a checkpoint can."""
    described = json.loads((folder / "checkpoint.json").read_text())
    described["files"][name] = checkpoint._identity(folder / name)
    (folder / "checkpoint.json").write_text(json.dumps(described))


class Trap:
    """Would run code when unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("trapped",))


def test_a_state_that_would_run_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path, 1.0)
    state = tmp_path / "checkpoint" / "state.pt"
    torch.save({"step": Trap()}, state)
    vouch(tmp_path / "checkpoint", "state.pt")
    found = checkpoint.read(tmp_path)
    assert found is not None
    with pytest.raises(RunError, match="cannot be loaded"):
        found.restore(model(0.0))
    assert not Path("trapped").exists()
