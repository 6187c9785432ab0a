"""The Hugging Face Trainer: what it does to a window by itself, and what `exact` makes of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

import wholebatch as wb
from tests.oracle import assert_differs, assert_same_gradient, relative_error, whole_batch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from wholebatch.integrations.transformers import exact  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

Rows = list[dict[str, Any]]
VOCABULARY = 48
PER_WINDOW = 16


def texts(count: int = 22, shortest: int = 3, longest: int = 14, classes: int = VOCABULARY) -> Rows:
    """Rows of very uneven length; a part of the labels of every third is ignored."""
    draws = torch.Generator().manual_seed(1)
    rows = []
    for number in range(count):
        length = int(torch.randint(shortest, longest, (1,), generator=draws))
        ids = torch.randint(1, VOCABULARY, (length,), generator=draws)
        labels = torch.randint(0, classes, (length,), generator=draws) if classes != VOCABULARY else ids.clone()
        if number % 3 == 0:
            labels[1 : length - 1] = -100
        rows.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    return rows


def labelled(rows: Rows, label: Callable[[int], Any]) -> Rows:
    return [{"input_ids": row["input_ids"], "labels": label(i)} for i, row in enumerate(rows)]


def padded(rows: Rows) -> dict[str, Tensor]:
    """Pad to the longest row; labels that are one a token are padded with the ignored label."""
    ids = [torch.tensor(row["input_ids"]) for row in rows]
    mask = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
    batch = {"input_ids": pad_sequence(ids, batch_first=True), "attention_mask": mask}
    labels = [torch.tensor(row["labels"]) for row in rows]
    token_level = isinstance(rows[0]["labels"], list) and isinstance(rows[0]["labels"][0], int)
    stacked = pad_sequence(labels, batch_first=True, padding_value=-100) if token_level else torch.stack(labels)
    return {**batch, "labels": stacked}


def tiny(kind: str, **changes: Any) -> nn.Module:
    """Build a model of a few thousand parameters without dropout."""
    torch.manual_seed(0)
    small: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 16}
    bert = {**small, "num_attention_heads": 2, "intermediate_size": 16, "hidden_dropout_prob": 0.0}
    configs: dict[str, tuple[str, dict[str, Any]]] = {
        "Llama": ("LlamaConfig", {**small, **heads, "pad_token_id": 0}),
        "Mixtral": (
            "MixtralConfig",
            {**small, **heads, "num_local_experts": 4, "output_router_logits": True}
            | {"experts_implementation": "eager"},
        ),
        "Bert": ("BertConfig", {**bert, "attention_probs_dropout_prob": 0.0}),
        "GPT2": (
            "GPT2Config",
            {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
            | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        ),
        "T5": (
            "T5Config",
            {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
            | {"dropout_rate": 0.0, "decoder_start_token_id": 0},
        ),
    }
    family = next(family for family in configs if kind.startswith(family))
    config, settings = configs[family]
    return getattr(transformers, kind)(getattr(transformers, config)(**settings | changes))


class Gradients(transformers.TrainerCallback):  # type: ignore[misc]
    """Keeps the gradients that each optimizer step was given."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Tensor | None]] = []

    def on_pre_optimizer_step(self, *args: Any, model: nn.Module, **kwargs: Any) -> None:
        self.steps.append({n: None if p.grad is None else p.grad.detach().clone() for n, p in model.named_parameters()})


class Run:
    """One training run of windows of 8 micro-batches of 2 rows at learning rate 0: gradients and logs are kept."""

    def __init__(self, trainer: Any, model: nn.Module, rows: Any, folder: Path, **settings: Any) -> None:
        taken = {name: settings.pop(name) for name in ("compute_loss_func", "eval_dataset") if name in settings}
        collator = settings.pop("data_collator", padded)
        self.gradients = Gradients()
        arguments = {
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 8,
            "num_train_epochs": 1,
            "max_grad_norm": 0.0,
            "learning_rate": 0.0,
            "weight_decay": 0.0,
            "train_sampling_strategy": "sequential",
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": True,
            "remove_unused_columns": False,
        }
        args = transformers.TrainingArguments(str(folder), **arguments | settings)
        self.trainer = trainer(
            model=copy.deepcopy(model),
            args=args,
            train_dataset=rows,
            data_collator=collator,
            callbacks=[self.gradients],
            **taken,
        )
        self.trainer.remove_callback(transformers.PrinterCallback)
        self.trainer.train()

    @property
    def losses(self) -> list[float]:
        return [log["loss"] for log in self.trainer.state.log_history if "loss" in log]


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    """What the model itself says of the whole batch in one micro-batch."""
    return model(**batch).loss


def windows_of(rows: Rows, size: int = PER_WINDOW) -> list[Rows]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def references(model: nn.Module, rows: Rows, loss: Callable[..., Tensor] = own_loss) -> list[Any]:
    return [whole_batch(model, loss, padded(window)) for window in windows_of(rows)]


CLASSES = {"num_labels": 3}
OWN_LOSSES = [
    pytest.param("LlamaForCausalLM", {}, texts(), (0, 1e-6), id="llama"),
    pytest.param("GPT2LMHeadModel", {}, texts(), (1e-3, 1), id="gpt2"),
    pytest.param("MixtralForCausalLM", {"router_aux_loss_coef": 0.1}, texts(), (1e-2, 1), id="mixtral-router-loss"),
    pytest.param("MixtralForCausalLM", {"output_router_logits": False}, texts(), (0, 1e-6), id="mixtral"),
    pytest.param("BertForMaskedLM", {}, texts(), (5, 20), id="bert-masked"),
    pytest.param("BertForTokenClassification", CLASSES, texts(classes=3), (5, 20), id="bert-tokens"),
    pytest.param("T5ForConditionalGeneration", {}, texts(), (5, 20), id="t5"),
    pytest.param(
        "BertForSequenceClassification", CLASSES, labelled(texts(), lambda i: i % 3), (6.9, 7.1), id="bert-classes"
    ),
    pytest.param(
        "BertForSequenceClassification",
        {"num_labels": 2, "problem_type": "regression"},
        labelled(texts(), lambda i: [float(i), i / 2]),
        (6.9, 7.1),
        id="bert-regression",
    ),
    pytest.param(
        "LlamaForSequenceClassification",
        {"num_labels": 3, "problem_type": "multi_label_classification"},
        labelled(texts(), lambda i: [float(i % 2), 1.0, float(i % 3 == 0)]),
        (6.9, 7.1),
        id="llama-multi-label",
    ),
]


@pytest.mark.parametrize(("kind", "changes", "rows", "stock"), OWN_LOSSES)
def test_a_models_own_loss(kind: str, changes: Any, rows: Rows, stock: tuple[float, float], tmp_path: Path) -> None:
    model = tiny(kind, **changes)
    expected = references(model, rows)
    usual = Run(transformers.Trainer, model, rows, tmp_path).gradients.steps
    assert stock[0] <= relative_error(usual[0], expected[0]) <= stock[1], "the Trainer itself has changed"
    run = Run(exact(transformers.Trainer), model, rows, tmp_path)
    assert len(run.gradients.steps) == 2
    for ours, reference, logged in zip(run.gradients.steps, expected, run.losses, strict=True):
        assert_same_gradient(ours, reference)
        assert logged == pytest.approx(float(reference.loss), rel=1e-5)


@pytest.mark.parametrize("size", [None, wb.Auto(4)], ids=["its own", "auto"])
@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "GPT2LMHeadModel"])
def test_a_window_in_tiles_and_without_logits(kind: str, size: Any, tmp_path: Path) -> None:
    model, rows = tiny(kind), texts()
    run = Run(exact(transformers.Trainer, size, tiled=True), model, rows, tmp_path)
    expected = references(model, rows)
    for ours, reference, logged in zip(run.gradients.steps, expected, run.losses, strict=True):
        assert_same_gradient(ours, reference)
        assert logged == pytest.approx(float(reference.loss), rel=1e-5)
    assert "lm_head" in run.trainer.tiles.names and sum("mlp" in name for name in run.trainer.tiles.names) == 2
    if kind == "GPT2LMHeadModel":  # which is told of no window: the usual way is off
        assert_differs(Run(transformers.Trainer, model, rows, tmp_path).gradients.steps[0], expected[0])


@pytest.mark.parametrize(
    "size", [3, wb.Tokens(40), wb.Auto(4), wb.Tokens(400)], ids=["rows", "tokens", "auto", "one-piece"]
)
@pytest.mark.parametrize("kind", ["GPT2LMHeadModel", "BertForMaskedLM", "MixtralForCausalLM"])
def test_a_window_cut_again(kind: str, size: Any, tmp_path: Path) -> None:
    model, rows = tiny(kind), texts()
    seen: list[int] = []

    def collate(samples: Rows) -> dict[str, Tensor]:
        seen.append(len(samples))
        return padded(samples)

    run = Run(exact(transformers.Trainer, micro_batch_size=size), model, rows, tmp_path, data_collator=collate)
    for ours, reference in zip(run.gradients.steps, references(model, rows), strict=True):
        assert_same_gradient(ours, reference)
    assert set(seen) != {2}


class Plain(nn.Module):
    """A user's own model: a mean over what is not ignored, and no word about it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.embedding(input_ids))
        answer = {"logits": logits}
        return answer if labels is None else {"loss": F.cross_entropy(logits.mT, labels), "logits": logits}


class Swallowing(Plain):
    """The same with keyword arguments that it ignores: enough for the Trainer to believe it has divided."""

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Any = None, **kwargs: Any
    ) -> dict[str, Tensor]:
        return super().forward(input_ids, attention_mask, labels)


class Summing(Plain):
    """A loss that is a sum over the rows."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Any = None) -> dict[str, Tensor]:
        answer = super().forward(input_ids, attention_mask)
        return {**answer, "loss": F.cross_entropy(answer["logits"].mT, labels, reduction="sum")}


@pytest.mark.parametrize(("model", "off"), [(Plain(), 0.1), (Swallowing(), 5), (Summing(), 0.8)], ids=str)
def test_a_plain_module_is_measured(model: nn.Module, off: float, tmp_path: Path) -> None:
    rows = texts()
    expected = whole_batch(model, lambda m, b: m(**b)["loss"], padded(rows[:PER_WINDOW]))
    assert_differs(Run(transformers.Trainer, model, rows, tmp_path).gradients.steps[0], expected, by=off)
    assert_same_gradient(Run(exact(transformers.Trainer), model, rows, tmp_path).gradients.steps[0], expected)


class Regularised(Plain):
    """A mean over tokens and a mean over rows in one number: no count explains it."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Any = None) -> dict[str, Tensor]:
        answer = super().forward(input_ids, attention_mask, labels)
        return {**answer, "loss": answer["loss"] + answer["logits"][:, 0].square().mean() * 3}


def test_what_measuring_cannot_explain_is_refused(tmp_path: Path) -> None:
    with pytest.raises(wb.LossError, match=r"no mean or sum over .*wb\.mean\(values, weights\)"):
        Run(exact(transformers.Trainer), Regularised(), texts(), tmp_path)


def shifted(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(logits[:, :-1].mT, labels[:, 1:], reduction="none"), labels[:, 1:] != -100


def token_mean(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Any:
    values, counted = shifted(outputs["logits"], labels)
    return wb.mean(values, counted)


def two_terms(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Any:
    return token_mean(outputs, labels) + 0.1 * wb.mean(outputs["logits"].square().mean((1, 2)))


def shared(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    values, counted = shifted(outputs["logits"], labels)
    return (values * counted).sum() / num_items_in_batch


def bare_mean(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    values, counted = shifted(outputs["logits"], labels)
    return values[counted].mean()


def meant(model: nn.Module, batch: Any) -> Tensor:
    """The token mean, in plain torch."""
    values, counted = shifted(model(**{**batch, "labels": None}).logits, batch["labels"])
    return values[counted].mean()


def two_meant(model: nn.Module, batch: Any) -> Tensor:
    logits, total, rows = model(**{**batch, "labels": None}).logits, 0.0, len(batch["labels"])
    for micro_batch in range(0, rows, 2):  # the second term looks at padding, which the cut decides
        longest = int(batch["attention_mask"][micro_batch : micro_batch + 2].sum(1).max())
        total = total + logits[micro_batch : micro_batch + 2, :longest].square().mean((1, 2)).sum()
    return meant(model, batch) + 0.1 * total / rows


@pytest.mark.parametrize(
    ("function", "loss"),
    [(token_mean, meant), (two_terms, two_meant), (shared, meant)],
    ids=["mean", "terms", "shared"],
)
@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "GPT2LMHeadModel"])
def test_a_loss_function_of_the_users(function: Any, loss: Any, kind: str, tmp_path: Path) -> None:
    model, rows = tiny(kind), texts()
    run = Run(exact(transformers.Trainer), model, rows, tmp_path, compute_loss_func=function)
    for ours, reference in zip(run.gradients.steps, references(model, rows, loss), strict=True):
        assert_same_gradient(ours, reference)


def test_the_trainer_counts_labels_before_the_shift(tmp_path: Path) -> None:
    model, rows = tiny("GPT2LMHeadModel"), texts()
    run = Run(transformers.Trainer, model, rows, tmp_path, compute_loss_func=shared)
    assert_differs(run.gradients.steps[0], references(model, rows, meant)[0], by=1e-2)


def test_a_bare_mean_of_the_users_is_measured_and_proven(tmp_path: Path) -> None:
    model, rows = tiny("LlamaForCausalLM"), texts()
    expected = references(model, rows, meant)
    usual = Run(transformers.Trainer, model, rows, tmp_path, compute_loss_func=bare_mean).gradients.steps
    assert_differs(usual[0], expected[0], by=5)
    run = Run(exact(transformers.Trainer), model, rows, tmp_path, compute_loss_func=bare_mean)
    for ours, reference in zip(run.gradients.steps, expected, strict=True):
        assert_same_gradient(ours, reference)


def test_items_declare_what_a_bare_mean_averages_over(tmp_path: Path) -> None:
    model, rows = tiny("LlamaForCausalLM"), texts()
    trainer = exact(transformers.Trainer, items=lambda batch: (batch["labels"][:, 1:] != -100).sum())
    run = Run(trainer, model, rows, tmp_path, compute_loss_func=bare_mean)
    for ours, reference in zip(run.gradients.steps, references(model, rows, meant), strict=True):
        assert_same_gradient(ours, reference)


class Weighted(transformers.Trainer):  # type: ignore[misc]
    """A user's Trainer with class weights, as the documentation shows it, but for the last line."""

    weight = torch.tensor([1.0, 5.0, 25.0])

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = wb.losses.cross_entropy(outputs.logits, labels, weight=self.weight)
        return (loss, outputs) if return_outputs else loss


def test_class_weights_are_summed_over_the_window(tmp_path: Path) -> None:
    rows = labelled(texts(), lambda i: (i * i) % 3)
    model = tiny("BertForSequenceClassification", num_labels=3)

    def weighted(model: nn.Module, batch: Any) -> Tensor:
        logits = model(**{**batch, "labels": None}).logits
        return F.cross_entropy(logits, batch["labels"], weight=Weighted.weight.to(logits))

    run = Run(exact(Weighted), model, rows, tmp_path, eval_dataset=rows)
    for ours, reference in zip(run.gradients.steps, references(model, rows, weighted), strict=True):
        assert_same_gradient(ours, reference)
    whole = whole_batch(model, weighted, padded(rows))
    assert run.trainer.evaluate()["eval_loss"] == pytest.approx(float(whole.loss), rel=1e-5)


class Declared(transformers.Trainer):  # type: ignore[misc]
    """A user's Trainer that says whether its number is a share of the window's."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        function = shared if self.loss_is_scaled_for_ga else bare_mean
        loss = function(outputs, inputs["labels"], num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


class Scaled(Declared):
    loss_is_scaled_for_ga = True


class NotScaled(Declared):
    loss_is_scaled_for_ga = False


@pytest.mark.parametrize(
    ("trainer", "size"),
    [(Scaled, None), (Scaled, 1), (NotScaled, None), (NotScaled, 1)],
    ids=["true", "true-cut-again", "false", "false-cut-again"],
)
def test_a_declaration_says_whether_a_number_is_a_share_and_not_what_of(
    trainer: Any, size: Any, tmp_path: Path
) -> None:
    model, rows = tiny("GPT2LMHeadModel"), texts()
    expected = references(model, rows, meant)
    assert_differs(Run(trainer, model, rows, tmp_path).gradients.steps[0], expected[0], by=1e-2)
    run = Run(exact(trainer, micro_batch_size=size), model, rows, tmp_path)
    for ours, reference in zip(run.gradients.steps, expected, strict=True):
        assert_same_gradient(ours, reference)


def test_labels_shifted_by_the_collator_count_as_they_are(tmp_path: Path) -> None:
    model, rows = tiny("LlamaForCausalLM"), texts()

    def collate(samples: Rows) -> dict[str, Tensor]:
        batch = padded(samples)
        return {**batch, "shift_labels": F.pad(batch["labels"], (0, 1), value=-100)[:, 1:].contiguous()}

    run = Run(exact(transformers.Trainer), model, rows, tmp_path, data_collator=collate)
    for ours, reference in zip(run.gradients.steps, references(model, rows), strict=True):
        assert_same_gradient(ours, reference)


def test_smoothed_labels(tmp_path: Path) -> None:
    model, rows = tiny("GPT2LMHeadModel"), texts()

    def smoothed(model: nn.Module, batch: Any) -> Tensor:
        logits = model(**{**batch, "labels": None}).logits
        return F.cross_entropy(logits[:, :-1].mT, batch["labels"][:, 1:], label_smoothing=0.1)

    run = Run(exact(transformers.Trainer), model, rows, tmp_path, label_smoothing_factor=0.1)
    for ours, reference in zip(run.gradients.steps, references(model, rows, smoothed), strict=True):
        assert_same_gradient(ours, reference)


def test_a_micro_batch_or_a_window_with_nothing_to_learn(tmp_path: Path) -> None:
    rows = texts()
    for row in (*rows[:4], *rows[16:]):
        row["labels"] = [-100] * len(row["labels"])
    model = tiny("BertForMaskedLM")
    run = Run(exact(transformers.Trainer), model, rows, tmp_path, learning_rate=1e-3, weight_decay=0.1)
    first, second = run.gradients.steps
    assert_same_gradient(first, references(model, rows[:16])[0])
    assert all(gradient is None for gradient in second.values())
    assert run.losses[1] == 0


class Stream(torch.utils.data.IterableDataset[Any]):
    """Rows without a length."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


def test_a_stream_without_a_length_leaves_nothing_unstepped(tmp_path: Path) -> None:
    model, rows = tiny("LlamaForCausalLM"), texts()
    run = Run(exact(transformers.Trainer), model, Stream(rows), tmp_path, max_steps=5)
    expected = references(model, rows)
    assert len(run.gradients.steps) == 5
    for number, ours in enumerate(run.gradients.steps):
        assert_same_gradient(ours, expected[number % 2])
    leaking = Run(transformers.Trainer, model, Stream(rows), tmp_path, max_steps=2).gradients.steps
    assert_differs(leaking[1], expected[0], by=0.1)


@pytest.mark.parametrize("count", [17, 31, 3], ids=str)
def test_short_and_odd_windows(count: int, tmp_path: Path) -> None:
    rows = labelled(texts(count), lambda i: i % 3)
    model = tiny("BertForSequenceClassification", num_labels=3)
    run = Run(exact(transformers.Trainer), model, rows, tmp_path)
    for ours, reference in zip(run.gradients.steps, references(model, rows), strict=True):
        assert_same_gradient(ours, reference)


class Events(transformers.TrainerCallback):  # type: ignore[misc]
    """Writes down the loop's own events."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.names.append("begin")

    def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
        self.names.append("substep")

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.names.append("end")


def train(trainer: Any, folder: Path, resume: bool = False, **settings: Any) -> Any:
    """Ten real steps of AdamW on the same rows."""
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "max_steps": 10,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_steps": 4,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    args = transformers.TrainingArguments(str(folder), **arguments | settings)
    events = Events()
    made = trainer(
        model=tiny("LlamaForCausalLM"), args=args, train_dataset=texts(), data_collator=padded, callbacks=[events]
    )
    made.remove_callback(transformers.PrinterCallback)
    made.train(resume_from_checkpoint=str(folder / "checkpoint-4") if resume else None)
    made.events = events.names
    return made


def test_ten_steps_with_the_trainers_own_events_schedule_and_counters(tmp_path: Path) -> None:
    ours, stock = (
        train(trainer, tmp_path / trainer.__name__) for trainer in (exact(transformers.Trainer), transformers.Trainer)
    )
    assert ours.events == stock.events
    assert ours.state.global_step == stock.state.global_step == 10
    assert ours.state.epoch == stock.state.epoch
    assert ours.state.total_flos == stock.state.total_flos
    for mine, theirs in zip(ours.state.log_history, stock.state.log_history, strict=True):
        assert mine.get("learning_rate") == theirs.get("learning_rate")
        for name in {"grad_norm", "loss", "train_loss"} & theirs.keys():
            assert mine[name] == pytest.approx(theirs[name], rel=1e-3)
    assert ours.state.log_history[9]["loss"] < ours.state.log_history[0]["loss"]


def test_resuming_from_a_checkpoint_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    whole = train(exact(transformers.Trainer), tmp_path)
    resumed = train(exact(transformers.Trainer), tmp_path, resume=True)
    for mine, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("size", [1, 2, 8, 22])
def test_the_evaluation_loss_does_not_depend_on_the_batch_size(size: int, tmp_path: Path) -> None:
    model, rows = tiny("GPT2LMHeadModel"), texts()
    run = Run(exact(transformers.Trainer), model, rows, tmp_path, eval_dataset=rows, per_device_eval_batch_size=size)
    expected = whole_batch(model, own_loss, padded(rows)).loss
    assert run.trainer.evaluate()["eval_loss"] == pytest.approx(float(expected), rel=1e-6)


class Cooperative(transformers.Trainer):  # type: ignore[misc]
    """A user's Trainer that wraps the step, as TRL's does."""

    wrapped = 0

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.wrapped += 1
        return super().training_step(*args, **kwargs)


class Drawing(transformers.Trainer):  # type: ignore[misc]
    """A user's Trainer that draws windows in its own way."""

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        return [next(epoch_iterator) for _ in range(num_batches)], None


def test_overrides_of_the_users_are_reached(tmp_path: Path) -> None:
    model, rows = tiny("GPT2LMHeadModel"), texts()
    run = Run(exact(Cooperative), model, rows, tmp_path)
    assert run.trainer.wrapped == 11
    assert_same_gradient(run.gradients.steps[0], references(model, rows)[0])


def test_windows_that_cannot_be_seen_are_refused(tmp_path: Path) -> None:
    with pytest.raises(wb.InexactError, match=r"super\(\)\.get_batch_samples"):
        Run(exact(Drawing), tiny("GPT2LMHeadModel"), texts(16), tmp_path)


@pytest.mark.parametrize(
    ("settings", "named"), [({"auto_find_batch_size": True}, "auto_find_batch_size"), ({"optim": "lomo"}, "lomo")]
)
def test_settings_that_cannot_be_exact_are_refused_by_name(settings: Any, named: str, tmp_path: Path) -> None:
    with pytest.raises(wb.InexactError, match=named):
        Run(exact(transformers.Trainer), tiny("GPT2LMHeadModel"), texts(), tmp_path, **settings)


@pytest.mark.parametrize("kind", ["tp", "cp", "sp"])
def test_ranks_that_share_rows_or_layers_are_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accelerate makes such meshes on several devices only, so what it says of them is put in its place."""
    args = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, max_steps=1)
    trainer = exact(transformers.Trainer)(
        model=tiny("GPT2LMHeadModel"), args=args, train_dataset=texts(), data_collator=padded
    )
    config = SimpleNamespace(**{"tp_size": 1, "cp_size": 1, "sp_size": 1} | {f"{kind}_size": 2})
    monkeypatch.setattr("accelerate.Accelerator.parallelism_config", property(lambda self: config))
    with pytest.raises(wb.InexactError, match=r"tensor, context or sequence parallelism.*wb\.shares"):
        trainer.train()


def test_tokens_are_not_counted_in_samples(tmp_path: Path) -> None:
    with pytest.raises(wb.InexactError, match="include_num_input_tokens_seen"):
        trainer = exact(transformers.Trainer, micro_batch_size=wb.Tokens(40))
        Run(trainer, tiny("GPT2LMHeadModel"), texts(), tmp_path, include_num_input_tokens_seen="all")


def test_the_tokens_of_a_run_are_the_trainers(tmp_path: Path) -> None:
    model, rows = tiny("GPT2LMHeadModel"), texts()
    runs = [
        Run(t, model, rows, tmp_path, include_num_input_tokens_seen="all")
        for t in (exact(transformers.Trainer), transformers.Trainer)
    ]
    assert runs[0].trainer.state.num_input_tokens_seen == runs[1].trainer.state.num_input_tokens_seen > 0


def test_dropout_draws_anew_and_measuring_leaves_no_trace(tmp_path: Path) -> None:
    model = tiny("BertForSequenceClassification", num_labels=3, hidden_dropout_prob=0.3)
    rows = labelled(texts(), lambda i: i % 3)
    counted = exact(transformers.Trainer, items=lambda batch: len(batch["labels"]))
    measured, declared = (
        Run(trainer, model, rows, tmp_path).gradients.steps for trainer in (exact(transformers.Trainer), counted)
    )
    for ours, reference in zip(measured, declared, strict=True):
        assert_same_gradient(ours, reference, tol=0)


@pytest.mark.parametrize("kind", ["GPT2LMHeadModel", "BertForTokenClassification", "MixtralForCausalLM"])
def test_bfloat16_autocast_comes_as_near_as_one_micro_batch(kind: str, tmp_path: Path) -> None:
    changes, rows = (CLASSES, texts(classes=3)) if "Bert" in kind else ({}, texts())
    model = tiny(kind, **changes)
    run = Run(exact(transformers.Trainer), model, rows, tmp_path, bf16=True)
    for ours, reference in zip(run.gradients.steps, references(model, rows), strict=True):
        assert_same_gradient(ours, reference, tol=2e-2)


def test_the_sft_trainer_of_trl(tmp_path: Path) -> None:
    trl, datasets, pyarrow = (pytest.importorskip(name) for name in ("trl", "datasets", "pyarrow"))
    model, rows, gradients = tiny("GPT2LMHeadModel"), texts(), Gradients()
    settings = {"train_sampling_strategy": "sequential", "remove_unused_columns": False, "shuffle_dataset": False}
    settings |= {"dataset_kwargs": {"skip_prepare_dataset": True}, "bf16": False, "gradient_checkpointing": False}
    settings |= {"learning_rate": 0.0, "max_grad_norm": 0.0, "num_train_epochs": 1, "save_strategy": "no"}
    shape = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8}
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), pad_token="w0", eos_token="w0"
    )
    exact(trl.SFTTrainer)(
        model=copy.deepcopy(model),
        args=trl.SFTConfig(str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, **shape, **settings),
        train_dataset=datasets.Dataset(pyarrow.Table.from_pylist(rows), fingerprint="rows"),
        data_collator=padded,
        processing_class=tokenizer,
        callbacks=[gradients],
    ).train()
    for ours, reference in zip(gradients.steps, references(model, rows, meant), strict=True):
        assert_same_gradient(ours, reference)
