"""The order of the rows: each once an epoch, the same again for the same seed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wholebatch.train import ConfigError
from wholebatch.train.order import Order


@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 5))
def test_every_row_comes_once_an_epoch(rows: int, batch: int, seed: int) -> None:
    order = Order(rows, min(batch, rows), seed)
    for epoch in range(2):
        steps = range(order.steps_in(epoch), order.steps_in(epoch + 1))
        batches = [order.batch(step) for step in steps]
        assert sorted(row for one in batches for row in one) == list(range(rows))
        assert all(len(one) == order.schedule.largest for one in batches[:-1])


def test_epochs_and_seeds_have_their_own_order_and_any_step_can_be_found_again() -> None:
    order = Order(rows=50, batch_size=50, seed=1)
    first = order.batch(0)
    assert order.batch(1) != first
    assert Order(rows=50, batch_size=50, seed=2).batch(0) != first
    assert order.batch(0) == first


def test_a_batch_that_cannot_be_met_is_refused() -> None:
    with pytest.raises(ConfigError, match="A batch of 64 rows cannot be met: there are 10 rows"):
        Order(rows=10, batch_size=64, seed=0)


@pytest.mark.parametrize(
    ("rows", "batch", "expected"),
    [
        (128, 64, "128 rows = 2 batches of 64"),
        (1800, 64, "1,800 rows = 28 batches of 64 + 1 of 8"),
        (5, 5, "5 rows = 1 batch of 5"),
    ],
)
def test_the_short_last_batch_of_an_epoch_is_said(rows: int, batch: int, expected: str) -> None:
    assert str(Order(rows, batch, seed=0)) == expected
