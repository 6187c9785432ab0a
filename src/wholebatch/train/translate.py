"""The arithmetic of the batch: other tools' words are translated, shown, and refused where they contradict each other.

Nothing is rounded: a batch that cannot be cut evenly has a remainder, which is said, or is an error, which says why.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from wholebatch.planning.arrangement import Arrangement, counted
from wholebatch.policies import scale_lr
from wholebatch.train.config import DEFAULT_BATCH, Config, schedule_of
from wholebatch.train.errors import ConfigError


def translate(config: Config, ranks: int = 1) -> Config:
    """Settle `batch_size` and `micro_batch_size` from whichever words were used.

    The words of other tools are gone afterwards: ``batch = rows a micro-batch x micro-batches x ranks``.

    Args:
        config: as the user wrote it.
        ranks: how many processes share the batch.

    Raises:
        ConfigError: if two words contradict each other, or do not say the batch.

    Example:
        >>> settled = translate(Config(per_device_train_batch_size=4, gradient_accumulation_steps=8), ranks=4)
        >>> settled.batch_size, settled.micro_batch_size
        (128, 4)
    """
    micro_batches = _agreed(config, "gradient_accumulation_steps", "accumulate_grad_batches")
    batch = _agreed(config, "batch_size", "nbs")
    rows = _rows(config)
    if isinstance(batch, str):
        return replace(
            _growing(config, batch, micro_batches), nbs=None, micro_batch_size="auto" if rows is None else rows
        )
    if micro_batches is not None:
        batch, rows = _cut_evenly(batch, rows, micro_batches, ranks)
    elif batch is None:
        alone = config.per_device_train_batch_size  # one micro-batch a step is what Hugging Face means by default
        batch = DEFAULT_BATCH if alone is None else alone * ranks
    return replace(
        _at_batch(config, batch),
        batch_size=batch,
        micro_batch_size="auto" if rows is None or config.max_tokens else rows,
        nbs=None,
        per_device_train_batch_size=None,
        gradient_accumulation_steps=None,
        accumulate_grad_batches=None,
    )


def _growing(config: Config, batch: str, micro_batches: int | None) -> Config:
    """Settle a batch that grows: what depends on it is worked out at each step."""
    if micro_batches is not None:
        raise ConfigError(
            f"batch_size is {batch}, and {counted(micro_batches, 'micro-batch')} of a step were asked for: a batch "
            "that grows has more and more of them. Leave their number out, and say micro_batch_size or max_tokens."
        )
    if config.scale_lr is not None and config.lr is None:
        raise ConfigError(f"scale_lr is {config.scale_lr}, but lr is left out: say what was found at base_batch.")
    schedule = schedule_of(config)
    base = config.base_batch or schedule.smallest if config.scale_lr is not None else None
    return replace(config, batch_size=str(schedule), base_batch=base, per_device_train_batch_size=None)


def _at_batch(config: Config, batch: int) -> Config:
    """Bring what was chosen at another batch to this one; the words that say so are gone afterwards."""
    lr, decay = config.lr, config.weight_decay
    if config.scale_lr is not None:
        if lr is None or config.base_batch is None:
            raise ConfigError(
                f"scale_lr is {config.scale_lr}, but lr is {lr} and base_batch {config.base_batch}: what was "
                "found, and at which batch? Give both."
            )
        lr = scale_lr(lr, batch, config.base_batch, config.scale_lr)
    if config.nominal_batch is not None:
        decay *= batch / config.nominal_batch
    return replace(config, lr=lr, weight_decay=decay, scale_lr=None, base_batch=None, nominal_batch=None)


def arithmetic(batch: int, rows: int | None, ranks: int = 1, tokens: int | None = None) -> str:
    """Say how a batch is cut, with every remainder.

    Args:
        batch: rows of one step over all ranks.
        rows: of one micro-batch; None if micro-batches are cut by tokens.
        ranks: how many processes share the batch.
        tokens: padded tokens of one micro-batch.

    Example:
        >>> arithmetic(128, 4, ranks=4)
        'batch 128 = 4 rows x 8 micro-batches x 4 ranks'
        >>> arithmetic(130, 4)
        'batch 130 = 4 rows x 32 micro-batches + 1 micro-batch of 2 rows'
    """
    if rows is not None:
        return str(Arrangement(batch, rows, ranks))
    return f"{Arrangement(batch, ranks=ranks).shared_out}, in micro-batches of at most {tokens} tokens"


def spoken(config: Config) -> str:
    """Return the other tools' words that a config uses, as the user wrote them: "nbs 64"."""
    micro_batches = ("per_device_train_batch_size", "gradient_accumulation_steps", "accumulate_grad_batches", "nbs")
    words = (*micro_batches, "scale_lr", "base_batch", "nominal_batch")
    return ", ".join(f"{word} {getattr(config, word)}" for word in words if getattr(config, word) is not None)


def _agreed(config: Config, first: str, second: str) -> Any:
    """The value of two words for one thing."""
    values = {name: getattr(config, name) for name in (first, second) if getattr(config, name) is not None}
    if len(set(values.values())) > 1:
        raise ConfigError(
            f"{first} is {values[first]} and {second} is {values[second]}, but they are two words for one number. "
            "Leave one out."
        )
    return next(iter(values.values()), None)


def _rows(config: Config) -> int | None:
    """Rows of one micro-batch, if they were said."""
    micro, device = config.micro_batch_size, config.per_device_train_batch_size
    if micro != "auto" and config.max_tokens is not None:
        raise ConfigError(
            f"micro_batch_size is {micro} rows and max_tokens {config.max_tokens}: both say where the batch is cut. "
            "Leave one out."
        )
    if micro == "auto" or micro == device:
        return device
    if device is not None:
        raise ConfigError(
            f"micro_batch_size is {micro} and per_device_train_batch_size {device}, but they are two words for one "
            "number. Leave one out."
        )
    return micro


def _cut_evenly(batch: int | None, rows: int | None, micro_batches: int, ranks: int) -> tuple[int, int]:
    """Find batch and rows of a micro-batch from the number of micro-batches and whichever of the two was said."""
    if rows is not None:
        return _product(rows, micro_batches, ranks, batch), rows
    found = _quotient(batch, micro_batches, ranks)
    return found * micro_batches * ranks, found


def _product(rows: int, micro_batches: int, ranks: int, batch: int | None) -> int:
    found = rows * micro_batches * ranks
    if batch not in (None, found):
        raise ConfigError(
            f"batch_size is {batch}, but {counted(rows, 'row')} x {counted(micro_batches, 'micro-batch')} x "
            f"{counted(ranks, 'rank')} = {found}. Leave out the number of micro-batches: a batch of {batch} is "
            f"then cut into "
            f"micro-batches of {rows} exactly, with the remainder in a smaller one."
        )
    return found


def _quotient(batch: int | None, micro_batches: int, ranks: int) -> int:
    parts = micro_batches * ranks
    if batch is None:
        raise ConfigError(
            f"{counted(micro_batches, 'accumulated micro-batch')} do not say how large the batch is. Give "
            f"batch_size, or the rows "
            "of a micro-batch: micro_batch_size or per_device_train_batch_size."
        )
    if batch % parts:
        below = batch // parts * parts
        choices = f"{below} or {below + parts}" if below else str(parts)
        raise ConfigError(
            f"A batch of {batch} cannot be cut into {micro_batches} equal micro-batches on {counted(ranks, 'rank')}: "
            f"{batch} / {parts} = {batch / parts:g}. Choose batch_size {choices}, or say micro_batch_size in the place "
            "of the micro-batches: an uneven last micro-batch is exact."
        )
    return batch // parts
