"""What a loss function may return, what it means, and what is refused with which words."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import wholebatch as wb
from wholebatch.loss.terms import read

VALUES = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])


def sums(term: wb.LossSum) -> tuple[float, float]:
    return float(term.total), float(term.count)


def test_values_alone_are_averaged_over_all_of_them() -> None:
    assert sums(wb.mean(VALUES)) == (63.0, 6.0)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        (torch.tensor([[True, False, True], [False, False, True]]), (37.0, 3.0)),
        (torch.tensor([[0.5, 0.0, 1.0], [0.0, 0.25, 0.0]]), (8.5, 1.75)),
        (torch.tensor([2.0, 1.0]), (70.0, 9.0)),
        (torch.tensor([True, False]), (7.0, 3.0)),
    ],
    ids=["mask", "fractions", "a weight a row", "a mask of rows"],
)
def test_weights_count_in_both_sums(weights: torch.Tensor, expected: tuple[float, float]) -> None:
    assert sums(wb.mean(VALUES, weights)) == expected


def test_what_a_mask_leaves_out_is_not_read() -> None:
    values = torch.tensor([1.0, math.nan, math.inf], requires_grad=True)
    term = wb.mean(values, torch.tensor([True, False, False]))
    term.total.backward()
    assert (term.total.item(), term.count) == (1.0, 1.0)
    assert values.grad is not None
    assert values.grad.tolist() == [1.0, 0.0, 0.0]


def test_half_precision_is_summed_in_float32() -> None:
    values = torch.full((4096,), 1.0, dtype=torch.bfloat16)
    assert sums(wb.mean(values)) == (4096.0, 4096.0)
    assert wb.total(values.half() * 100).total.dtype is torch.float32


def test_a_ready_made_mean_without_items_is_not_read() -> None:
    assert sums(wb.from_mean(torch.tensor(math.nan), items=0)) == (0.0, 0.0)
    assert sums(wb.from_mean(torch.tensor(math.nan), items=torch.tensor(0))) == (0.0, 0.0)


def test_terms_are_added_weighted_and_divided() -> None:
    a, b = wb.mean(VALUES), wb.total(VALUES)
    terms = (a + 0.5 * b - b / 4) * 2
    assert [part.weight for part in terms.parts] == [2.0, 1.0, -0.5]
    assert sum([a, b]).parts == (a, b)  # type: ignore[union-attr]


def test_a_weight_may_learn() -> None:
    scale = torch.tensor(3.0, requires_grad=True)
    term = (wb.mean(VALUES) * scale).parts[0]
    term.value.backward()
    assert float(scale.grad) == 10.5  # type: ignore[arg-type]


def test_terms_given_the_same_weights_share_a_denominator() -> None:
    mask, values = torch.tensor([True, False]), torch.ones(2)
    same = read(wb.mean(values, mask) + wb.mean(2 * values, mask), rows=2)
    other = read(wb.mean(values, mask) + wb.mean(values, mask.clone()), rows=2)
    spread = read(wb.mean(VALUES, mask) + wb.mean(values, mask), rows=2)
    assert [set(a.groups.values()) for a in (same, other, spread) if a] == [{0}, {0, 1}, {0, 1}]


def test_terms_without_weights_share_one_if_their_shapes_agree() -> None:
    same, other = read(wb.mean(VALUES) + wb.mean(-VALUES), 2), read(wb.mean(VALUES) + wb.mean(VALUES[:, :2]), 2)
    assert [set(a.groups.values()) for a in (same, other) if a] == [{0}, {0, 1}]


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (torch.tensor(1.0), "without dimensions"),
        (torch.ones(1), "one element for a micro-batch of 4 rows"),
        (torch.ones(4, dtype=torch.long), "int64"),
        (torch.ones(4, dtype=torch.complex64), "complex64"),
        (1.5, "float 1.5"),
        ([torch.ones(4)], "list"),
        ("loss", "str 'loss'"),
        ((torch.ones(4), torch.ones(4)), "tuple"),
        ({"ce": torch.tensor(1.0)}, "without dimensions"),
        ({"loss": torch.ones(4), "logits": torch.ones(4, 3)}, r"dict with 'loss' beside 'logits'.*return loss, \{"),
        ((torch.ones(4), {"accuracy": torch.tensor(0.5)}), "without dimensions"),
        ((torch.ones(4), {"accuracy": wb.mean(torch.ones(4)) + wb.mean(torch.ones(4))}), "'accuracy'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_averaged_is_refused(returned: Any, words: str) -> None:
    with pytest.raises(wb.LossError, match=words):
        read(returned, rows=4)


def test_a_tensor_without_dimensions_is_answered_with_the_forms() -> None:
    with pytest.raises(wb.LossError, match=r"wb\.from_mean\(outputs\.loss, items=n\)"):
        read(torch.tensor(1.0), rows=4)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: wb.mean(torch.tensor(1.0)), "before they are reduced"),
        (lambda: wb.mean(VALUES, torch.ones(3)), r"\(3,\) do not fit values of shape \(2, 3\)"),
        (lambda: wb.mean(VALUES, torch.ones(2, requires_grad=True)), "detach"),
        (lambda: wb.mean(VALUES, 2.0), "float 2.0"),  # type: ignore[arg-type]
        (lambda: wb.LossSum(VALUES, 6), r"total has shape \(2, 3\)"),
        (lambda: wb.LossSum(VALUES.sum(), torch.ones(2)), r"shape \(2,\)"),
        (lambda: wb.LossSum(VALUES.sum(), torch.tensor(6.0, requires_grad=True)), "detach"),
        (lambda: wb.from_mean(VALUES, items=6), r"shape \(2, 3\)"),
        (lambda: wb.mean(VALUES) + VALUES.sum(), r"wb\.once"),
        (lambda: wb.mean(VALUES) + 1.0, r"wb\.total"),
        (lambda: wb.mean(VALUES) * wb.mean(VALUES), "weighted by a number"),
        (lambda: wb.mean(VALUES) * torch.ones(2), r"shape \(2,\)"),
    ],
)
def test_a_wrong_term_is_refused_where_it_is_made(make: Any, words: str) -> None:
    with pytest.raises(wb.LossError, match=words):
        make()


LOGITS = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 3, -100, 1, -100])


@pytest.mark.parametrize("weight", [None, torch.tensor([1.0, 2.0, 3.0, 0.5])], ids=["plain", "class weights"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_cross_entropy_is_torch_s_mean(weight: torch.Tensor | None, smoothing: float) -> None:
    ours = wb.losses.cross_entropy(LOGITS, LABELS, weight, label_smoothing=smoothing).value
    wide = None if weight is None else weight.double()
    torch.testing.assert_close(ours, F.cross_entropy(LOGITS, LABELS, wide, label_smoothing=smoothing))


def test_cross_entropy_takes_probabilities_and_images() -> None:
    probabilities = LOGITS.softmax(1).flip(0)
    torch.testing.assert_close(
        wb.losses.cross_entropy(LOGITS, probabilities).value, F.cross_entropy(LOGITS, probabilities)
    )
    images, labels = torch.randn(2, 3, 4, 4), torch.randint(0, 3, (2, 4, 4))
    torch.testing.assert_close(wb.losses.cross_entropy(images, labels).value, F.cross_entropy(images, labels))


def test_causal_lm_shifts_once_and_counts_after_the_shift() -> None:
    logits, labels = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 5))
    labels[0, :3] = -100
    term = wb.losses.causal_lm(logits, labels)
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(term.value, expected)
    assert term.count == 6
    shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
    torch.testing.assert_close(wb.losses.causal_lm(logits, shift_labels=shifted).value, expected)


def test_token_losses_average_over_what_is_labelled() -> None:
    logits, labels = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 5))
    labels[1, 2:] = -100
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(wb.losses.masked_lm(logits, labels).value, expected)
    torch.testing.assert_close(wb.losses.token_classification(logits, labels).value, expected)


def test_losses_of_the_same_labels_share_a_denominator() -> None:
    logits, labels = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 5))
    answer = read(wb.losses.masked_lm(logits, labels) + wb.losses.masked_lm(-logits, labels), rows=2)
    assert answer is not None
    assert set(answer.groups.values()) == {0}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: wb.losses.causal_lm(torch.ones(2, 5, 7)), "exactly one"),
        (lambda: wb.losses.causal_lm(torch.ones(2, 5, 7), torch.ones(2, 4, dtype=torch.long)), "do not fit"),
        (lambda: wb.losses.cross_entropy(torch.ones(5), torch.ones(5, dtype=torch.long)), "no class dimension"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(make: Any, words: str) -> None:
    with pytest.raises(wb.LossError, match=words):
        make()


def test_a_term_may_be_taken_from_nothing_but_not_from_what_has_no_denominator() -> None:
    assert [part.weight for part in (wb.total(VALUES) - wb.mean(VALUES)).parts] == [1.0, -1.0]
    assert [part.weight for part in (0 - wb.mean(VALUES)).parts] == [-1.0]
    with pytest.raises(wb.LossError, match=r"wb\.once"):
        1 - wb.mean(VALUES)  # type: ignore[operator]


@pytest.mark.parametrize("use", [lambda t: t**0.5, lambda t: 1 / t], ids=["a power", "a quotient"])
def test_a_function_of_the_whole_mean_is_not_taken_of_a_share(use: Callable[[Any], Any]) -> None:
    with pytest.raises(wb.LossError, match="coupled_backward"):
        use(wb.mean(VALUES))


@pytest.mark.parametrize("name", ["backward", "sqrt", "item"])
def test_a_term_that_is_used_like_a_tensor_says_what_it_is(name: str) -> None:
    with pytest.raises(AttributeError, match=r"no .*'.*\.value"):
        getattr(wb.mean(VALUES), name)


@pytest.mark.parametrize(
    "use",
    [
        torch.sqrt,
        torch.exp,
        torch.log,
        lambda term: torch.clamp(term, min=0.1),
        lambda term: torch.stack([term, term]),
        lambda term: torch.tensor(1.0) > term,
        lambda term: term > 0,
        lambda term: term == 0,
        lambda term: max(term, 0.0),
        lambda term: 2**term,
        lambda term: f"{term:.3f}",
        float,
        abs,
    ],
)
def test_a_term_is_no_number_and_says_what_it_is(use: Any) -> None:
    values = torch.rand(3, requires_grad=True)
    for term in (wb.mean(values), wb.mean(values) + 0.5 * wb.total(values)):
        with pytest.raises(wb.LossError, match="only sums of terms, and terms times numbers"):
            use(term)


def test_tensors_still_weigh_terms_and_terms_are_themselves() -> None:
    values = torch.rand(3, requires_grad=True)
    term = wb.mean(values)
    for weighted in (torch.exp(torch.tensor(2.0)) * term, term * torch.tensor(2.0).exp(), term / torch.tensor(2.0)):
        assert isinstance(weighted, type(term + term))
    assert term == term and term != wb.mean(values) and term != None and len({term, term}) == 1  # noqa: E711
    for name in ("item", "backward", "sqrt"):
        with pytest.raises(AttributeError, match="Return it from the loss function"):
            getattr(term, name)()


def test_the_value_of_a_sum_of_terms_is_that_of_its_parts() -> None:
    term = wb.mean(VALUES) + 0.5 * wb.total(VALUES) - wb.mean(VALUES, VALUES > 2) / 2
    assert float(term.value) == pytest.approx(63 / 6 + 63 / 2 - 60 / 4 / 2)
    assert float((0.1 * wb.mean(VALUES)).value) == pytest.approx(1.05)


def test_values_of_rows_beside_a_term_are_told_to_be_a_mean() -> None:
    for add in (lambda: wb.mean(VALUES) + VALUES[:, 0], lambda: VALUES[:, 0] + wb.mean(VALUES)):
        with pytest.raises(wb.LossError, match=r"wb\.mean\(x\) for one loss a row"):
            add()


def test_the_loss_of_the_only_row_left_is_told_from_a_mean() -> None:
    """Thirteen rows by four leave one, and `squeeze()` takes its dimension; the first micro-batches say nothing."""
    torch.manual_seed(1)
    model, batch = torch.nn.Linear(3, 1), {"x": torch.randn(13, 3), "y": torch.randn(13)}

    def squeezed(model: Any, batch: Any) -> torch.Tensor:
        return F.mse_loss(model(batch["x"]).squeeze(), batch["y"].squeeze(), reduction="none")

    wb.backward(model, squeezed, {name: value[:12] for name, value in batch.items()}, 4)
    with pytest.raises(wb.LossError, match=r"one row.*squeeze\(-1\)"):
        wb.backward(model, squeezed, batch, 4)
    with pytest.raises(wb.LossError, match="a mean or a sum over the micro-batch"):
        wb.backward(model, lambda model, batch: squeezed(model, batch).mean(), batch, 4)


def test_several_models_and_none_are_told_what_to_give() -> None:
    layers = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)]

    def loss(models: Any, rows: torch.Tensor) -> torch.Tensor:
        return models[1](models[0](rows)).square()

    with pytest.raises(TypeError, match=r"nn\.ModuleList\(models\)"):
        wb.backward(layers, loss, torch.randn(4, 2), 2)  # type: ignore[arg-type]
    wb.backward(torch.nn.ModuleList(layers), loss, torch.randn(4, 2), 2)
    weight = torch.randn(2, 1, requires_grad=True)
    with pytest.raises(TypeError, match=r"nn\.ParameterList"):
        wb.backward(lambda rows: rows @ weight, loss, torch.randn(4, 2), 2)  # type: ignore[arg-type]
    held = torch.nn.ParameterList([weight])
    wb.backward(held, lambda held, rows: (rows @ held[0]).square(), torch.randn(4, 2), 2)
