"""A call is broken off at any operator, or any line: ``.grad`` is as before, and the next call is right."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.faults.entries import ENTRIES, faults_after, seed, undisturbed
from tests.faults.injection import ERRORS, AtLine, AtOperator

TRIALS = 36
"""Places of each way in that are tried here, evenly spread; benchmarks/attacks.py tries all."""


def places(name: str, injection: AtOperator | AtLine) -> range:
    """Choose some of the places at which a call can be broken off."""
    entry = ENTRIES[name]()
    seed()
    with injection:
        entry.call()
    return range(0, injection.count, 1 + injection.count // TRIALS)


@pytest.mark.parametrize("name", ENTRIES)
def test_an_error_at_any_operator_changes_nothing(name: str) -> None:
    expected, found = undisturbed(ENTRIES[name]), Counter[str]()
    errors = list(ERRORS.values())
    for trial, at in enumerate(places(name, AtOperator())):
        injection = AtOperator(at, errors[trial % len(errors)])
        faults, said = faults_after(ENTRIES[name], injection, gathered=trial % 2 == 1, expected=expected)
        assert not faults, f"operator {at}, {said}: {faults}"
        found[said] += 1
    assert sum(number for said, number in found.items() if said.startswith("raised")) > 10


@pytest.mark.parametrize("name", ENTRIES)
def test_an_interrupt_at_any_line_changes_nothing(name: str) -> None:
    expected, interrupted = undisturbed(ENTRIES[name]), 0
    for trial, at in enumerate(places(name, AtLine())):
        injection = AtLine(at)
        faults, said = faults_after(ENTRIES[name], injection, gathered=trial % 2 == 1, expected=expected)
        assert not faults, f"{injection.place}, {said}: {faults}"
        interrupted += said == "raised KeyboardInterrupt"
    assert interrupted > 10
