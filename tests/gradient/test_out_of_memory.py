"""Out of memory is not an error: wherever it strikes, the window ends as if it had run in the final micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import wholebatch as wb
from tests.oracle import assert_differs, assert_same_gradient, assert_same_parameters, gradients_of, whole_batch
from wholebatch.model.memory import SavedBytes

BLOCKS = 3


class Memory:
    """A memory that runs out at one place of the model once a micro-batch has more rows than it holds."""

    def __init__(self, rows: float = 1e9, place: int = 0, forward: bool = False) -> None:
        self.rows, self.place, self.forward = rows, place, forward
        self.failures = 0
        self.done: list[int] = []
        """Rows of the micro-batches that came through, or are on their way."""

    def check(self, place: int, rows: int, forward: bool) -> None:
        if self.strikes(place, rows, forward):
            self.failures += 1
            if not forward and self.done:
                self.done.pop()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate a block.")

    def strikes(self, place: int, rows: int, forward: bool) -> bool:
        return forward == self.forward and place == self.place and rows > self.rows


class Moments(Memory):
    """A memory that runs out at certain visits, whatever the size of the micro-batch."""

    def __init__(self, *moments: int) -> None:
        super().__init__()
        self.moments, self.visits = moments, -1

    def strikes(self, place: int, rows: int, forward: bool) -> bool:
        self.visits += 1
        return self.visits in self.moments


class Probe(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, memory: Memory, place: int) -> Tensor:
        ctx.memory, ctx.place, ctx.rows = memory, place, len(x)
        memory.check(place, len(x), forward=True)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.memory.check(ctx.place, ctx.rows, forward=False)
        return grad, None, None


class Observer(nn.Module):
    """Buffers that move with each forward, as running statistics do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.1)
        self.seen += 1
        return x


class Replacing(Observer):
    """The same, where a new tensor takes the place of the old one."""

    def forward(self, x: Tensor) -> Tensor:
        self.mean = torch.lerp(self.mean, x.detach().mean(0), 0.1)
        self.seen = self.seen + 1
        return x


class Net(nn.Module):
    """Tied ends, blocks that may be checkpointed or shared, dropout, and buffers that move."""

    def __init__(self, mode: str = "plain", memory: Memory | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(BLOCKS))
        self.last = nn.Linear(6, 4, bias=False)
        self.embedding = nn.Embedding(5, 4)
        self.observer = Observer()
        self.mode, self.memory = mode, memory or Memory()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.observer(self.first(self.embedding(ids)))
        for i in range(BLOCKS):
            block = self.blocks[0 if self.mode == "reentrant, shared" else i]
            x = Probe.apply(x, self.memory, i)
            x = self.step(block, x)
        x = Probe.apply(x, self.memory, BLOCKS)
        return self.last(nn.functional.dropout(x, 0.3)) @ self.embedding.weight.T

    def step(self, block: nn.Module, x: Tensor) -> Tensor:
        def run(x: Tensor) -> Tensor:
            return torch.tanh(block(x))

        if self.mode == "plain":
            return run(x)
        return checkpoint(run, x, use_reentrant=self.mode.startswith("reentrant"))  # type: ignore[no-any-return]


IDS = torch.randint(0, 5, (13,), generator=torch.Generator().manual_seed(0))


def squares(model: nn.Module, ids: Tensor) -> Any:
    values = model(ids).square()
    return wb.mean(values), {"largest": values.amax(1)}


def two_terms(model: nn.Module, ids: Tensor) -> Any:
    values = model(ids).square()
    return {"all": wb.mean(values), "even": 0.5 * wb.mean(values, (ids % 2 == 0).unsqueeze(1).expand_as(values))}


def build(mode: str = "plain", memory: Memory | None = None, grads: bool = True) -> Net:
    torch.manual_seed(3)
    model = Net(mode, memory).double()
    if grads:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
    return model


def run(model: Net, batch: Any, size: Any, loss: Callable[..., Any] = squares, **options: Any) -> Any:
    torch.manual_seed(7)
    result = wb.backward(model, loss, batch, size, batch_norm="micro", **options)
    return result, torch.rand(3)


def noted(memory: Memory, loss: Callable[..., Any] = squares) -> Callable[..., Any]:
    def noting(model: nn.Module, ids: Tensor) -> Any:
        answer = loss(model, ids)
        memory.done.append(len(ids))
        return answer

    return noting


def final_micro_batches(memory: Memory, result: Any, ids: Tensor = IDS) -> wb.Window:
    """The micro-batches that a disturbed run ended with; what ran before them was counted or undone."""
    final = memory.done[-result.micro_batches :]
    assert sum(final) == len(ids)
    return wb.Window(ids.split(final))


def assert_as_undisturbed(
    mode: str, memory: Memory, size: Any, loss: Callable[..., Any] = squares, ids: Tensor = IDS, **options: Any
) -> None:
    """Hold a disturbed run against one that had used its final micro-batches: all that it leaves behind is the same."""
    disturbed = build(mode, memory)
    result, draws = run(disturbed, ids, size, noted(memory, loss), **options)
    calm = build(mode)
    expected, expected_draws = run(calm, final_micro_batches(memory, result, ids), None, loss, **options)
    assert memory.failures
    assert_same_gradient(disturbed, gradients_of(calm))
    assert torch.equal(draws, expected_draws)
    assert torch.equal(disturbed.observer.mean, calm.observer.mean)
    assert disturbed.observer.seen == calm.observer.seen
    torch.testing.assert_close(result.loss, expected.loss, rtol=1e-13, atol=0)
    for name, metric in result.metrics.items():
        torch.testing.assert_close(metric, expected.metrics[name], rtol=1e-13, atol=0)


MODES = ["plain", "non-reentrant", "reentrant", "reentrant, shared"]


@pytest.mark.parametrize("forward", [True, False], ids=["forward", "backward"])
@pytest.mark.parametrize("place", range(BLOCKS + 1))
@pytest.mark.parametrize("mode", MODES)
def test_a_failure_at_any_place_leaves_no_trace(mode: str, place: int, forward: bool) -> None:
    assert_as_undisturbed(mode, Memory(rows=4, place=place, forward=forward), wb.Auto(8))


@pytest.mark.parametrize("mode", MODES)
def test_failures_within_failures_leave_no_trace(mode: str) -> None:
    assert_as_undisturbed(mode, Memory(rows=1, place=1), wb.Auto(13))


@pytest.mark.parametrize("forward", [True, False], ids=["forward", "backward"])
def test_several_denominators_survive_a_failure(forward: bool) -> None:
    assert_as_undisturbed("plain", Memory(rows=3, place=2, forward=forward), wb.Auto(8), two_terms)


@pytest.mark.parametrize("mode", ["plain", "non-reentrant"])
@pytest.mark.parametrize("first", range(4 * (BLOCKS + 1)))
def test_two_failures_in_a_window_leave_no_trace(mode: str, first: int) -> None:
    """Each visit of a place is a moment: 8 of them in each of two micro-batches, and those of the retries."""
    for second in range(first + 1, first + 2 * (BLOCKS + 1) + 2):
        memory = Moments(first, second)
        assert_as_undisturbed(mode, memory, wb.Auto(8), ids=torch.cat([IDS, IDS[:3]]))
        assert memory.failures == 2 or second > memory.visits


def test_stated_counts_survive_a_failure() -> None:
    def items(ids: Tensor) -> dict[str, Any]:
        return {"all": 5 * len(ids), "even": 5 * (ids % 2 == 0).sum()}

    assert_as_undisturbed("plain", Memory(rows=3, place=2), wb.Auto(8), two_terms, items=items)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("place", range(BLOCKS + 1))
def test_sums_in_float32_survive_a_failure(dtype: torch.dtype, place: int) -> None:
    """What both leave has been rounded once, so they may differ by the rounding of the micro-batches alone."""
    memory = Memory(rows=4, place=place)
    disturbed, calm = (build("plain", each).to(dtype) for each in (memory, Memory()))
    result, _ = run(disturbed, IDS, wb.Auto(8), noted(memory), accumulate_in=torch.float32)
    run(calm, final_micro_batches(memory, result), None, accumulate_in=torch.float32)
    assert memory.failures
    assert all(p.grad is not None and p.grad.dtype is dtype for p in disturbed.parameters())
    assert_same_gradient(disturbed, gradients_of(calm))


def test_a_scaled_gradient_survives_a_failure() -> None:
    memory, scaler = Memory(rows=4, place=1), torch.amp.GradScaler("cpu", init_scale=1024.0)
    disturbed, calm = build("plain", memory, grads=False), build(grads=False)
    result, _ = run(disturbed, IDS, wb.Auto(8), noted(memory), scaler=scaler)
    run(calm, final_micro_batches(memory, result), None)
    assert memory.failures
    for parameter in disturbed.parameters():
        assert parameter.grad is not None
        parameter.grad /= 1024
    assert_same_gradient(disturbed, gradients_of(calm))


def test_a_step_with_a_scaler_is_the_same_step_after_a_failure() -> None:
    memory = Memory(rows=4, place=1)
    disturbed, calm = build("plain", memory, grads=False), build(grads=False)
    result = scaled_step(disturbed, wb.Auto(8), noted(memory))(IDS)
    expected = scaled_step(calm, None, squares)(final_micro_batches(memory, result))
    assert memory.failures
    assert result.stepped and result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-12)
    assert_same_parameters(disturbed, calm)


def scaled_step(model: Net, size: Any, loss: Callable[..., Any]) -> wb.Step:
    torch.manual_seed(7)
    scaler, sgd = torch.amp.GradScaler("cpu", init_scale=64.0), torch.optim.SGD(model.parameters(), lr=0.1)
    return wb.Step(model, sgd, loss, micro_batch_size=size, scaler=scaler, max_grad_norm=0.1, batch_norm="micro")


def test_buffers_that_are_replaced_go_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory runs out in the second micro-batch, when the first one has put new buffers in place."""
    monkeypatch.setattr(f"{__name__}.Observer", Replacing)
    for moment in range(2 * (BLOCKS + 1), 4 * (BLOCKS + 1)):
        assert_as_undisturbed("plain", Moments(moment), wb.Auto(8), ids=torch.cat([IDS, IDS[:3]]))


def saved_by(ids: Tensor) -> int:
    model = build(grads=False)
    with SavedBytes(ignored=list(model.parameters())) as saved:
        kept = squares(model, ids)
    assert kept is not None
    return saved.peak


@settings(max_examples=25, deadline=None)
@given(share=st.floats(0, 1), start=st.integers(1, 13))
def test_any_budget_of_saved_bytes_leaves_no_trace(share: float, start: int) -> None:
    """From what one row saves to what all of them do, with dropout and buffers that move."""
    one, whole = saved_by(IDS[:1]), saved_by(IDS)
    memory, auto = Memory(), wb.Auto(start)
    disturbed, calm = build("plain", memory), build()
    with SavedBytes(one + int(share * (whole - one)), ignored=list(disturbed.parameters())) as saved:
        result, draws = run(disturbed, IDS, auto, noted(memory))
    _, expected_draws = run(calm, final_micro_batches(memory, result), None)
    assert saved.live == 0
    assert result.micro_batches >= len(IDS) / start
    assert torch.equal(draws, expected_draws)
    assert torch.equal(disturbed.observer.mean, calm.observer.mean)
    assert_same_gradient(disturbed, gradients_of(calm))


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 12),
    place=st.integers(0, BLOCKS),
    forward=st.booleans(),
    start=st.integers(1, 13),
    mode=st.sampled_from(MODES),
)
def test_any_memory_leaves_no_trace(rows: int, place: int, forward: bool, start: int, mode: str) -> None:
    memory = Memory(rows, place, forward)
    if start > rows:
        assert_as_undisturbed(mode, memory, wb.Auto(start))


@pytest.mark.parametrize("place", range(4))
def test_draws_that_depend_on_the_size_of_a_micro_batch_are_those_of_the_final_micro_batches(place: int) -> None:
    """A device draws other masks for eight rows than for twice four: what a failed micro-batch drew may not stay."""

    def noisy(model: nn.Module, ids: Tensor) -> Any:
        return wb.mean(model(ids).square() * (1 + torch.rand(())))

    assert_as_undisturbed("plain", Memory(rows=3, place=place), wb.Auto(8), noisy)


def test_a_retry_without_undoing_is_wrong() -> None:
    """The twin: run the halves of a failed micro-batch on top of what its backward had already added."""
    memory = Memory(rows=4, place=1)
    naive, calm = build("plain", memory, grads=False), build("plain", grads=False)
    for ids in IDS.split(8):
        for part in (ids, *ids.split(4)):
            try:
                (naive(part).square().sum() / (len(IDS) * 5)).backward()
            except torch.OutOfMemoryError:
                continue
            if len(part) == len(ids):
                break
    run(calm, wb.Window(IDS.split([4, 4, 4, 1])), None)
    assert memory.failures
    assert_differs(naive, gradients_of(calm), by=0.02)


def test_the_size_found_is_remembered_and_a_larger_one_is_tried_again() -> None:
    memory, auto = Memory(rows=4, place=0), wb.Auto(13)
    model = build("plain", memory, grads=False)
    sizes = run(model, IDS, auto)[0].sizes
    assert memory.failures == auto.failures == 2
    assert [row for size in sizes for row in size.index] == list(range(13))
    assert max(size.rows for size in sizes) == 4
    run(model, IDS, auto)
    assert memory.failures == auto.failures == 2
    memory.rows = 13
    counts = [run(model, IDS, auto)[0].micro_batches for _ in range(300)]
    assert counts[0] == 4  # 13 and 7 did not fit, the larger half of 7 does
    assert counts[-1] == 1


def test_token_budgets_are_split_and_remembered() -> None:
    memory = Memory(rows=2, place=0)
    model = build("plain", memory, grads=False)
    batch = [[int(i)] * (1 + n % 3) for n, i in enumerate(IDS)]
    auto = wb.Auto(wb.Tokens(16, length=len))

    def collate(samples: list[list[int]]) -> Tensor:
        return torch.tensor([sample[0] for sample in samples])

    run(model, batch, auto, collate=collate)
    assert memory.failures
    assert auto.size.budget < 16  # type: ignore[union-attr]


def test_one_row_that_does_not_fit_is_final_and_gradients_are_as_before() -> None:
    model = build("plain", Memory(rows=0, place=0))
    with pytest.raises(wb.OutOfMemoryError, match=r"One row alone does not fit.*\(1,\).*checkpoint"):
        run(model, IDS, wb.Auto(8))
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("error", [RuntimeError("shapes do not match"), ValueError("no"), KeyboardInterrupt()])
def test_every_other_error_passes_untouched(error: BaseException) -> None:
    model, calls = build(), []

    def broken(model: nn.Module, ids: Tensor) -> Any:
        calls.append(len(ids))
        if len(calls) == 2:
            raise error
        return squares(model, ids)

    with pytest.raises(type(error)) as raised:
        run(model, IDS, wb.Auto(8), broken, verify="never")
    assert raised.value is error
    assert calls == [8, 5]
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters() if p.grad is not None)


def test_a_host_that_runs_out_of_memory_while_a_micro_batch_is_made_is_no_error_either() -> None:
    model, micro_batches = nn.Linear(3, 2).double(), []
    rows = torch.randn(13, 3).double()

    def collate(samples: list[Tensor]) -> Tensor:
        if len(samples) > 4:
            raise MemoryError  # as numpy does, and any collate function may
        micro_batches.append(len(samples))
        return torch.stack(samples)

    result = wb.backward(model, lambda model, x: model(x).square(), list(rows), wb.Auto(8), collate=collate)
    assert_same_gradient(model, whole_batch(model, lambda model, x: model(x).square().mean(), rows))
    assert micro_batches == [4, 4, 3, 2] and result.micro_batches == 4


@pytest.mark.parametrize("late", [False, True], ids=["in the forward", "in the backward"])
def test_pooled_running_statistics_forget_the_rows_of_a_failed_micro_batch(late: bool) -> None:
    torch.manual_seed(3)
    model, x = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)).double(), torch.randn(16, 3).double() * 3 + 1
    whole = nn.BatchNorm1d(3).double()
    whole(x)

    def short(model: nn.Module, rows: Tensor) -> Any:
        said = model(rows)  # the layer has seen the rows by now
        if len(rows) > 4 and late:
            said.register_hook(out_of_memory)
        elif len(rows) > 4:
            out_of_memory(said)
        return said.square()

    result = wb.backward(model, short, x, wb.Auto(8), batch_norm="pooled")
    assert result.micro_batches == 4
    assert torch.allclose(model[0].running_mean, whole.running_mean, rtol=1e-12)
    assert torch.allclose(model[0].running_var, whole.running_var, rtol=1e-12)
    assert model[0].num_batches_tracked == 1


def out_of_memory(gradient: Tensor) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


def test_without_auto_running_out_of_memory_is_an_error_that_takes_its_share_back() -> None:
    model = build("plain", Memory(rows=4, place=1))
    with pytest.raises(torch.OutOfMemoryError):
        run(model, IDS, 8)
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters() if p.grad is not None)


def test_saved_bytes_count_each_storage_once_and_let_go_of_it() -> None:
    x = torch.ones(1000, dtype=torch.float64, requires_grad=True)
    with SavedBytes() as saved:
        y = x.exp()
        loss = (y * y[:]).sum()
    assert saved.live == 8000
    loss.backward()
    del loss, y
    assert (saved.live, saved.peak) == (0, 8000)


def test_a_budget_of_saved_bytes_makes_a_machine_small() -> None:
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.Tanh())]).double()
    rows = torch.randn(64, 32, dtype=torch.float64)
    reference = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.Tanh())]).double()
    reference.load_state_dict(model.state_dict())
    reference(rows).square().mean().backward()
    auto = wb.Auto(64)
    with SavedBytes(limit=50_000, ignored=list(model.parameters())) as saved:
        result = wb.backward(model, lambda model, rows: model(rows).square(), rows, auto)
    assert result.micro_batches > 2
    assert saved.peak <= 50_000
    assert_same_gradient(model, gradients_of(reference))
