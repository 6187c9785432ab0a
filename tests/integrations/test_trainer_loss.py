"""What a Trainer's loss averages over: proven by two uneven parts of a batch, looked at again, or refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wholebatch as wb
from tests.oracle import assert_differs, assert_same_gradient, whole_batch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from tests.integrations.test_transformers import (  # noqa: E402
    VOCABULARY,
    Plain,
    Rows,
    Run,
    labelled,
    padded,
    references,
    texts,
    tiny,
    windows_of,
)
from wholebatch.integrations.transformers import exact  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

CLASSES = labelled(texts(), lambda i: (i * i) % 3)


def stacked(rows: Rows) -> dict[str, Tensor]:
    return {name: torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in rows[0]}


def own(model: nn.Module, batch: Any) -> Tensor:
    answer = model(**{name: value.clone() if isinstance(value, Tensor) else value for name, value in batch.items()})
    return answer["loss"]


class Overriding(transformers.Trainer):  # type: ignore[misc]
    """A user's Trainer with the signature that is most common, and with a mean of its own."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


class Weighing(transformers.Trainer):  # type: ignore[misc]
    """Class weights as everybody writes them."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        loss = F.cross_entropy(outputs.logits, inputs["labels"], weight=torch.tensor([1.0, 5.0, 25.0]))
        return (loss, outputs) if return_outputs else loss


class WeighingByHand(transformers.Trainer):  # type: ignore[misc]
    """The same without a function that could be recognised."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        weights = torch.tensor([1.0, 5.0, 25.0])[inputs["labels"]]
        losses = -outputs.logits.log_softmax(-1).gather(1, inputs["labels"][:, None])[:, 0]
        loss = (weights * losses).sum() / weights.sum()
        return (loss, outputs) if return_outputs else loss


class Meeting(transformers.Trainer):  # type: ignore[misc]
    """Rows that meet: each row's logits are compared with those of the others."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        loss = F.cross_entropy(outputs.logits @ outputs.logits.T, torch.arange(len(inputs["labels"])))
        return (loss, outputs) if return_outputs else loss


class Derived(exact(transformers.Trainer)):  # type: ignore[misc]
    """Derived from what is exact already, with an override of its own."""

    compute_loss = Overriding.compute_loss


class Below(Derived):
    """Asks the class that it is derived from."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        return super().compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)


@pytest.mark.parametrize("trainer", [exact(Overriding), Derived, Below], ids=["made-exact", "derived", "derived-twice"])
def test_a_bare_mean_of_an_overridden_compute_loss_is_proven(trainer: Any, tmp_path: Path) -> None:
    model = tiny("BertForSequenceClassification", num_labels=3)
    expected = references(model, CLASSES)
    assert_differs(Run(Overriding, model, CLASSES, tmp_path).gradients.steps[0], expected[0], by=5)
    for ours, reference in zip(Run(trainer, model, CLASSES, tmp_path).gradients.steps, expected, strict=True):
        assert_same_gradient(ours, reference)


def rows_of(batch: Any) -> int:
    return len(batch["labels"])


class WeighingFound(Weighing):
    """Class weights of what is found in a row, as in detection: the labels are no tensor, and have no weight each."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        found = torch.stack([row["class"] for row in inputs["labels"]])
        return super().compute_loss(model, {**inputs, "labels": found}, return_outputs, **kwargs)


def found(rows: Rows) -> dict[str, Any]:
    batch = padded(rows)
    return {**batch, "labels": [{"class": label} for label in batch["labels"]]}


def test_labels_that_cannot_be_weighed_one_by_one_are_not_told_to_be(tmp_path: Path) -> None:
    model = tiny("BertForSequenceClassification", num_labels=3)
    with pytest.raises(wb.LossError, match=r"class weights.*State what the loss averages over") as refusal:
        Run(exact(WeighingFound), model, CLASSES, tmp_path, data_collator=found)
    assert "weight[batch" not in str(refusal.value)


@pytest.mark.parametrize(
    ("trainer", "options", "words"),
    [
        (Weighing, {}, "class weights.*wb.losses.cross_entropy"),
        (Weighing, {"items": rows_of}, "items= counts .* weighted so"),
        (WeighingByHand, {}, "no mean or sum over .*from_mean"),
        (WeighingByHand, {"items": rows_of}, "items= counts .* weighted so"),
        (Meeting, {}, "no mean or sum over .*coupled_backward"),
        (Meeting, {"items": rows_of}, "items= counts .*coupled_backward"),
    ],
    ids=["weights", "weights-by-rows", "by-hand", "by-hand-by-rows", "rows-meet", "rows-meet-by-rows"],
)
def test_what_no_count_explains_is_refused(trainer: Any, options: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(wb.LossError, match=words):
        Run(exact(trainer, **options), tiny("BertForSequenceClassification", num_labels=3), CLASSES, tmp_path)


@pytest.mark.parametrize("trainer", [Weighing, WeighingByHand], ids=["function", "by-hand"])
def test_class_weights_that_items_count_are_exact(trainer: Any, tmp_path: Path) -> None:
    model, weight = tiny("BertForSequenceClassification", num_labels=3), torch.tensor([1.0, 5.0, 25.0])

    def weighted(model: nn.Module, batch: Any) -> Tensor:
        logits = model(**batch).logits
        return F.cross_entropy(logits, batch["labels"], weight=weight.to(logits))

    counted = exact(trainer, items=lambda batch: weight[batch["labels"]].sum())
    run = Run(counted, model, CLASSES, tmp_path)
    for ours, reference in zip(run.gradients.steps, references(model, CLASSES, weighted), strict=True):
        assert_same_gradient(ours, reference)


def test_weights_that_show_only_later_are_refused_then(tmp_path: Path) -> None:
    rows = labelled(texts(), lambda i: int(i > 17))  # one class in the first window, and its weight is nowhere seen
    with pytest.raises(wb.LossError, match="no mean or sum"):
        Run(exact(WeighingByHand), tiny("BertForSequenceClassification", num_labels=3), rows, tmp_path)


def test_a_count_that_is_not_proven_is_taken_at_its_word_with_verify_never(tmp_path: Path) -> None:
    trainer = exact(Meeting, items=rows_of, verify="never")
    model = tiny("BertForSequenceClassification", num_labels=3)
    assert len(Run(trainer, model, CLASSES, tmp_path).gradients.steps) == 2


class Ignoring(nn.Module):
    """A token model that ignores another target than everybody."""

    def __init__(self, ignored: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.ignored = ignored
        self.embedding, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.embedding(input_ids))
        loss = F.cross_entropy(logits.mT, labels, ignore_index=self.ignored)
        return {"loss": loss, "logits": logits}


@pytest.mark.parametrize("ignored", [0, 255, -1], ids=str)
def test_targets_that_a_loss_ignores_are_seen(ignored: int, tmp_path: Path) -> None:
    draws = torch.Generator().manual_seed(5)
    rows = []
    for number in range(22):
        labels = torch.randint(1, VOCABULARY, (9,), generator=draws)
        labels[: (3 * number) % 8] = ignored
        rows.append({"input_ids": torch.randint(1, VOCABULARY, (9,), generator=draws), "labels": labels})
    model = Ignoring(ignored)
    expected = [whole_batch(model, own, stacked(window)) for window in windows_of(rows)]
    stock = Run(transformers.Trainer, model, rows, tmp_path, data_collator=stacked).gradients.steps
    assert_differs(stock[0], expected[0], by=0.2)
    ours = Run(exact(transformers.Trainer), model, rows, tmp_path, data_collator=stacked).gradients.steps
    for gradients, reference in zip(ours, expected, strict=True):
        assert_same_gradient(gradients, reference)


def answering(outside: tuple[int, ...], length: int = 12) -> Rows:
    draws = torch.Generator().manual_seed(6)
    return [
        {
            "input_ids": torch.randint(5, VOCABULARY, (length,), generator=draws),
            "start_positions": 200 if row in outside else row % 5,
            "end_positions": 200 if row in outside else row % 5 + 3,
        }
        for row in range(22)
    ]


@pytest.mark.parametrize("outside", [(), (1, 5), (18, 21)], ids=["inside", "first-window", "later"])
def test_answers_behind_the_end_of_the_text_are_no_items(outside: tuple[int, ...], tmp_path: Path) -> None:
    model, rows = tiny("BertForQuestionAnswering"), answering(outside)
    expected = [whole_batch(model, own, stacked(window)) for window in windows_of(rows)]
    run = Run(exact(transformers.Trainer), model, rows, tmp_path, data_collator=stacked)
    for gradients, reference in zip(run.gradients.steps, expected, strict=True):
        assert_same_gradient(gradients, reference)
    if outside == (1, 5):
        stock = Run(transformers.Trainer, model, rows, tmp_path, data_collator=stacked)
        assert_differs(stock.gradients.steps[0], expected[0], by=0.1)


def test_answers_that_begin_inside_and_end_outside_have_two_counts(tmp_path: Path) -> None:
    rows = answering(())
    rows[2]["end_positions"] = 200
    with pytest.raises(wb.LossError, match=r"two means with items of their own.*two terms"):
        Run(exact(transformers.Trainer), tiny("BertForQuestionAnswering"), rows, tmp_path, data_collator=stacked)


def test_a_loss_that_looks_at_padding_is_refused(tmp_path: Path) -> None:
    """The head for answers puts probability on padding, so a wider batch has another loss."""

    def collate(rows: Rows) -> dict[str, Tensor]:
        batch = padded(rows)
        del batch["labels"]
        return {**batch, "start_positions": torch.ones(len(rows)).long(), "end_positions": torch.ones(len(rows)).long()}

    with pytest.raises(wb.LossError, match=r"looks at padding.*max_length"):
        Run(exact(transformers.Trainer), tiny("BertForQuestionAnswering"), texts(), tmp_path, data_collator=collate)


class Noisy(Plain):
    """A model that draws in eval mode too, as masked autoencoders do."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Any = None) -> dict[str, Tensor]:
        hidden = self.embedding(input_ids)
        logits = self.head(hidden + torch.randn_like(hidden))
        return {"loss": F.cross_entropy(logits.mT, labels), "logits": logits}


def test_a_model_that_draws_in_eval_mode_is_measured(tmp_path: Path) -> None:
    model, rows = Noisy(), texts()
    counted = exact(transformers.Trainer, items=lambda batch: (batch["labels"] != -100).sum())
    measured = Run(exact(transformers.Trainer), model, rows, tmp_path, seed=3).gradients.steps
    declared = Run(counted, model, rows, tmp_path, seed=3).gradients.steps
    for ours, reference in zip(measured, declared, strict=True):
        assert_same_gradient(ours, reference, tol=0)


@pytest.mark.parametrize("kind", ["BertForSequenceClassification", "GPT2LMHeadModel"])
def test_one_row_a_micro_batch(kind: str, tmp_path: Path) -> None:
    model = tiny(kind, **({"num_labels": 3} if "Bert" in kind else {}))
    rows = CLASSES if "Bert" in kind else texts()
    run = Run(exact(transformers.Trainer), model, rows, tmp_path, per_device_train_batch_size=1)
    for ours, reference in zip(
        run.gradients.steps, [whole_batch(model, own, padded(w)) for w in windows_of(rows, 8)], strict=True
    ):
        assert_same_gradient(ours, reference)


def test_a_loss_that_is_not_a_number_trains_on_as_the_trainer_does(tmp_path: Path) -> None:
    model = tiny("LlamaForCausalLM")
    with torch.no_grad():
        model.lm_head.weight[0, 0] = float("nan")
    assert len(Run(exact(transformers.Trainer), copy.deepcopy(model), texts(), tmp_path).gradients.steps) == 2


def test_items_win_over_what_the_class_declares(tmp_path: Path) -> None:
    class Declaring(Overriding):
        loss_is_scaled_for_ga = False

    asked: list[int] = []

    def items(batch: Any) -> int:
        asked.append(1)
        return len(batch["labels"])

    model = tiny("BertForSequenceClassification", num_labels=3)
    run = Run(exact(Declaring, items=items), model, CLASSES, tmp_path)
    for ours, reference in zip(run.gradients.steps, references(model, CLASSES), strict=True):
        assert_same_gradient(ours, reference)
    assert asked


class SteppingItself(transformers.Trainer):  # type: ignore[misc]
    """A training step of one's own, with its own backward."""

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        model.train()
        inputs = self._prepare_inputs(inputs)
        loss = self.compute_loss(model, inputs) / self.args.gradient_accumulation_steps
        self.accelerator.backward(loss)
        return loss.detach()


class DerivedSteppingItself(exact(transformers.Trainer)):  # type: ignore[misc]
    training_step = SteppingItself.training_step


class Clipping(transformers.Trainer):  # type: ignore[misc]
    """Clips behind every micro-batch, where the batch is clipped once."""

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(model, *args, **kwargs)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        return loss


class Zeroing(transformers.Trainer):  # type: ignore[misc]
    """Takes back what the micro-batches before have added."""

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        self.optimizer.zero_grad()
        return super().training_step(model, *args, **kwargs)


class Fgm(transformers.Trainer):  # type: ignore[misc]
    """Adversarial training: the step once more with embeddings moved along their gradient."""

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(model, *args, **kwargs)
        embedding = model.get_input_embeddings().weight  # type: ignore[operator]
        moved = embedding.grad / embedding.grad.norm()
        embedding.data.add_(moved)
        super().training_step(model, *args, **kwargs)
        embedding.data.sub_(moved)
        return loss


class Guarding(transformers.Trainer):  # type: ignore[misc]
    """Looks at the gradients of each micro-batch and changes none."""

    norms: list[float]

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(model, *args, **kwargs)
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        self.norms = [*vars(self).get("norms", []), sum(float(g.norm()) for g in gradients)]
        for gradient in gradients:
            if gradient.isnan().any():
                gradient.zero_()
        return loss


class InitByName(transformers.Trainer):  # type: ignore[misc]
    """Reaches the Trainer's own construction by name, past every class between."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        transformers.Trainer.__init__(self, *args, **kwargs)


@pytest.mark.parametrize(
    ("trainer", "words"),
    [
        (Clipping, "Between two micro-batches.*max_grad_norm"),
        (Zeroing, "Between two micro-batches"),
        (Fgm, "runs the Trainer's step twice.*gradient_accumulation_steps=1"),
    ],
)
def test_a_training_step_that_acts_on_each_micro_batchs_gradient_is_refused(
    trainer: Any, words: str, tmp_path: Path
) -> None:
    model, rows = tiny("BertForSequenceClassification", num_labels=3), CLASSES
    with pytest.raises(wb.InexactError, match=words):
        Run(exact(trainer), model, rows, tmp_path)
    stock = Run(trainer, model, rows, tmp_path).gradients.steps[0]
    whole = Run(trainer, model, rows, tmp_path, per_device_train_batch_size=16, gradient_accumulation_steps=1)
    assert_differs(stock, whole.gradients.steps[0])
    ours = Run(exact(trainer), model, rows, tmp_path, per_device_train_batch_size=16, gradient_accumulation_steps=1)
    assert_same_gradient(ours.gradients.steps[0], whole.gradients.steps[0])


@pytest.mark.parametrize("trainer", [Guarding, InitByName])
def test_a_training_step_that_looks_and_a_class_that_constructs_by_name_are_served(
    trainer: Any, tmp_path: Path
) -> None:
    model = tiny("BertForSequenceClassification", num_labels=3)
    run = Run(exact(trainer), model, CLASSES, tmp_path)
    for ours, reference in zip(run.gradients.steps, references(model, CLASSES), strict=True):
        assert_same_gradient(ours, reference)
    assert_differs(Run(trainer, model, CLASSES, tmp_path).gradients.steps[0], references(model, CLASSES)[0])


@pytest.mark.parametrize("trainer", [exact(SteppingItself), DerivedSteppingItself], ids=["made-exact", "derived"])
def test_a_training_step_that_goes_back_by_itself_is_refused(trainer: Any, tmp_path: Path) -> None:
    with pytest.raises(wb.InexactError, match=r"goes back by itself.*super\(\)\.training_step"):
        Run(trainer, tiny("LlamaForCausalLM"), texts(), tmp_path)


def test_a_compiled_model(tmp_path: Path) -> None:
    model = tiny("BertForSequenceClassification", num_labels=3)
    compiled = {"torch_compile": True, "torch_compile_backend": "eager"}
    run = Run(exact(transformers.Trainer), model, CLASSES, tmp_path, eval_dataset=CLASSES, **compiled)
    named = [{name.removeprefix("_orig_mod."): g for name, g in step.items()} for step in run.gradients.steps]
    for ours, reference in zip(named, references(model, CLASSES), strict=True):
        assert_same_gradient(ours, reference)
    assert run.trainer.evaluate()["eval_loss"] > 0


def test_an_evaluation_costs_what_the_trainers_costs(tmp_path: Path) -> None:
    model, rows = tiny("GPT2LMHeadModel"), texts()
    run = Run(exact(transformers.Trainer), model, rows, tmp_path, eval_dataset=rows[:8], per_device_eval_batch_size=2)
    forwards: list[int] = []
    run.trainer.model.register_forward_hook(lambda *given: forwards.append(1))
    run.trainer.evaluate()
    assert len(forwards) == 4


class Normed(nn.Module):
    """A BatchNorm that no module has registered."""

    def __init__(self, hidden: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.head = nn.Linear(4, 6), nn.Linear(6, 3)
        norm = nn.BatchNorm1d(6)
        self.norm = (lambda x: norm(x)) if hidden else norm

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.norm(self.first(x)))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


@pytest.mark.parametrize("hidden", [False, True], ids=["registered", "hidden"])
def test_batch_norm_that_runs_is_seen_and_refused(hidden: bool, tmp_path: Path) -> None:
    rows = [{"x": torch.randn(4), "labels": i % 3} for i in range(22)]
    model = Normed(hidden)
    with pytest.raises(wb.InexactError, match=r'BatchNorm.*batch_norm="exact"'):
        Run(exact(transformers.Trainer), model, rows, tmp_path, data_collator=stacked)
    micro = exact(transformers.Trainer, batch_norm="micro")
    assert len(Run(micro, model, rows, tmp_path, data_collator=stacked).gradients.steps) == 2
