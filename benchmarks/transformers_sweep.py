"""Train every text model class of Transformers for two windows: how far from the whole batch is its Trainer, and ours?

A class is built from a tiny configuration without dropout. Its own loss on the whole window in one micro-batch is the
truth. Every row is padded to the same width, so that no class sees another padding in micro-batches than whole; how
many labels count differs from row to row. The windows hold 8 and 3 rows in micro-batches of 2. Takes about half an hour
on one core; what is measured is kept class by class, so a run may be stopped and taken up again.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import logging
import math
import resource
import signal
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from record import RESULTS, save, significant
from torch import Tensor, nn
from transformers.models.auto import modeling_auto as auto

from wholebatch.integrations.transformers import exact

MAPS = {
    "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "sequence": auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "token": auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    "seq2seq": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
}
VOCABULARY, WIDTH, CLASSES = 64, 16, 3
SECONDS, MEMORY = 25, 8 * 2**30
"""What a class may take."""

SMALL = {
    "vocab": VOCABULARY,
    "head_dim": 8,
    "kv_heads": 2,
    "num_key_value": 2,
    "heads": 2,
    "n_head": 2,
    "layers": 2,
    "n_layer": 2,
    "hidden_size": 16,
    "d_model": 16,
    "n_embd": 16,
    "embedding_size": 16,
    "intermediate": 32,
    "ffn_dim": 32,
    "d_ff": 32,
    "n_inner": 32,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "num_experts": 8,
    "n_routed_experts": 8,
    "top_k": 2,
    "rotary_dim": 4,
    "expand_ratio": 1,
    "d_kv": 8,
    "d_state": 4,
    "state_size": 4,
    "lora_rank": 8,
    "rope_head_dim": 8,
}
EXACTLY = {"dim": 16, "hidden_dim": 32, "emb_dim": 16, "attention_window": 8}
TRIES = [(layers, {"qk_rope_head_dim": width}) for layers in (2, 4, 8) for width in (4, 8)]
"""Kinds of layers that alternate need more than two of them; some classes rotate half of a head, some all of it."""
KEPT = ("hidden_layers_to", "layer_norm", "head_layers", "layers_to", "num_labels")


def small(settings: dict[str, Any], layers: int, exactly: dict[str, int]) -> dict[str, Any]:
    """Choose small numbers for everything that makes a model large, and no chance anywhere."""
    chosen: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict) and name.endswith("_config"):
            chosen[name] = small(value, layers, exactly)
        elif isinstance(value, float) and ("drop" in name or "jitter" in name):
            chosen[name] = 0.0
        elif isinstance(value, int) and not isinstance(value, bool) and not any(word in name for word in KEPT):
            fitting = [exactly[name]] if name in exactly else []
            fitting += [layers if "layer" in word else number for word, number in SMALL.items() if word in name]
            if fitting and value > fitting[0]:
                chosen[name] = fitting[0]
    return chosen


def build(kind: str, class_name: str, sample: dict[str, Tensor]) -> nn.Module:
    """Build a class with a few thousand parameters."""
    model_class = getattr(transformers, class_name)
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    labels = {"num_labels": CLASSES} if kind in ("sequence", "token") else {}
    for layers, widths in TRIES:
        try:
            settings = small(model_class.config_class().to_dict(), layers, EXACTLY | widths)
            config = model_class.config_class(**settings | special | labels)
            with torch.device("meta"):
                parameters = sum(parameter.numel() for parameter in model_class(copy.deepcopy(config)).parameters())
            if parameters > 3_000_000:
                raise ValueError("its configuration does not shrink")
            torch.manual_seed(0)
            model = model_class(config)
            for module in model.modules():
                if isinstance(module, nn.Dropout):  # some heads take a number of their own
                    module.p = 0.0
            model(**sample).loss.backward()
        except Exception:  # any class may fail in any way: with the last try it says how
            if (layers, widths) == TRIES[-1]:
                raise
            continue
        break
    model.zero_grad()
    return model


def rows_for(kind: str) -> list[dict[str, list[int] | int]]:
    """Eleven rows of one width; each ends with the end of a text, and has labels of its own number."""
    draws = torch.Generator().manual_seed(1)
    rows: list[dict[str, Any]] = []
    for number in range(11):
        ids = torch.randint(3, VOCABULARY, (WIDTH,), generator=draws)
        ids[-1] = 2
        labels = torch.randint(0, CLASSES, (WIDTH,), generator=draws) if kind == "token" else ids.clone()
        labels[3 + int(torch.randint(0, 12, (1,), generator=draws)) :] = -100
        row = {"input_ids": ids.tolist(), "attention_mask": [1] * WIDTH, "labels": labels.tolist()}
        rows.append({**row, "labels": number % CLASSES} if kind == "sequence" else row)
    return rows


def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}


class Gradients(transformers.TrainerCallback):
    """Keeps what each optimizer step was given."""

    def __init__(self) -> None:
        self.steps: list[list[Tensor | None]] = []

    def on_pre_optimizer_step(self, *args: Any, model: nn.Module, **kwargs: Any) -> None:
        self.steps.append([None if p.grad is None else p.grad.double() for p in model.parameters()])


def train(trainer: Any, model: nn.Module, rows: Any, folder: str) -> list[list[Tensor | None]]:
    """Run one epoch of two windows at learning rate 0."""
    kept = Gradients()
    args = transformers.TrainingArguments(
        folder,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        num_train_epochs=1,
        max_grad_norm=0.0,
        learning_rate=0.0,
        train_sampling_strategy="sequential",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        logging_strategy="no",
    )
    run = trainer(model=copy.deepcopy(model), args=args, train_dataset=rows, data_collator=collate, callbacks=[kept])
    run.remove_callback(transformers.PrinterCallback)
    run.train()
    return kept.steps


def in_one_micro_batch(model: nn.Module, rows: Any, dtype: torch.dtype) -> list[Tensor | None]:
    """The gradient of the model's own loss over all rows at once."""
    twin = copy.deepcopy(model).to(dtype).train()
    twin(**collate(rows)).loss.backward()
    return [None if p.grad is None else p.grad.double() for p in twin.parameters()]


def truth(model: nn.Module, rows: Any) -> list[Tensor | None]:
    """The gradient in one micro-batch, in float64 where the class can do that."""
    try:
        return in_one_micro_batch(model, rows, torch.float64)
    except RuntimeError:
        return in_one_micro_batch(model, rows, torch.float32)


def distance(ours: list[Tensor | None], theirs: list[Tensor | None]) -> float:
    pairs = [
        (torch.zeros(()) if a is None else a, torch.zeros(()) if b is None else b)
        for a, b in zip(ours, theirs, strict=True)
    ]
    apart = torch.stack([(a - b).norm() for a, b in pairs]).norm()
    relative = float(apart / torch.stack([b.norm() for _, b in pairs]).norm())
    if not math.isfinite(relative):
        raise ArithmeticError("a gradient is not finite, or zero everywhere")
    return significant(relative)


@contextlib.contextmanager
def at_most(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError(f"takes more than {seconds} seconds")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def measure(kind: str, class_name: str) -> dict[str, Any]:
    """Say how far the Trainer and ours are from the truth for one class, or why that cannot be said."""
    row: dict[str, Any] = {"class": class_name, "map": kind}
    stage = "not built"
    try:
        with at_most(SECONDS), tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            rows = rows_for(kind)
            model = build(kind, class_name, collate(rows[:2]))
            stage = "not trained by the Trainer"
            expected = [truth(model, rows[:8]), truth(model, rows[8:])]
            single = [in_one_micro_batch(model, part, torch.float32) for part in (rows[:8], rows[8:])]
            row["one_piece"] = [distance(*pair) for pair in zip(single, expected, strict=True)]
            stock = train(transformers.Trainer, model, rows, folder)
            row["trainer"] = [distance(*pair) for pair in zip(stock, expected, strict=True)]
            stage = "not trained by exact(Trainer)"
            ours = train(exact(transformers.Trainer), model, rows, folder)
            row["exact"] = [distance(*pair) for pair in zip(ours, expected, strict=True)]
    except Exception as error:  # any class may fail in any way: what it said is the result
        row[stage] = f"{type(error).__name__}: {error}".split("\n")[0][:160]
    return row


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Count, map by map: built, off under the Trainer, exact under ours."""
    counted = []
    for kind in MAPS:
        trained = [row for row in rows if row["map"] == kind and "trainer" in row]
        counted.append(
            {
                "map": kind,
                "trained": len(trained),
                "trainer_off": sum(max(row["trainer"]) > 1e-3 for row in trained),
                "exact": sum(is_exact(row) for row in trained),
                "refused": sum(REFUSED in row.get("not trained by exact(Trainer)", "") for row in trained),
            }
        )
    return counted


REFUSED = "InexactError"
LIMIT, ROUNDING = 2e-6, 1e-4
"""Relative distances to the truth: what counts as exact in float32 where one micro-batch is not itself farther away,
and how far away that may be; beyond, it is not rounding, and nothing can be said of the class."""


def is_exact(row: dict[str, Any]) -> bool:
    pairs = zip(row.get("exact", ()), row["one_piece"], strict=False)
    return "exact" in row and all(b < ROUNDING and a <= max(LIMIT, 3 * b) for a, b in pairs)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--out", type=Path, default=RESULTS)
    options.add_argument("--only", nargs="*", help="class names; all by default")
    options.add_argument("--again", action="store_true", help="measure anew what has been measured")
    options.add_argument("--retry", action="store_true", help="measure anew what could not be measured")
    chosen = options.parse_args()
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    kept = chosen.out / "transformers_sweep.json"
    before = json.loads(kept.read_text())["rows"] if kept.exists() else []
    if chosen.again:
        before = [row for row in before if chosen.only and row["class"] not in chosen.only]
    done = {(row["map"], row["class"]): row for row in before if "exact" in row or not chosen.retry}
    for kind, names in MAPS.items():
        for class_name in dict.fromkeys(flat(names.values())):
            if (kind, class_name) in done or (chosen.only and class_name not in chosen.only):
                continue
            done[kind, class_name] = row = measure(kind, class_name)
            print(json.dumps(row), flush=True)
            keep(chosen.out, list(done.values()))
    keep(chosen.out, list(done.values()))
    for row in summary(list(done.values())):
        print(row)


def flat(names: Iterable[str | tuple[str, ...]]) -> Iterator[str]:
    for listed in names:
        yield from (listed,) if isinstance(listed, str) else listed


def keep(folder: Path, rows: list[dict[str, Any]]) -> None:
    settings = {"transformers": transformers.__version__, "dtype": "float32", "limit": LIMIT, "summary": summary(rows)}
    save("transformers_sweep", settings, rows, folder)


if __name__ == "__main__":
    main()
