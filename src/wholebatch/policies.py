"""What a batch size says about learning rate, weight decay and averages, and how many micro-batches make a step.

Nothing here touches a gradient or holds state: every function is plain arithmetic on Python numbers, to be used in any
loop. A ratio is always the batch that is trained over the batch that the setting was found for.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal, TypedDict, TypeVar

from wholebatch.batch.window import Window, windows

T = TypeVar("T")
Rule = Literal["linear", "sqrt"]
Flavour = Literal["8.4", "8.3"]


class AdamSettings(TypedDict):
    """The arguments of `torch.optim.Adam` and `AdamW` that depend on the batch size."""

    lr: float
    betas: tuple[float, float]
    eps: float


def scale_lr(lr: float, batch: int, base_batch: int, rule: Rule = "linear") -> float:
    """Scale a learning rate found at `base_batch` to `batch`.

    With ratio = batch / base_batch: "linear" gives lr * ratio (SGD; weight decay, momentum and epochs stay), "sqrt"
    gives lr * sqrt(ratio) (adaptive optimizers; see `scale_adam` for the settings that go with it).

    Args:
        lr: the learning rate at `base_batch`.
        batch: rows of one optimizer step, over all ranks.
        base_batch: the same where `lr` was found.
        rule: "linear" or "sqrt".

    Raises:
        ValueError: a batch is below one, or the rule is neither of the two.

    Example:
        >>> scale_lr(0.1, batch=8192, base_batch=256)
        3.2
        >>> round(scale_lr(0.1, 8192, 256, rule="sqrt"), 6)
        0.565685

    Source:
        Goyal et al. 2017, arXiv 1706.02677, section 2.1 (linear, valid to about 8,192 images).
    """
    ratio = _ratio(batch, base_batch)
    if rule not in ("linear", "sqrt"):
        raise ValueError(f"rule={rule!r} is not a rule for the learning rate. Choose rule='linear' or rule='sqrt'.")
    return lr * ratio if rule == "linear" else lr * ratio**0.5


def scale_adam(
    lr: float, batch: int, base_batch: int, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
) -> AdamSettings:
    """Scale Adam's settings found at `base_batch` to `batch`, so that both follow the same continuous-time path.

    With r = batch / base_batch: lr * sqrt(r), each beta becomes 1 - r * (1 - beta), eps / sqrt(r). Weight decay is not
    part of the rule and stays the caller's. The result goes into the optimizer as it is: `AdamW(params, **settings)`.

    Args:
        lr: the learning rate at `base_batch`.
        batch: rows of one optimizer step, over all ranks.
        base_batch: the same where the settings were found.
        betas: the decay rates of the two moments at `base_batch`.
        eps: the constant under the fraction at `base_batch`.

    Raises:
        ValueError: the ratio is so large that a beta would fall below 0: the rule ends there.

    Example:
        >>> scale_adam(1e-3, batch=1024, base_batch=256)["lr"]
        0.002

    Source:
        Malladi et al. 2022, arXiv 2205.10287, the square root scaling rule.
    """
    ratio = _ratio(batch, base_batch)
    first, second = (1 - ratio * (1 - beta) for beta in betas)
    if min(first, second) < 0:
        largest = 1 / (1 - min(betas))
        raise ValueError(
            f"A batch of {batch} is {ratio:g} times {base_batch}: betas {betas} would become ({first:g}, {second:g}), "
            f"and a beta below 0 has no meaning. The rule holds up to {largest:g} times; scale less, or scale the "
            "learning rate alone: scale_lr(lr, batch, base_batch, rule='sqrt')."
        )
    return AdamSettings(lr=lr * ratio**0.5, betas=(first, second), eps=eps / ratio**0.5)


def scale_ema(decay: float, batch: int, base_batch: int) -> float:
    """Scale the decay of a model average, updated once a step, so that it remembers as many rows as before.

    The rule is decay ** (batch / base_batch).

    Example:
        >>> round(scale_ema(0.9999, batch=256, base_batch=64), 8)
        0.99960006

    Source:
        Busbridge et al. 2023, arXiv 2307.13813, definition 1.2.
    """
    return float(decay ** _ratio(batch, base_batch))


def warm_up(step: int, steps: int, start: float, end: float) -> float:
    """Return the value of a gradual warm-up: a straight line from `start` at step 0 to `end` at `steps` and after.

    Example:
        >>> round(warm_up(1, 780, start=0.1, end=3.2) - 0.1, 6)
        0.003974
    """
    return end if step >= steps else start + (end - start) / steps * step


def ramp(stages: Mapping[int, int], done: int = 0) -> Callable[[int], int]:
    """Return a schedule for `windows(loader, schedule)` that changes the micro-batches of a step at given steps.

    Args:
        stages: {step: micro-batches of a step from there on}; step 0 must be there.
        done: steps taken before this loader began, where each epoch has its own call of `windows`.

    Raises:
        ValueError: step 0 has no entry, or a stage holds no micro-batch.

    Example:
        >>> schedule = ramp({0: 1, 100: 4})
        >>> [schedule(step) for step in (0, 99, 100, 1000)]
        [1, 1, 4, 4]
    """
    starts = sorted(stages)
    if not starts or starts[0] != 0 or min(stages.values()) < 1:
        raise ValueError(
            f"The stages {dict(stages)} do not say what every step holds. Start at step 0 and let each stage hold at "
            "least one micro-batch: ramp({0: 1, 100: 4})."
        )
    return lambda step: stages[starts[bisect.bisect_right(starts, step + done) - 1]]


@dataclasses.dataclass(frozen=True)
class Iteration:
    """One micro-batch of a run under `NominalBatch`.

    Attributes:
        index: its number, counted over all epochs.
        epoch: the epoch that it belongs to.
        accumulate: the micro-batches that a step asks for at this point of the ramp.
        since: the index of the last step before it; -1 where there was none.
        steps: whether the optimizer steps after it.
    """

    index: int
    epoch: int
    accumulate: int
    since: int
    steps: bool


@dataclasses.dataclass(frozen=True)
class NominalBatch:
    """The nominal batch of the YOLO family: settings are given for `nbs` rows, micro-batches gather to about that many.

    A step takes A = max(round(nbs / batch), 1) micro-batches, ramped from one while the warm-up lasts, and weight decay
    is multiplied by batch * A / nbs. Windows run across epochs. Where the gathering is exact (a whole-batch
    denominator), only the schedule comes from here; what the loss averages over is not its business.

    Args:
        nbs: the nominal batch size that the settings were found for.
        batch: rows of one micro-batch, over all ranks.
        micro_batches: micro-batches of one epoch: `len(loader)`.
        epochs: epochs of the run.
        warmup_epochs: length of the warm-up, in epochs.
        flavour: the rules of Ultralytics "8.4" (read in 8.4.190) or "8.3" (read in 8.3.0: at least 100 iterations of
            warm-up, and no cap by the length of the run). They changed in 8.4.103.
        flush: "end" steps once more over what is left at the end of the run; "never" drops it, as Ultralytics does.

    Raises:
        ValueError: a size is below one, or a word is not known.

    Example:
        >>> nominal = NominalBatch(nbs=64, batch=16, micro_batches=100, epochs=10, warmup_epochs=0)
        >>> nominal.accumulate, nominal.decay_scale, nominal.sizes()[:2]
        (4, 1.0, [4, 4])
    """

    nbs: int = 64
    batch: int = 16
    micro_batches: int = dataclasses.field(kw_only=True)
    epochs: int = dataclasses.field(kw_only=True)
    warmup_epochs: float = dataclasses.field(default=3.0, kw_only=True)
    flavour: Flavour = dataclasses.field(default="8.4", kw_only=True)
    flush: Literal["end", "never"] = dataclasses.field(default="end", kw_only=True)

    def __post_init__(self) -> None:
        for name in ("nbs", "batch", "micro_batches", "epochs"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name}={getattr(self, name)} must be at least 1: a run has rows, micro-batches and epochs."
                )
        for name, words in (("flavour", ("8.4", "8.3")), ("flush", ("end", "never"))):
            if getattr(self, name) not in words:
                raise ValueError(f"{name}={getattr(self, name)!r} is not known. Choose one of {words}.")

    @property
    def accumulate(self) -> int:
        """Micro-batches of a step after the warm-up, capped (8.4) by the length of the run."""
        return min(self._wanted, self.iterations) if self.flavour == "8.4" else self._wanted

    @property
    def decay_scale(self) -> float:
        """The factor for weight decay, batch * A / nbs with the uncapped A; apply it to decayed parameters only."""
        return self.batch * self._wanted / self.nbs

    @property
    def iterations(self) -> int:
        """Micro-batches of the whole run."""
        return self.micro_batches * self.epochs

    @property
    def warmup_iterations(self) -> int:
        """The last iteration of the warm-up (it belongs to it); -1 where there is none."""
        if self.flavour == "8.3":
            return max(round(self.warmup_epochs * self.micro_batches), 100) if self.warmup_epochs > 0 else -1
        return round(min(self.warmup_epochs, self.epochs - 1) * self.micro_batches) or -1

    @property
    def _wanted(self) -> int:
        return max(round(self.nbs / self.batch), 1)  # Python rounds halves to the even number, and so does the original

    def accumulate_at(self, index: int) -> int:
        """Return the micro-batches that a step asks for at iteration `index`: the ramp from one to `accumulate`."""
        if index > self.warmup_iterations:
            return self.accumulate
        end = self.accumulate if self.flavour == "8.4" else self.nbs / self.batch
        return max(1, round(self.warm(index, 1, end)))

    def warm(self, index: int, start: float, end: float) -> float:
        """Return a setting at iteration `index`: on the line from `start` to `end` during the warm-up, `end` after.

        The originals: learning rate 0 (biases 0.1) to the epoch's own, momentum 0.8 to 0.937; a step uses the values of
        its last iteration.
        """
        return end if index > self.warmup_iterations else warm_up(index, self.warmup_iterations, start, end)

    def trace(self) -> Iterator[Iteration]:
        """Yield every micro-batch of the run with what the schedule says at it."""
        since = -1
        for index in range(self.iterations):
            accumulate = self.accumulate_at(index)
            last = self.flush == "end" and index == self.iterations - 1
            steps = index - since >= accumulate or last
            yield Iteration(index, index // self.micro_batches, accumulate, since, steps)
            since = index if steps else since

    def sizes(self) -> list[int]:
        """Return the number of micro-batches of every step of the run, in order."""
        return [iteration.index - iteration.since for iteration in self.trace() if iteration.steps]

    def windows(self, loader: Iterable[T]) -> Iterator[tuple[Iteration, Window[T]]]:
        """Iterate over `loader` once an epoch and yield, for each step, its last iteration and its window.

        Only windows that make a step are yielded. A sampler's `set_epoch` is the caller's: wrap the loader.

        Raises:
            ValueError: an epoch of `loader` has another number of micro-batches than the schedule was made for.
        """
        boundaries = (iteration for iteration in self.trace() if iteration.steps)
        yield from zip(boundaries, windows(self._batches(loader), self.sizes()), strict=False)

    def _batches(self, loader: Iterable[T]) -> Iterator[T]:
        for epoch in range(self.epochs):
            count = 0
            for count, batch in enumerate(loader, 1):
                if count > self.micro_batches:
                    break
                yield batch
            if count != self.micro_batches:
                more = "more" if count > self.micro_batches else str(count)
                raise ValueError(
                    f"Epoch {epoch} has {more} micro-batches, but the schedule was made for {self.micro_batches}: "
                    "steps would fall elsewhere. Build NominalBatch(micro_batches=len(loader), ...), and pass a loader "
                    "that can be walked through once an epoch."
                )

    def report(self) -> str:
        """Say in one line how far the step is from the nominal batch, and what is done about it."""
        rows = self.batch * self.accumulate
        left = self.iterations - sum(self.sizes())
        words = [f"nbs {self.nbs} at {self.batch} rows a micro-batch: {self.accumulate} a step, {rows} rows"]
        if rows != self.nbs:
            words.append(f"not {self.nbs}: rounded from {self.nbs / self.batch:.4g}, or capped by the run")
        words.append(f"weight decay x{self.decay_scale:.4g}")
        if left:
            words.append(f"the last {left} micro-batches are dropped (flush='end' steps over them)")
        return "; ".join(words)


def _ratio(batch: int, base_batch: int) -> float:
    if batch < 1 or base_batch < 1:
        raise ValueError(f"batch={batch} and base_batch={base_batch} must be at least 1: their ratio is the rule.")
    return batch / base_batch
