"""Checkpointed blocks give the very same gradient, move buffers once, and save less."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import wholebatch as wb
from wholebatch.checkpointing import checkpointed, find_blocks
from wholebatch.memory import SavedBytes


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.dropout = nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Dropout(0.4)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        out: Tensor = x + scale * self.dropout(torch.tanh(self.linear(self.norm(x))))
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.small = nn.Sequential(nn.Linear(8, 2), nn.Linear(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, scale=0.5)
        out: Tensor = self.small(x)
        return out


ROWS = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))


def trained(model: nn.Module) -> tuple[list[Tensor], dict[str, Tensor], float]:
    torch.manual_seed(5)
    loss = model(ROWS).square().sum()
    loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None], dict(model.named_buffers()), torch.rand(1).item()


def test_gradients_buffers_and_draws_are_bit_equal() -> None:
    plain, again = Net(), Net()
    with checkpointed(again, "Block") as handle:
        ours = trained(again)
    theirs = trained(plain)
    assert handle.names == ["blocks.0", "blocks.1", "blocks.2"]
    assert all(torch.equal(a, b) for a, b in zip(ours[0], theirs[0], strict=True))
    assert all(torch.equal(ours[1][name], theirs[1][name]) for name in theirs[1])
    assert ours[2] == theirs[2]


def test_torch_alone_moves_batch_norm_twice() -> None:
    block = Block()
    checkpoint(block, torch.randn(6, 8, requires_grad=True), use_reentrant=False).sum().backward()
    assert int(block.norm.num_batches_tracked) == 2  # type: ignore[arg-type]


def test_less_is_saved() -> None:
    plain, again = Net(), Net()
    with SavedBytes() as without:
        plain(ROWS)
        kept = plain(ROWS)
    with checkpointed(again), SavedBytes() as with_:
        held = again(ROWS)
    assert with_.peak < 0.7 * without.peak / 2
    assert kept.shape == held.shape


@pytest.mark.parametrize("blocks", [None, "Block", Block, ["blocks.0", "blocks.2"]], ids=str)
def test_blocks_are_found_by_class_name_or_size(blocks: Any) -> None:
    names = checkpointed(Net(), blocks).names
    assert names == (["blocks.0", "blocks.2"] if isinstance(blocks, list) else ["blocks.0", "blocks.1", "blocks.2"])


def test_the_blocks_of_a_plain_stack_are_its_layers() -> None:
    stack = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    assert list(find_blocks(stack)) == ["0", "2"]
    assert find_blocks(nn.Linear(3, 3)) == {}


def test_removing_it_leaves_no_trace() -> None:
    model = Net()
    before = set(vars(model.blocks[0]))
    checkpointed(model).remove()
    assert set(vars(model.blocks[0])) == before


@pytest.mark.parametrize(("model", "blocks"), [(Net(), "Layer"), (nn.Linear(2, 2), None)], ids=["unknown", "none"])
def test_blocks_that_are_not_there_are_refused(model: nn.Module, blocks: Any) -> None:
    with pytest.raises(ValueError, match="The model has no"):
        checkpointed(model, blocks)


def test_twice_is_refused() -> None:
    model = Net()
    checkpointed(model)
    with pytest.raises(ValueError, match="already"):
        checkpointed(model)


def test_a_window_over_a_checkpointed_model_is_bit_equal() -> None:
    plain, again = Net(), Net()

    def run(model: nn.Module) -> None:
        torch.manual_seed(2)
        wb.backward(model, lambda model, rows: model(rows).square(), ROWS, 3, batch_norm="micro")

    run(plain)
    with checkpointed(again):
        run(again)
    for a, b in zip(plain.parameters(), again.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        assert torch.equal(a.grad, b.grad)
