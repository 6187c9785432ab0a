"""Checkpointed blocks give the very same gradient, move buffers once, and save less."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import wholebatch as wb
from tests.oracle import assert_same_gradient, gradients_of
from wholebatch.model.checkpointing import checkpointed, find_blocks
from wholebatch.model.memory import SavedBytes


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


class Deep(nn.Module):
    """Blocks that keep far more than they hand on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 8)) for _ in range(6)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


needs_to_ask = pytest.mark.skipif(
    not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"),
    reason="torch 2.8 tells which hooks are in force",
)


@needs_to_ask
def test_the_block_that_is_computed_again_counts_too() -> None:
    model, rows = Deep(), torch.randn(16, 8)
    ignored = list(model.parameters())
    with SavedBytes(ignored=ignored) as alone:
        kept = model.blocks[0](rows)
    with checkpointed(model), SavedBytes(ignored=ignored) as saved:
        loss = model(rows).square().sum()
        forward = saved.live
        loss.backward()
    assert kept.shape == rows.shape
    assert forward < alone.peak
    assert 0 <= forward + alone.peak - saved.peak <= 2 * rows.nbytes
    del loss
    assert saved.live == 0


@needs_to_ask
def test_a_budget_that_only_the_second_forward_passes_splits_the_micro_batch() -> None:
    ours, reference = Deep().double(), Deep().double()
    rows, sizes = torch.randn(16, 8, dtype=torch.float64), []
    ignored = list(ours.parameters())

    def squares(model: nn.Module, rows: Tensor) -> Tensor:
        sizes.append(len(rows))
        out: Tensor = model(rows).square()
        return out

    with checkpointed(ours), SavedBytes(ignored=ignored) as whole:
        loss = squares(ours, rows).sum()
        forward = whole.live
        loss.backward()
    ours.zero_grad()
    torch.manual_seed(2)
    with checkpointed(ours), SavedBytes((forward + whole.peak) // 2, ignored):
        assert wb.backward(ours, squares, rows, wb.Auto(16)).micro_batches == 2
    torch.manual_seed(2)
    wb.backward(reference, squares, wb.Window(rows.split(8)))
    assert sizes[1:] == [16, 8, 8, 8, 8]
    assert_same_gradient(ours, gradients_of(reference))


def language_model(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    if name == "GPT-2":
        config = transformers.GPT2Config(
            vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2
        )
        return transformers.GPT2LMHeadModel(config).double().eval()  # type: ignore[no-any-return]
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=64, num_key_value_heads=2, **sizes)
    return transformers.LlamaForCausalLM(config).double().eval()  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["GPT-2", "Llama"])
def test_a_cache_of_keys_and_values_is_not_written_to_twice(name: str) -> None:
    ids = torch.randint(3, 64, (6, 8), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids).index_fill(1, torch.tensor([7]), 0)}

    def loss_fn(model: nn.Module, batch: Any) -> Any:
        return wb.losses.causal_lm(model(**batch).logits, batch["input_ids"])

    model = language_model(name)
    assert model.config.use_cache
    wb.backward(model, loss_fn, batch, 4)
    plain = gradients_of(model)
    model.zero_grad()
    with checkpointed(model):
        wb.backward(model, loss_fn, batch, 4)
    assert_same_gradient(model, plain)
    block = next(iter(find_blocks(model).values()))
    forward = block.forward
    block.forward = lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)
    with pytest.raises(RuntimeError, match="must match the size"):  # the naive way reads every key twice
        wb.backward(model, loss_fn, batch, 4)


def test_a_plan_is_made_for_a_model_that_keeps_keys_and_values() -> None:
    ids = torch.randint(3, 64, (4, 8), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids).index_fill(1, torch.tensor([7]), 0)}
    model = language_model("Llama")
    found = wb.plan(model, lambda m, b: wb.losses.causal_lm(m(**b).logits, b["input_ids"]), batch, memory=10**9)
    assert len(found.measured) > 1
