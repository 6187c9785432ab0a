"""The change that is shown: in the user's own line, and one that helps."""

from __future__ import annotations

from pathlib import Path

import pytest

from wholebatch.doctor.command import main
from wholebatch.doctor.findings.remedies import before_backward, condition_of
from wholebatch.verify.source_line import Site


@pytest.mark.parametrize(
    ("line", "loss"),
    [
        ("loss.backward()", "loss"),
        ("self.losses['a'][0].backward()", "self.losses['a'][0]"),
        ("F.cross_entropy(model(x), y).backward()", "F.cross_entropy(model(x), y)"),
        ("for x, y in loader: (a(x) + b(y)).mean().backward(); step()", "(a(x) + b(y)).mean()"),
        (").backward()", ""),
        ("step()", ""),
    ],
)
def test_the_loss_of_a_line_is_all_that_stands_before_backward(line: str, loss: str) -> None:
    assert before_backward(line) == loss


def test_the_condition_of_a_step_is_the_users_own(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("for i in range(9):\n    if i % 4 == 3:\n        step()\n    other()\n")
    assert condition_of(Site(str(path), 3)) == "if i % 4 == 3:"
    assert condition_of(Site(str(path), 4)) == ""


def test_a_window_with_left_over_micro_batches_does_not_tell_what_to_divide_by(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "import torch\n"
        "model = torch.nn.Linear(3, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for epoch in range(3):\n"
        "    for i in range(9):\n"
        "        model(torch.ones(2, 3)).square().mean().backward()\n"
        "        if (i + 1) % 4 == 0:\n"
        "            optimizer.step(), optimizer.zero_grad()\n"
    )
    assert main(["--steps", "0", str(path)]) == 1
    printed = capsys.readouterr().out
    assert "   + (model(torch.ones(2, 3)).square().mean() / 4).backward()" in printed
    removed = [line.removeprefix("   - ") for line in printed.splitlines() if line.startswith("   - ")]
    assert removed
    assert all(line in path.read_text() for line in removed)
