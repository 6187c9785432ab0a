"""The arithmetic of the batch: translated from every tool's words, never rounded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wholebatch.train import Config, ConfigError
from wholebatch.train.translate import arithmetic, spoken, translate


@pytest.mark.parametrize(
    ("given", "ranks", "batch", "rows"),
    [
        ({}, 1, 64, "auto"),
        ({"batch_size": 100}, 1, 100, "auto"),
        ({"batch_size": 100, "micro_batch_size": 8}, 1, 100, 8),
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8}, 4, 128, 4),
        ({"per_device_train_batch_size": 4}, 2, 8, 4),
        ({"batch_size": 128, "gradient_accumulation_steps": 8}, 4, 128, 4),
        ({"micro_batch_size": 4, "accumulate_grad_batches": 8}, 1, 32, 4),
        ({"batch_size": 32, "micro_batch_size": 4, "accumulate_grad_batches": 8}, 1, 32, 4),
        ({"nbs": 64, "micro_batch_size": 24}, 1, 64, 24),
        ({"nbs": 64, "batch_size": 64}, 1, 64, "auto"),
        ({"gradient_accumulation_steps": 2, "accumulate_grad_batches": 2, "batch_size": 8}, 1, 8, 4),
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8, "max_tokens": 512}, 1, 32, "auto"),
    ],
    ids=str,
)
def test_the_words_of_other_tools_say_the_same_batch(
    given: dict[str, int], ranks: int, batch: int, rows: int | str
) -> None:
    settled = translate(Config(**given), ranks)
    assert (settled.batch_size, settled.micro_batch_size) == (batch, rows)
    assert spoken(settled) == ""


@pytest.mark.parametrize(
    ("given", "ranks", "expected"),
    [
        (
            {"batch_size": 100, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 8},
            4,
            "batch_size is 100, but 4 rows x 8 micro-batches x 4 ranks = 128",
        ),
        ({"batch_size": 100, "gradient_accumulation_steps": 8}, 4, "100 / 32 = 3.125. Choose batch_size 96 or 128"),
        ({"batch_size": 4, "gradient_accumulation_steps": 8}, 1, "Choose batch_size 8,"),
        ({"gradient_accumulation_steps": 8}, 1, "do not say how large the batch is"),
        ({"gradient_accumulation_steps": 8, "accumulate_grad_batches": 4}, 1, "two words for one number"),
        ({"nbs": 64, "batch_size": 32}, 1, "two words for one number"),
        ({"micro_batch_size": 4, "per_device_train_batch_size": 8}, 1, "two words for one number"),
        ({"micro_batch_size": 4, "max_tokens": 512}, 1, "both say where the batch is cut"),
    ],
    ids=str,
)
def test_words_that_contradict_each_other_are_refused_with_the_numbers(
    given: dict[str, int], ranks: int, expected: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        translate(Config(**given), ranks)
    assert expected in str(refused.value)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ({"batch": 128, "rows": 4, "ranks": 4}, "batch 128 = 4 rows x 8 micro-batches x 4 ranks"),
        ({"batch": 128, "rows": 4}, "batch 128 = 4 rows x 32 micro-batches"),
        ({"batch": 130, "rows": 4}, "batch 130 = 4 rows x 32 micro-batches + 1 micro-batch of 2 rows"),
        ({"batch": 3, "rows": 4}, "batch 3 = 3 rows x 1 micro-batch"),
        (
            {"batch": 60, "rows": 4, "ranks": 4},
            "batch 60 = (4 rows x 3 micro-batches + 1 micro-batch of 3 rows) x 4 ranks",
        ),
        (
            {"batch": 130, "rows": 4, "ranks": 4},
            "batch 130 = 33 + 33 + 32 + 32 rows on 4 ranks, in micro-batches of at most 4 rows",
        ),
        ({"batch": 64, "rows": None, "tokens": 4096}, "batch 64 = 64 rows, in micro-batches of at most 4096 tokens"),
        (
            {"batch": 64, "rows": None, "ranks": 2, "tokens": 4096},
            "batch 64 = 32 rows x 2 ranks, in micro-batches of at most 4096 tokens",
        ),
    ],
    ids=str,
)
def test_the_arithmetic_is_said_with_every_remainder(call: dict[str, int], expected: str) -> None:
    assert arithmetic(**call) == expected


@given(st.integers(1, 300), st.integers(1, 40))
def test_the_numbers_that_are_said_add_up_to_the_batch(batch: int, rows: int) -> None:
    said = arithmetic(batch, rows).split(" = ")[1]
    formula = said.replace("micro-batch of ", "* ").replace(" x ", " * ")
    for word in ("rows", "row", "micro-batches", "micro-batch"):
        formula = formula.replace(word, "")
    assert eval(formula) == batch


def test_what_the_user_said_is_shown_in_the_users_words() -> None:
    config = Config(per_device_train_batch_size=4, gradient_accumulation_steps=8)
    assert spoken(config) == "per_device_train_batch_size 4, gradient_accumulation_steps 8"


def test_a_rate_and_a_decay_from_another_batch_are_brought_to_this_one() -> None:
    config = Config(batch_size=8192, lr=0.1, scale_lr="linear", base_batch=256, weight_decay=5e-4, nominal_batch=64)
    settled = translate(config)
    assert settled.lr == pytest.approx(3.2)
    assert settled.weight_decay == pytest.approx(5e-4 * 128)
    assert translate(settled) == settled  # a resumed run is not scaled again
    assert spoken(config) == "scale_lr linear, base_batch 256, nominal_batch 64"


def test_a_rule_without_the_rate_it_is_for_is_refused() -> None:
    with pytest.raises(ConfigError, match="Give both"):
        translate(Config(scale_lr="sqrt", base_batch=64))
