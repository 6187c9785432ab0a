"""The settings of `wholebatch train`: read from YAML, refused with the line and the nearest word."""

from __future__ import annotations

from pathlib import Path

import pytest

from wholebatch.batch.dealing import shuffled
from wholebatch.train import Config, ConfigError
from wholebatch.train.config import absolute, dump, load
from wholebatch.train.order import Order


def written(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


def refusal(folder: Path, text: str) -> str:
    with pytest.raises(ConfigError) as refused:
        load(written(folder, text))
    assert "config.yaml" in str(refused.value)
    return str(refused.value)


def test_what_is_dumped_is_loaded_again(tmp_path: Path) -> None:
    config = Config(data=Path("/notes"), batch_size=12, micro_batch_size=5, lr=5e-5, proof=False)
    assert load(written(tmp_path, dump(config))) == config


def test_only_what_is_written_differs_from_the_defaults(tmp_path: Path) -> None:
    assert load(written(tmp_path, "batch_size: 32\n")) == Config(batch_size=32)


def test_a_number_that_yaml_reads_as_text_is_a_number(tmp_path: Path) -> None:
    assert load(written(tmp_path, "lr: 5e-5\n")).lr == 5e-5


def test_an_unknown_key_is_named_with_its_line_and_the_nearest_one(tmp_path: Path) -> None:
    text = refusal(tmp_path, "steps: 3\nbatch-sise: 8\n")
    assert "line 2" in text
    assert "Did you mean 'batch_size'?" in text


def test_a_repeated_key_is_refused(tmp_path: Path) -> None:
    assert "line 3: 'steps' was set before, in line 1" in refusal(tmp_path, "steps: 3\nlr: 0.1\nsteps: 4\n")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("steps: many", "steps is 'many'; it must be a whole number"),
        ("steps: 2.5", "steps is 2.5"),
        ("steps: true", "steps is True"),
        ("lr: fast", "lr is 'fast'; it must be a number"),
        ("task: guess", "it must be 'text' or 'classify'"),
        ("micro_batch_size: some", "it must be a whole number or 'auto'"),
        ("proof: 1", "it must be true or false"),
        ("data: [a, b]", "it must be a path"),
        ("batch_size:", None),
        ("batch_size: 0", "batch_size is 0; it must be at least 1"),
        ("lr: -1", "lr is -1.0; it must be a positive number"),
        ("held_out: 1.5", "held_out is 1.5"),
        ("warmup: -1", "warmup is -1"),
        ("", "is empty"),
        ("- steps", "holds no settings"),
        ("steps: [", "is not YAML"),
        ("steps: 2024-13-45", "is not YAML: month must be in 1..12"),
        ("[" * 5_000, "is nested too deeply"),
        ("lr: 1" + "0" * 400, "lr is 1000"),
        ("seed: 18446744073709551616", "seed is 18446744073709551616; it must be of at most 64 bits"),
        ("seed: -9223372036854775809", "seed is -9223372036854775809; it must be of at most 64 bits"),
        ("width: 4294967296", "width is 4294967296; it must be at least 1 and at most 2147483647"),
        ('prompt: "\\uD800"', "prompt is '\\ud800', which is no text in UTF-8"),
        ("data: &a [1, 1]\nmodel: [*a, *a]\nsteps: 1", "it must be a path"),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_what_could_be(tmp_path: Path, text: str, expected: str | None) -> None:
    if expected is None:
        assert load(written(tmp_path, text)) == Config()
    else:
        assert expected in refusal(tmp_path, text)


@pytest.mark.parametrize("seed", [-(2**63), 2**63, 2**64 - 1])
def test_every_seed_of_64_bits_has_an_order(seed: int) -> None:
    assert sorted(Order(5, 2, Config(seed=seed).seed).batch(0) + Order(5, 2, seed).batch(1)) != []
    assert shuffled(50, seed, 1) != shuffled(50, seed, 2)


def test_a_config_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.yaml cannot be read"):
        load(tmp_path / "missing.yaml")


def test_paths_become_absolute_so_that_a_run_can_go_on_from_anywhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    settled = absolute(Config(data=Path("notes"), model=None))
    assert (settled.data, settled.model) == (tmp_path / "notes", None)
