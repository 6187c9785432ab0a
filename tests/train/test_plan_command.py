"""`wholebatch plan`: arithmetic at once, else what a few micro-batches of the run's own first batch tell."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import wholebatch as wb
from tests.train.test_run import config, run, texts  # noqa: F401
from wholebatch.cli import main
from wholebatch.planning.planner import Choice, Measured, Plan
from wholebatch.train import ConfigError
from wholebatch.train.picture import draw
from wholebatch.train.plan_command import Question, advise, answer_to

MIB = 2**20


def said(question: Question) -> str:
    stream = io.StringIO()
    advise(question, stream)
    return stream.getvalue()


def asked(texts: Path, **changes: Any) -> Question:  # noqa: F811
    return Question(**{**vars(config(texts, max_tokens=None, batch_size=24, width=16, layers=3)), **changes})


def test_arithmetic_alone_says_micro_batches_words_and_rates() -> None:
    told = said(Question(batch_size=128, micro_batch_size=4, ranks=4, lr=1e-3, base_batch=256))
    assert "batch 128 = 4 rows x 8 micro-batches x 4 ranks" in told
    assert re.search(r"Hugging Face +per_device_train_batch_size 4, gradient_accumulation_steps 8", told)
    assert re.search(r"Lightning +batch_size 4, accumulate_grad_batches 8", told)
    assert re.search(r"Ultralytics +batch 16, nbs 128", told)
    assert "0.0005 by the linear rule, 0.0007071 by the square root" in told


def test_arithmetic_builds_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    from wholebatch.train import plan_command

    monkeypatch.setattr(plan_command, "TASKS", {})
    assert said(Question(batch_size=8, micro_batch_size=4)).startswith(
        "batch         batch 8 = 4 rows x 2 micro-batches\n"
    )
    with pytest.raises(KeyError):
        said(Question(batch_size=8))


def test_a_batch_that_others_cannot_say_names_those_that_they_can() -> None:
    assert "could only say 128 or 144" in said(Question(batch_size=130, micro_batch_size=4, ranks=4))


def test_the_words_of_other_tools_are_understood() -> None:
    told = said(Question(per_device_train_batch_size=4, gradient_accumulation_steps=8, ranks=4))
    expected = (
        "batch 128 = 4 rows x 8 micro-batches x 4 ranks (from per_device_train_batch_size 4, "
        "gradient_accumulation_steps 8)"
    )
    assert expected in told


def test_json_holds_the_arithmetic() -> None:
    told = json.loads(said(Question(batch_size=130, micro_batch_size=4, lr=0.1, base_batch=65, json=True)))
    assert (told["pieces"], told["last_piece_rows"], told["in_other_words"]) == (33, 2, {})
    assert told["lr"] == {"at": 65, "was": 0.1, "linear": 0.2, "sqrt": pytest.approx(0.1 * 2**0.5)}


def memory_for(texts: Path, tokens: int) -> str:  # noqa: F811
    """A memory in which a micro-batch of so many tokens just fits."""
    free = answer_to(asked(texts)).plan
    assert free is not None
    return str(sum(free.parts.values()) + int(free.measured[0].micro_batch_bytes(tokens)))


def test_a_measured_plan_says_what_fits_and_training_agrees(texts: Path) -> None:  # noqa: F811
    memory = memory_for(texts, 200)
    answer = answer_to(asked(texts, memory=memory))
    assert answer.plan is not None
    plain = next(choice for choice in answer.plan.choices if choice.way == "smaller micro-batches")
    assert 150 <= plain.micro_batch_size <= 250
    settings = config(
        texts, max_tokens=plain.micro_batch_size, batch_size=24, width=16, layers=3, memory=memory, steps=1
    )
    outcome, shown = run(settings)
    assert shown.records[0]["retries"] == 0
    assert len(shown.records[0]["pieces"]) == plain.micro_batches
    assert outcome.summary is not None


def test_a_measured_plan_is_told_in_a_table_with_what_to_type(texts: Path) -> None:  # noqa: F811
    told = said(asked(texts, memory=memory_for(texts, 200)))
    assert re.search(r"^memory +\d.* MiB = weights .*, gradients .*, optimizer .*, and .* for activations$", told, re.M)
    assert re.search(r"^way +largest micro-batch +micro-batches +activations +a step$", told, re.M)
    assert re.search(r"^smaller micro-batches +\d+ tokens +\d+ +\d.* MiB +\d.* s$", told, re.M)
    assert re.search(r"^checkpointing +\d+ tokens", told, re.M)
    assert re.search(r"^fastest .* a step in micro-batches of \d+ tokens at most; .*would take \d", told, re.M)
    assert re.search(r"^use +wholebatch train --max-tokens \d+( --checkpoint)?$", told, re.M)
    assert "offload       not weighed: the model is on the cpu" in told


def test_a_way_that_fits_no_row_is_shown_as_such(texts: Path) -> None:  # noqa: F811
    free = answer_to(asked(texts)).plan
    assert free is not None
    plain, again = free.measured
    least = free.curves[0].micro_batch_size
    memory = sum(free.parts.values()) + int((plain.micro_batch_bytes(least) + again.micro_batch_bytes(least)) / 2)
    told = said(asked(texts, memory=str(memory)))
    assert re.search(r"^smaller micro-batches +none fits +\d.* MiB at least$", told, re.M)
    assert re.search(r"^use +wholebatch train --max-tokens \d+ --checkpoint$", told, re.M)


def test_a_memory_that_fits_nothing_is_refused_with_the_parts(texts: Path) -> None:  # noqa: F811
    with pytest.raises(wb.OutOfMemoryError, match=r"Not even one row fits into .*weights .*optimizer"):
        said(asked(texts, memory="50kB"))


def test_rows_are_planned_where_there_are_no_tokens() -> None:
    pytest.importorskip("sklearn")
    told = said(Question(task="classify", batch_size=96, memory="4MiB", device="cpu", ranks=2))
    assert "batch 96 = 48 rows x 2 ranks; planned for the 48 of one" in told
    assert re.search(r"^use +wholebatch train --micro-batch-size \d+$", told, re.M)
    assert "checkpointing not weighed: the model has no blocks that would keep less" in told


def test_a_loss_over_all_rows_is_not_planned_by_its_micro_batches() -> None:
    with pytest.raises(ConfigError, match="The task contrastive takes its loss over all rows at once"):
        said(Question(task="contrastive", memory="1GiB", device="cpu"))
    assert "4 rows x 16 micro-batches" in said(Question(task="contrastive", micro_batch_size=4))


def test_who_reads_may_stop_reading() -> None:
    command = f"{sys.executable} -m wholebatch plan --batch-size 8 --micro-batch-size 4 | true; exit ${{PIPESTATUS[0]}}"
    run = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, run.stderr) in ((0, ""), (128 + signal.SIGPIPE, ""))


def test_json_holds_the_plan(texts: Path) -> None:  # noqa: F811
    told = json.loads(said(asked(texts, json=True)))
    assert told["batch_size"] == 24 and told["memory"] is None
    assert {way["way"] for way in told["measured"]} == {"smaller micro-batches", "checkpointing"}
    assert told["use"].startswith("--max-tokens ")
    assert len(told["curves"]) > 10


def test_a_terminal_gets_a_table_with_lines(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    advise(Question(batch_size=128, micro_batch_size=4), stream)
    assert "│" in stream.getvalue() and "Megatron" in stream.getvalue()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"ranks": 0}, "ranks is 0; it must be at least 1"),
        ({"lr": 0.1, "base_batch": 0}, "base_batch is 0; it must be at least 1"),
        ({"base_batch": 64}, "base_batch is 64, but no lr"),
        ({"resume": Path("runs/one")}, r"A plan is made before a run, but resume is runs/one"),
    ],
    ids=str,
)
def test_questions_without_an_answer_are_refused(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        Question(**settings)


def test_a_picture_of_arithmetic_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="plot draws what was measured"):
        said(Question(batch_size=8, micro_batch_size=4, plot=tmp_path / "plan.png"))


def small_plan(memory: int | None = 200) -> Plan:
    ways = [Measured("smaller micro-batches", [1, 2], [10.0, 20.0], [1.0, 1.5], 0.0, 10.0, 0.5, 0.5)]
    curves = [Choice("smaller micro-batches", size, 8 // size, 8 / size + 4, 10.0 * size) for size in (1, 2, 4, 8)]
    return Plan(8, "rows", memory, {"weights": 100}, ways, [curves[2]], "", curves)


@pytest.mark.parametrize("memory", [200, None], ids=["a cap", "no cap"])
def test_a_plan_is_drawn_with_its_cap(tmp_path: Path, memory: int | None) -> None:
    pytest.importorskip("matplotlib")
    draw(small_plan(memory), tmp_path / "plan.svg")
    drawn = (tmp_path / "plan.svg").read_text()
    assert ("the cap" in drawn) is (memory is not None)
    draw(small_plan(memory), tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes()[:4] == b"\x89PNG"


def test_a_picture_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for path in (tmp_path / "no" / "plan.png", tmp_path / "plan.words"):
        with pytest.raises(ConfigError, match="cannot be written: "):
            draw(small_plan(), path)


def test_a_missing_matplotlib_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    with pytest.raises(ConfigError, match=r'pip install "wholebatch\[plot\]"'):
        draw(small_plan(), tmp_path / "plan.png")


def test_the_program_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("batch_size: 128\nmicro_batch_size: 4\n")
    assert main(["plan", str(path), "--ranks=4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["said"] == "batch 128 = 4 rows x 8 micro-batches x 4 ranks"
    assert main(["plan", "--batch-size=100", "--micro-batch-size=4", "--gradient-accumulation-steps=8"]) == 1
    assert capsys.readouterr().err.startswith(
        "wholebatch: batch_size is 100, but 4 rows x 8 micro-batches x 1 rank = 32."
    )
