"""What only a device can show: its real out-of-memory, what waits on the host, and a plan that holds there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import wholebatch as wb
from tests.oracle import assert_same_gradient, gradients_of

pytestmark = pytest.mark.gpu

MIB = 2**20
WIDTH, BLOCKS, ROWS = 1024, 8, 4096


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(BLOCKS)]).cuda()


def squares(model: nn.Module, rows: Tensor) -> Tensor:
    out: Tensor = model(rows).square().mean(1)
    return out


@pytest.fixture
def rows() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def little_memory() -> Iterator[int]:
    """An allocator that holds the model, its gradients, and the activations of about a quarter of the rows."""
    limit = 2 * 4 * BLOCKS * WIDTH**2 + ROWS * WIDTH * 4 * BLOCKS * 2 // 4 + 64 * MIB
    there = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(limit / there)
    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0)


def peak_of(model: nn.Module, rows: Tensor, size: int | None, offload: bool = False) -> int:
    model.zero_grad()
    torch.cuda.reset_peak_memory_stats()
    wb.backward(model, squares, rows, size, offload=offload)
    return torch.cuda.max_memory_allocated()


def test_the_device_s_own_out_of_memory_leaves_no_trace(rows: Tensor, little_memory: int) -> None:
    ours, reference, auto = build(), build(), wb.Auto(ROWS)
    wb.backward(reference, squares, rows, 64)
    result = wb.backward(ours, squares, rows, auto)
    assert 1 < result.micro_batches < 64
    assert_same_gradient(ours, gradients_of(reference))
    ours.zero_grad()
    assert wb.backward(ours, squares, rows, auto).micro_batches <= result.micro_batches
    assert_same_gradient(ours, gradients_of(reference))


def test_a_row_that_does_not_fit_is_final(rows: Tensor) -> None:
    def hungry(model: nn.Module, rows: Tensor) -> Tensor:
        held = torch.empty(2**50, device=rows.device)
        return squares(model, rows) + held[:1]

    model = build()
    with pytest.raises(wb.OutOfMemoryError, match=r"One row alone does not fit.*The device has held up to"):
        wb.backward(model, hungry, rows, wb.Auto(ROWS))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_waits_on_the_host_changes_no_bit(rows: Tensor) -> None:
    plain, offloaded = build(), build()
    peaks = peak_of(plain, rows, None), peak_of(offloaded, rows, None, offload=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), offloaded.parameters(), strict=True))
    assert peaks[1] < 0.8 * peaks[0]


def test_a_step_stays_within_what_was_planned(rows: Tensor) -> None:
    model = build()
    memory = 2 * 4 * 4 * BLOCKS * WIDTH**2 + 64 * MIB
    found = wb.plan(model, squares, rows, memory)
    assert {way.way for way in found.measured} >= {"smaller micro-batches", "offload"}
    plain = next(choice for choice in found.choices if choice.way == "smaller micro-batches")
    assert 1 <= plain.micro_batch_size < ROWS
    optimizer = 2 * 4 * BLOCKS * WIDTH**2
    assert peak_of(model, rows, plain.micro_batch_size) + optimizer <= memory
