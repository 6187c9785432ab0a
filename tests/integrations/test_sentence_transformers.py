"""sentence-transformers' trainer: losses of rows are exact; those in which rows meet are refused, or taken of all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import wholebatch as wb
from tests.oracle import assert_differs, assert_same_gradient

sentence_transformers = pytest.importorskip("sentence_transformers")
datasets = pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")

from sentence_transformers.sentence_transformer import losses, modules  # noqa: E402

from tests.integrations.test_transformers import Gradients  # noqa: E402
from tests.integrations.test_trl import WORDS, texts, tokenizer  # noqa: E402
from wholebatch.integrations.transformers import exact  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

Rows = Callable[[], Any]


class InOrder(sentence_transformers.SentenceTransformerTrainer):  # type: ignore[misc]
    """Takes the rows as they come."""

    def get_batch_sampler(self, dataset: Any, batch_size: int, drop_last: bool, **others: Any) -> Any:
        return torch.utils.data.BatchSampler(torch.utils.data.SequentialSampler(dataset), batch_size, drop_last)


def scored() -> Any:
    return datasets.Dataset.from_dict({"a": texts(7, 1), "b": texts(7, 2), "score": [i / 7 for i in range(7)]})


def paired() -> Any:
    return datasets.Dataset.from_dict({"a": texts(7, 1), "b": texts(7, 2)})


def gradient(kind: Any, loss: Any, rows: Any, folder: Path, size: int, k: int) -> Any:
    torch.manual_seed(0)
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    transformers.BertModel(transformers.BertConfig(vocab_size=len(WORDS), **small, **still)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    model = sentence_transformers.SentenceTransformer(
        modules=[modules.Transformer(str(folder)), modules.Pooling(16)], device="cpu"
    )
    args = sentence_transformers.SentenceTransformerTrainingArguments(
        str(folder / "out"),
        per_device_train_batch_size=size,
        gradient_accumulation_steps=k,
        num_train_epochs=1,
        learning_rate=1e-12,
        max_grad_norm=0.0,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        save_strategy="no",
    )
    kept = Gradients()
    trainer = kind(model=model, args=args, train_dataset=rows, loss=loss(model), callbacks=[kept])
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return kept.steps[0]


@pytest.mark.parametrize("options", [{}, {"items": lambda batch: len(batch["label"])}], ids=["measured", "items"])
def test_a_loss_of_rows_is_that_of_the_whole_window(options: Any, tmp_path: Path) -> None:
    expected = gradient(InOrder, losses.CosineSimilarityLoss, scored(), tmp_path, 7, 1)
    assert_differs(gradient(InOrder, losses.CosineSimilarityLoss, scored(), tmp_path, 2, 4), expected, by=0.05)
    ours = gradient(exact(InOrder, **options), losses.CosineSimilarityLoss, scored(), tmp_path, 2, 4)
    assert_same_gradient(ours, expected)


MEETING = [
    pytest.param(losses.MultipleNegativesRankingLoss, paired, id="negatives-of-the-batch"),
    pytest.param(losses.CoSENTLoss, scored, id="sorted-rows"),
]


@pytest.mark.parametrize(("loss", "rows"), MEETING)
@pytest.mark.parametrize(
    "options", [{}, {"items": lambda batch: len(next(v for v in batch.values() if isinstance(v, torch.Tensor)))}]
)
def test_a_loss_in_which_rows_meet_is_refused(options: Any, loss: Any, rows: Rows, tmp_path: Path) -> None:
    with pytest.raises(wb.LossError, match="coupled=True"):
        gradient(exact(InOrder, **options), loss, rows(), tmp_path, 2, 4)


@pytest.mark.parametrize(("loss", "rows"), MEETING)
def test_a_loss_in_which_rows_meet_is_taken_of_all_rows(loss: Any, rows: Rows, tmp_path: Path) -> None:
    expected = gradient(InOrder, loss, rows(), tmp_path, 7, 1)
    assert_differs(gradient(InOrder, loss, rows(), tmp_path, 2, 4), expected, by=0.3)
    assert_same_gradient(gradient(exact(InOrder, coupled=True), loss, rows(), tmp_path, 2, 4), expected)


def test_a_loss_that_keeps_gradients_itself_is_refused(tmp_path: Path) -> None:
    def cached(model: Any) -> Any:
        return losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=2)

    with pytest.raises(wb.LossError, match="use its plain form"):
        gradient(exact(InOrder, coupled=True), cached, paired(), tmp_path, 2, 4)
