"""The Hugging Face Trainer on two processes: uneven ranks, shares of a window, and what it does by itself."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import wholebatch as wb
from tests.distributed import Ranks, RanksError
from tests.oracle import Gradients, assert_differs, assert_same_gradient, whole_batch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from tests.integrations import test_transformers as alone  # noqa: E402
from wholebatch.integrations.transformers import exact  # noqa: E402

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Two processes of our own: the Trainer keeps its view of the world for as long as they live."""
    pair = Ranks(2)
    yield pair
    pair.close()


def run(kind: str, changes: Any, rows: Any, ours: bool, settings: Any) -> tuple[list[Gradients], list[float]]:
    """Train one epoch on this rank: four micro-batches of two rows a window, sixteen rows over both ranks."""
    os.environ.update(RANK=str(dist.get_rank()), LOCAL_RANK=str(dist.get_rank()), WORLD_SIZE=str(dist.get_world_size()))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    model = alone.tiny(kind, **changes)
    trainer = exact(transformers.Trainer) if ours else transformers.Trainer
    with tempfile.TemporaryDirectory() as folder:
        done = alone.Run(
            trainer,
            model,
            rows,
            Path(folder),
            gradient_accumulation_steps=4,
            ddp_find_unused_parameters=True,
            **settings,
        )
    return done.gradients.steps, done.losses


def uneven(settings: Any = None) -> dict[str, Any]:
    """Do not repeat rows to even the ranks out."""
    return {"accelerator_config": {"even_batches": False}} | (settings or {})


CASES = [
    pytest.param("LlamaForCausalLM", {}, alone.texts(), uneven(), id="llama"),
    pytest.param("GPT2LMHeadModel", {}, alone.texts(), uneven(), id="gpt2"),
    pytest.param(
        "LlamaForCausalLM", {}, alone.texts(), uneven({"average_tokens_across_devices": False}), id="llama-no-average"
    ),
    pytest.param(
        "MixtralForCausalLM", {"router_aux_loss_coef": 0.1}, alone.texts(), uneven(), id="mixtral-router-loss"
    ),
    pytest.param(
        "BertForSequenceClassification",
        alone.CLASSES,
        alone.labelled(alone.texts(), lambda i: i % 3),
        uneven(),
        id="bert-classes",
    ),
    pytest.param("MixtralForCausalLM", {"router_aux_loss_coef": 0.1}, alone.texts(), {}, id="mixtral-even-batches"),
    pytest.param(
        "BertForSequenceClassification",
        alone.CLASSES,
        alone.labelled(alone.texts(), lambda i: i % 3),
        {},
        id="bert-even-batches",
    ),
    pytest.param("LlamaForCausalLM", {}, alone.texts(18), uneven(), id="a-rank-without-rows-in-the-last-window"),
    pytest.param(
        "GPT2LMHeadModel", {}, alone.texts(), uneven({"compute_loss_func": alone.shared}), id="gpt2-users-share"
    ),
]


@pytest.mark.parametrize(("kind", "changes", "rows", "settings"), CASES)
def test_two_ranks_of_uneven_length(ranks: Ranks, kind: str, changes: Any, rows: Any, settings: Any) -> None:
    first, second = ranks.run(run, kind, changes, rows, True, settings, seconds=60.0)
    loss = alone.meant if "compute_loss_func" in settings else alone.own_loss
    expected = alone.references(alone.tiny(kind, **changes), rows, loss)
    assert len(first[0]) == len(expected) == 2
    for steps, losses in (first, second):
        for ours, reference in zip(steps, expected, strict=True):
            assert_same_gradient(ours, reference)
        assert losses == pytest.approx([float(reference.loss) for reference in expected], rel=1e-5) or not losses
    for mine, theirs in zip(first[0], second[0], strict=True):
        assert_same_gradient(mine, theirs, tol=0)


@pytest.mark.parametrize(
    ("kind", "changes", "settings", "by"),
    [
        ("LlamaForCausalLM", {}, {"average_tokens_across_devices": False}, 1e-2),
        ("BertForSequenceClassification", alone.CLASSES, {}, 6.9),
    ],
    ids=["llama-no-average", "bert-classes"],
)
def test_the_trainer_by_itself_is_off(ranks: Ranks, kind: str, changes: Any, settings: Any, by: float) -> None:
    rows = alone.texts(16)
    rows = alone.labelled(rows, lambda i: i % 3) if "Bert" in kind else rows
    steps, _ = ranks.run(run, kind, changes, rows, False, settings, seconds=60.0)[0]
    expected = whole_batch(alone.tiny(kind, **changes), alone.own_loss, alone.padded(rows))
    assert_differs(steps[0], expected, by=by)


def test_the_trainer_by_itself_hangs_where_one_rank_has_a_micro_batch_more(ranks: Ranks) -> None:
    with pytest.raises(RanksError, match="not done"):
        ranks.run(run, "LlamaForCausalLM", {}, alone.texts(18), False, uneven(), seconds=4.0)


class Stream(torch.utils.data.IterableDataset[Any]):
    """Rows of one length, without a length: three rows more than a whole number of batches over two ranks."""

    def __iter__(self) -> Iterator[Any]:
        return iter(STREAMED)


STREAMED = alone.labelled(alone.texts(19, 8, 9), lambda i: i % 3)


def stream(dispatches: bool) -> Any:
    settings = {"max_steps": 2, "accelerator_config": {"dispatch_batches": dispatches}}
    try:
        return run("BertForSequenceClassification", alone.CLASSES, Stream(), True, settings)[0]
    except wb.InexactError as refusal:
        return str(refusal)


def test_a_stream_that_one_rank_reads_for_all_counts_each_row_once(ranks: Ranks) -> None:
    expected = alone.references(alone.tiny("BertForSequenceClassification", **alone.CLASSES), STREAMED)
    for steps in ranks.run(stream, True, seconds=60.0):
        for ours, reference in zip(steps, expected, strict=True):
            assert_same_gradient(ours, reference)
    assert_differs(
        alone.references(
            alone.tiny("BertForSequenceClassification", **alone.CLASSES), STREAMED[:16] + STREAMED[16:] + STREAMED[:1]
        )[1].gradients,
        expected[1],
        by=0.1,
    )


def test_a_stream_whose_last_batch_is_filled_up_is_refused_where_ranks_read_for_themselves(ranks: Ranks) -> None:
    for said in ranks.run(stream, False, seconds=60.0):
        assert "ends after 19 rows, no whole number of batches of 4 rows over 2 ranks" in said
