"""Runs in little memory: the same training in smaller micro-batches, or a refusal that says which flag helps."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import wholebatch as wb
from tests.train.test_run import Interrupting, assert_same_weights, config, metrics, run, texts  # noqa: F401
from tests.train.test_tasks import folder_with_a_model, sentences, small  # noqa: F401
from wholebatch.amounts import bytes_in, in_bytes
from wholebatch.model.memory import SavedBytes
from wholebatch.planning.planner import parts_of
from wholebatch.train import Config, ConfigError, RunError, train, trainer
from wholebatch.train.machine import room
from wholebatch.train.text import Text

KIB = 1024


def lean(texts: Path, name: str, **changes: Any) -> Config:  # noqa: F811
    settings = {"max_tokens": None, "batch_size": 24, "steps": 4, "proof": False, **changes}
    return config(texts, out=texts.parent / name, **settings)


def needed(settings: Config) -> int:
    """Bytes of weights, gradients and optimizer."""
    return sum(parts_of(Text(settings).model).values())


def cap(settings: Config, share: float) -> str:
    """A memory that leaves this share of what the whole batch would save in one micro-batch."""
    task = Text(settings)
    with SavedBytes(ignored=[*task.model.parameters()]) as saved:
        kept = task.loss(task.model, task.collate(task.train[:24]))
    assert kept.total.requires_grad
    return str(needed(settings) + int(share * saved.peak))


@pytest.mark.parametrize("checkpoint", [False, True], ids=["as it is", "checkpointed"])
def test_a_run_in_little_memory_is_the_same_run(texts: Path, checkpoint: bool) -> None:  # noqa: F811
    whole, _ = run(lean(texts, "whole", micro_batch_size=24))
    small = lean(texts, "small", memory=cap(lean(texts, "small"), 0.15), checkpoint=checkpoint)
    micro_batches, shown = run(small)
    first = metrics(micro_batches.folder)[0]
    assert (first["retries"] > 0) and sum(first["pieces"]) == 24
    assert len(first["pieces"]) > 1 == len(metrics(whole.folder)[0]["pieces"])
    for one, other in zip(metrics(micro_batches.folder), metrics(whole.folder), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=2e-6)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=2e-5)
        assert one["tokens"] == other["tokens"]
    assert f"smaller where {small.memory} would not do" in shown.said("batch")[0]


def test_checkpointing_changes_no_number(texts: Path) -> None:  # noqa: F811
    plain, _ = run(lean(texts, "plain", micro_batch_size=6))
    again, _ = run(lean(texts, "again", micro_batch_size=6, checkpoint=True))
    assert_same_weights(plain.folder, again.folder)
    assert metrics(plain.folder) == metrics(again.folder)


def test_checkpointing_runs_larger_micro_batches_in_the_same_memory(texts: Path) -> None:  # noqa: F811
    settings = lean(texts, "plain", layers=8, width=16, steps=1)
    memory = cap(settings, 0.2)
    plain, _ = run(replace(settings, memory=memory))
    again, _ = run(replace(settings, memory=memory, checkpoint=True, out=texts.parent / "again"))
    micro_batches = [len(metrics(outcome.folder)[0]["pieces"]) for outcome in (plain, again)]
    assert micro_batches[1] < micro_batches[0]


def test_the_size_found_is_part_of_the_checkpoint(texts: Path) -> None:  # noqa: F811
    memory = cap(lean(texts, "any"), 0.15)
    whole, _ = run(lean(texts, "whole", memory=memory, steps=6))
    part = train(lean(texts, "part", memory=memory, steps=6), Interrupting(3, signal.SIGINT))
    again, _ = run(Config(resume=part.folder))
    assert metrics(whole.folder)[0]["retries"] > 0
    assert metrics(again.folder) == metrics(whole.folder)
    assert_same_weights(again.folder, whole.folder)


def test_a_fixed_micro_batch_that_does_not_fit_says_which_setting_helps(texts: Path) -> None:  # noqa: F811
    settings = lean(texts, "fixed", micro_batch_size=12)
    with pytest.raises(
        RunError, match=r"Step 1 ran out of memory in micro-batches of at most 12 rows: .*Leave micro_batch_size"
    ):
        run(replace(settings, memory=cap(settings, 0.05)))


def test_a_host_that_runs_out_of_memory_is_told_so_too(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    def fail(step: wb.Step, batch: Any) -> None:
        raise MemoryError("Unable to allocate 7 TiB")

    monkeypatch.setattr(wb.Step, "__call__", fail)
    with pytest.raises(
        RunError, match=r"Step 1 ran out of memory in micro-batches of at most .*: Unable to allocate 7 TiB"
    ):
        run(lean(texts, "fixed", micro_batch_size=12))


def test_a_row_that_does_not_fit_says_which_flag_helps(texts: Path) -> None:  # noqa: F811
    settings = lean(texts, "row")
    with pytest.raises(RunError, match=r"Step 1 could not be taken\. One row alone does not fit.*--checkpoint"):
        run(replace(settings, memory=str(needed(settings) + 2 * KIB)))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"memory": "1KiB"}, r"memory is 0\.0 MiB, but weights, gradients and optimizer alone take"),
        ({"offload": True}, "offload is on, but the model is on the cpu"),
        ({"task": "classify", "data": None, "checkpoint": True, "width": 8}, "checkpoint is on, but the classifiers"),
    ],
    ids=["memory", "offload", "classifier"],
)
def test_what_cannot_be_is_refused(texts: Path, changes: dict[str, Any], expected: str) -> None:  # noqa: F811
    if changes.get("task") == "classify":
        pytest.importorskip("sklearn")
    with pytest.raises(ConfigError, match=expected):
        run(lean(texts, "refused", **changes))
    assert not (texts.parent / "refused").exists()


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GiB", 2**31), ("2 gib", 2**31), ("1.5GB", 1_500_000_000), ("800MiB", 800 * 2**20), ("500000", 500_000)],
)
def test_bytes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert bytes_in(text) == size


@pytest.mark.parametrize("text", ["", "much", "-1GiB", "0", "2 GiBs", "1e9", "GiB"])
def test_what_is_no_number_of_bytes_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="it must be a number of bytes such as 2GiB"):
        Config(memory=text)


def test_bytes_are_said_in_the_unit_that_suits_them() -> None:
    assert [in_bytes(size) for size in (3 * 2**30, 900 * 2**20, 2**21, 0)] == [
        "3.0 GiB",
        "900 MiB",
        "2.0 MiB",
        "0.0 MiB",
    ]


def test_auto_begins_small_unless_memory_is_limited(texts: Path) -> None:  # noqa: F811
    settings, cpu = lean(texts, "auto"), torch.device("cpu")
    task = Text(settings)
    start = trainer.size_of(settings, task, cpu)
    assert isinstance(start, wb.Auto) and start.size == task.size
    for limited, device in ((replace(settings, memory="1GiB"), cpu), (settings, torch.device("cuda"))):
        start = trainer.size_of(limited, task, device)
        assert isinstance(start, wb.Auto) and isinstance(start.size, wb.Tokens)
        assert start.size.budget == 24 * 64
    fixed = replace(settings, micro_batch_size=3)
    assert trainer.size_of(fixed, Text(fixed), cpu) == 3


def test_without_a_limit_there_is_room_for_everything() -> None:
    model = torch.nn.Linear(4, 4)
    with room(None, model, torch.device("cpu"))() as limit:
        assert limit is None


def test_a_limit_on_the_cpu_leaves_what_the_weights_do_not_take() -> None:
    model = torch.nn.Linear(4, 4)
    with room(1000, model, torch.device("cpu"))() as limit:
        assert limit.limit == 1000 - 4 * 20 * 4


def test_a_hugging_face_model_uses_its_own_switch(
    tmp_path: Path,
    sentences: Path,  # noqa: F811
    folder_with_a_model: Path,  # noqa: F811
) -> None:
    settings = small(tmp_path, data=sentences, model=folder_with_a_model, max_tokens=64, steps=3, proof=False)
    plain = train(replace(settings, out=tmp_path / "plain"))
    again = train(replace(settings, out=tmp_path / "again", checkpoint=True))
    assert_same_weights(plain.folder, again.folder)
    task = Text(replace(settings, checkpoint=True))
    saved = {}
    for name in ("plain", "checkpointed"):
        with SavedBytes(ignored=[*task.model.parameters()]) as counted:
            loss = task.loss(task.model.train(), task.collate(task.train[:2]))
            saved[name] = counted.live
            loss.total.backward()
        if name == "plain":
            task.checkpoint()
    assert saved["checkpointed"] < saved["plain"]


def test_a_model_without_the_switch_says_so(
    tmp_path: Path,
    sentences: Path,  # noqa: F811
    folder_with_a_model: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task = Text(small(tmp_path, data=sentences, model=folder_with_a_model))
    monkeypatch.setattr(type(task.model), "supports_gradient_checkpointing", False)
    with pytest.raises(ConfigError, match="checkpoint is on, but the model cannot"):
        task.checkpoint()
