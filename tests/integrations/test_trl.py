"""Trainers that count their calls, compare pairs or keep metrics: TRL's, as they come and exact."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import wholebatch as wb
from tests.oracle import Gradients, assert_differs, assert_same_gradient

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

from tests.integrations import test_transformers as plain  # noqa: E402
from wholebatch.integrations.transformers import exact  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(45))]


def tokenizer() -> Any:
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", bos_token="<eos>"
    )


def texts(count: int, seed: int) -> list[str]:
    draws = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 9, (count,), generator=draws).tolist()
    return [" ".join(f"w{int(i)}" for i in torch.randint(0, 45, (n,), generator=draws)) for n in lengths]


def pairs(count: int = 7) -> Any:
    return datasets.Dataset.from_dict({"chosen": texts(count, 1), "rejected": texts(count, 2)})


def prompted(count: int = 7) -> Any:
    columns = {"prompt": texts(count, 3), "chosen": texts(count, 1), "rejected": texts(count, 2)}
    return datasets.Dataset.from_dict(columns)


def train(trainer: Any, config: Any, model: Any, rows: Any, folder: Path, size: int, k: int, **settings: Any) -> Any:
    """One window at learning rate 0, in order; the gradients of its step are kept."""
    made = {name: settings.pop(name) for name in ("ref_model", "reward_funcs", "eval_dataset") if name in settings}
    kept = plain.Gradients()
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": k,
        "num_train_epochs": 1,
        "learning_rate": 0.0,
        "max_grad_norm": 0.0,
        "train_sampling_strategy": "sequential",
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
    }
    args = config(str(folder), **arguments | settings)
    done = trainer(
        model=copy.deepcopy(model),
        args=args,
        train_dataset=rows,
        processing_class=tokenizer(),
        callbacks=[kept],
        **made,
    )
    done.remove_callback(transformers.PrinterCallback)
    done.train()
    done.kept = kept.steps
    return done


def reward_model() -> Any:
    return plain.tiny("LlamaForSequenceClassification", num_labels=1)


def language_model() -> Any:
    return plain.tiny("LlamaForCausalLM")


def drifted() -> Any:
    """The reference of a policy that has moved on."""
    model = language_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    return model


PREFERENCES = [
    pytest.param(trl.RewardTrainer, trl.RewardConfig, reward_model, pairs, {}, id="reward"),
    pytest.param(trl.DPOTrainer, trl.DPOConfig, language_model, prompted, {"ref_model": drifted}, id="dpo"),
    pytest.param(
        trl.DPOTrainer, trl.DPOConfig, language_model, prompted, {"ref_model": language_model}, id="dpo-start"
    ),
]


@pytest.mark.parametrize(("trainer", "config", "model", "rows", "more"), PREFERENCES)
def test_pairs_in_a_ragged_window(
    trainer: Any, config: Any, model: Any, rows: Any, more: dict[str, Any], tmp_path: Path
) -> None:
    def run(kind: Any, size: int, k: int) -> Gradients:
        made = {name: make() for name, make in more.items()}
        return train(kind, config, model(), rows(), tmp_path, size, k, **made).kept[0]

    expected = run(trainer, 7, 1)
    assert_differs(run(trainer, 2, 4), expected, by=0.05)
    assert_same_gradient(run(exact(trainer), 2, 4), expected)
    assert_same_gradient(run(exact(trainer, items=lambda batch: batch["input_ids"].shape[0] / 2), 2, 4), expected)


@pytest.mark.parametrize(
    ("loss", "error"),
    [({"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 1.0]}, "no mean or sum over .*pairs")],
    ids=["sigmoid-and-sft"],
)
def test_a_preference_loss_with_two_denominators_is_refused(loss: dict[str, Any], error: str, tmp_path: Path) -> None:
    with pytest.raises(wb.LossError, match=error):
        train(
            exact(trl.DPOTrainer),
            trl.DPOConfig,
            language_model(),
            prompted(),
            tmp_path,
            2,
            4,
            ref_model=drifted(),
            **loss,
        )


def completions() -> Any:
    columns = {"prompt": texts(7, 3), "completion": texts(7, 1), "label": [bool(i % 3) for i in range(7)]}
    return datasets.Dataset.from_dict(columns)


def balanced() -> Any:
    return plain.tiny("MixtralForCausalLM", router_aux_loss_coef=0.1)


OF_ALL_ROWS = [
    pytest.param(
        "DPO",
        language_model,
        prompted,
        {"ref_model": drifted, "loss_type": lambda: ["sigmoid", "sft"], "loss_weights": lambda: [1.0, 1.0]},
        id="dpo-sigmoid-and-sft",
    ),
    pytest.param("KTO", drifted, completions, {"ref_model": language_model}, id="kto-baseline"),
    pytest.param(
        "SFT",
        balanced,
        lambda: datasets.Dataset.from_dict({"text": texts(7, 3)}),
        {},
        id="sft-balanced-experts",
    ),
]


@pytest.mark.parametrize(("name", "model", "rows", "more"), OF_ALL_ROWS)
def test_a_loss_that_no_count_explains_is_taken_of_all_rows(
    name: str, model: Any, rows: Any, more: dict[str, Any], tmp_path: Path
) -> None:
    def run(kind: Any, size: int, k: int) -> Gradients:
        made = {name: make() for name, make in more.items()}
        return train(kind, getattr(trl, f"{name}Config"), model(), rows(), tmp_path, size, k, **made).kept[0]

    trainer = getattr(trl, f"{name}Trainer")
    expected = run(trainer, 7, 1)
    assert_differs(run(trainer, 2, 4), expected, by=0.01)
    assert_same_gradient(run(exact(trainer, coupled=True), 2, 4), expected)


def test_a_baseline_of_the_micro_batchs_own_rows_is_refused_by_name(tmp_path: Path) -> None:
    columns = {"prompt": texts(8, 3), "completion": texts(8, 1), "label": [bool(i % 3) for i in range(8)]}
    given = (trl.KTOConfig, language_model(), datasets.Dataset.from_dict(columns), tmp_path, 2, 4)
    with pytest.raises(wb.InexactError, match=re.escape("loss_type='apo_zero_unpaired'")):
        train(exact(trl.KTOTrainer), *given, ref_model=language_model())
    done = train(exact(trl.KTOTrainer), *given, ref_model=language_model(), loss_type="apo_zero_unpaired")
    assert len(done.kept) == 1


@pytest.mark.parametrize("name", ["GRPO", "RLOO"])
def test_a_trainer_that_generates_runs_every_micro_batch_at_its_own_time(name: str, tmp_path: Path) -> None:
    """It counts its calls to know which of its completions to learn from, so waiting would repeat one for ever."""
    rows = datasets.Dataset.from_dict({"prompt": texts(8, 3)})

    def reward(completions: list[str], **others: Any) -> list[float]:
        return [float(len(completion) % 5) for completion in completions]

    def run(kind: Any) -> Any:
        calls: list[int] = []

        class Counting(kind):  # type: ignore[misc, valid-type]
            def _generate_and_score_completions(self, inputs: Any) -> Any:
                calls.append(1)
                return super()._generate_and_score_completions(inputs)

        torch.manual_seed(0)
        shape = {"num_generations": 2, "max_completion_length": 4, "eval_dataset": rows, "seed": 1, "beta": 0.0}
        done = train(
            Counting,
            getattr(trl, f"{name}Config"),
            language_model(),
            rows,
            tmp_path,
            2,
            2,
            reward_funcs=reward,
            per_device_eval_batch_size=2,
            **shape,
        )
        generated = len(calls)
        return generated, done

    stock, ours = (run(kind) for kind in (getattr(trl, f"{name}Trainer"), exact(getattr(trl, f"{name}Trainer"))))
    assert ours[0] == stock[0] > 1
    for mine, theirs in zip(ours[1].kept, stock[1].kept, strict=True):
        assert_same_gradient(mine, theirs, tol=0)
    assert "eval_loss" in ours[1].evaluate()
    with pytest.raises(wb.InexactError, match="prepares its own inputs"):
        run(exact(getattr(trl, f"{name}Trainer"), micro_batch_size=1))


def test_measuring_leaves_no_trace_in_a_trainers_metrics(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"text": texts(8, 3)})
    stock, ours = (
        train(kind, trl.SFTConfig, language_model(), rows, tmp_path, 2, 4, eval_dataset=rows, eval_strategy="epoch")
        for kind in (trl.SFTTrainer, exact(trl.SFTTrainer))
    )
    assert len(ours.state.log_history) == len(stock.state.log_history)
    for mine, theirs in zip(ours.state.log_history, stock.state.log_history, strict=True):
        shared = {name for name in theirs if "accuracy" in name or "entropy" in name or "num_tokens" in name}
        assert {name: mine[name] for name in shared} == pytest.approx({name: theirs[name] for name in shared})
