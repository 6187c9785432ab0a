"""Each row draws for itself: drawn counts and drawn partners are refused, drawn noise is let pass, the rest is said."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import assert_differs, assert_same_gradient, whole_batch
from torch import Tensor, nn

import wholebatch as wb
from wholebatch.errors import InexactError
from wholebatch.first_window.draws import FixedDraws
from wholebatch.first_window.levels import Draw, RowNumbers

D = torch.float64


def linear() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(5, 3).double()


def batch(rows: int = 24) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(rows, 7, 5, dtype=D), "some": torch.rand(rows, 7) < 0.5}


def tokens(model: Any, batch: Any) -> Tensor:
    return model(batch["x"]).square().sum(-1)


def noised(model: Any, x: Tensor) -> Tensor:
    return tokens(model, {"x": x + torch.randn_like(x)})


# Wrong: a mean over a drawn number, and drawn partners.


def masked(model: Any, batch: Any) -> wb.LossSum:
    values = tokens(model, batch)
    mask = torch.rand(values.shape) < 0.3
    return wb.from_mean(values[mask].sum() / mask.sum(), items=len(values))


def masked_and_averaged(model: Any, batch: Any) -> wb.LossSum:
    values = tokens(model, batch)
    mask = torch.bernoulli(torch.full(values.shape, 0.3))
    return wb.mean((values * mask).sum(1) / mask.sum() * len(values))


def rows_left_out(model: Any, batch: Any) -> wb.LossSum:
    values = tokens(model, batch).mean(1)
    kept = torch.rand(len(values)) < 0.5
    return wb.from_mean((values * kept).sum() / kept.sum().clamp(min=1), items=len(values))


def mixed(model: Any, batch: Any, partner: Tensor) -> Tensor:
    return tokens(model, {"x": 0.7 * batch["x"] + 0.3 * batch["x"][partner]}).mean(1)


def others(model: Any, batch: Any) -> Tensor:
    said = model(batch["x"]).mean(1)
    return (said[:, None] * said[torch.randint(0, len(said), (len(said), 4))]).sum(-1).logsumexp(1)


WRONG: dict[str, Callable[[Any, Any], Any]] = {
    "a mean over a random mask": masked,
    "values over a random mask's places": masked_and_averaged,
    "a mean over rows left by chance": rows_left_out,
    "a shuffle": lambda m, b: mixed(m, b, torch.rand(len(b["x"])).argsort()),
    "a shuffle, downwards": lambda m, b: mixed(m, b, torch.rand(len(b["x"])).argsort(descending=True)),
    "a permutation": lambda m, b: mixed(m, b, torch.randperm(len(b["x"]))),
    "partners": lambda m, b: mixed(m, b, torch.randint(0, len(b["x"]), (len(b["x"]),))),
    "weighted partners": lambda m, b: mixed(m, b, torch.multinomial(torch.ones(len(b["x"])), len(b["x"]))),
    "negatives": others,
}


@pytest.mark.parametrize("size", [8, 3, 2])
@pytest.mark.parametrize("name", WRONG)
def test_what_counts_or_pairs_rows_by_chance_is_refused(name: str, size: int) -> None:
    model, loss_fn, rows = linear(), WRONG[name], batch()
    before = torch.get_rng_state()
    with pytest.raises(InexactError, match=r"Rows meet|of their own"):
        wb.backward(model, loss_fn, rows, size)
    assert torch.equal(torch.get_rng_state(), before)
    assert wb.check(model, loss_fn, rows, size).verdict == "not exact"


def test_a_refused_mask_names_its_line_and_the_call_that_mends_it() -> None:
    with pytest.raises(InexactError, match=r"rand \(in masked, .*line \d+\).*wb\.mean\(values, mask\)"):
        wb.backward(linear(), masked, batch(), 8)
    report = wb.check(linear(), masked, batch(), 8)
    assert [finding.rule for finding in report.findings] == ["draws-mix-rows"] and "in masked" in str(report)


def given(model: Any, batch: Any) -> wb.LossSum:
    """As `masked`, with the mask drawn beforehand: so the whole batch has one to be held against."""
    values, mask = tokens(model, batch), batch["some"]
    return wb.from_mean(values[mask].sum() / mask.sum(), items=len(values))


def test_a_mean_over_a_random_mask_is_another_in_micro_batches() -> None:
    model, rows = linear(), batch()
    reference = whole_batch(model, lambda m, b: tokens(m, b)[b["some"]].mean(), rows)
    wb.backward(model, given, rows, 5, verify="never")
    assert_differs(model, reference)
    model.zero_grad()
    wb.backward(model, lambda m, b: wb.mean(tokens(m, b), b["some"]), rows, 5)
    assert_same_gradient(model, reference)


def test_rows_that_are_shuffled_in_micro_batches_have_other_partners() -> None:
    model, rows, order = linear(), batch(), torch.randperm(24)
    reference = whole_batch(model, lambda m, b: mixed(m, b, order).mean(), rows)
    wb.backward(model, lambda m, b: mixed(m, b, torch.randperm(len(b["x"]))), rows, 6, verify="never")
    assert_differs(model, reference)
    model.zero_grad()
    rows["x"] = 0.7 * rows["x"] + 0.3 * rows["x"][order]
    wb.backward(model, lambda m, b: tokens(m, b).mean(1), rows, 6)
    assert_same_gradient(model, reference)


# Right: noise, masks that are counted, choices within a row.


def counted(model: Any, batch: Any) -> wb.LossSum:
    values = tokens(model, batch)
    return wb.mean(values, torch.rand(values.shape) < 0.3)


def counted_by_hand(model: Any, batch: Any) -> wb.LossSum:
    values = tokens(model, batch)
    mask = torch.rand(values.shape) < 0.5
    return wb.from_mean(values[mask].mean(), items=mask.sum())


def places_within_a_row(model: Any, batch: Any) -> Tensor:
    x = batch["x"]
    chosen = torch.rand(x.shape[:2]).argsort(1)[:, :3, None]
    return tokens(model, {"x": x.gather(1, chosen.expand(-1, -1, 5))}).mean(1)


def sampled(model: Any, batch: Any) -> Tensor:
    likely = torch.distributions.Categorical(logits=model(batch["x"]).mean(1))
    return -likely.log_prob(likely.sample())


def times_and_noise(model: Any, batch: Any) -> Tensor:
    return noised(model, batch["x"] * torch.randint(1, 9, (len(batch["x"]), 1, 1))).mean(1)


def two_views(model: Any, batch: Any) -> Tensor:
    one, two = noised(model, torch.cat([batch["x"], batch["x"]])).mean(1).chunk(2)
    return (one - two).square()


RIGHT: dict[str, Callable[[Any, Any], Any]] = {
    "a mask that is counted": counted,
    "a mask whose count is stated": counted_by_hand,
    "places within a row": places_within_a_row,
    "sampled classes": sampled,
    "time steps and noise": times_and_noise,
    "rows behind time": lambda m, b: noised(m, b["x"].transpose(0, 1)).mean(0),
    "rows and time in one dimension": lambda m, b: noised(m, b["x"].flatten(0, 1)).view(-1, 7).mean(1),
    "two views": two_views,
}


@pytest.mark.parametrize("size", [8, 2])
@pytest.mark.parametrize("name", RIGHT)
def test_what_a_row_draws_for_itself_is_verified(name: str, size: int) -> None:
    said = wb.backward(linear(), RIGHT[name], batch(), size).verified
    assert said.endswith("items exactly, each row with draws of its own"), said
    if name != "two views":  # which are alike where draws are held still, so that there is no gradient
        assert wb.check(linear(), RIGHT[name], batch(), size).verdict == "exact"


# Neither: drawn once for all rows, or for nobody knows whom.


class NoisyWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.inner.weight + 0.1 * torch.randn_like(self.inner.weight))


def one_time(model: Any, batch: Any) -> Tensor:
    return tokens(model, {"x": batch["x"] * torch.randint(1, 1000, ())}).mean(1)


def by_chance(model: Any, batch: Any) -> Tensor:
    return tokens(model, {"x": batch["x"] * (1.0 if torch.rand(()) < 0.5 else 2.0)}).mean(1)


SHARED: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Any], Any]]] = {
    "one time step": (linear, one_time),
    "noise on a weight": (NoisyWeight, lambda m, b: tokens(m, b).mean(1)),
    "a layer by chance": (linear, by_chance),
    "one mask for all rows": (linear, lambda m, b: (tokens(m, b) * (torch.rand(7) < 0.5)).sum(1)),
}


@pytest.mark.parametrize("name", SHARED)
def test_what_is_drawn_once_for_all_rows_is_said(name: str) -> None:
    make, loss_fn = SHARED[name]
    said = wb.backward(make(), loss_fn, batch(), 8).verified
    assert said.startswith("verified on 8 rows") and "drawn once for all rows of a micro-batch" in said, said
    report = wb.check(make(), loss_fn, batch(), 8)
    assert report.verdict == "not shown" and "drawn once for all rows" in report.not_shown[0]


def test_one_time_step_for_a_micro_batch_is_not_one_for_the_batch() -> None:
    model, rows = linear(), batch()
    torch.manual_seed(5)
    time = torch.randint(1, 1000, ())
    reference = whole_batch(model, lambda m, b: tokens(m, {"x": b["x"] * time}).mean(), rows)
    torch.manual_seed(5)
    wb.backward(model, one_time, rows, 8, verify="never")
    assert_differs(model, reference)
    model.zero_grad()
    rows["time"] = time.expand(24, 1, 1)
    wb.backward(model, lambda m, b: tokens(m, {"x": b["x"] * b["time"]}).mean(1), rows, 8)
    assert_same_gradient(model, reference)


def test_a_draw_that_nothing_follows_is_not_worth_a_word() -> None:
    def skips(model: Any, batch: Any) -> Tensor | None:
        return None if torch.rand(()) < 0.0 else tokens(model, batch).mean(1)

    assert "drawn once" not in wb.backward(linear(), skips, batch(), 8).verified
    assert wb.check(linear(), skips, batch(), 8).ok


def noise_on_some(model: Any, batch: Any) -> Tensor:
    return noised(model, batch["x"][batch["some"]])


def row_by_row(model: Any, batch: Any) -> Tensor:
    return torch.stack([noised(model, x).mean() for x in batch["x"]])


@pytest.mark.parametrize("loss_fn", [noise_on_some, row_by_row], ids=["of chosen places", "in a loop over rows"])
def test_noise_that_goes_with_no_row_is_held_still_and_said(loss_fn: Callable[[Any, Any], Any]) -> None:
    said = wb.backward(linear(), loss_fn, batch(), 8).verified
    assert said.startswith("verified on 8 rows") and "randn_like (in noised" in said and "not shown" in said
    report = wb.check(linear(), loss_fn, batch(), 8)
    assert report.verdict == "not shown" and "randn_like" in report.not_shown[0]


def test_a_dropout_of_chosen_places_acts_on_each_number_and_needs_no_word() -> None:
    def loss_fn(model: Any, batch: Any) -> Tensor:
        return tokens(model, {"x": F.dropout(batch["x"][batch["some"]], 0.3)})

    said = wb.backward(linear(), loss_fn, batch(), 8).verified
    assert said.startswith("verified on 8 rows") and "not shown" not in said, said
    assert wb.check(linear(), loss_fn, batch(), 8).ok


def test_a_mask_made_by_dropout_that_is_counted_is_refused() -> None:
    def counts(model: Any, batch: Any) -> wb.LossSum:
        values = tokens(model, batch)
        kept = F.dropout(torch.ones_like(values), 0.7)
        return wb.from_mean((values * kept).sum() / kept.sum(), items=len(values))

    with pytest.raises(InexactError, match="of their own"):
        wb.backward(linear(), counts, batch(), 8)
    assert wb.check(linear(), counts, batch(), 8).verdict == "not exact"


@pytest.mark.parametrize("seed", range(4))
def test_rows_that_pythons_own_numbers_shuffle_are_never_verified_by_chance(seed: int) -> None:
    def shuffled(model: Any, batch: Any) -> Tensor:
        partner = list(range(len(batch["x"])))
        random.shuffle(partner)
        return mixed(model, batch, torch.tensor(partner))

    random.seed(seed)
    assert wb.backward(linear(), shuffled, batch(), 8).verified.startswith("not verified: NumPy's or Python's")


def test_the_detector_finds_rows_that_a_drawn_order_brings_together() -> None:
    found = wb.find_coupling(linear(), WRONG["a shuffle"], batch())
    assert found and not wb.find_coupling(linear(), times_and_noise, batch())


# The numbers themselves.


@pytest.mark.parametrize("shape", [(6,), (6, 4), (3, 6, 2), (12, 4), (5, 6)], ids=str)
def test_a_row_keeps_its_numbers_in_any_part(shape: tuple[int, ...]) -> None:
    draw, numbers, cpu = Draw(0, "rand"), RowNumbers(), torch.device("cpu")
    along = next(d for d, size in enumerate(shape) if size % 6 == 0)
    each = shape[along] // 6
    numbers.begin([10, 11, 12, 13, 14, 15])
    whole = numbers.of(draw, shape, cpu)
    for rows in ([13, 11], [15]):
        numbers.begin(rows)
        part = numbers.of(draw, tuple(len(rows) * each if d == along else size for d, size in enumerate(shape)), cpu)
        places = torch.tensor([(row - 10) * each + entry for row in rows for entry in range(each)])
        assert torch.equal(part, whole.index_select(along, places))
    assert numbers.by_rows and not numbers.shared and bool(numbers.doubtful) == (each > 1)
    assert len(whole.unique()) > whole.numel() // 2


@pytest.mark.parametrize("rows", range(2, 10))
@pytest.mark.parametrize("downwards", [False, True])
def test_of_two_sets_of_numbers_one_at_least_moves_rows(rows: int, downwards: bool) -> None:
    orders = []
    for flipped in (False, True):
        numbers = RowNumbers(flipped)
        with FixedDraws(numbers) as draws:
            draws.begin(range(rows))
            orders.append(torch.rand(rows).argsort(descending=downwards).tolist())
    assert any(order != list(range(rows)) for order in orders)
