"""Every kind of input in a run of its own: files, folders, a Hugging Face model, digits, images and tables."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from wholebatch.train import Config, ConfigError, Outcome, train
from wholebatch.train.display import Plain
from wholebatch.train.text import Text

SENTENCES = [f"{'so ' * (i % 7)}the row {i} has {i % 5} words{' and then some' * (i % 4)}" for i in range(48)]


def small(folder: Path, **changes: Any) -> Config:
    made = Config(
        out=folder / "run",
        width=8,
        layers=1,
        heads=2,
        batch_size=8,
        steps=3,
        save_every=2,
        warmup=1,
        held_out=0.2,
        device="cpu",
    )
    return replace(made, **changes)


def proven(outcome: Outcome) -> dict[str, Any]:
    """The summary of a run that ended well: its gradient was exact, and that of the usual loop was not."""
    assert outcome.summary is not None
    summary = json.loads((outcome.folder / "summary.json").read_text())
    assert summary["gradient_error"] < 2e-6
    assert summary["proof"]["pieces"] > 1
    return summary


def test_json_lines_are_trained_on(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"body": text}) + "\n" for text in SENTENCES))
    summary = proven(train(small(tmp_path, data=data, column="body", max_tokens=128)))
    assert summary["usual_loop_error"] > 1e-3
    assert summary["rows"] == 24


def test_parquet_is_trained_on(tmp_path: Path) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"text": SENTENCES}), tmp_path / "rows.parquet")
    assert proven(train(small(tmp_path, data=tmp_path / "rows.parquet", max_tokens=128)))["usual_loop_error"] > 1e-3


def test_a_folder_of_paragraphs_is_trained_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for half in range(2):
        (tmp_path / "notes").mkdir(exist_ok=True)
        (tmp_path / "notes" / f"{half}.md").write_text("\n\n".join(SENTENCES[half::2]))
    settings = small(tmp_path, data=tmp_path / "notes", rows="paragraphs", context=32, max_tokens=128)
    proven(train(settings))
    said = capsys.readouterr().out
    trained, held = (
        int(said.split(word)[0].split()[-1]) for word in ("rows to train on", "held out,", "held out;")[::2]
    )
    assert trained + held == len(SENTENCES)
    assert "longer than 32 tokens are cut there" in said


def test_the_docstrings_are_the_data_if_none_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wholebatch.train.text.docstrings", lambda: SENTENCES)
    task = Text(small(tmp_path))
    assert task.origin.startswith("the docstrings of Python 3.")
    assert len(task.train) + len(task.held) == len(SENTENCES)


def test_bits_per_byte_are_those_of_an_even_guess_for_a_model_that_knows_nothing(tmp_path: Path) -> None:
    data = tmp_path / "rows.txt"
    data.write_text("\n".join("abcdefg" + str(i % 10) for i in range(20)))
    task = Text(small(tmp_path, data=data))
    with torch.no_grad():
        task.model.head.weight.zero_()  # type: ignore[union-attr]
    nine_tokens_of_eight_bytes = 9 / 8 * math.log2(257)
    assert task.measure(task.model)["bits_per_byte"] == pytest.approx(nine_tokens_of_eight_bytes, rel=1e-6)


def test_a_sample_is_the_same_every_time_and_leaves_the_draws_alone(tmp_path: Path) -> None:
    data = tmp_path / "rows.txt"
    data.write_text("\n".join(SENTENCES))
    task = Text(small(tmp_path, data=data, prompt="über"))
    before = torch.get_rng_state()
    assert task.sample(task.model) == task.sample(task.model)
    assert task.sample(task.model).startswith("über")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.fixture
def folder_with_a_model(tmp_path: Path) -> Path:
    """A model folder as people have them: a causal model, tied weights, and a tokenizer trained on the sentences."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<end>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["<end>"], show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    shape = transformers.GPT2Config(
        vocab_size=len(fast),
        n_embd=16,
        n_layer=1,
        n_head=2,
        n_positions=48,
        eos_token_id=fast.eos_token_id,
        bos_token_id=fast.eos_token_id,
        resid_pdrop=0.1,
        embd_pdrop=0.1,
        attn_pdrop=0.1,
    )
    folder = tmp_path / "model"
    transformers.GPT2LMHeadModel(shape).save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


@pytest.fixture
def sentences(tmp_path: Path) -> Path:
    path = tmp_path / "rows.txt"
    path.write_text("\n".join(SENTENCES))
    return path


def test_a_hugging_face_folder_is_trained_and_its_checkpoint_opens_there_again(
    tmp_path: Path, sentences: Path, folder_with_a_model: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    outcome = train(small(tmp_path, data=sentences, model=folder_with_a_model, max_tokens=64, lr=1e-2, steps=8))
    summary = proven(outcome)
    assert summary["usual_loop_error"] > 1e-3
    assert summary["held_out_after"]["bits_per_byte"] < summary["held_out_before"]["bits_per_byte"]
    opened = transformers.AutoModelForCausalLM.from_pretrained(outcome.folder / "checkpoint")
    assert transformers.AutoTokenizer.from_pretrained(outcome.folder / "checkpoint").eos_token == "<end>"
    task = Text(small(tmp_path, data=sentences, model=folder_with_a_model))
    opened.eval()
    assert task.measure(opened) == pytest.approx(summary["held_out_after"], rel=1e-6)


def test_a_hugging_face_model_with_dropout_goes_on_to_the_very_same_weights(
    tmp_path: Path, sentences: Path, folder_with_a_model: Path
) -> None:
    settings = small(tmp_path, data=sentences, model=folder_with_a_model, max_tokens=64, proof=False, steps=4)
    whole = train(replace(settings, out=tmp_path / "whole"))

    class Stopping(Plain):
        def step(self, record: dict[str, Any]) -> None:
            if record["step"] == 2 and not (tmp_path / "run" / "stopped").exists():
                (tmp_path / "run" / "stopped").touch()
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(replace(settings, save_every=1), Stopping())
    again = train(Config(resume=tmp_path / "run"))
    one, other = (torch.load(run.folder / "checkpoint" / "state.pt", weights_only=True) for run in (whole, again))
    pairs = zip(one["learner"]["draws"], other["learner"]["draws"], strict=True)
    assert all(torch.equal(draws, again) for draws, again in pairs)
    weights = [load_file(run.folder / "checkpoint" / "model.safetensors") for run in (whole, again)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize(
    ("content", "expected"),
    [(None, "config.json is missing"), ("{}", "does not hold a causal model with its tokenizer")],
    ids=["empty", "unknown"],
)
def test_a_folder_without_a_model_is_refused(
    tmp_path: Path, sentences: Path, content: str | None, expected: str
) -> None:
    pytest.importorskip("transformers")
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=expected):
        train(small(tmp_path, data=sentences, model=tmp_path))


def test_digits_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    settings = small(tmp_path, task="classify", width=16, layers=2, batch_size=64, steps=30, warmup=3, lr=1e-2)
    summary = proven(train(settings))
    assert summary["held_out_before"]["accuracy"] < 0.3
    assert summary["held_out_after"]["accuracy"] > 0.6
    said = capsys.readouterr().out
    assert f"{summary['held_out_after']['accuracy']:.1%} of the rows right after training" in said
    assert "rows/s" in said and "so the usual loop is right too" in said
    assert "accuracy" in json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])


def test_a_folder_of_images_is_told_apart(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    draws = random.Random(0)
    for kind, bright in {"dark": 60, "light": 190}.items():
        (tmp_path / "pictures" / kind).mkdir(parents=True)
        for number in range(24):
            picture = image.new("RGB", (9, 9))
            picture.putdata([(bright + draws.randrange(60),) * 3 for _ in range(81)])
            picture.save(tmp_path / "pictures" / kind / f"{number}.png")
    settings = small(tmp_path, task="classify", data=tmp_path / "pictures", image_size=8, steps=12, lr=1e-2)
    assert proven(train(settings))["held_out_after"]["accuracy"] > 0.9


def test_a_table_is_told_apart_in_micro_batches_that_do_not_divide_the_batch(tmp_path: Path) -> None:
    draws = random.Random(0)
    lines = ["height,weight,kind"]
    for _ in range(60):
        height, weight = draws.gauss(0, 1), draws.gauss(100, 20)
        lines.append(f"{height:.3f},{weight:.2f},{'big' if height + (weight - 100) / 20 > 0 else 'small'}")
    (tmp_path / "rows.csv").write_text("\n".join(lines))
    settings = small(tmp_path, task="classify", data=tmp_path / "rows.csv", label="kind", micro_batch_size=3, steps=30)
    summary = proven(train(replace(settings, lr=3e-2)))
    assert summary["usual_loop_error"] > 1e-3, "micro-batches of 3, 3 and 2 rows: the usual loop weighs rows unequally"
    assert summary["held_out_after"]["accuracy"] >= 0.75


@pytest.mark.parametrize(("word", "value"), [("model", Path("here")), ("max_tokens", 64)])
def test_words_that_mean_nothing_to_a_classifier_are_refused(tmp_path: Path, word: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{word} is .*{value}, but the task classify has no {word}"):
        train(small(tmp_path, task="classify", **{word: value}))
