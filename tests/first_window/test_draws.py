"""Draws held still: the same for every row, whoever draws, and seen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from wholebatch.first_window.draws import FixedDraws, uncompiled
from wholebatch.first_window.norms import NormWatch

ENCODER = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
RECURRENT = nn.LSTM(4, 4, 2, dropout=0.3, batch_first=True)
OWN = torch.Generator().manual_seed(0)

# What people draw, and the rows they draw for.
DRAWING: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "dropout": (nn.Dropout(0.5), torch.randn(5, 3)),
    "channels": (nn.Dropout1d(), torch.randn(5, 3, 4)),
    "alpha dropout": (nn.FeatureAlphaDropout(), torch.randn(5, 3, 4)),
    "random leaks": (nn.RReLU(), torch.randn(5, 3)),
    "transformer": (ENCODER, torch.randn(5, 3, 8)),
    "checkpointed": (lambda x: checkpoint(ENCODER, x, use_reentrant=False), torch.randn(5, 3, 8)),
    "recurrent": (lambda x: RECURRENT(x)[0], torch.randn(5, 3, 4)),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5), torch.randn(5, 2, 3, 4)),
    "stochastic depth": (lambda x: x * x.new_empty((len(x), 1)).bernoulli_(0.7) / 0.7, torch.randn(5, 3)),
    "noise": (lambda x: x + torch.randn_like(x), torch.randn(5, 3)),
    "own generator": (lambda x: x * torch.rand(len(x), 1, generator=OWN), torch.randn(5, 3)),
    "time steps": (lambda x: x * torch.randint(0, 9, (len(x), 1)), torch.randn(5, 3)),
    "mask of chances": (lambda x: torch.bernoulli(x.sigmoid()), torch.randn(5, 3)),
    "latent normal": (lambda x: torch.distributions.Normal(x, 1.0).rsample(), torch.randn(5, 3)),
    "latent gamma": (lambda x: torch.distributions.Gamma(x.exp(), 1.0).rsample(), torch.randn(5, 3)),
    "gumbel": (F.gumbel_softmax, torch.randn(5, 3)),
    "tokens": (lambda x: x.gather(1, torch.multinomial(x.softmax(1), 2)), torch.randn(5, 3)),
    "counts": (lambda x: torch.poisson(x.exp()), torch.randn(5, 3)),
}


@pytest.mark.parametrize("name", DRAWING)
def test_a_row_gets_the_same_draws_in_any_part_of_a_batch(name: str) -> None:
    draw, rows = DRAWING[name]
    with FixedDraws() as draws:
        whole = draw(rows)
        parts = torch.cat([draw(rows[:1]), draw(rows[1:])])
    torch.testing.assert_close(parts, whole)
    assert draws.seen
    torch.manual_seed(0)
    assert not torch.allclose(draw(rows), torch.cat([draw(rows[:1]), draw(rows[1:])]))  # left to chance, they differ


def test_a_generator_of_ones_own_stays_where_it_is() -> None:
    before = OWN.get_state()
    with FixedDraws():
        torch.rand(3, generator=OWN)
        torch.empty(3).normal_(generator=OWN)
    assert torch.equal(OWN.get_state(), before)


def test_rows_that_a_permutation_mixes_still_meet() -> None:
    rows = torch.randn(5, 3)

    def mixed(x: Tensor) -> Tensor:
        return x + x[torch.randperm(len(x))]

    with FixedDraws():
        assert not torch.allclose(mixed(rows), torch.cat([mixed(rows[:2]), mixed(rows[2:])]))


def test_gradients_belong_to_the_values() -> None:
    weight = torch.randn(3, dtype=torch.float64, requires_grad=True)
    with FixedDraws():
        assert torch.autograd.gradcheck(lambda w: F.dropout(w.expand(4, 3), 0.3), (weight,))


def test_half_precision_is_noticed() -> None:
    with FixedDraws() as draws:
        torch.ones(2, 2) @ torch.ones(2, 2)
        assert not draws.half
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.ones(2, 2) @ torch.ones(2, 2)
    assert draws.half


class Hidden(nn.Module):
    """A BatchNorm that no module knows of."""

    layer = staticmethod(nn.BatchNorm1d(3))

    def forward(self, x: Tensor) -> Tensor:
        return type(self).layer(x)


NORMALISING = {
    "registered": nn.BatchNorm1d(3),
    "hidden": Hidden(),
    "without statistics": nn.BatchNorm1d(3, track_running_stats=False),
    "function": lambda x: F.batch_norm(x, None, None, training=True),
    "torch's own": lambda x: torch.batch_norm(x, None, None, None, None, True, 0.1, 1e-5, False),
}


@pytest.mark.parametrize("normalise", NORMALISING.values(), ids=NORMALISING)
def test_batch_norm_is_seen_wherever_it_stands_and_rows_do_not_meet_in_it(
    normalise: Callable[[Tensor], Tensor],
) -> None:
    rows = torch.randn(5, 3)
    with NormWatch(hold=True) as watch:
        whole, parts = normalise(rows), torch.cat([normalise(rows[:2]), normalise(rows[2:])])
    torch.testing.assert_close(parts, whole)
    assert len(watch.seen) == 3
    assert not torch.allclose(normalise(rows), torch.cat([normalise(rows[:2]), normalise(rows[2:])]))


def test_layers_that_normalise_within_a_row_are_not_noted() -> None:
    with NormWatch(hold=True) as watch:
        nn.GroupNorm(1, 3)(torch.randn(5, 3))
        nn.InstanceNorm1d(3)(torch.randn(5, 3, 4))
        nn.BatchNorm1d(3).eval()(torch.randn(5, 3))
    assert not watch.seen


def test_a_compiled_function_runs_as_it_was_written() -> None:
    calls: list[int] = []

    def plain(x: Tensor) -> Tensor:
        calls.append(len(x))
        return F.dropout(x, 0.5)

    compiled = torch.compile(plain, backend="eager")
    with uncompiled(), FixedDraws() as draws:
        for rows in range(2, 12):
            compiled(torch.ones(rows, 2))
    assert calls == [*range(2, 12)] and draws.seen == {"bernoulli"}
