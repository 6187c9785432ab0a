"""The program's own networks: what they see, and what they must not."""

from __future__ import annotations

import pytest
import torch

from wholebatch.train import ConfigError
from wholebatch.train.model import Decoder, classifier, parameters_of, rotate, turns


def decoder() -> Decoder:
    return Decoder(vocabulary=11, width=16, layers=2, heads=2).double()


def test_no_position_sees_a_later_one() -> None:
    model, tokens = decoder(), torch.randint(11, (2, 9))
    later = tokens.clone()
    later[:, 5:] = torch.randint(11, (2, 4))
    assert torch.equal(model(tokens)[:, :5], model(later)[:, :5])
    assert not torch.equal(model(tokens)[:, 5:], model(later)[:, 5:])


def test_padding_on_the_right_changes_nothing() -> None:
    model, tokens = decoder(), torch.randint(11, (1, 6))
    padded = torch.cat([tokens, torch.zeros(1, 5, dtype=torch.long)], dim=1)
    torch.testing.assert_close(model(padded)[:, :6], model(tokens))


def test_a_position_sees_the_order_of_those_before_it() -> None:
    model = decoder()
    one, other = model(torch.tensor([[1, 2, 3]])), model(torch.tensor([[2, 1, 3]]))
    assert not torch.allclose(one[:, -1], other[:, -1])


def test_turned_features_meet_by_their_distance_alone() -> None:
    turn = turns(12, 8)
    query, key = torch.randn(2, 8, dtype=torch.float64)
    products = rotate(query.expand(12, 8), turn) @ rotate(key.expand(12, 8), turn).T
    torch.testing.assert_close(products.diagonal(3), products.diagonal(3)[:1].expand(9))
    assert not torch.isclose(products[0, 3], products[0, 4])


def test_heads_that_cannot_share_the_width_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"A width of 20 gives 3 heads no even share\. Choose a multiple of 6"):
        Decoder(vocabulary=11, width=20, layers=1, heads=3)


@pytest.mark.parametrize("shape", [(5,), (1, 8, 8), (3, 32, 20), (3, 2, 2)], ids=str)
@pytest.mark.parametrize("layers", [1, 3, 6])
def test_a_classifier_takes_rows_of_any_shape_and_never_lets_them_meet(shape: tuple[int, ...], layers: int) -> None:
    model = classifier(torch.Size(shape), classes=4, width=6, layers=layers).double()
    rows = torch.randn(3, *shape, dtype=torch.float64)
    together = model(rows)
    assert together.shape == (3, 4)
    torch.testing.assert_close(together, torch.cat([model(row[None]) for row in rows]))


def test_a_shared_parameter_counts_once() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    assert parameters_of(model) == 4
