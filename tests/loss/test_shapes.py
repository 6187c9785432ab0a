"""A bare tensor counts as one loss a row or token only if something shows that it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wholebatch as wb
from tests.oracle import assert_differs, assert_same_gradient, gradients_of, whole_batch

Loss = Callable[[nn.Module, Any], Any]

torch.manual_seed(1201)
IDS = torch.randint(1, 9, (10, 7))
MASK = torch.rand(10, 7) < 0.3
MASK[:4] = False
MASK[1, 3] = True  # in micro-batches of one or two rows there is one token, or none
LABELS = torch.where(MASK, IDS, -100)
TEXT = {"ids": IDS, "mask": MASK, "labels": LABELS}
IMAGES = {"x": torch.randn(6, 2, 5, 5), "y": torch.randint(0, 3, (6, 5, 5))}
POINTS = {"x": torch.randn(12, 5), "y": F.one_hot(torch.randint(0, 3, (12,)), 3).double()}


def per_item(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="none")


def words() -> nn.Module:
    return nn.Sequential(nn.Embedding(9, 6), nn.Tanh(), nn.Linear(6, 9)).double()


def flattened(model: nn.Module, batch: Any) -> Tensor:
    return per_item(model(batch["ids"])[:, :-1].flatten(0, 1), batch["ids"][:, 1:].flatten())


def chosen_after(model: nn.Module, batch: Any) -> Tensor:
    return per_item(model(batch["ids"])[batch["mask"]], batch["ids"][batch["mask"]])


def chosen_values(model: nn.Module, batch: Any) -> Tensor:
    return per_item(model(batch["ids"]).flatten(0, 1), batch["ids"].flatten())[batch["mask"].flatten()]


def chosen_before(model: nn.Module, batch: Any) -> Tensor:
    return per_item(model(batch["ids"][batch["mask"]]), batch["ids"][batch["mask"]])


def chosen_by_number(model: nn.Module, batch: Any) -> Tensor:
    places = (batch["labels"].flatten() != -100).nonzero()[:, 0]
    return per_item(model(batch["ids"]).flatten(0, 1)[places], batch["labels"].flatten()[places])


def chosen_by_a_mask_that_no_field_holds(model: nn.Module, batch: Any) -> Tensor:
    rare = batch["ids"][batch["ids"] > 6]
    return per_item(model(rare), rare)


def rows_that_count(model: nn.Module, batch: Any) -> Tensor:
    return per_item(model(batch["ids"])[:, 0], batch["ids"][:, 1])[batch["ids"][:, 2] > 4]


def two_views(model: nn.Module, batch: Any) -> Tensor:
    views = batch["ids"], batch["ids"].flip(1)
    return torch.cat([per_item(model(view)[:, 0], batch["ids"][:, 1]) for view in views])


def time_first(model: nn.Module, batch: Any) -> Tensor:
    turned = batch["ids"].t()
    return per_item(model(turned).flatten(0, 1), turned.flatten()).view(7, -1)


RIGHT = [
    flattened,
    chosen_after,
    chosen_values,
    chosen_before,
    chosen_by_number,
    chosen_by_a_mask_that_no_field_holds,
    rows_that_count,
    two_views,
    time_first,
]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("loss", RIGHT, ids=lambda loss: loss.__name__)
def test_values_of_rows_and_tokens_are_right_at_any_number(loss: Loss, size: int) -> None:
    model = words()
    wb.backward(model, loss, TEXT, size)
    assert_same_gradient(model, whole_batch(model, lambda model, batch: loss(model, batch).mean(), TEXT))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=["jagged", "strided"])
def test_values_of_the_tokens_of_a_nested_tensor_are_right(layout: torch.layout) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    rows = [torch.randn(length, 3, dtype=torch.float64) for length in (3, 7, 2, 5, 1, 4)]
    batch = torch.nested.as_nested_tensor(rows, layout=layout)
    wb.backward(model, lambda model, batch: torch.cat([model(row).square() for row in batch.unbind()]), batch, 2)
    assert_same_gradient(model, whole_batch(model, lambda model, rows: model(torch.cat(rows)).square().mean(), rows))


@pytest.mark.parametrize("loss", [chosen_after, chosen_before, rows_that_count], ids=lambda loss: loss.__name__)
def test_the_mean_of_their_means_is_another(loss: Loss) -> None:
    model = words()
    micro_batches = [{key: column[i : i + 4] for key, column in TEXT.items()} for i in range(0, 10, 4)]
    for micro_batch in micro_batches:
        (loss(model, micro_batch).mean() / len(micro_batches)).backward()
    assert_differs(model, whole_batch(model, lambda model, batch: loss(model, batch).mean(), TEXT))


@pytest.mark.parametrize("lengths", [(9, 9, 9), (9, 4, 6)], ids=["of equal length", "of uneven length"])
def test_a_stream_of_tokens_that_predicts_its_next_has_one_value_less_than_rows(lengths: tuple[int, ...]) -> None:
    def shifted(model: nn.Module, ids: Tensor) -> Tensor:
        return per_item(model(ids[:-1]), ids[1:])

    model, window = words(), [IDS.flatten()[:length] for length in lengths]
    wb.backward(model, shifted, wb.Window(window))
    reference = whole_batch(model, lambda model, window: torch.cat([shifted(model, i) for i in window]).mean(), window)
    assert_same_gradient(model, reference)


def dice(model: nn.Module, batch: Any) -> Tensor:
    found = model(batch["x"]).softmax(1)
    return 1 - (2 * (found * batch["y"]).sum(0) + 1e-5) / (found.sum(0) + batch["y"].sum(0) + 1e-5)


def variance(model: nn.Module, batch: Any) -> Tensor:
    return F.relu(1 - (model(batch["x"]).var(0, correction=0) + 1e-4).sqrt())


def correlation(model: nn.Module, batch: Any) -> Tensor:
    z = model(batch["x"])
    z = (z - z.mean(0)) / (z.std(0, correction=0) + 1e-3)
    return (z.T @ z / len(z) - torch.eye(3, dtype=z.dtype)).square()


def hardest(model: nn.Module, batch: Any) -> Tensor:
    losses = per_item(model(batch["x"]), batch["y"]).flatten()
    return losses.topk(len(losses) // 4).values


def hardest_ten(model: nn.Module, batch: Any) -> Tensor:
    return per_item(model(batch["x"]), batch["y"]).flatten().topk(10).values


def halves(model: nn.Module, batch: Any) -> Tensor:
    first, second = model(batch["x"])[:, 0].chunk(2)
    return -F.logsigmoid(first - second)


def halves_before(model: nn.Module, batch: Any) -> Tensor:
    first, second = batch["x"].chunk(2)
    return -F.logsigmoid(model(first) - model(second))[:, 0]


def neighbours(model: nn.Module, batch: Any) -> Tensor:
    score = model(batch["x"])[:, 0]
    return -F.logsigmoid(score[0::2] - score[1::2])


def of_all_pairs(model: nn.Module, batch: Any) -> Tensor:
    return torch.pdist(model(batch["x"]))


def a_mean_in_one_place(model: nn.Module, batch: Any) -> Tensor:
    return model(batch["x"]).square().mean().reshape(1)


WRONG = [dice, variance, correlation, halves, halves_before, neighbours, of_all_pairs, a_mean_in_one_place]
OF_IMAGES = [hardest, hardest_ten]


def refused(model: nn.Module, loss: Loss, batch: Any, size: int) -> None:
    """Assert that a window is refused with the forms named, and that nothing of it is left."""
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.25)
    before = gradients_of(model)
    with pytest.raises(wb.LossError, match=r"(?s)wb\.mean\(values\).*wb\.total.*wb\.coupled_backward"):
        wb.backward(model, loss, batch, size)
    assert_same_gradient(model, before, tol=0.0)


@pytest.mark.parametrize("size", [2, 4, 6])
@pytest.mark.parametrize("loss", WRONG, ids=lambda loss: loss.__name__)
def test_values_that_are_not_of_rows_are_refused(loss: Loss, size: int) -> None:
    refused(nn.Linear(5, 3).double(), loss, {key: value.double() for key, value in POINTS.items()}, size)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("loss", OF_IMAGES, ids=lambda loss: loss.__name__)
def test_the_hardest_of_all_are_refused(loss: Loss, size: int) -> None:
    refused(nn.Conv2d(2, 3, 3, padding=1).double(), loss, {**IMAGES, "x": IMAGES["x"].double()}, size)


@pytest.mark.parametrize("classes", [4, 8])
def test_a_value_a_class_is_refused_though_the_rows_divide_it(classes: int) -> None:
    def spread(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).var(0, correction=0)

    refused(nn.Linear(5, classes).double(), spread, POINTS["x"].double(), 2)


def test_a_shape_that_stays_while_rows_change_is_not_of_rows() -> None:
    """Four rows and four classes look alike; three rows and four classes do not."""

    def held(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).sum(0).square()

    refused(nn.Linear(5, 4).double(), held, POINTS["x"][:7].double(), 4)


def test_in_one_micro_batch_any_shape_is_the_batch_s() -> None:
    model = nn.Linear(5, 3).double()
    batch = {key: value.double() for key, value in POINTS.items()}
    wb.backward(model, dice, batch)
    assert_same_gradient(model, whole_batch(model, lambda model, batch: dice(model, batch).mean(), batch))


def test_what_is_said_is_believed() -> None:
    """A mean that somebody writes down as one is taken for what it is, and left to the proof of the first window."""
    model, x = nn.Linear(5, 3).double(), POINTS["x"].double()
    wb.backward(model, lambda model, x: wb.mean(model(x).mean(1)[: len(x) // 2]), x, 4, verify="never")
    expected = whole_batch(model, lambda model, x: model(x).mean(1).view(3, 4)[:, :2].mean(), x)
    assert_same_gradient(model, expected)


def test_a_metric_of_classes_is_refused_as_a_loss_would_be() -> None:
    def loss(model: nn.Module, x: Tensor) -> Any:
        out = model(x)
        return out.square(), {"spread": out.detach().var(0, correction=0)}

    with pytest.raises(wb.LossError, match=r"wb\.mean\(values\)"):
        wb.backward(nn.Linear(5, 3), loss, POINTS["x"], 4)


# Ignored targets


def of_tokens(model: nn.Module, batch: Any, **options: Any) -> Tensor:
    return F.cross_entropy(model(batch["ids"]).transpose(1, 2), batch["labels"], reduction="none", **options)


IGNORING: dict[str, Loss] = {
    "bare": of_tokens,
    "explicit": lambda model, batch: wb.mean(of_tokens(model, batch)),
    "flattened": lambda model, batch: per_item(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten()),
    "smoothed": lambda model, batch: of_tokens(model, batch, label_smoothing=0.1),
    "named": lambda model, batch: {"ce": 0.5 * wb.mean(of_tokens(model, batch))},
    "times a mask": lambda model, batch: of_tokens(model, batch) * batch["mask"],
    "nll_loss": lambda model, batch: F.nll_loss(
        model(batch["ids"]).log_softmax(2).flatten(0, 1), batch["labels"].flatten(), reduction="none"
    ),
}


@pytest.mark.parametrize("loss", IGNORING.values(), ids=IGNORING.keys())
def test_ignored_targets_are_not_averaged_over(loss: Loss) -> None:
    model = words()
    with pytest.raises(wb.LossError, match=r"(?s)ignored targets.*wb\.losses\.cross_entropy.*labels != ignore_index"):
        wb.backward(model, loss, TEXT, 4)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_zeros_of_ignored_targets_would_change_the_gradient() -> None:
    model = words()
    of_tokens(model, TEXT).mean().backward()
    kept = lambda model, batch: F.cross_entropy(model(batch["ids"]).transpose(1, 2), batch["labels"])  # noqa: E731
    assert_differs(model, whole_batch(model, kept, TEXT))


LEFT_ALONE: dict[str, tuple[Loss, Loss]] = {
    "a mask says which": (
        lambda model, batch: wb.mean(of_tokens(model, batch), batch["labels"] != -100),
        lambda model, batch: F.cross_entropy(model(batch["ids"]).transpose(1, 2), batch["labels"]),
    ),
    "summed a row": (
        lambda model, batch: of_tokens(model, batch).sum(1),
        lambda model, batch: of_tokens(model, batch).sum(1).mean(),
    ),
    "chosen since": (
        lambda model, batch: of_tokens(model, batch)[batch["mask"]],
        lambda model, batch: F.cross_entropy(model(batch["ids"]).transpose(1, 2), batch["labels"]),
    ),
    "all of them on purpose": (
        lambda model, batch: wb.LossSum(of_tokens(model, batch).sum(), batch["labels"].numel()),
        lambda model, batch: of_tokens(model, batch).mean(),
    ),
    "another ignored number": (
        lambda model, batch: F.cross_entropy(
            model(batch["ids"]).transpose(1, 2), batch["ids"], reduction="none", ignore_index=-1
        ),
        lambda model, batch: F.cross_entropy(model(batch["ids"]).transpose(1, 2), batch["ids"]),
    ),
}


@pytest.mark.parametrize(("loss", "meant"), LEFT_ALONE.values(), ids=LEFT_ALONE.keys())
def test_ignored_targets_that_nobody_averages_over_are_left_alone(loss: Loss, meant: Loss) -> None:
    model = words()
    wb.backward(model, loss, TEXT, 4)
    assert_same_gradient(model, whole_batch(model, meant, TEXT))


def test_a_number_without_dimensions_beside_the_rows_explains_no_shape_and_breaks_nothing() -> None:
    def one_a_pair(model: nn.Module, batch: Any) -> Any:
        return model(batch["x"]).square().mean(1).view(-1, 2).sum(1)[: int(batch["pairs"])]

    batch = {"x": torch.randn(8, 5), "pairs": torch.tensor(1)}
    with pytest.raises(wb.LossError, match="one element for a micro-batch of 4 rows"):
        wb.backward(nn.Linear(5, 3), one_a_pair, batch, 4, verify="never")
    stated = wb.backward(
        nn.Linear(5, 3), lambda model, part: wb.mean(one_a_pair(model, part)), batch, 4, verify="never"
    )
    assert float(stated.items[0]) == 2.0
