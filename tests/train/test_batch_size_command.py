"""`wholebatch batch-size`: what a run's noise says, and what branches of it come to."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from tests.train.test_run import config, run, texts  # noqa: F401
from wholebatch.cli import main
from wholebatch.train import ConfigError, RunError, batch_size_command
from wholebatch.train.batch_size_command import Question, advise
from wholebatch.train.picture import draw_batches


@pytest.fixture
def trained(texts: Path) -> Path:  # noqa: F811
    """A run of 18 steps, of which the noise of one was measured."""
    run(config(texts, steps=18, max_tokens=60, proof=False))
    return texts.parent / "run"


def said(question: Question) -> str:
    stream = io.StringIO()
    advise(question, stream)
    return stream.getvalue()


def test_the_noise_of_a_run_is_read(trained: Path) -> None:
    told = said(Question(trained))
    lines = (trained / "metrics.jsonl").read_text().splitlines()
    record = next(each for each in map(json.loads, lines) if "noise_scale" in each)
    assert f"{record['noise_scale']:.4g} rows at step 16" in told
    assert "not to be judged yet" in told  # one measurement has no error
    assert "--measure" in told


@pytest.mark.parametrize(
    ("batch", "error", "words"),
    [
        (64, 3.0, "well above"),
        (16, 3.0, "near it"),
        (4, 3.0, "well below"),
        (4, 30.0, "not to be judged"),
        (4, None, "not"),
    ],
)
def test_a_batch_is_judged_by_the_noise_and_its_error(trained: Path, batch: int, error: Any, words: str) -> None:
    record = {"step": 32, "rows": batch, "noise_scale": 20.0, "noise_scale_error": error}
    with (trained / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")
    assert f"{batch} rows is {words}" in said(Question(trained))


def test_branches_train_on_the_same_rows_and_are_kept(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (trained / "metrics.jsonl").read_bytes(), (trained / "checkpoint" / "model.safetensors").read_bytes()
    picture = trained / "batch.png"
    told = said(Question(trained, measure=True, sizes=(3, 12), rows=24, plot=picture))
    assert told.count("branch ") == 2 and "choose" in told and "not known" in told
    assert picture.stat().st_size > 1000
    values = json.loads(said(Question(trained, measure=True, sizes=(3, 12), rows=24, json=True)))
    small, large = values["branches"]
    assert (small["steps"], large["steps"], small["began"]) == (8, 2, 18)
    assert large["lr"] / small["lr"] == pytest.approx(2)  # the square root of 4
    losses = {branch["batch"]: branch["held_out"]["bits_per_byte"] for branch in values["branches"]}
    assert values["choose"] == (12 if losses[12] <= 1.01 * losses[3] else 3)

    def again(*given: Any) -> None:
        raise AssertionError("a finished branch was trained again")

    monkeypatch.setattr(batch_size_command, "_trained", again)
    said(Question(trained, measure=True, sizes=(3, 12), rows=24))
    now = (trained / "metrics.jsonl").read_bytes(), (trained / "checkpoint" / "model.safetensors").read_bytes()
    assert now == before  # the run itself is as it was


def test_what_cannot_be_asked_is_refused(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="holds no run"):
        said(Question(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="--measure"):
        Question(trained, sizes=(4,))
    with pytest.raises(ConfigError, match="1 or more"):
        Question(trained, measure=True, rows=0)
    (trained / "metrics.jsonl").write_text("")
    assert "not measured" in said(Question(trained))
    with pytest.raises(ConfigError, match="nothing was"):
        said(Question(trained, plot=tmp_path / "a.png"))
    with pytest.raises(ConfigError, match="cannot be written"):
        draw_batches([(1, 2, 3.0)], [], tmp_path / "no" / "a.png")
    (trained / "checkpoint").rename(trained / "elsewhere")
    with pytest.raises(RunError, match="no checkpoint yet"):
        said(Question(trained, measure=True))


def test_the_command_line_takes_the_run(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["batch-size", str(trained), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["noise"][0]["step"] == 16
    assert main(["batch-size", str(trained / "nothing")]) == 1
