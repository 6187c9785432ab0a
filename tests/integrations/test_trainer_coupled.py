"""Losses in which the rows of a window meet, inside the Hugging Face Trainer: `exact(Trainer, coupled=True)`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import wholebatch as wb
from tests.distributed import Ranks
from tests.oracle import Gradients, assert_differs, assert_same_gradient

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from tests.integrations import test_transformers as plain  # noqa: E402
from wholebatch.integrations.transformers import exact  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

BERT = "BertForSequenceClassification"


def classified(count: int = 21) -> plain.Rows:
    return plain.labelled(plain.texts(count), lambda i: i % 3)


def negatives(model: nn.Module, batch: Any) -> Tensor:
    """Each text against all others of the batch: the first and the last hidden state belong together."""
    states = model(**{n: v for n, v in batch.items() if n != "labels"}, output_hidden_states=True).hidden_states
    one, other = (F.normalize(states[layer][:, 0], dim=-1) for layer in (1, -1))
    return F.cross_entropy(one @ other.T / 0.1, torch.arange(len(one)))


def weighted(model: nn.Module, batch: Any) -> Tensor:
    """A mean by class weights, and the spread of the batch's logits: two denominators and rows that meet."""
    logits = model(**{n: v for n, v in batch.items() if n != "labels"}).logits
    weights = torch.tensor([1.0, 2.0, 3.0], dtype=logits.dtype)
    return F.cross_entropy(logits, batch["labels"], weight=weights) + 0.1 * logits.std()


class Negatives(transformers.Trainer):  # type: ignore[misc]
    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        return negatives(model, inputs)


class Weighted(transformers.Trainer):  # type: ignore[misc]
    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        return weighted(model, inputs)


def bert() -> nn.Module:
    return plain.tiny(BERT, **plain.CLASSES)


@pytest.mark.parametrize(
    ("trainer", "loss"), [(Negatives, negatives), (Weighted, weighted)], ids=["negatives", "weights-and-spread"]
)
@pytest.mark.parametrize("size", [None, 5, wb.Tokens(40, length=lambda row: len(row["input_ids"]))])
def test_a_loss_of_your_own_is_that_of_the_whole_window(trainer: Any, loss: Any, size: Any, tmp_path: Path) -> None:
    model, rows = bert(), classified()
    expected = plain.references(model, rows, loss)
    usual = plain.Run(trainer, model, rows, tmp_path).gradients.steps
    assert_differs(usual[0], expected[0], by=0.1)
    run = plain.Run(exact(trainer, size, coupled=True), model, rows, tmp_path)
    for ours, reference, logged in zip(run.gradients.steps, expected, run.losses, strict=True):
        assert_same_gradient(ours, reference)
        assert logged == pytest.approx(float(reference.loss), rel=1e-5)


class Stepped(Weighted):
    """Divides a part of its loss by the micro-batches, which the Trainer does not do for it."""

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        return super().compute_loss(model, inputs) / self.current_gradient_accumulation_steps


@pytest.mark.parametrize("trainer", [Stepped, Weighted])
def test_the_window_is_one_batch_for_a_loss_that_looks_at_their_number(trainer: Any, tmp_path: Path) -> None:
    model, rows = bert(), classified(16)
    ours = plain.Run(exact(trainer, coupled=True), model, rows, tmp_path).gradients.steps
    assert_same_gradient(ours[0], plain.references(model, rows, weighted)[0])


def clip() -> nn.Module:
    torch.manual_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**small, "vocab_size": 48, "max_position_embeddings": 20, "bos_token_id": 0, "eos_token_id": 1}
    config = transformers.CLIPConfig(
        text_config={**text, "pad_token_id": 0},
        vision_config={**small, "image_size": 32, "patch_size": 8},
        projection_dim=16,
    )
    return transformers.CLIPModel(config)


def detr() -> nn.Module:
    torch.manual_seed(0)
    layers = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
    backbone = transformers.ResNetConfig(**layers, out_features=["stage2"])
    small = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "num_queries": 5, "num_labels": 3}
    small |= {f"{side}_{what}": size for side in ("encoder", "decoder") for what, size in [("ffn_dim", 16)]}
    small |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "auxiliary_loss": False}
    still = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0)
    return transformers.DetrForObjectDetection(
        transformers.DetrConfig(
            **small, **still, use_timm_backbone=False, use_pretrained_backbone=False, backbone_config=backbone
        )
    )


def captioned(rows: Any) -> Any:
    pixels = torch.stack([row["pixel_values"] for row in rows])
    return {"pixel_values": pixels, "input_ids": torch.stack([row["input_ids"] for row in rows]), "return_loss": True}


def boxed(rows: Any) -> Any:
    return {"pixel_values": torch.stack([row["pixel_values"] for row in rows]), "labels": [r["labels"] for r in rows]}


def pictures(size: int) -> Any:
    draws = torch.Generator().manual_seed(1)
    return [
        {
            "pixel_values": torch.randn(3, size, size, generator=draws),
            "input_ids": torch.randint(2, 48, (8,), generator=draws),
            "labels": {
                "class_labels": torch.randint(0, 3, (1 + i % 3,), generator=draws),
                "boxes": torch.rand(1 + i % 3, 4, generator=draws) * 0.4 + 0.3,
            },
        }
        for i in range(21)
    ]


@pytest.mark.parametrize(("model", "size", "collate"), [(clip, 32, captioned), (detr, 64, boxed)], ids=["clip", "detr"])
def test_a_loss_within_the_models_forward(model: Any, size: int, collate: Any, tmp_path: Path) -> None:
    rows, made = pictures(size), model()
    run = {"data_collator": collate}
    whole = {"per_device_train_batch_size": plain.PER_WINDOW, "gradient_accumulation_steps": 1, **run}
    expected = plain.Run(transformers.Trainer, made, rows, tmp_path, **whole).gradients.steps  # DETR is float32 within
    usual = plain.Run(transformers.Trainer, made, rows, tmp_path, **run).gradients.steps
    assert_differs(usual[0], expected[0], by=0.1)
    with pytest.raises(wb.LossError, match="coupled=True"):
        plain.Run(exact(transformers.Trainer), made, rows, tmp_path, **run)
    ours = plain.Run(exact(transformers.Trainer, coupled=True), made, rows, tmp_path, **run).gradients.steps
    for mine, reference in zip(ours, expected, strict=True):
        assert_same_gradient(mine, reference)


class Inner(nn.Module):
    """Its rows meet between two layers, so that what the second says is of no row alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.first(x)
        return {"loss": F.cross_entropy(self.second((x - x.mean(0)).exp()), labels)}


def test_a_layer_after_the_rows_have_met_is_refused(tmp_path: Path) -> None:
    draws = torch.Generator().manual_seed(1)
    rows = [{"x": torch.randn(2, generator=draws), "labels": i % 2} for i in range(21)]
    with pytest.raises(wb.LossError, match="cannot tell what of the loss is made row by row"):
        plain.Run(exact(transformers.Trainer, coupled=True), Inner(), rows, tmp_path, data_collator=None)


@pytest.mark.parametrize(
    ("size", "options", "error"),
    [(None, {"items": len}, "items= has no meaning"), (wb.Auto(4), {}, "micro_batch_size=Auto")],
    ids=["items", "auto"],
)
def test_what_has_no_meaning_for_all_rows_is_refused(size: Any, options: Any, error: str) -> None:
    with pytest.raises(TypeError, match=error):
        exact(transformers.Trainer, size, coupled=True, **options)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pair = Ranks(2)
    yield pair
    pair.close()


def train(ours: bool, rows: Any) -> list[Gradients]:
    """Train one epoch on this rank: windows of four micro-batches of two rows, sixteen rows over both ranks."""
    os.environ.update(RANK=str(dist.get_rank()), LOCAL_RANK=str(dist.get_rank()), WORLD_SIZE=str(dist.get_world_size()))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    kind = exact(Negatives, coupled=True) if ours else Negatives
    with tempfile.TemporaryDirectory() as folder:
        settings = {"gradient_accumulation_steps": 4, "ddp_find_unused_parameters": True}
        return plain.Run(kind, bert(), rows, Path(folder), **settings).gradients.steps


@pytest.mark.distributed
def test_rows_of_two_ranks_meet(ranks: Ranks) -> None:
    rows = classified(22)
    expected = plain.references(bert(), rows, negatives)
    for steps in ranks.run(train, True, rows, seconds=60.0):
        for ours, reference in zip(steps, expected, strict=True):
            assert_same_gradient(ours, reference)
    assert_differs(ranks.run(train, False, rows, seconds=60.0)[0][0], expected[0], by=0.1)
