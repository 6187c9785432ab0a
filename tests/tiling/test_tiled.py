"""Blocks over tiles of positions and a loss without logits: the plain gradient, in less memory, and nothing silent."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import wholebatch as wb
from tests.oracle import assert_differs, assert_same_gradient, gradients_of, whole_batch
from wholebatch.errors import LossError
from wholebatch.model.memory import SavedBytes, offloaded

WIDTH = 8


def feed_forward(dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 6 * WIDTH), nn.GELU(), nn.Dropout(dropout), nn.Linear(6 * WIDTH, WIDTH))


class Mixing(nn.Module):
    """Positions of a row meet in its middle."""

    def __init__(self, how: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.how = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), how

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.how(self.first(x)))
        return out


class Net(nn.Module):
    """One block between what is alike for all, with attention of a kind before it."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(5, WIDTH), block

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x + x.cumsum(1) / 10
        out: Tensor = x + self.block(x)
        return out


def net(block: nn.Module | None = None, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net(feed_forward() if block is None else block).double()


ROWS = torch.randn(3, 50, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def squares(model: nn.Module, rows: Tensor) -> Tensor:
    out: Tensor = model(rows).square().mean()
    return out


@pytest.mark.parametrize("positions", [1, 7, 50, 64, None])
def test_tiles_of_any_size_have_the_whole_row_s_gradient(positions: int | None) -> None:
    model = net()
    reference = whole_batch(model, squares, ROWS)
    with wb.tiled(model, positions=positions) as handle:
        squares(model, ROWS).backward()
        assert handle.names == ["block"]
    assert_same_gradient(model, reference)


def test_what_waits_for_the_backward_is_a_tile_s() -> None:
    model, rows = net(), torch.randn(1, 4000, 5, dtype=torch.float64)
    ignored = list(model.parameters())
    with SavedBytes(ignored=ignored) as plain:
        squares(model, rows).backward()
    with wb.tiled(model, positions=50), SavedBytes(ignored=ignored) as saved:
        squares(model, rows).backward()
    hidden = rows[..., :1].nbytes * WIDTH
    assert plain.peak > 10 * hidden
    assert saved.peak < 6 * hidden


class Masks(TorchDispatchMode):
    """Keeps what dropout draws."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drawn: list[Tensor] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if "bernoulli" in function.name():
            self.drawn.append(result.clone())
        return result


def test_dropout_of_a_tile_is_drawn_again_and_differs_from_tile_to_tile() -> None:
    model = net(feed_forward(0.5))
    twin = copy.deepcopy(model)
    with wb.tiled(model, positions=10) as handle:
        squares(model, ROWS)
        assert handle.names == ["block"]
        with Masks() as seen:
            loss = squares(model, ROWS)
            forward = list(seen.drawn)
            loss.backward()
    again = seen.drawn[5:]
    assert len(forward) == len(again) == 5
    assert all(any(torch.equal(a, b) for b in forward) for a in again)
    assert not any(torch.equal(forward[0], other) for other in forward[1:])

    model.zero_grad()
    with wb.tiled(model, positions=10):
        torch.manual_seed(3)
        with Masks() as drawn:
            squares(model, ROWS).backward()
    mask = torch.cat(drawn.drawn[:5], dim=1).bool()  # the gradient is that of these very masks
    twin.block[2] = Masked(mask)  # type: ignore[index]
    reference = whole_batch(twin, squares, ROWS)
    assert_same_gradient(model, reference)
    twin.block[2] = Masked(mask.flip(1))  # type: ignore[index]
    assert_differs(twin_gradients(twin), reference)


class Masked(nn.Module):
    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask * 2


def twin_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    model.zero_grad()
    squares(model, ROWS).backward()
    return gradients_of(model)


MEET: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x - x.mean(1, keepdim=True),
    "softmax over positions": lambda x: x.softmax(1),
    "neighbours": lambda x: x + x.roll(1, 1),
    "next but 100": lambda x: x + x.roll(30, 1),
    "sorted": lambda x: x.sort(1).values,
    "in value alone": lambda x: x + x.detach().mean(1, keepdim=True),
    "position's number": lambda x: x * torch.arange(x.shape[1], dtype=x.dtype)[:, None],
    "one mask": lambda x: x * F.dropout(torch.ones_like(x[:, :1]), 0.5),
    "number of positions": lambda x: x / x.shape[1],
}


@pytest.mark.parametrize("how", MEET.values(), ids=MEET)
def test_a_block_in_which_positions_meet_is_left_alone_and_said(how: Callable[[Tensor], Tensor]) -> None:
    model = net(Mixing(how))
    torch.manual_seed(7)
    reference = whole_batch(model, squares, ROWS)
    with wb.tiled(model, positions=10) as handle:
        torch.manual_seed(7)
        squares(model, ROWS).backward()
        assert handle.names == [] and "block" in handle.left_alone
        assert "left alone, as" in repr(handle) and "block" in repr(handle)
    assert_same_gradient(model, reference)


def test_a_block_in_which_positions_meet_would_be_wrong_in_tiles() -> None:
    model = net(Mixing(MEET["mean"]))
    reference = whole_batch(model, squares, ROWS)
    own = model.block.forward
    model.block.forward = lambda x: torch.cat([own(part) for part in x.split(10, 1)], 1)  # type: ignore[method-assign]
    squares(model, ROWS).backward()
    assert_differs(model, reference)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = feed_forward(), 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen: Tensor = self.seen + x.detach().abs().sum()
        out: Tensor = self.inner(x)
        return out


def test_what_keeps_something_of_what_it_saw_is_left_alone_and_what_it_holds_is_not() -> None:
    model = net(Counting())
    plain = copy.deepcopy(model)
    with wb.tiled(model, positions=10) as handle:
        squares(model, ROWS).backward()
        assert "changes" in handle.left_alone["block"]
        assert handle.names == ["block.inner"]
    squares(plain, ROWS).backward()
    assert model.block.calls == plain.block.calls == 1
    assert torch.equal(model.block.seen, plain.block.seen)  # type: ignore[arg-type]
    assert_same_gradient(model, gradients_of(plain))


def test_a_block_that_shows_nothing_yet_is_left_alone() -> None:
    model = net(feed_forward())
    for parameter in model.block[3].parameters():  # type: ignore[index]
        parameter.data.zero_()
        parameter.requires_grad_(False)
    with wb.tiled(model, positions=10) as handle:
        squares(model, ROWS).backward()
        assert "show nothing" in handle.left_alone["block"]


def test_batch_norm_is_left_alone_in_training_and_runs_in_tiles_in_evaluation() -> None:
    class Over(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.norm, self.b = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.b(self.norm(self.a(x).transpose(1, 2)).transpose(1, 2))
            return out

    model = net(Over())
    with wb.tiled(model, positions=10) as handle:
        squares(model, ROWS).backward()
        assert "block" in handle.left_alone
        assert int(model.block.norm.num_batches_tracked) == 1  # type: ignore[union-attr, arg-type]
        squares(model.eval(), ROWS).backward()
        assert handle.names == ["block"]


def test_hooks_inside_see_all_positions_and_hooks_at_the_block_stay() -> None:
    model, shapes = net(), []
    model.block.register_forward_hook(lambda module, given, out: shapes.append(tuple(out.shape)))
    with wb.tiled(model, positions=10) as handle:
        squares(model, ROWS).backward()
        assert handle.names == ["block"] and shapes == [(3, 50, WIDTH)]
        model.block[0].register_forward_hook(lambda module, given, out: shapes.append(tuple(out.shape)))  # type: ignore[index]
        squares(model, ROWS).backward()
    assert shapes[1:] == [(3, 50, 6 * WIDTH), (3, 50, WIDTH)]


def test_removing_it_leaves_no_trace() -> None:
    model = net()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    keys = list(model.state_dict())
    with wb.tiled(model) as handle:
        assert list(model.state_dict()) == keys
        squares(model, ROWS).backward()
        with pytest.raises(ValueError, match="runs over tiles already"):
            wb.tiled(model)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert repr(handle) == "Tiled(removed)"


def test_what_cannot_be_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match="no block that could run over tiles"):
        wb.tiled(nn.Linear(3, 3))
    with pytest.raises(ValueError, match=r"no module 'blok'.*block"):
        wb.tiled(net(), ["blok"])
    with pytest.raises(ValueError, match="positions is 0"):
        wb.tiled(net(), positions=0)
    with pytest.raises(TypeError, match="positions is"):
        wb.tiled(net(), positions=2.5)  # type: ignore[arg-type]


def test_a_copy_of_a_tiled_model_is_tiled_by_itself() -> None:
    model = net()
    reference = whole_batch(model, squares, ROWS)
    wb.tiled(model, positions=10)
    twin = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data.zero_()
    squares(twin, ROWS).backward()
    assert_same_gradient(twin, reference)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_the_first_window_is_proven_and_micro_batches_add_up(dropout: float) -> None:
    model = net(feed_forward(dropout))
    reference = whole_batch(model, squares, ROWS)
    with wb.tiled(model, positions=16):
        result = wb.backward(model, lambda m, x: m(x).square().mean((1, 2)), ROWS, micro_batch_size=2)
    assert "agree" in str(result.verified)
    if not dropout:
        assert_same_gradient(model, reference)


@pytest.mark.parametrize("norm_first", [False, True])
def test_the_feed_forward_of_torch_s_own_layers(norm_first: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 6 * WIDTH, 0.0, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double()
    rows = torch.randn(2, 40, WIDTH, dtype=torch.float64)
    reference = whole_batch(model, squares, rows)
    with wb.tiled(model, positions=10) as handle:
        squares(model, rows).backward()
        assert handle.names == ["layers.0._ff_block", "layers.1._ff_block"]
    assert_same_gradient(model, reference)
    assert "_ff_block" not in vars(model.layers[0])


def test_tiles_checkpointing_and_tensors_on_the_host_compose() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[Net(feed_forward()) if i == 0 else nn.Sequential(feed_forward()) for i in range(4)])
    model = model.double()
    reference = whole_batch(model, squares, ROWS)
    with wb.checkpointed(model, ["1", "2"]), wb.tiled(model, positions=10), offloaded(model, True):
        squares(model, ROWS).backward()
    assert_same_gradient(model, reference)
    model.zero_grad()
    with wb.tiled(model, positions=10), wb.checkpointed(model, ["1", "2"]):
        wb.backward(model, lambda m, x: m(x).square().mean((1, 2)), ROWS, 1, offload=True)
    assert_same_gradient(model, reference)
    model.zero_grad()
    with wb.tiled(model, positions=10):
        checkpoint(lambda x: squares(model, x), ROWS.clone().requires_grad_(), use_reentrant=True).backward()
    assert_same_gradient(model, reference)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_a_compiled_model_leaves_tiles_out_of_its_graph() -> None:
    model = net()
    reference = whole_batch(model, squares, ROWS)
    with wb.tiled(model, positions=10) as handle:
        squares(torch.compile(model, backend="eager"), ROWS).backward()  # type: ignore[arg-type]
        assert handle.names == ["block"]
    assert_same_gradient(model, reference)


SIZES = {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"num_key_value_heads": 2}),
    "qwen": ("Qwen2", {"num_key_value_heads": 2}),
    "mistral": ("Mistral", {"num_key_value_heads": 2}),
    "gemma": ("Gemma2", {"num_key_value_heads": 2, "head_dim": 8, "final_logit_softcapping": 0.5}),
    "granite": ("Granite", {"num_key_value_heads": 2, "logits_scaling": 8.0}),
    "cohere": ("Cohere", {"num_key_value_heads": 2}),
    "gpt-neox": ("GPTNeoX", {}),
    "gpt-2": ("GPT2", {"n_embd": 16, "n_layer": 2, "n_head": 2}),
}


def language_model(kind: str) -> Any:
    transformers = pytest.importorskip("transformers")
    name, options = KINDS[kind]
    sizes = {} if kind == "gpt-2" else SIZES
    config = getattr(transformers, f"{name}Config")(
        vocab_size=331, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0, **sizes, **options
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}LMHeadModel" if kind == "gpt-2" else f"{name}ForCausalLM")(config)
    return model.double().eval()


def texts() -> dict[str, Tensor]:
    ids = torch.randint(3, 331, (3, 60), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, 20:] = -100
    return {"input_ids": ids, "labels": labels}


def own_loss(model: Any, batch: Any) -> Tensor:
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


@pytest.mark.parametrize("kind", KINDS)
def test_the_own_loss_of_a_causal_model_has_no_logits_and_its_gradient(kind: str) -> None:
    model, batch = language_model(kind), texts()
    reference = whole_batch(model, own_loss, batch)
    with wb.tiled(model, positions=16) as handle:
        outputs = model(**batch)
        outputs.loss.backward()
        assert sum("mlp" in name for name in handle.names) == 2 and len(handle.names) == 3
        with pytest.raises(LossError, match=r"Logits were not made.*head=False"):
            outputs.logits.argmax(-1)
        with pytest.raises(LossError, match="Logits were not made"):
            torch.softmax(outputs.logits, -1)
        with torch.no_grad():
            assert model(**batch).logits.shape == (3, 60, 331)
        assert isinstance(model(input_ids=batch["input_ids"]).logits, Tensor)
    assert_same_gradient(model, reference)
    assert abs(float(outputs.loss.detach() - reference.loss)) < 1e-12 * float(reference.loss)


@pytest.mark.parametrize("kind", ["llama", "gpt-2"])
def test_a_window_of_a_causal_model_is_exact_and_saves_less(kind: str) -> None:
    model, batch = language_model(kind), texts()
    reference = whole_batch(model, own_loss, batch)

    def loss(model: Any, batch: Any) -> Any:
        return wb.from_mean(model(**batch).loss, (batch["labels"][:, 1:] != -100).sum())

    with SavedBytes(ignored=list(model.parameters())) as plain:
        wb.backward(model, loss, batch, 2)
    with wb.tiled(model, positions=16), SavedBytes(ignored=list(model.parameters())) as saved:
        model.zero_grad()
        result = wb.backward(model, loss, batch, 2)
    assert "agree" in str(result.verified)
    assert_same_gradient(model, reference, tol=2e-6)  # some layers compute in single precision whatever they are given
    assert saved.peak < 0.7 * plain.peak

    model.zero_grad()
    with wb.tiled(model, positions=16):
        for part in (slice(0, 2), slice(2, 3)):
            (model(**{name: leaf[part] for name, leaf in batch.items()}).loss / 2).backward()
    assert_differs(model, reference)


def test_another_loss_of_the_model_is_tried_and_left_with_its_logits() -> None:
    model, batch = language_model("llama"), texts()

    def focal(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
        each = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none")
        return ((1 - (-each).exp()) * each).mean()

    def written(model: Any, batch: Any) -> Tensor:
        return focal(model(input_ids=batch["input_ids"]).logits, batch["labels"], 331)

    model.loss_function = focal
    reference = whole_batch(model, written, batch)
    with wb.tiled(model) as handle:
        model(**batch).loss.backward()
        assert "focal is another loss" in handle.left_alone["lm_head"]
    assert model.loss_function is focal
    assert_same_gradient(model, reference)


def test_the_items_of_a_window_and_shifted_labels_reach_the_loss() -> None:
    model, batch = language_model("llama"), texts()
    shifted = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    with wb.tiled(model):
        loss = model(**batch).loss.detach()
        summed = model(**batch, num_items_in_batch=torch.tensor(7)).loss.detach()
        again = model(**batch, shift_labels=shifted).loss.detach()
    assert torch.allclose(summed * 7, loss * (shifted != -100).sum(), rtol=1e-12)
    assert torch.allclose(loss, again, rtol=1e-12)


def test_a_model_s_signature_and_class_stay_and_removal_restores_it() -> None:
    model = language_model("llama")
    before = inspect.signature(model.forward)
    held = {name: set(vars(module)) for name, module in model.named_modules()}
    with wb.tiled(model):
        assert inspect.signature(model.forward) == before
        model(**texts()).loss.backward()
    assert {name: set(vars(module)) for name, module in model.named_modules()} == held
