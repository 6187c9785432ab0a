"""Break windows and steps off, everywhere, and count what is not as it was promised. About as long as it is told to be.

Three attacks, each in turns through all ways into a window, at places drawn at random:

* memory runs out at an operator, forward or backward, under ``wb.Auto``: the window must end as a plain loop over its
  final micro-batches, on the same draws, or raise and leave ``.grad`` as it was;
* an error or an interrupt at an operator: ``.grad``, hooks, modes and weights as before, the next call right;
* an interrupt at a line of the library, wherever Python can raise one: the same.

The windows, and what each is held against, are those of tests/faults.

    python benchmarks/attacks.py --seconds 360
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from record import RESULTS, save

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.faults.cases import CASES, Case, assert_survived, run
from tests.faults.entries import ENTRIES, faults_after, seed, undisturbed
from tests.faults.injection import ERRORS, MEMORY, AtLine, AtOperator

Trial = Callable[[], tuple[str, str]]
"""Returns how a window ended, and what was wrong; nothing if all was right."""


def short_of_memory(order: random.Random) -> tuple[int, Iterator[Trial]]:
    """Count the places, and yield trials in random order."""
    places: list[tuple[type[Case], int]] = []
    for kind in CASES:
        calm = AtOperator()
        run(kind, calm)
        places += [(kind, at) for at in range(calm.count)]

    def trial(kind: type[Case], at: int, maker: str, gathered: bool) -> tuple[str, str]:
        ended = run(kind, AtOperator(at, MEMORY[maker]), gathered)
        try:
            assert_survived(ended, gathered)
        except AssertionError as error:
            return "wrong", f"{kind.__name__}, operator {at}, {maker}: {error}"
        return "recovered" if ended.error is None else "raised", ""

    return len(places), (
        lambda kind=kind, at=at: trial(kind, at, order.choice(list(MEMORY)), order.random() < 0.5)  # type: ignore[misc]
        for kind, at in order.sample(places, len(places))
    )


def broken_off(order: random.Random, make: Callable[[int], AtOperator | AtLine]) -> tuple[int, Iterator[Trial]]:
    """Count the places, and yield trials in random order."""
    places: list[tuple[str, int]] = []
    expected = {name: undisturbed(ENTRIES[name]) for name in ENTRIES}
    for name, entry in ENTRIES.items():
        calm, built = make(-1), entry()
        seed()
        with calm:
            built.call()
        places += [(name, at) for at in range(calm.count)]

    def trial(name: str, at: int, gathered: bool) -> tuple[str, str]:
        faults, said = faults_after(ENTRIES[name], make(at), gathered, expected[name])
        return ("wrong", f"{name}, place {at}, {said}: {', '.join(faults)}") if faults else (said.split()[0], "")

    return len(places), (
        lambda name=name, at=at: trial(name, at, order.random() < 0.5)  # type: ignore[misc]
        for name, at in order.sample(places, len(places))
    )


def measure(attack: str, places: int, trials: Iterator[Trial], seconds: float) -> dict[str, Any]:
    """Run trials until they end, or the time does."""
    found, wrong, end = Counter[str](), [], time.monotonic() + seconds
    for trial in trials:
        how, what = trial()
        found[how] += 1
        if what:
            wrong.append(what)
        if time.monotonic() > end:
            break
    row = {"attack": attack, "places": places, "trials": found.total(), "wrong": len(wrong), "what": wrong[:20]}
    return row | {how: found[how] for how in ("recovered", "raised", "came")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=360, help="for all attacks together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    order = random.Random(options.seed)
    errors = list(ERRORS.values())
    attacks: dict[str, Callable[[], tuple[int, Iterator[Trial]]]] = {
        "memory, at any operator": lambda: short_of_memory(order),
        "errors and interrupts, at any operator": lambda: broken_off(
            order, lambda at: AtOperator(at, order.choice(errors))
        ),
        "interrupts, at any line": lambda: broken_off(order, AtLine),
    }
    rows = []
    for attack, prepare in attacks.items():
        end = time.monotonic() + options.seconds / len(attacks)
        places, trials = prepare()
        rows.append(measure(attack, places, trials, end - time.monotonic()))
        print(rows[-1], flush=True)
    print(save("attacks", {"seconds": options.seconds, "seed": options.seed}, rows, options.out))


if __name__ == "__main__":
    main()
