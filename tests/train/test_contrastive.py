"""The task contrastive: signatures and docstrings, every pair of the batch against every other."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from wholebatch.train import Config, ConfigError, train
from wholebatch.train.contrast import Contrast, Sentences
from wholebatch.train.corpus import signatures


def small(folder: Path, **changes: Any) -> Config:
    made = Config(
        task="contrastive", out=folder / "run", width=16, batch_size=32, micro_batch_size=8, steps=3, save_every=2,
        warmup=1, device="cpu",
    )  # fmt: skip
    return replace(made, **changes)


def test_pairs_are_a_function_s_own_signature_and_docstring() -> None:
    found = dict(signatures())
    assert len(found) > 1000
    signature = next(each for each in found if each.startswith("dumps(obj, *, skipkeys"))
    assert found[signature].startswith("Serialize ``obj`` to a JSON formatted ``str``")


def test_a_run_learns_from_the_whole_batch_and_proves_it(tmp_path: Path) -> None:
    outcome = train(small(tmp_path, steps=25))
    summary = json.loads((outcome.folder / "summary.json").read_text())
    assert summary["gradient_error"] < 5e-6 and summary["usual_loop_error"] > 0.05
    assert summary["proof"]["pieces"] == 4
    rows = [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert not any(row.get("retries") for row in rows)


@pytest.mark.parametrize("changes", [{"max_tokens": 64}, {"data": Path("rows.txt")}, {"checkpoint": True}])
def test_words_that_mean_nothing_here_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        train(small(tmp_path, **changes))


def test_a_folder_of_a_sentence_encoder_is_taken(tmp_path: Path) -> None:
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    words = {word: number for number, word in enumerate(["[PAD]", "[UNK]", *"abcdefghijklmnopqrstuvwxyz_(),"])}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    folder = tmp_path / "encoder"
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="[PAD]", unk_token="[UNK]")
    fast.model_max_length = 32
    fast.save_pretrained(folder)
    shape = transformers.BertConfig(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=32,
    )  # fmt: skip
    transformers.BertModel(shape).save_pretrained(folder)
    config = small(tmp_path, model=folder)
    assert isinstance(Contrast(config).model, Sentences)
    assert isinstance(Contrast(config).model.log_scale, torch.nn.Parameter)
    summary = json.loads((train(config).folder / "summary.json").read_text())
    assert summary["gradient_error"] < 2e-5 and summary["usual_loop_error"] > 0.05
