"""The plain reading: the whole batch in double precision, in one micro-batch or in several, leaving no trace."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import wholebatch as wb
from tests.oracle import assert_differs, assert_same_gradient, whole_batch
from wholebatch.verify import reference
from wholebatch.verify.reference import plain_gradient, whole_gradient


def tokens(model: nn.Module, labels: torch.Tensor) -> Any:
    return wb.losses.causal_lm(model(labels.clamp(min=0)), labels)


def token_mean(model: nn.Module, labels: torch.Tensor) -> torch.Tensor:
    logits = model(labels.clamp(min=0))[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


def sentences(rows: int = 7) -> torch.Tensor:
    labels = torch.randint(0, 9, (rows, 6))
    labels[torch.arange(6) > torch.randint(1, 6, (rows, 1))] = -100
    return labels


def language_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(9, 5), nn.Tanh(), nn.Linear(5, 9))


def test_it_is_the_oracles_gradient_in_float64() -> None:
    model, batch = language_model(), sentences()
    answer = whole_gradient(model, tokens, batch)
    assert answer.gradients["0.weight"].dtype == torch.float64
    expected = whole_batch(model, token_mean, batch)
    assert_same_gradient(answer.gradients, expected.gradients)
    assert float(answer.loss) == pytest.approx(float(expected.loss), rel=1e-12)


def test_micro_batches_of_any_size_give_the_same_and_their_means_do_not() -> None:
    model, batch = language_model(), sentences()
    micro_batches = [batch[:1], batch[1:5], batch[5:]]
    whole = whole_gradient(model, tokens, batch)
    in_micro_batches = plain_gradient(model, tokens, micro_batches)
    assert in_micro_batches.micro_batches == 3
    assert_same_gradient(in_micro_batches.gradients, whole.gradients)
    means = [whole_gradient(model, tokens, micro_batch).gradients for micro_batch in micro_batches]
    averaged = {name: sum(mean[name] for mean in means) / 3 for name in whole.gradients}
    assert_differs(averaged, whole.gradients)


def test_a_plain_mean_over_the_whole_batch_is_understood() -> None:
    model, batch = language_model(), sentences()
    assert_same_gradient(
        whole_gradient(model, token_mean, batch).gradients, whole_gradient(model, tokens, batch).gradients
    )


def test_a_plain_mean_of_micro_batches_is_refused() -> None:
    model, batch = language_model(), sentences()
    with pytest.raises(wb.LossError, match="without dimensions"):
        plain_gradient(model, token_mean, [batch[:3], batch[3:]])


def test_a_windows_micro_batches_are_joined_where_they_fit_and_run_one_by_one_where_not() -> None:
    model, batch = language_model(), sentences()
    joined = whole_gradient(model, tokens, wb.Window([batch[:3], batch[3:]]))
    ragged = whole_gradient(model, tokens, wb.Window([batch[:3], batch[3:, :5], batch[3:, :4]]))
    assert joined.micro_batches == 1
    assert ragged.micro_batches == 3


def test_several_terms_have_their_own_denominators() -> None:
    model = nn.Linear(4, 3)
    rows, weights = torch.randn(9, 4), torch.rand(9)

    def loss_fn(model: nn.Module, batch: Any) -> Any:
        x, w = batch
        out = model(x)
        return {
            "a": wb.mean(out.square().mean(1), w),
            "b": 0.3 * wb.total(out.abs().sum()) + 2.0 * wb.once(model.weight.square().sum()),
        }

    def plain(model: nn.Module, batch: Any) -> torch.Tensor:
        x, w = batch
        out = model(x)
        main = (out.square().mean(1) * w).sum() / w.sum()
        return main + 0.3 * out.abs().sum() + 2.0 * model.weight.square().sum()

    expected = whole_batch(model, plain, (rows, weights))
    micro_batches = [(rows[:2], weights[:2]), (rows[2:], weights[2:])]
    assert_same_gradient(plain_gradient(model, loss_fn, micro_batches).gradients, expected.gradients)
    assert_same_gradient(whole_gradient(model, loss_fn, (rows, weights)).gradients, expected.gradients)


def test_a_micro_batch_with_nothing_to_learn_from_adds_nothing() -> None:
    model, batch = language_model(), sentences()
    empty = torch.full_like(batch[:2], -100)
    nothing = plain_gradient(model, lambda m, b: None if (b == -100).all() else tokens(m, b), [empty, batch])
    assert_same_gradient(nothing.gradients, whole_gradient(model, tokens, batch).gradients)


def test_everything_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    model[0].weight.grad = torch.ones(4, 3)
    scale = nn.Parameter(torch.tensor(2.0))
    scale.grad = torch.tensor(7.0)
    before, draws = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    answer = whole_gradient(
        model, lambda m, x: m(x).squeeze(-1) * scale, torch.randn(6, 3, generator=torch.Generator())
    )
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(model[0].weight.grad, torch.ones(4, 3))
    assert model[3].weight.grad is None
    assert scale.grad == 7.0
    assert torch.equal(draws, torch.get_rng_state())
    assert answer.gradients["loss_fn[0]"] != 0


def test_one_row_at_a_time_where_the_whole_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = language_model(), sentences()
    plain = reference.plain_gradient

    def small(model: nn.Module, loss_fn: Any, micro_batches: Any, **options: Any) -> Any:
        if any(len(micro_batch) > 1 for micro_batch in micro_batches):
            raise torch.OutOfMemoryError("too large")
        return plain(model, loss_fn, micro_batches, **options)

    monkeypatch.setattr(reference, "plain_gradient", small)
    answer = whole_gradient(model, tokens, batch)
    assert answer.micro_batches == 7
    assert_same_gradient(answer.gradients, whole_batch(model, token_mean, batch).gradients)


def test_complex_sparse_and_frozen_parameters() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 2, sparse=True)
            self.turn = nn.Parameter(torch.randn(2, dtype=torch.complex64))
            self.fixed = nn.Parameter(torch.ones(2), requires_grad=False)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return (self.table(ids) * self.fixed * self.turn).abs().sum(-1)

    answer = whole_gradient(Odd(), lambda model, ids: model(ids), torch.randint(0, 5, (8,)))
    assert set(answer.gradients) == {"table.weight", "turn"}
    assert answer.gradients["turn"].dtype == torch.complex128
    assert not answer.gradients["table.weight"].is_sparse
