"""Checkpoints that are whole or not there: written to a new folder, synced to disk, renamed.

    checkpoint/checkpoint.json       what this is: format, version, step, config, and size and hash of the other files
    checkpoint/model.safetensors     the weights
    checkpoint/state.pt              optimizer, schedule and random state; read without running any pickled code

At every moment either `checkpoint` or `checkpoint.old` is complete. A process killed while writing leaves
`checkpoint.new` with its number, which is never read, and taken away when the run goes on.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model, save_model
from torch import nn

from wholebatch.train.errors import RunError, remedy

FORMAT = "wholebatch checkpoint"
VERSION = 1
CURRENT, NEW, OLD = "checkpoint", "checkpoint.new", "checkpoint.old"
ABOUT, WEIGHTS, STATE = "checkpoint.json", "model.safetensors", "state.pt"
SHARDS = ".metadata"
"""Describes the shards that stand in the place of one file of weights."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk, every file of it verified.

    Attributes:
        folder: where it lies.
        step: how many steps were taken.
        config: the settings of the run it belongs to.
        data: the fingerprint of the rows it was trained on.
        weights: the hash of the file of weights, as it lies there; None for shards, which tell their step themselves.
    """

    folder: Path
    step: int
    config: dict[str, Any]
    data: str
    weights: str | None = None

    def restore(self, model: nn.Module | None) -> dict[str, Any]:
        """Load the weights into a model, if they lie in one file, and return the state that was saved beside them.

        Raises:
            RunError: if the weights are those of another model, the state is not plain data, or they are of
                different steps.
        """
        try:
            state: Any = torch.load(self.folder / STATE, map_location="cpu", weights_only=True)
            if not isinstance(state, dict):
                raise RuntimeError(f"{STATE} holds no state.")
            self.compare(STATE, state.get("step"))
            if state.get("weights", self.weights) != self.weights:
                raise self._mixed(f"{WEIGHTS} and {STATE} are of different steps")
            if model is not None:
                load_model(model, str(self.folder / WEIGHTS))
        except (RuntimeError, SafetensorError, UnpicklingError, EOFError, OSError, ValueError, KeyError) as error:
            first = " ".join(str(error).split())[:300]
            raise RunError(f"{self.folder} cannot be loaded into this model: {first}") from None
        return state

    def compare(self, name: str, step: int | None) -> None:
        """Hold the step that a file belongs to against that of the description.

        Args:
            name: of the file.
            step: None where the file does not say it, as those of the first versions.

        Raises:
            RunError: if they are of different steps.
        """
        if step not in (None, self.step):
            raise self._mixed(f"{name} is of step {step}, but {ABOUT} of step {self.step}")

    def _mixed(self, what: str) -> RunError:
        return RunError(
            f"In {self.folder} {what}: files of two checkpoints were mixed. Bring back those that belong together, or "
            f"start a new run from the same config: wholebatch train {self.folder.parent / 'config.yaml'} --out FOLDER."
        )


def save(
    run: Path,
    model: nn.Module | None,
    state: dict[str, Any],
    about: dict[str, Any],
    export: Callable[[Path], None] | None = None,
) -> None:
    """Write a checkpoint and put it in the place of the one before.

    Args:
        run: the run folder.
        model: whose weights are saved; None if `export` writes them.
        state: tensors and plain values.
        about: step, config and data, as `Checkpoint` has them.
        export: writes further files into the folder.

    Raises:
        RunError: if the disk is full or cannot be written; the checkpoint before stays, and stays complete.
    """
    new, current, old = unfinished(run), run / CURRENT, run / OLD
    step = int(about["step"])
    with _cleaned(new, step):
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        held: dict[str, Any] = {**state, "step": step}
        if model is not None:  # save_model, not save_file: tied weights are stored once.
            save_model(model, str(new / WEIGHTS), metadata={"format": "pt"})
            held["weights"] = _identity(new / WEIGHTS)["sha256"]
        torch.save(held, new / STATE)
        if export is not None:
            export(new)
        files = {path.name: _identity(path) for path in sorted(new.iterdir())}
        described = {"format": FORMAT, "version": VERSION, **about, "files": files}
        (new / ABOUT).write_text(json.dumps(described, indent=1), encoding="utf-8")
        # Contents first, then names: a rename that is on disk must never point at content that is not.
        for path in (*new.iterdir(), new):
            _sync(path)
        # A folder that is not empty cannot be replaced in one move, so the old one steps aside first. A process killed
        # between the two moves leaves it under its other name, where `read` finds it.
        if current.exists():
            shutil.rmtree(old, ignore_errors=True)
            current.rename(old)
        new.rename(current)
        _sync(run)
    shutil.rmtree(old, ignore_errors=True)


def unfinished(run: Path) -> Path:
    """Return where this process writes a checkpoint; no other one has this name."""
    return run / f"{NEW}.{os.getpid()}"


def recover(run: Path) -> None:
    """Give a checkpoint that a killed writer had moved aside its name back, and take away what was half-written.

    Call it with the run locked.
    """
    if not (run / CURRENT).exists() and (run / OLD).exists():
        (run / OLD).rename(run / CURRENT)
    for half in run.glob(f"{NEW}*"):
        shutil.rmtree(half, ignore_errors=True)


def tidy(run: Path) -> None:
    """Take away the checkpoint before the current one, which has been read and is whole."""
    if (run / CURRENT).exists():
        shutil.rmtree(run / OLD, ignore_errors=True)


def read(run: Path) -> Checkpoint | None:
    """Find and verify the checkpoint of a run; None if none was written yet.

    Raises:
        RunError: if it is torn, of another program, or written by a newer version; names the file.
    """
    folders = [run / name for name in (CURRENT, OLD) if (run / name).exists()]
    if not folders:
        return None
    folder = folders[0]
    about = _about(folder)
    for name, identity in about["files"].items():
        found = _found(folder / name, identity)
        if found is not None:
            raise RunError(
                f"{folder / name} {found} and is not what was saved: the checkpoint is torn. "
                "Restore the file, or start a new run from the same config: "
                f"wholebatch train {run / 'config.yaml'} --out FOLDER."
            )
    weights = about["files"].get(WEIGHTS, {}).get("sha256")
    return Checkpoint(folder, about["step"], about["config"], about["data"], weights)


def _found(path: Path, identity: object) -> str | None:
    """Say what is there in the place of the file that was saved; None if it is that very file."""
    try:
        found = _identity(path)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None if found == identity else f"has {found['bytes']:,} bytes"


def _about(folder: Path) -> dict[str, Any]:
    path = folder / ABOUT
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path} cannot be read ({error}): {folder} is torn, or no checkpoint of wholebatch.") from None
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise RunError(f"{path} is not a {FORMAT}. --resume takes the folder of a run that wholebatch train began.")
    if about.get("version") != VERSION:
        raise RunError(
            f"{path} has version {about.get('version')!r}, and this wholebatch reads version {VERSION}: it was written "
            "by a newer one. Upgrade with: pip install -U wholebatch."
        )
    missing = {"step", "config", "data", "files"} - about.keys()
    if missing:
        raise RunError(f"{path} says nothing of {', '.join(sorted(missing))}: the checkpoint is torn.")
    kinds = {"step": int, "config": dict, "data": str, "files": dict}
    wrong = [name for name, kind in kinds.items() if type(about[name]) is not kind]
    # What no hash vouches for must not be loaded.
    if wrong or not about["files"].keys() >= {STATE} or not about["files"].keys() & {WEIGHTS, SHARDS}:
        raise RunError(f"{path} says {', '.join(wrong) or 'files'} in a way that no checkpoint does: it is torn.")
    return about


@contextmanager
def _cleaned(new: Path, step: int) -> Iterator[None]:
    """Remove what was written of a checkpoint that could not be finished, and say that the old one stays."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:  # each library reports a full disk in its own way
        advice = remedy(error, new.parent)  # asked while the disk is as full as it was
        shutil.rmtree(new, ignore_errors=True)
        raise RunError(
            f"The checkpoint of step {step} could not be written to {new.parent}: {_reason(error)}. The one before is "
            f"untouched. {advice}, then go on with: wholebatch train --resume {new.parent}."
        ) from error


def _reason(error: Exception) -> str:
    """Say why a file could not be written; torch counts what it wrote, and passes on no error of the system."""
    if "inline_container" in str(error):
        return "not all of a file could be written"
    return error.strerror if isinstance(error, OSError) and error.strerror else " ".join(str(error).split())


def _identity(path: Path) -> dict[str, int | str]:
    """Size and hash of a file."""
    hashed = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            hashed.update(block)
    return {"bytes": path.stat().st_size, "sha256": hashed.hexdigest()}


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
