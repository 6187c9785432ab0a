"""What `wholebatch train` is asked to do: one typed dataclass, whose fields are the flags and the keys of the YAML."""

from __future__ import annotations

import difflib
import math
import reprlib
import types
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

from wholebatch.amounts import bytes_in
from wholebatch.batch.batch_schedule import BatchSchedule
from wholebatch.noise_scale import NoiseScale
from wholebatch.train.errors import ConfigError

Scalar: TypeAlias = "int | float | str | bool | None"


@dataclass(frozen=True)
class Config:
    """Settings of a training run. Without any, a byte-level language model learns Python's own docstrings.

    The batch is named in rows over all ranks, the micro-batch in rows or tokens of one forward and backward. How the
    batch is cut changes time and memory, never the gradient.
    """

    task: Literal["text", "classify", "contrastive"] = "text"
    """Predict the next token of texts, the class of rows, or which docstring belongs to a signature."""
    data: Path | None = None
    """A file or folder: text, .jsonl, .parquet; for classify a .csv or a folder with one subfolder of images a class.
    Left out: the docstrings of Python's standard library; for classify scikit-learn's digits."""
    column: str = "text"
    """Which column of JSON lines or Parquet holds the text."""
    label: str = "label"
    """Which column of a CSV holds the class."""
    rows: Literal["lines", "paragraphs"] = "lines"
    """What a row of a text file is: a line, or a paragraph that ends at a blank line."""
    held_out: float = 0.05
    """Share of the rows, chosen by a hash of their content, that is measured and never trained on."""
    image_size: int = 32
    """Images are brought to this height and width, in pixels."""

    model: Path | None = None
    """A local Hugging Face folder with a causal model and its tokenizer. Left out: a small model of our own."""
    width: int = 96
    """Features of a position or layer in our own models."""
    layers: int = 3
    """Blocks of our own models."""
    heads: int = 4
    """Attention heads of a block."""
    context: int = 1024
    """The longest row, in tokens; longer ones are cut there, and how many is said."""

    batch_size: int | str | None = None
    """The batch you mean: the rows of one optimizer step, over all ranks. 64 if nothing else says it. A batch that
    grows: 16,64@200,256@600 (64 rows from step 200 on), 16..256@epoch (twice as many each epoch), 16..256@noise (twice
    as many whenever the noise of the gradient is that large)."""
    micro_batch_size: int | Literal["auto"] = "auto"
    """Rows of one forward and backward; auto: as many as memory holds, found while training, on a GPU or with --memory;
    else 4096 tokens of text, or a quarter of the batch for classify."""
    max_tokens: int | None = None
    """Padded tokens of one forward and backward, in the place of rows."""
    per_device_train_batch_size: int | None = None
    """Hugging Face's word for the rows of one forward and backward; translated."""
    gradient_accumulation_steps: int | None = None
    """Hugging Face's word for the micro-batches of a step on one rank; translated."""
    accumulate_grad_batches: int | None = None
    """Lightning's word for the same; translated."""
    nbs: int | None = None
    """Ultralytics' word for the batch that is meant; translated."""

    memory: str | None = None
    """How much memory a step may use, such as 2GiB: on a GPU all of it; without one, weights, gradients, optimizer and
    what autograd saves. Left out: all there is."""
    checkpoint: bool = False
    """Let blocks compute their activations again in the backward instead of keeping them: less memory, more time."""
    tiled: bool = False
    """Run blocks in which positions do not meet over tiles of a row, and take a model folder's loss without logits: for
    rows longer than memory."""
    offload: bool = False
    """Keep on the host what autograd saves; needs a GPU."""

    steps: int | None = None
    """Optimizer steps; left out: as many as the epochs have."""
    epochs: int = 2
    """Passes over the training rows."""
    lr: float | None = None
    """Peak learning rate. Left out: 0.01 for our own language model, 0.003 for our classifiers, 0.00005 for a model
    folder."""
    scale_lr: Literal["linear", "sqrt"] | None = None
    """The lr was found at base_batch: scale it to the batch, by the rule for SGD or the one for Adam; with a batch that
    grows, to the batch of each step."""
    base_batch: int | None = None
    """The batch at which the lr was found; left out with a batch that grows: its first."""
    nominal_batch: int | None = None
    """The batch for which weight_decay was chosen: it is scaled by batch / nominal_batch, as Ultralytics does."""
    warmup: int = 10
    """Steps over which the learning rate rises to its peak."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """What the learning rate does afterwards; cosine falls to a tenth."""
    weight_decay: float = 0.1
    """Of AdamW."""
    max_grad_norm: float = 1.0
    """Clip the gradient of the whole batch to this norm."""
    seed: int = 0
    """Of the first weights, the order of the rows and all other draws."""
    device: str = "auto"
    """Where to train: auto, cpu, cuda, cuda:1 ..."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """How the processes that torchrun starts share the model: each holds all of it, or a shard (torch 2.8 or newer)."""

    out: Path | None = None
    """The run folder. Left out: a new one under runs/."""
    resume: Path | None = None
    """Go on with the run in this folder, with its settings; goes with no other flag."""
    save_every: int = 50
    """Steps between checkpoints; one is always written at the end and on Ctrl-C."""
    prompt: str = "Return "
    """What the sample at the end begins with."""
    proof: bool = True
    """Hold one batch's gradient against the reference at the end."""

    def __post_init__(self) -> None:
        values = vars(self)
        for name, (says, holds) in _RULES.items():
            value = values[name]
            # "auto" and None are words for "left out"; whatever they stand for obeys the rule.
            if isinstance(value, (int, float)) and not holds(value):
                raise ConfigError(f"{name} is {_shown(value)}; it must be {says}.")
        if isinstance(self.batch_size, str):
            try:
                schedule_of(self)
            except ValueError as error:
                raise ConfigError(f"batch_size: {error}") from None
        for name in ("column", "label", "prompt"):
            if not _has_bytes(values[name]):
                raise ConfigError(f"{name} is {_shown(values[name])}, which is no text in UTF-8. Write it in UTF-8.")
        if self.memory is not None:
            try:
                bytes_in(self.memory)
            except (TypeError, ValueError) as error:
                raise ConfigError(str(error)) from None


DEFAULT_BATCH = 64


def schedule_of(config: Config, noise: NoiseScale | None = None) -> BatchSchedule:
    """Return the batch of each step; one that does not change is a schedule too.

    Args:
        noise: what measures the noise, for a batch that follows it.
    """
    said = config.batch_size or DEFAULT_BATCH
    follows = isinstance(said, str) and said.rstrip().endswith("noise")
    return BatchSchedule(said, (noise or NoiseScale()) if follows else None)


_Rule: TypeAlias = "tuple[str, Callable[[float], bool]]"
_LARGEST = 2**31 - 1
"""Beyond any batch or model that is trained; larger ones would fail inside of torch, without a word of the setting."""
_WHOLE: _Rule = (f"at least 1 and at most {_LARGEST}", lambda value: 1 <= value <= _LARGEST)
_POSITIVE: _Rule = ("a positive number", lambda value: 0 < value < math.inf)
_NOT_NEGATIVE: _Rule = ("0 or more", lambda value: 0 <= value < math.inf)
_SEED: _Rule = ("of at most 64 bits, from -2**63 to 2**64 - 1", lambda value: -(2**63) <= value < 2**64)
_RULES: dict[str, _Rule] = {
    **dict.fromkeys(("batch_size", "micro_batch_size", "max_tokens", "per_device_train_batch_size", "nbs"), _WHOLE),
    **dict.fromkeys(("base_batch", "nominal_batch"), _WHOLE),
    **dict.fromkeys(("gradient_accumulation_steps", "accumulate_grad_batches", "steps", "epochs"), _WHOLE),
    **dict.fromkeys(("save_every", "width", "layers", "heads", "context", "image_size"), _WHOLE),
    **dict.fromkeys(("lr", "max_grad_norm"), _POSITIVE),
    **dict.fromkeys(("warmup", "weight_decay"), _NOT_NEGATIVE),
    "seed": _SEED,
    "held_out": ("a share of the rows, between 0 and 1", lambda value: 0 < value < 1),
}


def load(path: Path) -> Config:
    """Read a config from YAML.

    Raises:
        ConfigError: for a file that is not there or no YAML, and for an unknown, repeated or mistyped key; names the
            line, and the nearest key.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The config {path} cannot be read: {error}.") from None
    settings = _mapping(text, path)
    typed = {key: _typed(key, value, f"{path}, line {line}") for key, (line, value) in settings.items()}
    try:
        return Config(**typed)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def dump(config: Config) -> str:
    """Write a config as YAML that `load` reads back; keys that say nothing are left out."""
    import yaml

    text: str = yaml.safe_dump(plain(config), sort_keys=False)
    return text


def plain(config: Config) -> dict[str, Scalar]:
    """Return the settings that say something, as plain values."""
    values = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(config).items()}
    return {key: value for key, value in values.items() if value is not None}


def absolute(config: Config) -> Config:
    """Name data and model by their full path, so that the run can be resumed from any folder."""
    paths = {name: getattr(config, name) for name in ("data", "model")}
    return replace(config, **{name: path.absolute() for name, path in paths.items() if path is not None})


def nearest(word: str, known: list[str]) -> str:
    """Return " Did you mean 'known'?", or nothing where no known word is near."""
    near = difflib.get_close_matches(word.replace("-", "_"), known, 1)
    return f" Did you mean '{near[0]}'?" if near else ""


def _mapping(text: str, path: Path) -> dict[str, tuple[int, Any]]:
    """Parse the YAML: the line and the value of every key."""
    import yaml

    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # a date of month 13, or a number of too many digits
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}.") from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply. Write one setting a line, such as 'steps: 100'.") from None
    if not isinstance(node, yaml.MappingNode):
        state = "is empty" if node is None else "holds no settings"
        raise ConfigError(f"{path} {state}. Write one setting a line, such as 'steps: 100'.")
    lines = _lines([(str(key.value), key.start_mark.line + 1) for key, _ in node.value], path)
    return {key: (line, values[key]) for key, line in lines.items()}


def _lines(keys: list[tuple[str, int]], path: Path) -> dict[str, int]:
    """Return the line of every key, each of which is a setting and comes once."""
    known = [field.name for field in fields(Config)]
    lines: dict[str, int] = {}
    for key, line in keys:
        if key not in known:
            raise ConfigError(f"{path}, line {line}: there is no setting '{key}'.{nearest(key, known)}")
        if key in lines:  # YAML itself would silently keep the last one
            raise ConfigError(f"{path}, line {line}: '{key}' was set before, in line {lines[key]}. Keep one.")
        lines[key] = line
    return lines


def _typed(key: str, value: Scalar, where: str) -> Any:
    """Bring a YAML value to the type of its field."""
    kind = get_type_hints(Config)[key]
    choices = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    if value is None and type(None) in choices:
        return None
    found = [result for choice in choices if (result := _as(choice, value)) is not None]
    if not found:
        wanted = " or ".join(_in_words(choice) for choice in choices if choice is not type(None))
        raise ConfigError(f"{where}: {key} is {_shown(value)}; it must be {wanted}.")
    return found[0]


def _as(kind: Any, value: Scalar) -> object:
    """Return the value as this type, or None if it is none."""
    if get_origin(kind) is Literal:
        return value if value in get_args(kind) else None
    if kind is float:
        return _number(value)
    if kind is Path:
        return Path(value) if isinstance(value, str) else None
    return value if type(value) is kind else None  # not isinstance: True is no number of steps


def _number(value: Scalar) -> float | None:
    """Return a number, which may be text: YAML 1.1 reads 5e-3 so."""
    try:
        return None if value is None or isinstance(value, bool) else float(value)
    except (ValueError, TypeError, OverflowError):
        return None


def _shown(value: object) -> str:
    """Return a value as it was written, cut where it is long."""
    return reprlib.repr(value)


def _has_bytes(text: str) -> bool:
    """Tell whether a text can be written as UTF-8: bytes of another encoding on the command line cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _in_words(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(repr(choice) for choice in get_args(kind))
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text", Path: "a path"}[kind]
