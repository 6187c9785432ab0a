"""Break windows, steps and whole runs off, everywhere, and count what is not as it was promised.

Takes as long as it is told to. In turns through all ways into a window, at places drawn at random:

* memory runs out at an operator, forward or backward, under ``wb.Auto``: the window must end as a plain loop over its
  final micro-batches, on the same draws, or raise and leave ``.grad`` as it was;
* an error or an interrupt at an operator: ``.grad``, hooks, modes and weights as before, the next call right;
* an interrupt at a line of the library, wherever Python can raise one: the same.

The windows, and what each is held against, are those of tests/faults. Further parts, see there: random windows on
several ranks with a fault on one (attacks_on_ranks.py), kills of whole runs and of launchers (attacks_on_runs.py).

    python benchmarks/attacks.py --seconds 120
    python benchmarks/attacks.py --parts ranks,kills,orphans --seconds 1500
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from record import RESULTS, machine, save

sys.path.insert(0, str(Path(__file__).parents[1]))

import attacks_on_ranks
import attacks_on_runs

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


def measure(attack: str, places: int | None, trials: Iterator[Trial], seconds: float, most: int) -> dict[str, Any]:
    """Run trials until they end, or the time does, or so many have been run."""
    found, wrong, end = Counter[str](), [], time.monotonic() + seconds
    for trial in trials:
        how, what = trial()
        found[how] += 1
        if what:
            wrong.append(what)
            print(f"{attack}: {what}", flush=True)
        if time.monotonic() > end or found.total() == most:
            break
    row = {"attack": attack, "places": places, "trials": found.total(), "wrong": len(wrong), "what": wrong[:20]}
    return row | {how: found[how] for how in ("recovered", "raised", "came", "lost")}


def parts(
    order: random.Random, scratch: Path
) -> dict[str, dict[str, Callable[[], tuple[int | None, Iterator[Trial]]]]]:
    """Name the attacks of each part; each counts its places, where these can be counted, and yields trials."""
    errors = list(ERRORS.values())
    return {
        "memory": {"memory, at any operator": lambda: short_of_memory(order)},
        "exceptions": {
            "errors and interrupts, at any operator": lambda: broken_off(
                order, lambda at: AtOperator(at, order.choice(errors))
            ),
            "interrupts, at any line": lambda: broken_off(order, AtLine),
        },
        "ranks": {
            f"random windows on {ranks} ranks, one broken off": lambda ranks=ranks: (  # type: ignore[misc]
                None,
                attacks_on_ranks.broken_off(ranks, order),
            )
            for ranks in (2, 3)
        },
        "kills": {"whole runs killed, at any moment": lambda: (None, attacks_on_runs.killed(scratch, order))},
        "orphans": {"torchrun killed, resumed at once": lambda: (None, attacks_on_runs.orphaned(scratch, order))},
    }


def earlier(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return what the parts that are left out had found on this machine."""
    path = options.out / "attacks.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    same = kept.get("machine") == machine()
    return [row for row in kept["rows"] if row.get("part") not in options.parts] if same else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", type=lambda names: names.split(","), default=["memory", "exceptions"])
    parser.add_argument("--seconds", type=float, default=120, help="for each attack")
    parser.add_argument(
        "--trials", type=int, default=0, help="for each attack, at most; 0 for as many as there is time"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = earlier(options)
    with TemporaryDirectory(prefix="attacks-") as scratch:
        attacks = parts(random.Random(options.seed), Path(scratch))
        for part in options.parts:
            for attack, prepare in attacks[part].items():
                end = time.monotonic() + options.seconds
                places, trials = prepare()
                row = measure(attack, places, trials, end - time.monotonic(), options.trials)
                rows.append({"part": part, "seconds": options.seconds, "seed": options.seed, **row})
                print(rows[-1], flush=True)
    rows.sort(key=lambda row: list(attacks).index(row["part"]))
    print(save("attacks", {}, rows, options.out))


if __name__ == "__main__":
    main()
