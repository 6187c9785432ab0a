"""A head whose logits are never all there: the gradient of the plain loss, whatever the chunk, in a fraction of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import wholebatch as wb
from tests.oracle import assert_differs, assert_same_gradient, gradients_of, whole_batch
from wholebatch.errors import LossError
from wholebatch.losses import causal_lm_head, linear_cross_entropy
from wholebatch.model.memory import SavedBytes

VOCABULARY, WIDTH = 37, 8
ROW = 8 * VOCABULARY
"""Bytes of a token's logits in double precision."""


class Language(nn.Module):
    """A model that returns hidden states, beside a head of its own."""

    def __init__(self, tied: bool = False, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding, self.inner = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = torch.tanh(self.inner(self.embedding(tokens)))
        return out


def batch(rows: int = 7, length: int = 5, ignored: int = -100) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)
    labels = torch.randint(VOCABULARY, (rows, length), generator=generator)
    tokens = labels.clone()
    labels[: rows // 2, 2:] = ignored  # so that micro-batches differ in what counts
    return {"tokens": tokens, "labels": labels}


def plain(model: Any, batch: Any, **options: Any) -> Tensor:
    """The whole batch's loss as it is written down, of all logits at once."""
    cap, scale, z_loss = options.pop("softcap", None), options.pop("scale", 1.0), options.pop("z_loss", 0.0)
    weight, ignored = options.pop("class_weight", None), options.get("ignore_index", -100)
    logits = scale * F.linear(model(batch["tokens"]), model.head.weight, model.head.bias).flatten(0, 1)
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    labels = batch["labels"].flatten()
    counted = labels != ignored
    weight = torch.ones(VOCABULARY) if weight is None else weight
    weights = weight.to(logits)[torch.where(counted, labels, 0)] * counted
    summed = F.cross_entropy(logits, labels, weight.to(logits), reduction="sum", **options)
    total: Tensor = (summed + z_loss * (weights * logits.logsumexp(1).square()).sum()) / weights.sum()
    return total


def ours(**options: Any) -> Callable[[Any, Any], wb.LossSum]:
    def loss(model: Any, batch: Any) -> wb.LossSum:
        return linear_cross_entropy(
            model(batch["tokens"]), model.head.weight, batch["labels"], model.head.bias, **options
        )

    return loss


def naive(model: Any, batch: Any, size: int, **options: Any) -> None:
    """What the usual loop does: each micro-batch's own mean, over their number."""
    starts = range(0, len(batch["tokens"]), size)
    for start in starts:
        part = {name: leaf[start : start + size] for name, leaf in batch.items()}
        (plain(model, part, **options) / len(starts)).backward()


OPTIONS: dict[str, dict[str, Any]] = {
    "bare": {},
    "smoothed": {"label_smoothing": 0.3},
    "weighted": {"class_weight": torch.linspace(0.1, 3, VOCABULARY)},
    "weighted and smoothed": {"class_weight": torch.linspace(0.1, 3, VOCABULARY), "label_smoothing": 0.2},
    "capped": {"softcap": 0.8},
    "scaled": {"scale": 0.125},
    "z-loss": {"z_loss": 0.05},
    "all of it": {
        "class_weight": torch.linspace(0.1, 3, VOCABULARY),
        "label_smoothing": 0.2,
        "softcap": 1.5,
        "scale": 2.0,
        "z_loss": 0.05,
    },
}


@pytest.mark.parametrize("form", ["own", "tied", "bias"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_micro_batches_over_chunks_have_the_whole_batch_s_gradient(options: dict[str, Any], form: str) -> None:
    model, rows = Language(tied=form == "tied", bias=form == "bias").double(), batch()
    reference = whole_batch(model, lambda model, batch: plain(model, batch, **options), rows)
    result = wb.backward(model, ours(memory=4 * ROW, **options), rows, micro_batch_size=3)
    assert_same_gradient(model, reference)
    assert torch.allclose(result.loss, reference.loss, rtol=1e-12)
    assert "agree" in str(result.verified)

    model.zero_grad()
    naive(model, rows, 3, **options)
    assert_differs(model, reference)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_size_of_chunk_and_no_cut_of_the_batch_changes_the_gradient(data: st.DataObject) -> None:
    rows, length = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 5))
    options = data.draw(st.sampled_from(list(OPTIONS.values())))
    memory = data.draw(st.none() | st.integers(1, 40 * ROW))
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32]))
    ignored = data.draw(st.sampled_from([-100, 0, 255]))
    model, given_ = Language(bias=data.draw(st.booleans())), batch(rows, length, ignored)
    options = {**options, "ignore_index": ignored}
    if not bool((given_["labels"] != ignored).any()):
        return
    reference = whole_batch(model, lambda model, batch: plain(model, batch, **options), given_)
    size = data.draw(st.integers(1, rows))
    wb.backward(model.to(dtype), ours(memory=memory, **options), given_, micro_batch_size=size)
    assert_same_gradient(model, reference)


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_causal_head_shifts_its_labels_once(shifted: bool, weighted: bool) -> None:
    weight = torch.linspace(0.1, 3, VOCABULARY).double() if weighted else None
    model, rows = Language().double(), batch()
    if shifted:
        rows["labels"] = F.pad(rows["labels"], (0, 1), value=-100)[:, 1:]

    def loss(model: Any, batch: Any) -> wb.LossSum:
        name = "shift_labels" if shifted else "labels"
        return causal_lm_head(
            model(batch["tokens"]), model.head.weight, **{name: batch["labels"]}, class_weight=weight, memory=5 * ROW
        )

    def truth(model: Any, batch: Any) -> Tensor:
        logits = model.head(model(batch["tokens"]))
        logits, labels = (logits, batch["labels"]) if shifted else (logits[:, :-1], batch["labels"][:, 1:])
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight)

    reference = whole_batch(model, truth, rows)
    wb.backward(model, loss, rows, micro_batch_size=2)
    assert_same_gradient(model, reference)

    model.zero_grad()
    unshifted = {"tokens": rows["tokens"], "labels": batch()["labels"]}
    wb.backward(model, ours(class_weight=weight), unshifted if not shifted else batch(), micro_batch_size=2)
    assert_differs(model, reference)


@pytest.mark.parametrize("frozen", ["head", "model"])
def test_what_is_frozen_has_no_gradient_and_the_rest_its_own(frozen: str) -> None:
    model, rows = Language(bias=True).double(), batch()
    for parameter in (
        model.head.parameters() if frozen == "head" else [*model.inner.parameters(), *model.embedding.parameters()]
    ):
        parameter.requires_grad_(False)
    reference = whole_batch(model, plain, rows)
    wb.backward(model, ours(memory=4 * ROW), rows, micro_batch_size=3)
    assert_same_gradient(model, reference)
    left = {name for name, gradient in gradients_of(model).items() if gradient is None}
    assert left == {name for name, p in model.named_parameters() if not p.requires_grad}


def test_a_term_of_a_sum_shares_the_denominator_of_another_over_the_same_labels() -> None:
    model, rows = Language().double(), batch()

    def two(model: Any, batch: Any) -> Any:
        hidden = model(batch["tokens"])
        head = linear_cross_entropy(hidden, model.head.weight, batch["labels"], memory=4 * ROW)
        return {"head": 3.0 * head, "size": 0.1 * wb.mean(hidden.square().mean(-1))}

    reference = whole_batch(
        model, lambda model, b: 3 * plain(model, b) + 0.1 * model(b["tokens"]).square().mean(), rows
    )
    result = wb.backward(model, two, rows, micro_batch_size=3)
    assert_same_gradient(model, reference)
    assert float(result.items["head"]) == float((rows["labels"] != -100).sum())


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation makes, and counts products of matrices."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numel, self.products = 0, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        made = result if isinstance(result, (tuple, list)) else (result,)
        self.products += "mm" in function.name()
        self.numel = max([self.numel, *(t.numel() for t in made if isinstance(t, Tensor))])
        return result


def test_no_tensor_is_larger_than_a_chunk_or_the_head() -> None:
    hidden, weight = torch.randn(4, 500, WIDTH, requires_grad=True), torch.randn(400, WIDTH, requires_grad=True)
    labels = torch.randint(400, (4, 500))
    with Largest() as seen:
        linear_cross_entropy(hidden, weight, labels, memory=4 * 400 * 20, softcap=None).value.backward()
    assert seen.numel == max(20 * 400, hidden.numel())
    with Largest() as seen:
        F.cross_entropy(F.linear(hidden, weight).flatten(0, 1), labels.flatten()).backward()
    assert seen.numel == 2000 * 400


def test_what_waits_for_the_backward_is_the_gradient_and_a_checkpoint_drops_it() -> None:
    hidden, weight = torch.randn(300, WIDTH, requires_grad=True), torch.randn(400, WIDTH, requires_grad=True)
    labels = torch.randint(400, (300,))

    def loss(hidden: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, labels).value

    with SavedBytes(ignored=[weight, hidden]) as kept:
        value = loss(hidden)
    assert kept.peak < 2 * weight.nbytes + 2 * hidden.nbytes
    with SavedBytes(ignored=[weight, hidden]) as dropped:
        again = checkpoint(loss, hidden, use_reentrant=False)
    assert dropped.live < 100
    expected, found = (torch.autograd.grad(each, (hidden, weight)) for each in (value, again))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def head_and_tokens(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(6)
    hidden, weight = torch.randn(9, WIDTH, dtype=dtype), torch.randn(VOCABULARY, WIDTH, dtype=dtype)
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(VOCABULARY, (9,))


def test_what_comes_in_at_the_loss_multiplies_the_gradient_also_where_a_graph_goes_back_twice() -> None:
    hidden, weight, labels = head_and_tokens()
    value = linear_cross_entropy(hidden, weight, labels, memory=2 * ROW).value
    expected = torch.autograd.grad(F.cross_entropy(F.linear(hidden, weight), labels), (hidden, weight))
    for factor in (3.0, -0.5, 0.0):
        found = torch.autograd.grad(factor * value, (hidden, weight), retain_graph=True)
        for a, b in zip(found, expected, strict=True):
            assert torch.allclose(a, factor * b, rtol=1e-12, atol=1e-15)


def test_a_gradient_of_the_gradient_is_refused_in_words() -> None:
    hidden, weight, labels = head_and_tokens()
    value = linear_cross_entropy(hidden, weight, labels).value
    with pytest.raises(LossError, match=r"create_graph=True.*wb.losses.cross_entropy"):
        torch.autograd.grad(value, hidden, create_graph=True)


def test_values_without_a_gradient_cost_no_backward() -> None:
    hidden, weight, labels = head_and_tokens()
    with torch.no_grad(), Largest() as seen:
        value = linear_cross_entropy(hidden, weight, labels, memory=2 * ROW).value
    assert not value.requires_grad
    assert seen.products == 5  # of 9 tokens, two at a time
    assert torch.allclose(value, F.cross_entropy(F.linear(hidden, weight), labels), rtol=1e-12)


@pytest.mark.parametrize("rows", [0, 3], ids=["no rows", "all ignored"])
def test_a_micro_batch_without_items_adds_nothing(rows: int) -> None:
    hidden, weight, _ = head_and_tokens()
    labels = torch.full((rows, 4), -100)
    term = linear_cross_entropy(hidden[:rows, None].expand(-1, 4, -1), weight, labels, label_smoothing=0.1, z_loss=0.1)
    assert term.count == 0 and float(term.total.detach()) == 0
    gradients = torch.autograd.grad(term.total, (hidden, weight))
    assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in gradients)


@pytest.mark.parametrize("label", [VOCABULARY, -1, 255])
def test_a_label_that_is_no_class_is_named_with_the_argument_that_ignores_it(label: int) -> None:
    hidden, weight, labels = head_and_tokens()
    labels[2] = label
    with pytest.raises(LossError, match=rf"labels hold {label}, but logits have {VOCABULARY} .*ignore_index={label}"):
        linear_cross_entropy(hidden, weight, labels)


def test_bfloat16_is_summed_in_float32() -> None:
    torch.manual_seed(8)
    hidden, weight = torch.randn(600, WIDTH).bfloat16(), torch.randn(VOCABULARY, WIDTH).bfloat16()
    labels = torch.randint(VOCABULARY, (600,))
    exact = [t.double().requires_grad_() for t in (hidden, weight)]
    F.cross_entropy(F.linear(*exact), labels).backward()
    low = [t.clone().requires_grad_() for t in (hidden, weight)]
    term = linear_cross_entropy(low[0], low[1], labels, memory=6 * VOCABULARY * 4)  # 150 chunks of 4 tokens
    assert term.total.dtype is torch.float32
    term.value.backward()
    assert low[1].grad is not None and low[1].grad.dtype is torch.bfloat16
    names = ("hidden", "weight")
    truth = {name: t.grad for name, t in zip(names, exact, strict=True)}
    assert_same_gradient({name: t.grad for name, t in zip(names, low, strict=True)}, truth)

    summed = torch.zeros_like(weight)
    for start in range(0, 600, 4):
        part = low[1].detach().clone().requires_grad_()
        logits = F.linear(hidden[start : start + 4], part).float()
        (F.cross_entropy(logits, labels[start : start + 4], reduction="sum") / 600).backward()
        assert part.grad is not None
        summed += part.grad
    assert_differs({"weight": summed}, {"weight": truth["weight"]})


def test_autocast_multiplies_in_its_own_type_and_keeps_the_sum_in_float32() -> None:
    hidden, weight, labels = head_and_tokens(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        value = linear_cross_entropy(hidden, weight, labels, memory=600).value
        logits = F.linear(hidden, weight)
    assert logits.dtype is torch.bfloat16 and value.dtype is torch.float32
    found = torch.autograd.grad(value, (hidden, weight))
    expected = torch.autograd.grad(F.cross_entropy(logits.float(), labels), (hidden, weight))
    assert torch.allclose(value, F.cross_entropy(logits.float(), labels), rtol=1e-6)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype is torch.float32
        assert float((a - b).norm() / b.norm()) < 1e-2


@pytest.mark.parametrize("name", ["hidden", "weight"])
def test_a_tensor_whose_numbers_lie_elsewhere_is_refused(name: str) -> None:
    hidden, weight, labels = head_and_tokens()
    given_ = {"hidden": hidden, "weight": weight}
    given_[name] = TwoTensor(given_[name].detach(), given_[name].detach())
    with pytest.raises(LossError, match=rf"{name} is a TwoTensor.*full_tensor"):
        linear_cross_entropy(given_["hidden"], given_["weight"], labels)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_what_is_ignored_need_not_be_a_number(options: dict[str, Any]) -> None:
    hidden, weight, labels = head_and_tokens()
    labels[3], clean = -100, hidden.detach().clone().requires_grad_()
    hidden.data[3] = float("nan")
    loss, truth = (linear_cross_entropy(each, weight, labels, memory=2 * ROW, **options) for each in (hidden, clean))
    assert torch.equal(loss.value, truth.value)
    found, expected = (
        torch.autograd.grad(each.value, (leaf, weight)) for each, leaf in ((loss, hidden), (truth, clean))
    )
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))

    labels[3] = 5  # and what counts is not passed over
    assert linear_cross_entropy(hidden, weight, labels, **options).value.isnan()


def test_a_class_that_is_never_said_may_stand_in_for_what_is_ignored() -> None:
    hidden, weight, labels = head_and_tokens()
    labels[labels == 0], labels[3] = 1, -100
    bias = torch.zeros(VOCABULARY, dtype=torch.float64)
    bias[0] = -float("inf")
    bias.requires_grad_()
    term = linear_cross_entropy(hidden, weight, labels, bias, memory=2 * ROW).value
    truth = F.cross_entropy(F.linear(hidden, weight, bias), labels)
    assert torch.allclose(term, truth, rtol=1e-12)
    found, expected = (torch.autograd.grad(each, (hidden, weight, bias)) for each in (term, truth))
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("unit", [1e-7, 1.0, 1e6])
def test_float16_holds_class_weights_of_any_size(unit: float) -> None:
    hidden, weight, labels = head_and_tokens(torch.float16)
    by_class = torch.linspace(0.1, 3, VOCABULARY) * unit
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    truth = torch.autograd.grad(F.cross_entropy(F.linear(*exact), labels, by_class.double()), exact)
    term = linear_cross_entropy(hidden, weight, labels, class_weight=by_class)
    assert float(term.count) == pytest.approx(float(by_class[labels].sum()), rel=1e-6)
    found = torch.autograd.grad(term.value, (hidden, weight))
    names = ("hidden", "weight")
    assert_same_gradient(dict(zip(names, found, strict=True)), dict(zip(names, truth, strict=True)))
    # the naive way: half numbers times the weights as they are told
    logits = F.linear(*exact)
    by_logit = torch.autograd.grad(F.cross_entropy(logits, labels, by_class.double(), reduction="sum"), logits)[0]
    naive = (by_logit.half().double().T @ exact[0]) / by_class[labels].sum()
    if unit != 1.0:
        assert_differs({"weight": naive.detach()}, {"weight": truth[1]})


@pytest.mark.parametrize("options", [{}, {"z_loss": 0.5, "scale": 3.0}], ids=["bare", "scaled"])
def test_a_word_that_many_tokens_say_does_not_pass_the_end_of_float16(options: dict[str, Any]) -> None:
    hidden = torch.full((20_000, 4), 8.0, dtype=torch.float16, requires_grad=True)
    weight = torch.randn(50, 4, generator=torch.Generator().manual_seed(1)).half().requires_grad_()
    labels = torch.zeros(20_000, dtype=torch.int64)
    found = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels, **options).value, (hidden, weight))
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    truth = torch.autograd.grad(linear_cross_entropy(*exact, labels, **options).value, exact)
    names = ("hidden", "weight")
    assert_same_gradient(dict(zip(names, found, strict=True)), dict(zip(names, truth, strict=True)), tol=4e-3)
    one_sum = torch.mm(torch.ones(1, 20_000, dtype=torch.float16), hidden.detach())
    assert bool(one_sum.isinf().any())  # the naive way


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # torch's own, of its forward mode
def test_a_transform_is_refused_in_words() -> None:
    hidden, weight, labels = (each.detach() for each in head_and_tokens())

    def loss(hidden: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, labels).value

    with pytest.raises(LossError, match=r"torch.func reached linear_cross_entropy.*F.linear"):
        torch.func.grad(loss)(hidden)
    with pytest.raises(LossError, match=r"torch.func reached"):
        torch.func.jvp(loss, (hidden,), (hidden,))
    with forward_ad.dual_level(), pytest.raises(LossError, match="Forward-mode"):
        loss(forward_ad.make_dual(hidden, hidden))
    with pytest.raises(LossError, match="Several gradients at once"):
        torch.autograd.functional.jacobian(loss, hidden, vectorize=True)
    whole = torch.autograd.functional.jacobian(loss, hidden)  # one gradient is what it has
    expected = torch.autograd.functional.jacobian(lambda h: F.cross_entropy(F.linear(h, weight), labels), hidden)
    assert torch.allclose(whole, expected, rtol=1e-12)


@pytest.mark.parametrize("name", ["hidden", "weight"])
def test_what_changes_before_the_backward_is_noticed(name: str) -> None:
    hidden, weight, labels = head_and_tokens()
    given_ = {"hidden": hidden * 1, "weight": weight * 1}
    value = linear_cross_entropy(given_["hidden"], given_["weight"], labels).value
    with torch.no_grad():
        given_[name].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(value, (hidden, weight))


@pytest.mark.parametrize("reentrant", [False, True])
def test_either_checkpoint_around_it_has_the_same_gradient(reentrant: bool) -> None:
    hidden, weight, labels = head_and_tokens()

    def loss(hidden: Tensor) -> Tensor:
        return linear_cross_entropy(torch.tanh(hidden), weight, labels, memory=2 * ROW).value

    (3 * checkpoint(loss, hidden, use_reentrant=reentrant)).backward()
    expected = torch.autograd.grad(3 * F.cross_entropy(F.linear(torch.tanh(hidden), weight), labels), (hidden, weight))
    for leaf, truth in zip((hidden, weight), expected, strict=True):
        assert leaf.grad is not None
        assert torch.allclose(leaf.grad, truth, rtol=1e-12, atol=1e-15)


def test_views_and_labels_of_any_integer_type_are_read_as_they_are() -> None:
    _, weight, _ = head_and_tokens()
    turned = torch.randn(WIDTH, 3, 5, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(VOCABULARY, (5, 3))
    expected = torch.autograd.grad(
        F.cross_entropy(F.linear(turned.permute(2, 1, 0), weight).flatten(0, 1), labels.flatten()), (turned, weight)
    )
    for dtype in (torch.uint8, torch.int8, torch.int32, torch.int64):
        value = linear_cross_entropy(turned.permute(2, 1, 0), weight, labels.to(dtype)).value
        found = torch.autograd.grad(value, (turned, weight))
        assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-15) for a, b in zip(found, expected, strict=True))


def test_values_that_mean_nothing_are_named() -> None:
    hidden, weight, labels = head_and_tokens()
    for name, value, allowed in [
        ("label_smoothing", 1.5, "from 0 to 1"),
        ("label_smoothing", float("nan"), "from 0 to 1"),
        ("softcap", 0, "above 0"),
        ("softcap", float("inf"), "above 0"),
        ("scale", float("nan"), "finite"),
        ("z_loss", float("inf"), "finite"),
    ]:
        with pytest.raises(LossError, match=rf"{name} is {value}; it must be {allowed}"):
            linear_cross_entropy(hidden, weight, labels, **{name: value})
    with pytest.raises(LossError, match=r"class_weight requires a gradient.*detach"):
        linear_cross_entropy(hidden, weight, labels, class_weight=torch.ones(VOCABULARY, requires_grad=True))
    with pytest.raises(LossError, match=r"bias is on meta and hidden on cpu"):
        linear_cross_entropy(hidden, weight, labels, torch.zeros(VOCABULARY, device="meta"))
    with pytest.raises(LossError, match=r"weight is Linear.*head.weight"):
        linear_cross_entropy(hidden, nn.Linear(WIDTH, VOCABULARY), labels)  # type: ignore[arg-type]
    with pytest.raises(LossError, match=r"labels is NoneType"):
        linear_cross_entropy(hidden, weight, None)  # type: ignore[arg-type]
    with pytest.raises(LossError, match=r"dense ones"):
        linear_cross_entropy(hidden, weight.detach().to_sparse(), labels)


def test_shapes_and_types_that_do_not_fit_are_named() -> None:
    hidden, weight, labels = head_and_tokens()
    with pytest.raises(LossError, match=r"hidden of shape \(9, 8\) and weight of shape \(8, 37\) do not fit"):
        linear_cross_entropy(hidden, weight.T, labels)
    with pytest.raises(LossError, match=r"labels of shape \(8,\) do not fit"):
        linear_cross_entropy(hidden, weight, labels[:8])
    with pytest.raises(LossError, match=r"bias of shape \(36,\) does not fit a vocabulary of 37"):
        linear_cross_entropy(hidden, weight, labels, torch.zeros(36))
    with pytest.raises(LossError, match=r"hidden is torch.float64 and weight torch.float32.*hidden.to"):
        linear_cross_entropy(hidden, weight.float(), labels)
    with pytest.raises(LossError, match=r"scale is a tensor.*hidden \* scale"):
        linear_cross_entropy(hidden, weight, labels, scale=torch.ones((), requires_grad=True))  # type: ignore[arg-type]
    with pytest.raises(LossError, match="causal_lm_head takes labels="):
        causal_lm_head(hidden[None], weight)
    with pytest.raises(ValueError, match="memory is '3 apples'"):
        linear_cross_entropy(hidden, weight, labels, memory="3 apples")


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor:UserWarning"
)  # torch's own, of what it resumes with
def test_a_compiled_caller_leaves_the_head_out_of_its_graph() -> None:
    hidden, weight, labels = head_and_tokens()

    def loss(hidden: Tensor, labels: Tensor) -> Tensor:
        return 2 * linear_cross_entropy(torch.tanh(hidden), weight, labels, memory=2 * ROW).value

    expected = torch.autograd.grad(loss(hidden, labels), (hidden, weight))
    value = torch.compile(loss, backend="eager")(hidden, labels)
    for _ in range(2):
        found = torch.autograd.grad(value, (hidden, weight), retain_graph=True)
        assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(found, expected, strict=True))


def test_check_and_step_and_tokens_take_it() -> None:
    model, rows = Language(tied=True), batch()
    rows["attention_mask"] = torch.ones_like(rows["tokens"])
    assert wb.check(model, ours(memory=3 * ROW), rows, wb.Tokens(15)).verdict == "exact"
    step = wb.Step(
        model, torch.optim.SGD(model.parameters(), lr=0.1), ours(memory=3 * ROW), micro_batch_size=wb.Tokens(15)
    )
    twin = Language(tied=True)
    plain(twin, rows).backward()
    step(rows)
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert theirs.grad is not None
        assert torch.allclose(mine, theirs.detach() - 0.1 * theirs.grad, atol=1e-6)
