"""How far the Hugging Face Trainer's gradient is from its whole batch's, as it comes and under `exact`. A minute.

Every set-up runs three times over the same rows in the same order: with one batch a step (the reference), as it comes
in micro-batches, and exact. Models are tiny and at their first step; what is kept is the largest error of any step,
relative to the norm of the reference, or the first sentence of a refusal. Two ranks are two gloo processes on one
machine, compared with one process in float64.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import transformers
from record import RESULTS, save, significant
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from wholebatch.errors import WholeBatchError
from wholebatch.integrations.transformers import exact

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.distributed import Ranks
from tests.integrations import test_trainer_coupled as met
from tests.integrations import test_transformers as alone
from tests.oracle import relative_error

Steps = Sequence[Any]
"""The gradients of every step, by the name of the parameter."""
Setup = Callable[[Callable[[type], type], bool, Path], Steps]
"""Trains a class made of the Trainer's, in whole batches or not, with a folder to write to."""
WINDOW = 8
LIBRARIES = ("transformers", "accelerate", "trl", "sentence-transformers")
BERT = "BertForSequenceClassification"


def trainer(
    model: Callable[[], nn.Module],
    rows: Callable[[], Any],
    collate: Callable[[Any], Any] = alone.padded,
    kind: str = "Trainer",
    **settings: Any,
) -> Setup:
    """A Trainer with windows of four micro-batches of two rows; 21 rows leave a short window and a ragged end."""

    def train(made: Callable[[type], type], whole: bool, folder: Path) -> Steps:
        size, k = (WINDOW, 1) if whole else (2, WINDOW // 2)
        sizes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": k, "data_collator": collate}
        return alone.Run(
            made(getattr(transformers, kind)), model(), rows(), folder, **sizes, **settings
        ).gradients.steps

    return train


def preference(name: str, model: str, rows: str, **settings: str) -> Setup:
    """A trainer of TRL on seven rows by two, in one window; models and rows are those of its tests."""

    def train(made: Callable[[type], type], whole: bool, folder: Path) -> Steps:
        import trl

        from tests.integrations import test_trl

        given = getattr(test_trl, model)(), getattr(test_trl, rows)()
        more = {name: getattr(test_trl, value)() for name, value in settings.items()}
        sizes = (7, 1) if whole else (2, 4)
        kinds = made(getattr(trl, f"{name}Trainer")), getattr(trl, f"{name}Config")
        return test_trl.train(*kinds, *given, folder, *sizes, **more).kept

    return train


def sft(made: Callable[[type], type], whole: bool, folder: Path) -> Steps:
    """TRL's supervised fine-tuning of texts."""
    import datasets
    import trl

    from tests.integrations import test_trl

    rows = datasets.Dataset.from_dict({"text": test_trl.texts(7, 3)})
    sizes = (7, 1) if whole else (2, 4)
    model = test_trl.language_model()
    return test_trl.train(made(trl.SFTTrainer), trl.SFTConfig, model, rows, folder, *sizes).kept


def grpo(made: Callable[[type], type], whole: bool, folder: Path) -> Steps:
    """TRL's GRPO: the same completions are drawn, as a generation holds the whole window."""
    import datasets
    import trl

    from tests.integrations import test_trl

    def reward(completions: list[str], **others: Any) -> list[float]:
        return [float(sum(map(ord, completion)) % 7) for completion in completions]

    torch.manual_seed(0)
    rows = datasets.Dataset.from_dict({"prompt": test_trl.texts(8, 3)})
    drawn = {"num_generations": 2, "max_completion_length": 4, "seed": 1, "beta": 0.0, "reward_funcs": reward}
    given = (trl.GRPOConfig, test_trl.language_model(), rows, folder, *((4, 1) if whole else (2, 2)))
    return test_trl.train(made(trl.GRPOTrainer), *given, **drawn).kept


def sentences(loss: str, rows: str) -> Setup:
    """A loss of sentence-transformers on seven rows by two."""

    def train(made: Callable[[type], type], whole: bool, folder: Path) -> Steps:
        from tests.integrations import test_sentence_transformers as st

        sizes = (7, 1) if whole else (2, 4)
        return [st.gradient(made(st.InOrder), getattr(st.losses, loss), getattr(st, rows)(), folder, *sizes)]

    return train


def classified(count: int = 21) -> Any:
    return alone.labelled(alone.texts(count), lambda i: i % 3)


class Stream(torch.utils.data.IterableDataset[Any]):
    """Texts without a length."""

    def __iter__(self) -> Iterator[Any]:
        return iter(alone.texts(21))


def vit() -> nn.Module:
    torch.manual_seed(0)
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.ViTConfig(image_size=32, patch_size=8, num_labels=3, **small, **still)
    return transformers.ViTForImageClassification(config)


def images() -> Any:
    draws = torch.Generator().manual_seed(1)
    return [{"pixel_values": torch.randn(3, 32, 32, generator=draws), "labels": i % 3} for i in range(21)]


def stacked(rows: Any) -> dict[str, Tensor]:
    labels = torch.tensor([row["labels"] for row in rows])
    return {"pixel_values": torch.stack([row["pixel_values"] for row in rows]), "labels": labels}


def ctc() -> nn.Module:
    torch.manual_seed(0)
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    dropped = ("hidden_dropout", "activation_dropout", "attention_dropout", "feat_proj_dropout", "layerdrop")
    still = dict.fromkeys((*dropped, "final_dropout", "mask_time_prob"), 0.0) | {"apply_spec_augment": False}
    layers = {"conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 4), "num_feat_extract_layers": 2}
    layers |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "feat_extract_norm": "layer"}
    shape = {"vocab_size": 12, "pad_token_id": 0, "do_stable_layer_norm": True, "ctc_loss_reduction": "mean"}
    return transformers.Wav2Vec2ForCTC(transformers.Wav2Vec2Config(**small, **still, **layers, **shape))


def sounds() -> Any:
    draws = torch.Generator().manual_seed(1)
    return [
        {
            "input_values": torch.randn(400 + 40 * (i % 5), generator=draws),
            "labels": torch.randint(1, 12, (2 + i % 5,), generator=draws),
        }
        for i in range(21)
    ]


def filled(rows: Any) -> dict[str, Tensor]:
    waves = [row["input_values"] for row in rows]
    mask = pad_sequence([torch.ones(len(wave), dtype=torch.long) for wave in waves], batch_first=True)
    labels = pad_sequence([row["labels"] for row in rows], batch_first=True, padding_value=-100)
    return {"input_values": pad_sequence(waves, batch_first=True), "attention_mask": mask, "labels": labels}


def repeated() -> tuple[float, float]:
    """A causal model on two ranks, where Accelerate repeats two of 22 rows to even the ranks out."""
    from tests.integrations import test_transformers_ranks as two

    rows = alone.texts()
    expected = alone.references(alone.tiny("LlamaForCausalLM"), rows)
    with contextlib.closing(Ranks(2)) as ranks:
        runs = [
            ranks.run(two.run, "LlamaForCausalLM", {}, rows, ours, {}, seconds=120.0)[0][0] for ours in (False, True)
        ]
    stock, ours = (max(map(relative_error, steps, expected)) for steps in runs)
    return stock, ours


def sharded() -> tuple[float, float]:
    """A classifier sharded over two ranks: the update of two steps, as its gradients are nowhere whole."""
    from tests.integrations import test_transformers_engines as two

    with contextlib.closing(Ranks(2)) as ranks:
        stock, ours = (
            two.off_by(ranks.run(two.train, "fsdp2", ours, {}, seconds=120.0)[0][1]) for ours in (False, True)
        )
    return stock, ours


SETUPS: dict[str, tuple[str, Setup | Callable[[], tuple[float, float]]]] = {
    "bert": ("classification (BERT)", trainer(functools.partial(alone.tiny, BERT, **alone.CLASSES), classified)),
    "t5": (
        "sequence to sequence (T5)",
        trainer(functools.partial(alone.tiny, "T5ForConditionalGeneration"), functools.partial(alone.texts, 21)),
    ),
    "ctc": ("speech, CTC mean (Wav2Vec2)", trainer(ctc, sounds, filled)),
    "mixtral": (
        "balanced experts (Mixtral)",
        trainer(
            functools.partial(alone.tiny, "MixtralForCausalLM", router_aux_loss_coef=0.1),
            functools.partial(alone.texts, 21),
        ),
    ),
    "vit": ("images, ragged last micro-batch (ViT)", trainer(vit, images, stacked)),
    "iterable": (
        "the tail of an IterableDataset, causal language (Llama)",
        trainer(functools.partial(alone.tiny, "LlamaForCausalLM"), Stream, max_steps=5),
    ),
    "sft": ("causal language, fine-tuning (TRL's SFT)", sft),
    "dpo": ("preferences, ragged (TRL's DPO)", preference("DPO", "language_model", "prompted", ref_model="drifted")),
    "reward": ("rewards, ragged (TRL's Reward)", preference("Reward", "reward_model", "pairs")),
    "grpo": ("generated completions (TRL's GRPO)", grpo),
    "similarity": (
        "sentence pairs with scores, ragged (sentence-transformers)",
        sentences("CosineSimilarityLoss", "scored"),
    ),
    "negatives": (
        "negatives of the batch (sentence-transformers), `coupled=True`",
        sentences("MultipleNegativesRankingLoss", "paired"),
    ),
    "sorted": ("sorted rows (sentence-transformers' CoSENT), `coupled=True`", sentences("CoSENTLoss", "scored")),
    "clip": (
        "images and captions (CLIP), `coupled=True`",
        trainer(met.clip, functools.partial(met.pictures, 32), met.captioned),
    ),
    "detr": ("boxes (DETR), `coupled=True`", trainer(met.detr, functools.partial(met.pictures, 64), met.boxed)),
    "kto": (
        "desired and undesired answers (TRL's KTO), `coupled=True`",
        preference("KTO", "drifted", "completions", ref_model="language_model"),
    ),
    "even": ("causal language, two ranks, `even_batches` repeats rows", repeated),
    "fsdp2": ("classification, FSDP2 on two ranks (update of SGD, rate 8)", sharded),
}
ON_RANKS = (repeated, sharded)
COUPLED = ("negatives", "sorted", "clip", "detr", "kto")


def error(steps: Steps, expected: Steps) -> float:
    """Return the largest error of a step, relative to the norm of the whole batch's gradient."""
    if len(steps) != len(expected):
        raise RuntimeError(f"{len(steps)} steps were made, and {len(expected)} with whole batches.")
    return max(apart(*pair) for pair in zip(steps, expected, strict=True))


def apart(ours: Mapping[str, Tensor | None], whole: Mapping[str, Tensor | None]) -> float:
    known = {name: gradient.double() for name, gradient in whole.items() if gradient is not None}
    found = {name: torch.zeros(()) if ours[name] is None else ours[name] for name in known}
    squares = sum(float((found[name] - known[name]).square().sum()) for name in known)
    return float((squares / sum(float(gradient.square().sum()) for gradient in known.values())) ** 0.5)


def measure(setup: Any, coupled: bool) -> tuple[float, float | None, str | None]:
    """Return the Trainer's error and that of `exact`, or the first sentence of its refusal."""
    if setup in ON_RANKS:
        return (*setup(), None)
    with tempfile.TemporaryDirectory() as folder:

        def run(made: Callable[[type], type], whole: bool = False) -> Steps:
            return setup(made, whole, Path(folder))

        expected = run(lambda kind: kind, whole=True)
        stock = error(run(lambda kind: kind), expected)
        try:
            return stock, error(run(functools.partial(exact, coupled=coupled)), expected), None
        except WholeBatchError as refusal:
            return stock, None, str(refusal).split(". ")[0] + "."


def versions() -> dict[str, object]:
    """The libraries of the trainers, as far as they are installed."""
    installed = {path.metadata["Name"]: path.version for path in metadata.distributions()}
    return {name: installed[name] for name in LIBRARIES if name in installed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=sorted(SETUPS), nargs="+", default=list(SETUPS), help="set-ups to run")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    rows: list[dict[str, object]] = []
    for name in (name for name in SETUPS if name in options.only):
        what, setup = SETUPS[name]
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            stock, ours, refused = measure(setup, name in COUPLED)
        row = {"name": name, "setup": what, "stock": significant(stock), "refused": refused}
        rows.append({**row, "exact": None if ours is None else significant(ours)})
        print(rows[-1], flush=True)
    print(save("trainers", versions(), rows, options.out))


if __name__ == "__main__":
    main()
