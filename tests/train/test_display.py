"""What a run shows, on a terminal and elsewhere."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest

from wholebatch.train import display
from wholebatch.train.display import Plain, Terminal, clock, header, micro_batches, row, size

HEADER = header("tokens")


def record(step: int = 1, **changes: Any) -> dict[str, Any]:
    told = {"step": step, "steps": 4, "loss": 2.34567, "lr": 0.005, "grad_norm": 0.8123, "pieces": [3, 9, 2]}
    told |= {
        "padding": 0.045,
        "tokens_per_second": 15432.1,
        "peak_memory_bytes": 512 * 2**20,
        "left": 4.0 - step,
        "retries": 0,
    }
    return told | {"stepped": True, "reason": None, "unit": "tokens"} | changes


def test_a_step_stands_under_its_header() -> None:
    line = row(record())
    assert len(line) == len(HEADER)
    assert line.split() == [
        "1/4",
        "2.3457",
        "5.00e-03",
        "0.812",
        "3",
        "x",
        "2-9",
        "4.5%",
        "15,432",
        "512",
        "MiB",
        "0:03",
    ]
    for word, value in {"loss": "2.3457", "lr": "5.00e-03", "padding": "4.5%", "left": "0:03"}.items():
        assert HEADER.index(word) + len(word) == line.index(value) + len(value)


def test_a_window_that_was_not_stepped_says_why() -> None:
    assert row(record(stepped=False, reason="no items")).endswith("not stepped: no items")


def test_numbers_are_said_as_people_say_them() -> None:
    assert [micro_batches([4] * 16), micro_batches([1])] == ["16 x 4", "1 x 1"]
    assert [size(3 * 2**20), size(3 * 2**29)] == ["3 MiB", "1.5 GiB"]
    assert [clock(6.6), clock(123), clock(7395)] == ["0:07", "2:03", "2:03:15"]


def test_the_first_and_the_last_step_are_always_written_and_those_between_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream, times = io.StringIO(), iter([0.0, 1.0, 2.5, 3.0])
    monkeypatch.setattr(display.time, "monotonic", lambda: next(times))
    plain = Plain(stream)
    for step in range(1, 5):
        plain.step(record(step))
    lines = stream.getvalue().splitlines()
    assert lines[0] == HEADER
    assert [line.split()[0] for line in lines[1:]] == ["1/4", "3/4", "4/4"]


def test_a_note_of_several_lines_stays_in_its_column() -> None:
    stream = io.StringIO()
    Plain(stream).note("sample", "one\ntwo")
    assert stream.getvalue() == "sample      one\n            two\n"


def test_a_sample_cannot_command_the_terminal() -> None:
    stream = io.StringIO()
    Plain(stream).note("sample", "Return \x1b[2J\a\tthé")
    assert stream.getvalue() == "sample      Return ·[2J··thé\n"


def test_a_terminal_shows_the_same_lines_and_markup_is_only_text(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal()
    terminal.note("sample", "[bold]Return[/bold] :smile:")
    terminal.step(record(1))
    terminal.step(record(4))
    terminal.close()
    said = capsys.readouterr().out
    assert "[bold]Return[/bold] :smile:" in said
    assert HEADER in said and row(record(4)) in said


def test_lines_are_chosen_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(display.choose()) is Plain
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert type(display.choose()) is Terminal
