"""Real tokens a second on rows of uneven length: fixed micro-batches, wholebatch, the Hugging Face Trainer, and no
padding.

All train the same Llama from the same start on the same rows with the same batch, optimizer and clip, and no
micro-batch may hold more padded tokens than ``batch / micro_batches`` rows of the longest length (the Trainer's
``batch_rebalance`` knows no such cap: its largest micro-batch stands in the result). They take turns, one epoch each,
in random order; what is kept is the
ratio within each round. Needs the extra ``bench``; about fifteen minutes.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F
import transformers
from record import RESULTS, Clock, Seconds, quartiles, save, significant
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM

import wholebatch as wb

Batch = dict[str, Any]
OURS = "wholebatch"


@dataclass
class Setting:
    """What all contestants share."""

    rows: list[Tensor]
    batch: int
    micro_batches: int
    longest: int
    hidden: int
    layers: int

    @property
    def cap(self) -> int:
        """Padded tokens that a micro-batch may hold."""
        return self.batch // self.micro_batches * self.longest

    def shuffled(self, seed: int) -> Iterator[list[Tensor]]:
        """The batches of one epoch, each a list of rows of uneven length."""
        order = random.Random(seed).sample(self.rows, len(self.rows))
        return (order[start : start + self.batch] for start in range(0, len(order), self.batch))

    def model(self, attention: str = "sdpa") -> LlamaForCausalLM:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=self.hidden,
            intermediate_size=2 * self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=self.longest,
            use_cache=False,
            attn_implementation=attention,
        )
        return LlamaForCausalLM(config).train()


@dataclass
class Collate:
    """Pad the rows of a micro-batch to the longest among them, and count what that adds."""

    slots: int = 0
    real: int = 0
    sizes: list[int] = field(default_factory=list)

    def __call__(self, rows: list[Any]) -> Batch:
        rows = [row["input_ids"] if isinstance(row, dict) else row for row in rows]
        ids = pad_sequence(rows, batch_first=True)
        lengths = torch.tensor([len(row) for row in rows])
        mask = torch.arange(ids.shape[1]) < lengths[:, None]
        self.seen(ids.numel(), int(lengths.sum()))
        return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}

    def seen(self, slots: int, real: int) -> None:
        self.slots, self.real = self.slots + slots, self.real + real
        self.sizes.append(slots)


@dataclass(frozen=True)
class Epoch:
    """What one contestant did in one round."""

    seconds: Seconds
    collate: Collate
    model: nn.Module


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer that the Trainer takes by default."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def finish(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def fixed(setting: Setting, seed: int) -> Epoch:
    """A careful hand-written loop: micro-batches of equally many rows in loader order, divided by the tokens of the
    batch."""
    model, collate, rows = setting.model(), Collate(), setting.batch // setting.micro_batches
    optimizer = adamw(model)
    with Clock() as clock:
        for batch in setting.shuffled(seed):
            items = sum(len(row) - 1 for row in batch)
            for start in range(0, len(batch), rows):
                model(**collate(batch[start : start + rows]), num_items_in_batch=items).loss.backward()
            finish(model, optimizer)
    return Epoch(clock.seconds, collate, model)


def causal_loss(model: nn.Module, batch: Batch) -> wb.LossSum:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return wb.losses.causal_lm(logits, batch["labels"])


def ours(setting: Setting, seed: int) -> Epoch:
    """``wb.Step`` with micro-batches by padded tokens."""
    model, collate = setting.model(), Collate()
    size = wb.Tokens(setting.cap, length=len)
    step = wb.Step(model, adamw(model), causal_loss, micro_batch_size=size, collate=collate, max_grad_norm=1.0)
    with Clock() as clock:
        for batch in setting.shuffled(seed):
            step(batch)
    return Epoch(clock.seconds, collate, model)


def attend_row_by_row(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, *, row_lengths: list[int], **options: Any
) -> tuple[Tensor, None]:
    """Causal attention within each row of a packed sequence, without a mask."""
    rows = zip(*(tensor.split(row_lengths, dim=2) for tensor in (query, key, value)), strict=True)
    scale = options.get("scaling")
    attended = [F.scaled_dot_product_attention(*row, is_causal=True, scale=scale) for row in rows]
    return torch.cat(attended, dim=2).transpose(1, 2), None


def packed(setting: Setting, seed: int) -> Epoch:
    """The limit: rows end to end without padding, attention row by row; only a model made for it can run so."""
    AttentionInterface.register("row_by_row", attend_row_by_row)
    AttentionMaskInterface.register("row_by_row", lambda *_, **__: None)
    model, collate = setting.model("row_by_row"), Collate()
    optimizer = adamw(model)
    with Clock() as clock:
        for batch in setting.shuffled(seed):
            items = sum(len(row) - 1 for row in batch)
            for micro_batch in filled(batch, setting.cap):
                lengths = [len(row) for row in micro_batch]
                ids = torch.cat(micro_batch)
                labels = torch.cat([torch.cat([row.new_tensor([-100]), row[1:]]) for row in micro_batch])
                positions = torch.cat([torch.arange(length) for length in lengths])
                collate.seen(len(ids), len(ids))
                inputs = {"input_ids": ids[None], "labels": labels[None], "position_ids": positions[None]}
                model(**inputs, row_lengths=lengths, num_items_in_batch=items).loss.backward()
            finish(model, optimizer)
    return Epoch(clock.seconds, collate, model)


def filled(batch: list[Tensor], cap: int) -> list[list[Tensor]]:
    """Fill micro-batches to the cap, longest rows first."""
    micro_batches: list[list[Tensor]] = []
    for row in sorted(batch, key=len, reverse=True):
        fits = (micro_batch for micro_batch in micro_batches if sum(map(len, micro_batch)) + len(row) <= cap)
        micro_batch = next(fits, None)
        if micro_batch is None:
            micro_batches.append(micro_batch := [])
        micro_batch.append(row)
    return micro_batches


class Stopwatch(transformers.TrainerCallback):
    """Times the Trainer from its first step to its last, without what it sets up before."""

    def __init__(self) -> None:
        self.clock = Clock()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.clock.__enter__()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.clock.__exit__()


def trainer(strategy: str) -> Callable[[Setting, int], Epoch]:
    """One epoch of the Hugging Face Trainer with one of its sampling strategies."""

    def run(setting: Setting, seed: int) -> Epoch:
        watch, collate = Stopwatch(), Collate()
        with tempfile.TemporaryDirectory() as folder:
            arguments = transformers.TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=setting.batch // setting.micro_batches,
                gradient_accumulation_steps=setting.micro_batches,
                train_sampling_strategy=strategy,
                num_train_epochs=1,
                learning_rate=1e-3,
                lr_scheduler_type="constant",
                seed=seed,
                use_cpu=not torch.cuda.is_available(),
                remove_unused_columns=False,
                disable_tqdm=True,
                logging_strategy="no",
                save_strategy="no",
                report_to=[],
            )
            contestant = transformers.Trainer(
                model=setting.model(),
                args=arguments,
                train_dataset=[{"input_ids": row} for row in setting.rows],
                data_collator=collate,
                callbacks=[watch],
            )
            contestant.remove_callback(transformers.PrinterCallback)
            contestant.train()
        return Epoch(watch.clock.seconds, collate, contestant.model)

    return run


CONTESTANTS: dict[str, Callable[[Setting, int], Epoch]] = {
    "fixed micro-batches, loader order": fixed,
    "Trainer, random (its default)": trainer("random"),
    "Trainer, group_by_length": trainer("group_by_length"),
    "Trainer, batch_rebalance": trainer("batch_rebalance"),
    OURS: ours,
    "no padding at all (the limit)": packed,
}


def docstrings(count: int, longest: int) -> list[Tensor]:
    """Docstrings of Python's standard library, as bytes."""
    from wholebatch.train.corpus import docstrings as harvested

    texts = [text.encode()[:longest] for text in harvested()]
    return [
        torch.frombuffer(bytearray(text), dtype=torch.uint8).long() for text in random.Random(0).sample(texts, count)
    ]


def lognormal(count: int, longest: int) -> list[Tensor]:
    """Draws from a log-normal distribution of lengths with median 110 and sigma 0.8."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.exp(torch.randn(count, generator=draw) * 0.8 + 4.7).round().clamp(16, longest).long()
    return [torch.randint(1, 256, (length,), generator=draw) for length in lengths.tolist()]


CORPORA = {"docstrings": docstrings, "log-normal": lognormal}


def compete(setting: Setting, rounds: int) -> dict[str, list[Epoch]]:
    """Let all run one epoch each, round after round."""
    order, seen = random.Random(0), {name: [] for name in CONTESTANTS}
    for turn in range(rounds):
        for name in order.sample(list(CONTESTANTS), len(CONTESTANTS)):
            seen[name].append(CONTESTANTS[name](setting, turn))
            epoch = seen[name][-1]
            rate = epoch.collate.real / epoch.seconds.wall
            print(f"  round {turn + 1}/{rounds}  {name:32} {rate:8.0f} real tokens/s", flush=True)
    return seen


def row(corpus: str, name: str, seen: dict[str, list[Epoch]], setting: Setting) -> dict[str, object]:
    """Summarise one contestant: its rates, its padding, and how much faster wholebatch was in the same round."""
    epochs, pairs = seen[name], list(zip(seen[name], seen[OURS], strict=True))
    slots, real = (sum(getattr(epoch.collate, what) for epoch in epochs) for what in ("slots", "real"))
    steps = len(epochs) * -(-len(setting.rows) // setting.batch)
    return {
        "corpus": corpus,
        "name": name,
        "tokens_per_second": quartiles(epoch.collate.real / epoch.seconds.wall for epoch in epochs),
        "tokens_per_cpu_second": quartiles(epoch.collate.real / epoch.seconds.cpu for epoch in epochs),
        "wholebatch_is": quartiles(rate(mine) / rate(theirs) for theirs, mine in pairs),
        "wholebatch_is_cpu": quartiles(rate(mine, "cpu") / rate(theirs, "cpu") for theirs, mine in pairs),
        "padding": significant(1 - real / slots),
        "pieces_per_step": significant(sum(len(epoch.collate.sizes) for epoch in epochs) / steps),
        "largest_piece": max(max(epoch.collate.sizes) for epoch in epochs),
        "parameters_apart": significant(max(apart(theirs, mine) for theirs, mine in pairs))
        if same_rows(name)
        else None,
    }


def rate(epoch: Epoch, clock: str = "wall") -> float:
    return epoch.collate.real / getattr(epoch.seconds, clock)


def same_rows(name: str) -> bool:
    """Whether a contestant's batches hold the same rows as ours, so that its parameters must come out the same."""
    return "Trainer" not in name


def apart(one: Epoch, other: Epoch) -> float:
    """The relative distance of two trained models."""
    a, b = (torch.cat([p.detach().flatten() for p in epoch.model.parameters()]) for epoch in (one, other))
    return float((a - b).norm() / b.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=3, help="optimizer steps of an epoch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=128, help="rows of a batch")
    parser.add_argument("--micro-batches", type=int, default=8, help="micro-batches of a batch where they are fixed")
    parser.add_argument("--longest", type=int, default=512, help="rows are cut to so many tokens")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--corpus", choices=CORPORA, action="append", help="default: both")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    results, settings = [], {"transformers": transformers.__version__}
    for corpus in options.corpus or CORPORA:
        rows = CORPORA[corpus](options.batches * options.batch, options.longest)
        setting = Setting(rows, options.batch, options.micro_batches, options.longest, options.hidden, options.layers)
        print(f"{corpus}: {len(rows)} rows, {sum(map(len, rows))} tokens, cap {setting.cap}", flush=True)
        seen = compete(setting, options.rounds)
        results += [row(corpus, name, seen, setting) for name in CONTESTANTS]
        settings |= {"cap": setting.cap, "parameters": sum(p.numel() for p in setting.model().parameters())}
    names = ("batches", "rounds", "batch", "micro_batches", "longest", "hidden", "layers")
    settings |= {name: getattr(options, name) for name in names}
    for result in results:
        wall, cpu = (f"{result[key]['median']:.3f}" for key in ("wholebatch_is", "wholebatch_is_cpu"))
        factor = f"padding {result['padding']:.3f}  wholebatch is {wall} x, cpu {cpu} x"
        print(f"{result['corpus']:10} {result['name']:32} {factor}")
    print(save("variable_length", settings, results, options.out))


if __name__ == "__main__":
    main()
