"""Whole runs on small real files: what they leave behind, and that they go on as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import wholebatch as wb
from wholebatch.train import Config, ConfigError, Outcome, RunError, train, trainer
from wholebatch.train.folder import RunFolder

WORDS = ["the", "batch", "you", "meant", "on", "the", "memory", "you", "have", "is", "one", "gradient", "of", "all"]


class Silent:
    """A display that remembers."""

    def __init__(self) -> None:
        self.notes: list[tuple[str, str]] = []
        self.records: list[dict[str, Any]] = []

    def note(self, label: str, text: str) -> None:
        self.notes.append((label, text))

    def step(self, record: dict[str, Any]) -> None:
        self.records.append(record)

    def close(self) -> None:
        self.notes.append(("closed", ""))

    def said(self, label: str) -> list[str]:
        return [text for each, text in self.notes if each == label]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Forty lines of very uneven length."""
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(" ".join(WORDS[i % 5 : i % 5 + 1 + i % 9] * (1 + i % 3)) + f" {i}" for i in range(40)))
    return path


def config(texts: Path, **changes: Any) -> Config:
    small = Config(
        data=texts,
        out=texts.parent / "run",
        width=8,
        layers=1,
        heads=2,
        context=64,
        batch_size=12,
        max_tokens=200,
        steps=7,
        save_every=3,
        warmup=2,
        device="cpu",
        held_out=0.2,
    )
    return replace(small, **changes)


def run(settings: Config) -> tuple[Outcome, Silent]:
    shown = Silent()
    return train(settings, shown), shown


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoint" / "model.safetensors")


def assert_same_weights(one: Path, other: Path) -> None:
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def metrics(folder: Path) -> list[dict[str, Any]]:
    timed = {"seconds", "tokens_per_second", "peak_memory_bytes"}
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in timed} for line in lines]


def test_a_run_learns_and_leaves_its_config_metrics_checkpoint_and_summary(texts: Path) -> None:
    outcome, shown = run(config(texts, epochs=12, steps=None, lr=0.02))
    assert sorted(path.name for path in outcome.folder.iterdir()) == [
        "checkpoint",
        "config.yaml",
        "metrics.jsonl",
        "summary.json",
    ]
    summary = json.loads((outcome.folder / "summary.json").read_text())
    assert summary == outcome.summary
    assert summary["held_out_after"]["bits_per_byte"] < 0.8 * summary["held_out_before"]["bits_per_byte"]
    assert summary["gradient_error"] < 2e-6 < 0.01 < summary["usual_loop_error"]
    assert summary["sample"].startswith("Return ")
    assert [record["step"] for record in metrics(outcome.folder)] == list(range(1, summary["steps"] + 1))
    assert shown.said("batch") == ["batch 12 = 12 rows, in micro-batches of at most 200 tokens"]
    assert len(shown.said("held out")) == 2 and len(shown.said("proof")) == 1
    assert shown.notes[-1] == ("closed", "")


def test_each_step_tells_what_was_done(texts: Path) -> None:
    outcome, shown = run(config(texts, proof=False))
    record = metrics(outcome.folder)[0]
    assert record["rows"] == sum(record["pieces"]) == 12
    assert len(record["pieces"]) > 1
    assert 0 < record["padding"] < 1 and record["tokens"] > 12
    assert record["stepped"] and record["reason"] is None
    assert record["lr"] == pytest.approx(0.005)
    assert shown.records[0]["left"] > 0 and shown.records[-1]["left"] == 0


def test_the_loss_told_is_that_of_the_batch_that_was_stepped(texts: Path) -> None:
    micro_batches, _ = run(config(texts, out=texts.parent / "pieces", steps=2, proof=False))
    one_micro_batch = config(texts, out=texts.parent / "whole", max_tokens=None, micro_batch_size=12)
    whole, _ = run(replace(one_micro_batch, steps=2, proof=False))
    for one, other in zip(metrics(micro_batches.folder), metrics(whole.folder), strict=True):
        assert len(one["pieces"]) > len(other["pieces"]) == 1
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-6)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)


def test_every_row_is_trained_on_once_an_epoch_the_short_last_batch_included(texts: Path) -> None:
    outcome, shown = run(config(texts, steps=None, epochs=2, proof=False))
    rows = [record["rows"] for record in metrics(outcome.folder)]
    count = int(shown.said("data")[0].split(": ")[1].split()[0])
    assert sum(rows) == 2 * count
    assert rows[len(rows) // 2 - 1] == count % 12 > 0


def test_rows_that_are_cut_or_do_not_fit_into_a_micro_batch_are_counted(texts: Path) -> None:
    _, shown = run(config(texts, steps=1, proof=False, context=50, max_tokens=40))
    lengths = [min(50, len(line) + 2) for line in texts.read_text().splitlines()]
    cut = sum(len(line) + 2 > 50 for line in texts.read_text().splitlines())
    (said,) = shown.said("data")
    assert f"; {cut} longer than 50 tokens are cut there; " in said
    alone = int(said.split("; ")[2].split()[0])
    assert 0 < alone <= sum(length > 40 for length in lengths)
    assert said.endswith("longer than the 40 tokens of a micro-batch run alone")


def test_a_proof_can_be_left_out(texts: Path) -> None:
    outcome, _ = run(config(texts, steps=1, proof=False))
    assert outcome.summary is not None and outcome.summary["gradient_error"] is None


def test_the_words_of_other_tools_are_shown_with_the_arithmetic(texts: Path) -> None:
    words = {"batch_size": None, "max_tokens": None, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 3}
    _, shown = run(config(texts, steps=1, proof=False, **words))
    expected = "batch 12 = 4 rows x 3 micro-batches (from per_device_train_batch_size 4, gradient_accumulation_steps 3)"
    assert shown.said("batch") == [expected]


class Interrupting(Silent):
    """A display that asks for an end while a step is shown."""

    def __init__(self, step: int, number: int) -> None:
        super().__init__()
        self.at, self.number = step, number

    def step(self, record: dict[str, Any]) -> None:
        super().step(record)
        if record["step"] == self.at:
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_asked_to_end_goes_on_to_the_very_same_weights(texts: Path, number: int) -> None:
    whole, _ = run(config(texts, out=texts.parent / "whole"))
    shown = Interrupting(4, number)
    outcome = train(config(texts, out=texts.parent / "part"), shown)
    assert (outcome.signal, outcome.summary) == (number, None)
    assert [record["step"] for record in metrics(outcome.folder)] == [1, 2, 3, 4]
    assert shown.said("go on") == [f"wholebatch train --resume {outcome.folder}"]
    again, resumed = run(Config(resume=outcome.folder))
    assert resumed.said("resumed") == ["after step 4 of 7"]
    assert_same_weights(again.folder, whole.folder)
    assert metrics(again.folder) == metrics(whole.folder)
    assert again.summary is not None and whole.summary is not None
    assert again.summary["held_out_before"] == whole.summary["held_out_before"]
    assert again.summary["rows"] == whole.summary["rows"]


class Loud(wb.NoiseScale):
    """Measures every window, and finds more noise than these rows have."""

    def __init__(self) -> None:
        super().__init__(every=1)

    def estimate(self) -> wb.NoiseEstimate:
        found = super().estimate()
        return replace(found, rows=100 * found.rows)


@pytest.mark.parametrize("batch", ["4,8@4,12@8", "3..12@epoch", "4..16@noise"])
def test_a_batch_that_grows_goes_on_with_the_very_same_batches(
    texts: Path, batch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer.wb, "NoiseScale", Loud)
    growing = {"batch_size": batch, "max_tokens": 20, "steps": 24, "lr": 0.01, "scale_lr": "sqrt", "nominal_batch": 8}
    whole, _ = run(config(texts, out=texts.parent / "whole", **growing))
    begun = train(config(texts, out=texts.parent / "part", **growing), Interrupting(14, signal.SIGINT))
    again, _ = run(Config(resume=begun.folder))
    assert_same_weights(again.folder, whole.folder)
    assert metrics(again.folder) == metrics(whole.folder)
    told = metrics(whole.folder)
    assert max(record["rows"] for record in told) > told[0]["rows"]
    steps = list(pairwise(record for record in told if record["step"] > 2))
    grown = [later["lr"] / before["lr"] for before, later in steps if later["rows"] == 2 * before["rows"]]
    assert grown and min(grown) > 1.2  # beside the cosine that falls meanwhile


def test_the_noise_of_the_gradient_is_told(texts: Path) -> None:
    outcome, shown = run(config(texts, steps=18, max_tokens=60))
    measured = [record["step"] for record in metrics(outcome.folder) if "noise_scale" in record]
    assert measured == [16]
    assert shown.said("noise")[0].startswith("noise scale")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch_size": "2..16@noise", "steps": None}, "--steps"),
        ({"batch_size": "4,x@3"}, "cannot be read"),
        ({"batch_size": "4,8@3", "gradient_accumulation_steps": 2}, "Leave their number out"),
        ({"batch_size": "4,8@3", "scale_lr": "sqrt"}, "lr is left out"),
        ({"batch_size": "4,800@3"}, "cannot be met"),
    ],
)
def test_a_batch_that_cannot_grow_so_is_refused(texts: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run(config(texts, **changes))
    assert not (texts.parent / "run").exists()


def killed_run(settings: Config, step: int, delay: float) -> None:
    """Run in a process of its own, and kill it a moment after its metrics tell of a step."""
    assert settings.out is not None
    program = f"from pathlib import *\nfrom wholebatch.train import *\ntrain({settings!r})"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL)
    path = settings.out / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not path.exists() or path.read_text().count("\n") < step:
        assert process.poll() is None and time.monotonic() < deadline, "the run ended before it could be killed"
        time.sleep(0.001)
    time.sleep(delay)
    process.kill()
    process.wait()


@pytest.mark.parametrize(("step", "delay"), [(1, 0.0), (10, 0.003), (21, 0.01)])
def test_a_killed_run_goes_on_to_the_very_same_weights(texts: Path, step: int, delay: float) -> None:
    settings = config(texts, steps=40, save_every=3, proof=False)
    whole, _ = run(replace(settings, out=texts.parent / "whole"))
    killed_run(replace(settings, out=texts.parent / "killed"), step, delay)
    assert not (texts.parent / "killed" / "summary.json").exists(), "the run ended before it was killed"
    again, _ = run(Config(resume=texts.parent / "killed"))
    assert_same_weights(again.folder, whole.folder)
    assert metrics(again.folder) == metrics(whole.folder)


def test_dropping_the_saved_state_is_noticed(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin of the tests above: a resume that forgets the optimizer does not give the same weights."""
    whole, _ = run(config(texts, out=texts.parent / "whole"))
    part = train(config(texts, out=texts.parent / "part"), Interrupting(4, signal.SIGINT))
    monkeypatch.setattr(torch.optim.AdamW, "load_state_dict", lambda self, state: None)
    again, _ = run(Config(resume=part.folder))
    with pytest.raises(AssertionError):
        assert_same_weights(again.folder, whole.folder)


def test_a_line_cut_off_by_a_kill_is_written_again(texts: Path) -> None:
    part = train(config(texts), Interrupting(4, signal.SIGINT))
    with (part.folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "loss": 1.0}\n{"step": 6, "lo')
    again, _ = run(Config(resume=part.folder))
    assert [record["step"] for record in metrics(again.folder)] == [1, 2, 3, 4, 5, 6, 7]
    assert "reason" in metrics(again.folder)[4]


def test_a_run_killed_before_its_first_checkpoint_begins_again(texts: Path) -> None:
    whole, _ = run(config(texts, out=texts.parent / "whole"))
    folder = texts.parent / "begun"
    with ExitStack() as held:
        RunFolder.create(folder, replace(config(texts), out=None), held)
    (folder / "metrics.jsonl").write_text('{"step": 1}\n{"st')
    again, shown = run(Config(resume=folder))
    assert shown.said("resumed") == ["from the beginning: no checkpoint was written yet"]
    assert_same_weights(again.folder, whole.folder)
    assert metrics(again.folder) == metrics(whole.folder)


def test_a_lost_checkpoint_is_not_taken_for_a_new_run(texts: Path) -> None:
    part = train(config(texts), Interrupting(5, signal.SIGINT))
    (part.folder / "checkpoint").rename(part.folder / "elsewhere")
    with pytest.raises(RunError, match="took 5 steps, but has no checkpoint"):
        run(Config(resume=part.folder))
    assert len(metrics(part.folder)) == 5


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda path, texts: (path / "config.yaml").unlink(), "holds no run: config.yaml is missing"),
        (lambda path, texts: (path / "summary.json").write_text("{}"), "has ended: summary.json is there"),
        (lambda path, texts: texts.write_text(texts.read_text() + "\none more"), "was trained on other rows than"),
        (
            lambda path, texts: (path / "config.yaml").write_text(
                (path / "config.yaml").read_text().replace("seed: 0", "seed: 1")
            ),
            "belongs to another run: seed is 0 there and 1 here",
        ),
    ],
    ids=["no config", "ended", "other data", "other config"],
)
def test_a_run_that_cannot_go_on_says_why(texts: Path, change: Any, expected: str) -> None:
    part = train(config(texts), Interrupting(5, signal.SIGINT))
    change(part.folder, texts)
    with pytest.raises(RunError) as refused:
        run(Config(resume=part.folder))
    assert expected in str(refused.value)


def test_a_resumed_run_keeps_its_settings(texts: Path) -> None:
    with pytest.raises(ConfigError, match="but lr, seed was given too"):
        run(Config(resume=texts.parent, lr=1.0, seed=2))


def test_a_folder_with_a_run_is_not_written_over(texts: Path) -> None:
    first, _ = run(config(texts, steps=1, proof=False))
    before = {path: path.read_bytes() for path in first.folder.rglob("*") if path.is_file()}
    with pytest.raises(RunError, match=r"holds a run already. Go on with it: wholebatch train --resume"):
        run(config(texts))
    assert {path: path.read_bytes() for path in first.folder.rglob("*") if path.is_file()} == before


def test_a_batch_that_cannot_be_met_leaves_no_folder_behind(texts: Path) -> None:
    with pytest.raises(ConfigError, match="A batch of 100 rows cannot be met"):
        run(config(texts, batch_size=100))
    assert not (texts.parent / "run").exists()


def test_a_run_without_a_name_gets_one_of_its_own(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(texts.parent)
    monkeypatch.setattr(time, "strftime", lambda form: "now")
    names = [run(config(texts, steps=1, proof=False, out=None))[0].folder for _ in range(2)]
    assert names == [Path("runs/now"), Path("runs/now-2")]


def test_a_full_disk_ends_the_run_with_a_way_on(texts: Path) -> None:
    """Linux offers a file on a disk that is always full."""
    if not Path("/dev/full").exists():
        pytest.skip("this system has no full disk to offer")
    path, kept = texts.parent / "run" / "metrics.jsonl", texts.parent / "kept"

    class FillingUp(Silent):
        def step(self, record: dict[str, Any]) -> None:
            if record["step"] == 4:
                path.rename(kept)
                path.symlink_to("/dev/full")

    with pytest.raises(RunError, match=r"metrics\.jsonl could not be written: No space left on device\. .*--resume"):
        train(config(texts), FillingUp())
    path.unlink()
    kept.rename(path)
    whole, _ = run(config(texts, out=texts.parent / "whole"))
    again, _ = run(Config(resume=path.parent))
    assert_same_weights(again.folder, whole.folder)
    assert metrics(again.folder) == metrics(whole.folder)


def test_a_loss_that_is_not_finite_ends_the_run_and_keeps_the_checkpoint(
    texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = trainer.Trainer.advance

    def poisoned(self: trainer.Trainer) -> dict[str, Any]:
        if self.taken == 4:
            with torch.no_grad():
                next(self.model.parameters()).fill_(float("nan"))
        return real(self)

    monkeypatch.setattr(trainer.Trainer, "advance", poisoned)
    with pytest.raises(RunError, match=r"Step 5 could not be taken\. .*nan.*A smaller lr may help"):
        run(config(texts))
    assert all(tensor.isfinite().all() for tensor in weights(texts.parent / "run").values())


def test_a_clock_that_stands_still_ends_no_run(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", lambda: 1.0)
    monkeypatch.setattr(time, "monotonic", lambda: 1.0)
    outcome, _ = run(config(texts, steps=2, proof=False))
    told = [
        json.loads(line)["tokens_per_second"] for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()
    ]
    assert told == [0.0, 0.0]


def test_the_trial_of_the_first_window_is_not_told_as_a_lack_of_memory(texts: Path) -> None:
    part = train(config(texts), Interrupting(4, signal.SIGINT))
    again, _ = run(Config(resume=part.folder))  # a new process tries its first window anew
    assert [record["retries"] for record in metrics(again.folder)] == [0] * 7


@pytest.mark.gpu
def test_a_run_on_a_gpu_is_proven_and_goes_on(texts: Path) -> None:
    part = train(config(texts, device="cuda"), Interrupting(4, signal.SIGINT))
    again, _ = run(Config(resume=part.folder))
    assert again.summary is not None and again.summary["steps"] == 7
    assert again.summary["gradient_error"] < 1e-5 < again.summary["usual_loop_error"]


def test_a_device_that_is_not_there_is_refused(texts: Path) -> None:
    with pytest.raises(ConfigError, match="device is 'cupboard', which cannot be used here"):
        run(config(texts, device="cupboard"))
