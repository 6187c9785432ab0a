"""`wb.check` on ranks: each brings its share, and is told of the batch of all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from tests.distributed import Ranks, RanksError

pytestmark = pytest.mark.distributed


def net(normalised: bool) -> nn.Module:
    torch.manual_seed(7)
    middle = nn.BatchNorm1d(6) if normalised else nn.Tanh()
    return nn.Sequential(nn.Linear(5, 6), middle, nn.Dropout(0.3), nn.Linear(6, 3))


def values(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def means(model: nn.Module, batch: Any) -> Any:
    return wb.from_mean(values(model, batch).mean(), items=1)


def one_fails(model: nn.Module, batch: Any) -> Any:
    if dist.get_rank() == 1:
        raise ArithmeticError("the second rank cannot")
    return values(model, batch)


def run(loss_fn: Any, wrapped: bool, choice: Any) -> Any:
    draws = torch.Generator().manual_seed(3)
    whole = torch.randn(11, 5, generator=draws), torch.randint(0, 3, (11,), generator=draws)
    share = tuple(part.split([7, 4])[dist.get_rank()] for part in whole)
    model = DistributedDataParallel(net(choice is not None)) if wrapped else net(choice is not None)
    alone: dict[str, Any] = {} if wrapped else {"sync": "alone"}
    report = wb.check(model, loss_fn, share, 4, batch_norm=choice, **alone)
    return report.verdict, [finding.rule for finding in report.findings], report.notes


def test_the_batch_of_all_ranks_is_what_each_is_compared_with(two_ranks: Ranks) -> None:
    for verdict, _, _ in two_ranks.run(run, values, True, "exact", seconds=90.0):
        assert verdict == "exact"
    for verdict, rules, _ in two_ranks.run(run, values, True, "micro", seconds=90.0):
        assert (verdict, rules) == ("not exact", ["rows-meet"])


def test_a_mean_of_means_over_ranks_is_a_miscount(two_ranks: Ranks) -> None:
    for verdict, rules, _ in two_ranks.run(run, means, True, None, seconds=90.0):
        assert (verdict, rules) == ("not exact", ["items-do-not-add-up"])


def test_a_model_that_is_not_wrapped_says_what_it_was_compared_with(two_ranks: Ranks) -> None:
    for verdict, _, notes in two_ranks.run(run, values, False, None, seconds=90.0):
        assert verdict == "exact"
        assert "not wrapped" in notes[0]


def bare() -> None:
    wb.check(net(False), values, (torch.randn(5, 5), torch.randint(0, 3, (5,))), 4)


def test_a_model_that_is_not_wrapped_is_asked_about_as_by_backward(two_ranks: Ranks) -> None:
    with pytest.raises(RanksError, match='sync="alone"'):
        two_ranks.run(bare, seconds=60.0)


def test_a_rank_that_fails_ends_all_of_them(two_ranks: Ranks) -> None:
    with pytest.raises(RanksError, match="the second rank cannot"):
        two_ranks.run(run, one_fails, True, None, seconds=60.0)


def real(name: str, naive: bool) -> str:
    from tests.verify.test_real_models import MODELS  # transformers is not there everywhere

    case = MODELS[name]
    share = {key: value.split([6, 4])[dist.get_rank()] for key, value in case.batch().items()}
    loss_fn = case.means if naive else case.loss_fn
    return wb.check(DistributedDataParallel(case.make()), loss_fn, share, case.size, **case.options).verdict


@pytest.mark.parametrize("name", ["ResNet", "GPT-2", "Llama"])
def test_a_real_model_with_its_dropout_is_exact_over_two_ranks(two_ranks: Ranks, name: str) -> None:
    pytest.importorskip("transformers")
    assert two_ranks.run(real, name, False, seconds=110.0) == ["exact", "exact"]
    assert two_ranks.run(real, name, True, seconds=110.0) == ["not exact", "not exact"]


def drawn(counted: bool) -> tuple[str, list[str]]:
    def loss_fn(model: nn.Module, batch: Any) -> Any:
        losses = values(model, batch)
        kept = torch.rand(len(losses)) < 0.6
        if counted:
            return wb.mean(losses, kept)
        return wb.from_mean((losses * kept).sum() / kept.sum().clamp(min=1), items=len(losses))

    draws = torch.Generator().manual_seed(3)
    whole = torch.randn(11, 5, generator=draws), torch.randint(0, 3, (11,), generator=draws)
    share = tuple(part.split([7, 4])[dist.get_rank()] for part in whole)
    report = wb.check(DistributedDataParallel(net(False)), loss_fn, share, 3)
    return report.verdict, [finding.rule for finding in report.findings]


def test_a_mean_over_drawn_rows_is_found_over_two_ranks(two_ranks: Ranks) -> None:
    assert two_ranks.run(drawn, False, seconds=90.0) == [("not exact", ["draws-mix-rows"])] * 2
    assert two_ranks.run(drawn, True, seconds=90.0) == [("exact", [])] * 2
