"""Where rows meet, in BatchNorm or in the loss: exact, or refused with a reason, never wrong in silence."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from tests.distributed import Ranks
from tests.oracle import assert_differs, assert_same_gradient, gradients_of, relative_error, whole_batch

# BatchNorm


def normalised() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(28)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=0.1), nn.ReLU(), nn.Linear(4, 2)).double()
    x = torch.randn(8, 3).double() * torch.linspace(0.5, 3, 8).double()[:, None]
    return model.train(), (x, torch.randint(0, 2, (8,)))


def class_losses(model: nn.Module, rows: Any) -> torch.Tensor:
    return F.cross_entropy(model(rows[0]), rows[1], reduction="none")


def class_mean(model: nn.Module, rows: Any) -> torch.Tensor:
    return F.cross_entropy(model(rows[0]), rows[1])


def assert_same_buffers(model: nn.Module, expected: nn.Module) -> None:
    for name, buffer in expected.named_buffers():
        assert torch.allclose(model.get_buffer(name), buffer, rtol=1e-12, atol=1e-14), name


def micro_batches_in_a_plain_loop(model: nn.Module, rows: Any, size: int) -> None:
    for micro_batch in zip(*(column.split(size) for column in rows), strict=True):
        (class_losses(model, micro_batch).sum() / len(rows[0])).backward()


@pytest.mark.parametrize("door", ["backward", "Step"])
def test_batch_norm_in_training_mode_is_refused_until_the_user_chooses(door: str) -> None:
    """pytorch/pytorch#46516: every micro-batch normalised by itself, the running statistics moved four times."""
    model, rows = normalised()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(wb.InexactError, match=r"(?s)1 BatchNorm.*'1'.*batch_norm="):
        if door == "backward":
            wb.backward(model, class_losses, rows, micro_batch_size=2)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            wb.Step(model, optimizer, class_losses, micro_batch_size=2)(rows)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert set(gradients_of(model).values()) == {None}


def test_the_plain_loop_is_what_micro_means_and_what_the_refusal_is_for() -> None:
    model, rows = normalised()
    reference = whole_batch(model, class_mean, rows)
    naive = copy.deepcopy(model)
    wb.backward(model, class_losses, rows, micro_batch_size=2, batch_norm="micro")
    micro_batches_in_a_plain_loop(naive, rows, 2)
    assert_same_gradient(model, gradients_of(naive))
    assert_same_buffers(model, naive)
    assert_differs(model, reference, by=0.1)
    assert (int(model[1].num_batches_tracked), int(reference.model[1].num_batches_tracked)) == (4, 1)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_exact_batch_norm_is_that_of_the_whole_batch(size: int) -> None:
    model, rows = normalised()
    reference = whole_batch(model, class_mean, rows)
    result = wb.backward(model, class_losses, rows, micro_batch_size=size, batch_norm="exact")
    assert_same_gradient(model, reference)
    assert_same_buffers(model, reference.model)
    assert int(model[1].num_batches_tracked) == 1
    assert result.loss.item() == pytest.approx(reference.loss.item(), rel=1e-12)


def test_exact_batch_norm_in_depth() -> None:
    """Convolutions, a residual sum, one layer used twice, and a second and third normalisation behind the first."""
    torch.manual_seed(601)
    model, images = Residual().double().train(), torch.randn(7, 2, 4, 4).double()
    reference = whole_batch(model, lambda m, x: m(x).square().mean(), images)
    naive = copy.deepcopy(model)
    wb.backward(model, lambda m, x: m(x).square().mean(1), images, micro_batch_size=3, batch_norm="exact")
    assert_same_gradient(model, reference)
    assert_same_buffers(model, reference.model)
    for x in images.split(3):
        (naive(x).square().mean(1).sum() / 7).backward()
    assert_differs(naive, reference, by=0.1)


class Residual(nn.Module):
    """A small net in which three normalisations follow each other, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.second, self.norm2 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.out = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.silu(self.norm1(self.first(x)))
        for _ in range(2):
            x = F.silu(x + self.norm2(self.second(x)))
        out: torch.Tensor = self.out(x.mean((2, 3)))
        return out


def test_pooled_batch_norm_keeps_the_plain_gradient_and_the_whole_batch_s_first_statistics() -> None:
    model, rows = normalised()
    reference = whole_batch(model, class_mean, rows)
    naive = copy.deepcopy(model)
    wb.backward(model, class_losses, rows, micro_batch_size=2, batch_norm="pooled")
    micro_batches_in_a_plain_loop(naive, rows, 2)
    assert_same_gradient(model, gradients_of(naive))
    assert_same_buffers(model, reference.model)


def test_batch_norm_that_uses_no_statistics_of_the_batch_needs_no_choice() -> None:
    model, rows = normalised()
    model.eval()
    reference = whole_batch(model, class_mean, rows)
    wb.backward(model, class_losses, rows, micro_batch_size=3)
    assert_same_gradient(model, reference)


def test_batch_norm_without_running_statistics_uses_the_batch_s_in_eval_mode_too() -> None:
    torch.manual_seed(602)
    model = (
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 2)).double().eval()
    )
    with pytest.raises(wb.InexactError, match="BatchNorm"):
        wb.backward(model, class_losses, normalised()[1], micro_batch_size=3)


def test_a_single_micro_batch_needs_no_choice() -> None:
    model, rows = normalised()
    reference = whole_batch(model, class_mean, rows)
    wb.backward(model, class_losses, rows)
    assert_same_gradient(model, reference)
    assert_same_buffers(model, reference.model)


@pytest.mark.parametrize(
    "layer",
    [
        lambda: nn.GroupNorm(2, 4),
        lambda: nn.InstanceNorm1d(4),
        lambda: nn.LayerNorm(5),
        lambda: nn.LocalResponseNorm(3),
    ],
    ids=["GroupNorm", "InstanceNorm", "LayerNorm", "LocalResponseNorm"],
)
def test_norms_within_a_row_need_nothing(layer: Callable[[], nn.Module]) -> None:
    torch.manual_seed(603)
    model = nn.Sequential(nn.Conv1d(3, 4, 1), layer(), nn.Conv1d(4, 1, 1)).double().train()
    x = torch.randn(7, 3, 5).double()
    reference = whole_batch(model, lambda m, x: m(x).square().mean(), x)
    wb.backward(model, lambda m, x: m(x).square(), x, micro_batch_size=3)
    assert_same_gradient(model, reference)


# Losses over all rows


def info_nce(queries: torch.Tensor, documents: torch.Tensor, scale: Any = 10.0) -> torch.Tensor:
    similar = F.normalize(queries, dim=-1) @ F.normalize(documents, dim=-1).T * scale
    return F.cross_entropy(similar, torch.arange(len(similar)))


class Towers(nn.Module):
    """Two encoders, and a temperature that is learned by the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.d = nn.Linear(5, 4), nn.Sequential(nn.Linear(6, 4), nn.Tanh())
        self.log_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, queries: torch.Tensor, documents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.q(queries), self.d(documents)


def pairs(rows: int = 8) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(29)
    model = Towers().double()
    return model, (torch.randn(rows, 5).double(), torch.randn(rows, 6).double())


def encode(model: nn.Module, rows: Any) -> Any:
    return model(*rows)


def small_losses(model: nn.Module, rows: Any, loss: Callable[..., torch.Tensor], size: int) -> None:
    """The usual loop: the mean of the micro-batches' own losses."""
    window = list(zip(*(column.split(size) for column in rows), strict=True))
    for micro_batch in window:
        (loss(*encode(model, micro_batch)) / len(window)).backward()


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_every_anchor_sees_the_negatives_of_the_whole_batch(size: int) -> None:
    """huggingface/sentence-transformers#1822: 512 steps of one pair teach nothing, a batch of 512 does."""
    model, rows = pairs()
    model.log_scale.requires_grad_(False)
    reference = whole_batch(model, lambda m, rows: info_nce(*m(*rows)), rows)
    naive = copy.deepcopy(model)
    result = wb.coupled_backward(model, encode, info_nce, rows, micro_batch_size=size)
    assert_same_gradient(model, reference)
    assert result.loss.item() == pytest.approx(reference.loss.item(), rel=1e-12)
    small_losses(naive, rows, info_nce, 2)
    assert_differs(naive, reference, by=0.1)


def test_a_window_of_ready_made_pairs_is_encoded_as_it_is() -> None:
    model, rows = pairs()
    reference = whole_batch(model, lambda m, rows: info_nce(*m(*rows), m.log_scale.exp()), rows)
    window = wb.Window(zip(*(column.split(3) for column in rows), strict=True))
    wb.coupled_backward(model, encode, lambda q, d: info_nce(q, d, model.log_scale.exp()), window)
    assert_same_gradient(model, reference)


def test_a_temperature_learned_in_the_loss_gets_its_gradient_once() -> None:
    """A cached loss that is taken once a micro-batch counts the loss's own parameters as often."""
    model, rows = pairs()
    reference = whole_batch(model, lambda m, rows: info_nce(*m(*rows), m.log_scale.exp()), rows)
    naive = copy.deepcopy(model)
    wb.coupled_backward(model, encode, lambda q, d: info_nce(q, d, model.log_scale.exp()), rows, micro_batch_size=2)
    assert_same_gradient(model, reference)

    cached = [
        [side.detach() for side in encode(naive, micro_batch)]
        for micro_batch in zip(*(c.split(2) for c in rows), strict=True)
    ]
    for index, micro_batch in enumerate(zip(*(column.split(2) for column in rows), strict=True)):
        live = [*cached[:index], encode(naive, micro_batch), *cached[index + 1 :]]
        queries, documents = (torch.cat(side) for side in zip(*live, strict=True))
        info_nce(queries, documents, naive.log_scale.exp()).backward()
    towers = {name: gradient for name, gradient in gradients_of(naive).items() if name != "log_scale"}
    assert_same_gradient(towers, {name: reference.gradients[name] for name in towers})
    wanted = reference.gradients["log_scale"]
    assert wanted is not None
    assert naive.log_scale.grad.item() == pytest.approx(4 * wanted.item(), rel=1e-9)
    assert_differs(naive, reference)


LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "root mean square": lambda q, d: (q - d).square().mean().sqrt(),
    "batch Dice": lambda q, d: 1 - 2 * (q.sigmoid() * d.sigmoid()).sum() / (q.sigmoid().sum() + d.sigmoid().sum()),
    "correlation": lambda q, d: -torch.corrcoef(torch.stack([q.flatten(), d.flatten()]))[0, 1],
    "covariance": lambda q, d: torch.cov(q.T).square().sum() + F.relu(1 - d.var(0).sqrt()).mean(),
    "hardest negative": lambda q, d: F.softplus(
        (torch.cdist(q, d) * torch.eye(len(q))).sum(1) - (torch.cdist(q, d) + 1e9 * torch.eye(len(q))).amin(1)
    ).mean(),
    "load balance": lambda q, d: 4 * (q.softmax(-1).mean(0) * d.softmax(-1).mean(0)).sum(),
    "quantile": lambda q, d: (q - d).square().sum(1).quantile(0.8),
}


@pytest.mark.parametrize("name", LOSSES)
def test_any_loss_over_all_rows_is_exact(name: str) -> None:
    model, rows = pairs(9)
    model.log_scale.requires_grad_(False)
    reference = whole_batch(model, lambda m, rows: LOSSES[name](*m(*rows)), rows)
    naive = copy.deepcopy(model)
    wb.coupled_backward(model, encode, LOSSES[name], rows, micro_batch_size=4)
    assert_same_gradient(model, reference)
    small_losses(naive, rows, LOSSES[name], 3)
    assert_differs(naive, reference, by=1e-3)


def test_dropout_draws_the_same_masks_in_both_passes() -> None:
    torch.manual_seed(604)
    model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 4)).double()
    rows = torch.randn(9, 5).double()

    def loss(encoded: torch.Tensor) -> torch.Tensor:
        return torch.cov(encoded.T).square().sum()

    expected = copy.deepcopy(model)
    torch.manual_seed(605)
    loss(torch.cat([expected(micro_batch) for micro_batch in rows.split(4)])).backward()
    after = torch.rand(())
    torch.manual_seed(605)
    wb.coupled_backward(model, lambda m, x: m(x), loss, rows, micro_batch_size=4)
    assert_same_gradient(model, gradients_of(expected))
    assert torch.equal(torch.rand(()), after)

    naive = copy.deepcopy(model)
    naive.zero_grad()
    torch.manual_seed(605)
    with torch.no_grad():
        parts = [naive(micro_batch) for micro_batch in rows.split(4)]
    leaf = torch.cat(parts).requires_grad_()
    loss(leaf).backward()
    assert leaf.grad is not None
    for micro_batch, gradient in zip(rows.split(4), leaf.grad.split(4), strict=True):
        naive(micro_batch).backward(gradient)  # other draws than those that the loss saw
    assert_differs(naive, gradients_of(expected), by=0.1)


def test_gradients_that_are_there_already_are_added_to() -> None:
    model, rows = pairs()
    reference = whole_batch(model, lambda m, rows: info_nce(*m(*rows), m.log_scale.exp()), rows)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    wb.coupled_backward(model, encode, lambda q, d: info_nce(q, d, model.log_scale.exp()), rows, micro_batch_size=3)
    expected = {name: 0.5 + gradient for name, gradient in reference.gradients.items() if gradient is not None}
    assert_same_gradient(model, expected)


def test_a_loss_over_all_rows_given_as_a_mean_of_micro_batches_is_not_recognised_but_stated_by_the_user() -> None:
    """`backward` cannot see rows meeting inside the loss; a bare number is refused, so nobody slips into it."""
    model, rows = pairs()
    with pytest.raises(wb.LossError):
        wb.backward(model, lambda m, rows: info_nce(*m(*rows)), rows, micro_batch_size=2)


def test_a_scaler_scales_the_gradient_and_not_the_reported_loss() -> None:
    model, rows = pairs()
    reference = whole_batch(model, lambda m, rows: info_nce(*m(*rows), m.log_scale.exp()), rows)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)

    def loss(queries: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        return info_nce(queries, documents, model.log_scale.exp())

    result = wb.coupled_backward(model, encode, loss, rows, micro_batch_size=3, scaler=scaler)
    expected = {name: 256 * gradient for name, gradient in reference.gradients.items() if gradient is not None}
    assert_same_gradient(model, expected)
    assert result.loss.item() == pytest.approx(reference.loss.item(), rel=1e-12)


@pytest.mark.parametrize("choice", ["exact", None])
def test_batch_norm_in_the_encoder_is_exact_or_refused(choice: Any) -> None:
    torch.manual_seed(606)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)).double().train()
    rows = torch.randn(9, 5).double()

    def loss(encoded: torch.Tensor) -> torch.Tensor:
        return torch.cov(encoded.T).square().sum()

    reference = whole_batch(model, lambda m, x: loss(m(x)), rows)
    if choice is None:
        with pytest.raises(wb.InexactError, match="BatchNorm"):
            wb.coupled_backward(model, lambda m, x: m(x), loss, rows, micro_batch_size=4)
        return
    wb.coupled_backward(model, lambda m, x: m(x), loss, rows, micro_batch_size=4, batch_norm=choice)
    assert_same_gradient(model, reference)
    assert_same_buffers(model, reference.model)


def normalised_on_ranks() -> Any:
    model, rows = normalised()
    wrapped = DistributedDataParallel(model)
    share = tuple(column.split([5, 3])[dist.get_rank()] for column in rows)
    result = wb.backward(wrapped, class_losses, share, micro_batch_size=2, batch_norm="exact")
    return gradients_of(wrapped), {name: b.clone() for name, b in model.named_buffers()}, result.loss.item()


def test_exact_batch_norm_takes_its_statistics_over_all_ranks(two_ranks: Ranks) -> None:
    model, rows = normalised()
    reference = whole_batch(model, class_mean, rows)
    for gradients, buffers, loss in two_ranks.run(normalised_on_ranks, seconds=90):
        assert_same_gradient(gradients, reference)
        assert loss == pytest.approx(reference.loss.item(), rel=1e-12)
        for name, buffer in reference.model.named_buffers():
            assert torch.allclose(buffers[name], buffer, rtol=1e-12, atol=1e-14), name


def gathered() -> Any:
    model, rows = pairs(9)
    wrapped = DistributedDataParallel(model)
    share = tuple(column.split([5, 4])[dist.get_rank()] for column in rows)

    def loss(queries: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        return info_nce(queries, documents, model.log_scale.exp())

    result = wb.coupled_backward(wrapped, encode, loss, share, micro_batch_size=2, gather=True)
    return gradients_of(wrapped), result.loss.item()


def test_negatives_of_all_ranks_count_when_they_are_gathered(two_ranks: Ranks) -> None:
    model, rows = pairs(9)
    reference = whole_batch(model, lambda m, rows: info_nce(*m(*rows), m.log_scale.exp()), rows)
    for gradients, loss in two_ranks.run(gathered):
        assert_same_gradient(gradients, reference)
        assert loss == pytest.approx(reference.loss.item(), rel=1e-12)


def test_the_reference_notices_a_single_row_that_is_missing() -> None:
    """The oracle itself: eight rows and nine give other gradients for every loss above."""
    for loss in LOSSES.values():
        model, rows = pairs(9)
        eight = whole_batch(model, lambda m, rows, loss=loss: loss(*m(*rows)), tuple(column[:8] for column in rows))
        nine = whole_batch(model, lambda m, rows, loss=loss: loss(*m(*rows)), rows)
        assert relative_error(eight, nine) > 1e-3
