"""`wb.check` on models that people train: ResNet, GPT-2 and Llama, small, with the dropout of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wholebatch as wb
from tests.oracle import assert_differs, assert_same_gradient, whole_batch

transformers = pytest.importorskip("transformers")

WORDS, CLASSES = 48, 4


class RealModel(NamedTuple):
    """A model, what it is trained with, right and as a loop of means would have it."""

    make: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Tensor]]
    loss_fn: Callable[[Any, Any], Any]
    means: Callable[[Any, Any], Any]
    size: Any
    options: dict[str, Any]


def resnet() -> nn.Module:
    torch.manual_seed(7)
    shape = {"embedding_size": 8, "hidden_sizes": [8, 12], "depths": [1, 1], "layer_type": "basic"}
    body = transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=CLASSES, **shape))
    body.classifier = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(12, CLASSES))
    return body.train()


def gpt2() -> nn.Module:
    torch.manual_seed(7)
    config = transformers.GPT2Config(vocab_size=WORDS, n_embd=16, n_layer=1, n_head=2, n_positions=32)
    return transformers.GPT2LMHeadModel(config).train()


def llama() -> nn.Module:
    torch.manual_seed(7)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=WORDS, attention_dropout=0.1, **sizes)
    return transformers.LlamaForCausalLM(config).train()


def images() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(10, 3, 16, 16), "y": torch.arange(10) % CLASSES}


def texts() -> dict[str, Tensor]:
    torch.manual_seed(1)
    mask = torch.arange(12) < torch.tensor([12, 3, 7, 5, 12, 4, 9, 6, 3, 11])[:, None]
    ids = torch.randint(3, WORDS, (10, 12)) * mask
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": torch.where(mask, ids, -100)}


def classified(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]).logits, batch["y"], reduction="none")


def continued(model: Any, batch: Any) -> Any:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return wb.losses.causal_lm(logits, batch["labels"])


def mean_of_texts(model: Any, batch: Any) -> Any:
    return wb.from_mean(model(**batch).loss, items=1)


def mean_of_images(model: Any, batch: Any) -> Any:
    return wb.from_mean(classified(model, batch).mean(), items=1)


TOKENS = wb.Tokens(36, mask="attention_mask")
MODELS = {
    "ResNet": RealModel(resnet, images, classified, mean_of_images, 4, {"batch_norm": "exact"}),
    "GPT-2": RealModel(gpt2, texts, continued, mean_of_texts, TOKENS, {}),
    "Llama": RealModel(llama, texts, continued, mean_of_texts, TOKENS, {}),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["as written", "compiled"])
@pytest.mark.parametrize("name", MODELS)
def test_a_real_model_with_its_dropout_is_exact_and_a_mean_of_means_is_not(name: str, compiled: bool) -> None:
    case = MODELS[name]
    model = torch.compile(case.make(), backend="eager") if compiled else case.make()
    right = wb.check(model, case.loss_fn, case.batch(), case.size, **case.options)
    assert right.verdict == "exact" and right.micro_batches > 1, str(right)
    assert "draws random numbers" in right.notes[0]
    naive = wb.check(model, case.means, case.batch(), case.size, **case.options)
    assert naive.verdict == "not exact", str(naive)


def test_batch_norm_of_a_resnet_in_micro_batches_is_found() -> None:
    case = MODELS["ResNet"]
    report = wb.check(case.make(), case.loss_fn, case.batch(), case.size, batch_norm="micro")
    assert [finding.rule for finding in report.findings] == ["rows-meet"] and "BatchNorm" in str(report)


def counts_by_chance(model: Any, ids: Tensor) -> Any:
    """Learns from places drawn at random, and divides by how many there are."""
    values = F.cross_entropy(model(input_ids=ids).logits.transpose(1, 2), ids, reduction="none")
    chosen = torch.rand(values.shape) < 0.5
    return wb.from_mean((values * chosen).sum() / chosen.sum(), items=len(values))


def counts_what_is_drawn(model: Any, ids: Tensor) -> Any:
    values = F.cross_entropy(model(input_ids=ids).logits.transpose(1, 2), ids, reduction="none")
    return wb.mean(values, torch.rand(values.shape) < 0.5)


@pytest.mark.parametrize("name", ["GPT-2", "Llama"])
def test_a_mean_over_drawn_places_of_a_language_model_is_found_beside_its_dropout(name: str) -> None:
    make, ids = MODELS[name].make, torch.randint(3, WORDS, (10, 12))
    report = wb.check(make(), counts_by_chance, ids, 4)
    assert [finding.rule for finding in report.findings] == ["draws-mix-rows"], str(report)
    with pytest.raises(wb.InexactError, match="of their own"):
        wb.backward(make(), counts_by_chance, ids, 4)
    assert wb.check(make(), counts_what_is_drawn, ids, 4).verdict == "exact"


@pytest.mark.parametrize("name", MODELS)
def test_what_a_check_calls_exact_is_the_gradient_of_plain_torch(name: str) -> None:
    """Without dropout, so that there is one gradient to be held against."""
    case, model = MODELS[name], MODELS[name].make()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout") and isinstance(module.attention_dropout, float):
            module.attention_dropout = 0.0
    double, batch = model.double(), case.batch()
    batch = {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}

    def plain(model: Any, batch: Any) -> Tensor:
        if name == "ResNet":
            return classified(model, batch).mean()
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())

    reference = whole_batch(double, plain, batch)
    wb.backward(double, case.loss_fn, batch, case.size, **case.options)
    assert_same_gradient(double, reference, tol=1e-6)  # Llama normalises in single precision
    double.zero_grad()
    wb.backward(double, case.means, batch, case.size, verify="never", **case.options)
    assert_differs(double, reference)
