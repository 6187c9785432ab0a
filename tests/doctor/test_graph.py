"""What a loss divides by is read off its graph, however it was written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from wholebatch.doctor.graph import terms_of
from wholebatch.doctor.trace import TracedTerm

ROWS, CLASSES = 6, 4
LABELS = torch.tensor([0, 1, -100, 3, 2, -100])
MASK = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0])
WEIGHT = torch.tensor([0.5, 1.0, 2.0, 4.0])


def scores() -> Tensor:
    return torch.randn(ROWS, CLASSES, requires_grad=True)


def each(x: Tensor) -> Tensor:
    return F.cross_entropy(x, LABELS, reduction="none")


LOSSES: list[tuple[str, Callable[[Tensor], Tensor], str, float, float]] = [
    ("cross entropy", lambda x: F.cross_entropy(x, LABELS), "mean", 1.0, 4.0),
    ("over four micro-batches", lambda x: F.cross_entropy(x, LABELS) / 4, "mean", 0.25, 4.0),
    ("times a scale", lambda x: F.cross_entropy(x, LABELS) * torch.tensor(1024.0), "mean", 1024.0, 4.0),
    ("class weights", lambda x: F.cross_entropy(x, LABELS, weight=WEIGHT), "mean", 1.0, 7.5),
    ("summed over a window's count", lambda x: F.cross_entropy(x, LABELS, reduction="sum") / 13, "sum", 1 / 13, 4.0),
    ("summed, by hand", lambda x: each(x).sum() / 13, "sum", 1 / 13, 4.0),
    ("masked mean, by hand", lambda x: (each(x) * MASK).sum() / MASK.sum(), "mean", 1.0, 3.0),
    ("mean of chosen entries", lambda x: each(x)[LABELS != -100].mean(), "mean", 1.0, 4.0),
    ("squared error", lambda x: F.mse_loss(x, torch.zeros(ROWS, CLASSES)) / 2, "mean", 0.5, 24.0),
    ("squared error, summed", lambda x: F.mse_loss(x, torch.zeros(ROWS, CLASSES), reduction="sum"), "sum", 1.0, 24.0),
    ("smooth l1", lambda x: F.smooth_l1_loss(x, torch.zeros(ROWS, CLASSES)), "mean", 1.0, 24.0),
    ("l1", lambda x: F.l1_loss(x, torch.zeros(ROWS, CLASSES)), "mean", 1.0, 24.0),
    ("binary", lambda x: F.binary_cross_entropy_with_logits(x, torch.zeros(ROWS, CLASSES)), "mean", 1.0, 24.0),
    (
        "through casts and shapes",
        lambda x: F.cross_entropy(x, LABELS).double().view(1).squeeze() / 3,
        "mean",
        1 / 3,
        4.0,
    ),
    ("an image", lambda x: F.cross_entropy(x.T[None], LABELS[None]), "mean", 1.0, 4.0),
    ("minus", lambda x: -x.mean(), "mean", 1.0, 24.0),
    ("a norm", lambda x: x.norm() / 4, "opaque", 0.25, 0.0),
    ("a surrogate", lambda x: (x * (torch.randn(ROWS, CLASSES) - 1)).sum(), "opaque", 1.0, 0.0),
]


@pytest.mark.parametrize(("loss", "kind", "factor", "items"), [case[1:] for case in LOSSES], ids=[c[0] for c in LOSSES])
def test_reduction_factor_and_items_are_read(
    loss: Callable[[Tensor], Tensor], kind: str, factor: float, items: float
) -> None:
    (term,) = terms_of(loss(scores()))
    assert term.reduction == kind
    assert term.factor == pytest.approx(factor)
    assert term.items == pytest.approx(items)


def test_terms_are_kept_apart_with_their_own_factors() -> None:
    x = scores()
    main, aux = F.cross_entropy(x, LABELS, reduction="sum") / 13, x.square().mean()
    found = terms_of((main + 0.1 * aux) / 2)
    assert [(term.reduction, round(term.factor, 6)) for term in found] == [("sum", round(1 / 26, 6)), ("mean", 0.05)]
    assert found[1].factors == pytest.approx((0.5, 0.1))


def test_stacked_and_listed_losses_are_terms() -> None:
    x = scores()
    parts = [x.mean(), each(x).sum()]
    assert [term.factor for term in terms_of(torch.stack(parts).mean())] == [0.5, 0.5]
    assert [term.reduction for term in terms_of(sum(parts))] == ["mean", "sum"]


def test_a_learned_weight_is_a_factor() -> None:
    x, log_variance = scores(), torch.zeros((), requires_grad=True)
    found = terms_of(torch.exp(-log_variance) * x.mean() + log_variance)
    assert any(term.reduction == "mean" and term.items == 24 for term in found)


def test_pairs_are_told_from_classes() -> None:
    rows = torch.randn(5, 3, requires_grad=True)
    (pairs,) = terms_of(F.cross_entropy(rows @ rows.T, torch.arange(5)))
    (classes,) = terms_of(F.cross_entropy(rows @ rows.T, torch.tensor([1, 2, 3, 4, 0])))
    assert pairs.paired
    assert not classes.paired


def test_looking_leaves_the_graph_as_it_was() -> None:
    x = scores()
    loss = (F.cross_entropy(x, LABELS, weight=WEIGHT) + each(x).sum() / 13) / 4
    terms_of(loss)
    loss.backward()
    seen, x.grad = x.grad, None
    ((F.cross_entropy(x, LABELS, weight=WEIGHT) + each(x).sum() / 13) / 4).backward()
    assert torch.equal(seen, x.grad)


def test_what_has_no_graph_has_no_terms() -> None:
    assert terms_of(torch.tensor(1.0)) == ()
    assert terms_of(scores() * 2) == ()


def test_a_graph_that_was_freed_is_opaque_not_an_error() -> None:
    x = scores()
    loss = F.cross_entropy(x, LABELS)
    loss.backward()
    assert terms_of(loss)[0].reduction == "opaque"


def test_the_factor_of_an_item() -> None:
    mean = TracedTerm("", "Mean", "mean", 0.5, (0.5,), 4.0, 4.0)
    total = TracedTerm("", "Sum", "sum", 0.1, (0.1,), 4.0, 4.0)
    assert (mean.per_item, total.per_item) == (0.125, 0.1)
