"""The cutting rules: least modelled time against every partition, packing, lengths of samples, and `Auto`."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wholebatch.batch.sizes import Auto, Cost, Tokens, pack, plan
from wholebatch.errors import SplitError

COSTS = st.builds(
    Cost,
    overhead=st.sampled_from([0, 1, 67, 1000]),
    linear=st.sampled_from([0, 1, 3.44e-4]),
    quadratic=st.sampled_from([0, 7e-4, 0.3]),
)


def partitions(rows: list[int]) -> Iterator[list[list[int]]]:
    """Every way to part rows into micro-batches."""
    if not rows:
        yield []
        return
    first, *rest = rows
    for partition in partitions(rest):
        yield [[first], *partition]
        for place in range(len(partition)):
            yield [*partition[:place], [first, *partition[place]], *partition[place + 1 :]]


def modelled(micro_batches: list[list[int]], lengths: list[int], cost: Cost) -> float:
    return sum(cost(len(micro_batch), max(lengths[row] for row in micro_batch)) for micro_batch in micro_batches)


def fits(micro_batches: list[list[int]], lengths: list[int], budget: int) -> bool:
    return all(
        len(micro_batch) == 1 or len(micro_batch) * max(lengths[row] for row in micro_batch) <= budget
        for micro_batch in micro_batches
    )


@settings(max_examples=150)
@given(st.lists(st.integers(1, 40), max_size=7), st.integers(1, 120), COSTS)
def test_no_partition_is_faster_under_the_model(lengths: list[int], budget: int, cost: Cost) -> None:
    ours = plan(lengths, budget, cost)
    every = (
        micro_batches for micro_batches in partitions(list(range(len(lengths)))) if fits(micro_batches, lengths, budget)
    )
    least = min(modelled(micro_batches, lengths, cost) for micro_batches in every)
    assert fits(ours, lengths, budget)
    assert modelled(ours, lengths, cost) == pytest.approx(least, rel=1e-9, abs=1e-12)


@given(st.lists(st.integers(0, 600), max_size=80), st.integers(1, 3000), COSTS)
def test_every_row_goes_to_exactly_one_micro_batch_within_the_budget(
    lengths: list[int], budget: int, cost: Cost
) -> None:
    micro_batches = plan(lengths, budget, cost)
    assert sorted(itertools.chain.from_iterable(micro_batches)) == list(range(len(lengths)))
    assert fits(micro_batches, lengths, budget)
    assert all(micro_batch == sorted(micro_batch) for micro_batch in micro_batches)
    longest = [max(lengths[row] for row in micro_batch) for micro_batch in micro_batches]
    assert longest == sorted(longest, reverse=True), "the longest micro-batch first"


def quadratic_time_plan(lengths: list[int], budget: int, cost: Cost) -> float:
    """The least modelled time by the plain recursion over every start of every micro-batch."""
    ordered = sorted(lengths, reverse=True)
    least = [0.0] + [math.inf] * len(ordered)
    for end in range(1, len(ordered) + 1):
        for start in range(end):
            if end - start == 1 or (end - start) * ordered[start] <= budget:
                least[end] = min(least[end], least[start] + cost(end - start, ordered[start]))
    return least[-1]


@settings(max_examples=60)
@given(st.lists(st.integers(1, 500), min_size=1, max_size=120), st.integers(1, 20000), COSTS)
def test_the_fast_program_finds_what_the_plain_recursion_finds(lengths: list[int], budget: int, cost: Cost) -> None:
    expected = quadratic_time_plan(lengths, budget, cost)
    assert modelled(plan(lengths, budget, cost), lengths, cost) == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_filling_to_the_budget_is_slower_than_the_plan() -> None:
    lengths = [512, 30, 30, 30, 30, 30, 30, 30]
    filled = [list(range(8))]
    assert fits(filled, lengths, 4096)
    cost = Cost()
    assert modelled(plan(lengths, 4096, cost), lengths, cost) < 0.3 * modelled(filled, lengths, cost)


def test_a_dear_micro_batch_makes_fewer_of_them() -> None:
    lengths = [8 * row for row in range(1, 65)]
    numbers = [len(plan(lengths, 4096, Cost(overhead=overhead))) for overhead in (0, 67, 1000, 100_000)]
    assert numbers == sorted(numbers, reverse=True)
    assert numbers[0] == 64
    assert numbers[-1] < 12


def test_a_row_beyond_the_budget_runs_alone() -> None:
    assert plan([5, 300, 5, 400], budget=100) == [[3], [1], [0, 2]]
    assert pack([5, 300, 5, 400], budget=100) == [[3], [1], [0, 2]]


def test_no_rows_make_no_micro_batches() -> None:
    assert plan([], 100) == []
    assert pack([], 100) == []


def test_a_window_of_256_rows_is_planned_in_a_few_milliseconds() -> None:
    lengths = torch.randn(4096).exp().mul(80).clamp(1, 512).int().tolist()

    def least_seconds(rows: int) -> float:
        def once() -> float:
            start = time.perf_counter()
            plan(lengths[:rows], 8192)
            return time.perf_counter() - start

        return min(once() for _ in range(7))

    assert least_seconds(256) < 0.005
    assert least_seconds(4096) < 0.1


@given(st.lists(st.integers(0, 40), max_size=30), st.integers(1, 60))
def test_packing_is_first_fit_in_falling_order(lengths: list[int], budget: int) -> None:
    expected: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        length = max(1, lengths[row])
        room = [budget - sum(max(1, lengths[other]) for other in micro_batch) for micro_batch in expected]
        place = next((place for place, left in enumerate(room) if left >= length), None)
        if place is None:
            expected.append([row])
        else:
            expected[place].append(row)
    assert pack(lengths, budget) == [sorted(micro_batch) for micro_batch in expected]


@given(st.builds(Cost, st.floats(1e-4, 1), st.floats(1e-6, 1e-3), st.floats(0, 1e-5)))
def test_the_fit_finds_the_cost_that_made_the_times(cost: Cost) -> None:
    shapes = [(n, length) for n in (1, 4, 16) for length in (16, 64, 256, 1024)]
    found = Cost.fit(shapes, [cost(*shape) for shape in shapes])
    assert [found(*shape) for shape in shapes] == pytest.approx([cost(*shape) for shape in shapes], rel=1e-6)


def test_the_fit_is_never_negative_and_the_best_that_is_not() -> None:
    shapes, seconds = [(1, 10), (2, 10), (4, 10), (8, 10), (8, 40)], [0.1, 0.25, 0.55, 1.2, 4.0]  # a line below zero
    found = Cost.fit(shapes, seconds)
    error = sum((found(*shape) / time - 1) ** 2 for shape, time in zip(shapes, seconds, strict=True))
    assert min(found.overhead, found.linear, found.quadratic) >= 0
    for factors in itertools.product((0.98, 1.0, 1.02), repeat=3):
        other = Cost(*(a * f for a, f in zip((found.overhead, found.linear, found.quadratic), factors, strict=True)))
        assert sum((other(*s) / t - 1) ** 2 for s, t in zip(shapes, seconds, strict=True)) >= error - 1e-12
    for extra in (Cost(1e-3, 0, 0), Cost(0, 1e-5, 0), Cost(0, 0, 1e-7)):
        grown = Cost(*(getattr(found, name) + getattr(extra, name) for name in ("overhead", "linear", "quadratic")))
        assert sum((grown(*s) / t - 1) ** 2 for s, t in zip(shapes, seconds, strict=True)) >= error - 1e-12


@pytest.mark.parametrize(
    ("shapes", "seconds"), [([], []), ([(1, 2)], []), ([(1, 2)], [0.0]), ([(0, 2)], [1.0])], ids=str
)
def test_times_that_cannot_be_fitted_are_refused(shapes: Any, seconds: Any) -> None:
    with pytest.raises(ValueError, match="cannot be fitted"):
        Cost.fit(shapes, seconds)


@pytest.mark.parametrize(
    ("sample", "length"),
    [
        (torch.zeros(7), 7),
        ([1, 2, 3], 3),
        ({"input_ids": [1, 2, 3], "meta": [0] * 9}, 3),
        ({"source": torch.zeros(4), "target": torch.zeros(6), "features": torch.zeros(50, 3)}, 6),
        ((torch.zeros(5), 1), 5),
        (([1, 2, 3], 0), 3),
        ({"ids": np.zeros(4), "text": "many more letters"}, 4),
    ],
    ids=["tensor", "list", "input_ids", "longest", "tuple", "plain tuple", "array"],
)
def test_the_length_of_a_sample_is_found(sample: Any, length: int) -> None:
    assert Tokens(100).lengths([sample]) == [length]


def test_the_length_of_a_sample_can_be_told() -> None:
    sample = {"text": "four", "ids": [1, 2], "features": torch.zeros(50, 3)}
    assert Tokens(100, lambda sample: len(sample["text"])).lengths([sample]) == [4]
    assert Tokens(100, length="features").lengths([sample]) == [50]
    assert Tokens(100, length=("ids", "features")).lengths([sample]) == [50]


@pytest.mark.parametrize("sample", ["text", {"text": "text"}, torch.zeros(3, 8, 8), ["a", "b"], [[1, 2], [3]], 5])
def test_a_length_is_never_guessed(sample: Any) -> None:
    with pytest.raises(SplitError, match=r"cannot be known.*Say it: wb.Tokens\(100, length=lambda"):
        Tokens(100).lengths([sample])


@pytest.mark.parametrize("budget", [True, 8192.0, "8192", None, torch.tensor(1.5)], ids=str)
def test_a_budget_is_a_whole_number(budget: Any) -> None:
    with pytest.raises(TypeError, match=r"Tokens\(budget\) is .* must be a whole number: wb.Tokens\(8192\)"):
        Tokens(budget)


@pytest.mark.parametrize("budget", [0, -8])
def test_a_budget_is_positive(budget: int) -> None:
    with pytest.raises(ValueError, match=f"is {budget}, but must be at least 1"):
        Tokens(budget)


@pytest.mark.parametrize("overhead", [-1.0, math.inf, math.nan])
def test_an_overhead_is_a_time(overhead: float) -> None:
    with pytest.raises(ValueError, match="finite time"):
        Tokens(100, overhead=overhead)


def test_numpy_numbers_are_numbers() -> None:
    assert Tokens(np.int64(64)) == Tokens(64)
    assert type(Tokens(np.int32(64)).budget) is int


def test_the_overhead_and_a_measured_cost_reach_the_plan() -> None:
    lengths = [10, 20, 30, 40]
    assert len(Tokens(1000, overhead=0).plan(lengths)) == 4
    assert len(Tokens(1000, overhead=1e6).plan(lengths)) == 1
    assert len(Tokens(1000, overhead=1e6, cost=Cost(0, 1, 0)).plan(lengths)) == 4


def test_auto_halves_remembers_and_never_grows_beyond_its_start() -> None:
    auto = Auto(64)
    assert auto.size == 64
    assert [auto.shrink(), auto.shrink()] == [32, 16]
    sizes = [auto.rest() for _ in range(2000)]
    assert sizes[:31] == [16] * 31, "a quiet stretch first"
    assert (sizes[31], max(sizes), sizes[-1]) == (20, 64, 64)


def test_auto_learns_from_a_micro_batch_smaller_than_its_size() -> None:
    auto = Auto(64)
    assert auto.shrink(failed=10) == 5
    assert Auto(64).shrink(failed=100) == 32
    assert Auto(1).shrink() == 1


def test_each_failure_makes_auto_wait_longer() -> None:
    auto = Auto(64)

    def quiet_windows_before_growth() -> int:
        before = auto.shrink()
        return next(n for n in itertools.count(1) if auto.rest() != before)

    waits = [quiet_windows_before_growth() for _ in range(3)]
    assert waits == [16, 32, 64]


def test_auto_over_tokens_shrinks_the_budget_and_keeps_the_rest() -> None:
    start = Tokens(8192, "ids", mask="pad", overhead=5)
    auto = Auto(start)
    assert auto.size == start
    assert auto.shrink() == Tokens(4096, "ids", mask="pad", overhead=5)
    assert "4096" in repr(auto)


def test_auto_goes_on_where_it_stopped() -> None:
    auto, other = Auto(64), Auto(64)
    auto.shrink()
    for _ in range(5):
        auto.rest()
    other.load_state_dict(auto.state_dict())
    assert [auto.rest() for _ in range(40)] == [other.rest() for _ in range(40)]
    small = Auto(8)
    small.load_state_dict(auto.state_dict())
    assert small.size == 8


@pytest.mark.parametrize("state", [{}, {"limit": 0, "stretch": 8, "quiet": 0}, {"limit": 4, "stretch": 8}])
def test_a_foreign_state_is_refused(state: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="no state of Auto"):
        Auto(64).load_state_dict(state)


@pytest.mark.parametrize("start", [True, 6.4, "64", None])
def test_auto_starts_with_rows_or_tokens(start: Any) -> None:
    with pytest.raises(TypeError, match=r"Auto\(start\).*wb.Auto\(64\)"):
        Auto(start)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"length": 512}, r"Tokens\(length\) is 512, of type int.*length=len"),
        ({"length": ("input_ids", 3)}, r"Tokens\(length\) is \('input_ids', 3\)"),
        ({"length": ()}, r"Tokens\(length\) is \(\)"),
        ({"mask": 3}, r"Tokens\(mask\) is 3, of type int.*mask="),
        ({"cost": 67.0}, r"Tokens\(cost\) is 67.0, of type float.*overhead="),
        ({"overhead": "67"}, r"Cost\(overhead='67', of type str\)"),
        ({"overhead": True}, r"Cost\(overhead=True, of type bool\)"),
    ],
    ids=str,
)
def test_an_argument_of_another_type_is_refused_with_the_call_that_is_meant(
    arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(TypeError, match=words):
        Tokens(100, **arguments)


def test_a_budget_and_a_length_in_each_other_s_place_are_noticed() -> None:
    with pytest.raises(TypeError, match=r"Tokens\(budget\) is <built-in function len>"):
        Tokens(len, 8192)  # type: ignore[arg-type]


def test_what_is_wrong_is_written_in_one_short_line() -> None:
    with pytest.raises(TypeError) as said:
        Auto(torch.zeros(100, 100))  # type: ignore[arg-type]
    assert "tensor([[0., 0." in str(said.value) and "of type Tensor" in str(said.value)
    assert len(str(said.value)) < 200 and "\n" not in str(said.value)


@pytest.mark.parametrize("state", [None, {}, {"limit": "3", "stretch": 8, "quiet": 0}], ids=str)
def test_what_is_no_state_of_auto_is_refused_whatever_it_is(state: Any) -> None:
    auto = Auto(8)
    with pytest.raises(ValueError, match="no state of Auto"):
        auto.load_state_dict(state)
    assert auto.size == 8
