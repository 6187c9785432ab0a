"""Threads that cannot start, that draw meanwhile, that run windows of their own; objects that end half made."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholebatch as wb
from tests.oracle import assert_same_gradient, whole_batch
from wholebatch.batchnorm import program_cache
from wholebatch.model.memory import SavedBytes, _Saved
from wholebatch.model.state import State


def normed(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean(1)


ROWS = torch.randn(12, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_a_thread_that_cannot_be_started_leaves_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container with few process ids: the error is the caller's, and the process can still end."""
    started, start, before = [], threading.Thread.start, threading.active_count()

    def third(thread: threading.Thread) -> None:
        started.append(thread)
        if len(started) == 3:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", third)
    model = normed()
    with pytest.raises(RuntimeError, match="can't start new thread"):
        wb.backward(model, squares, ROWS, 3, batch_norm="exact-lock-step")
    assert len(started) == 3
    assert threading.active_count() == before
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(thread.daemon for thread in started)


class Stubborn(nn.Module):
    """Catches whatever is raised in it, and goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = normed()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            try:
                x = x + self.inside(x).mean()
            except BaseException as error:
                self.caught = error
        if len(x) == 2:
            raise ValueError("the last micro-batch has two rows")
        return x


def test_a_model_that_catches_everything_ends_all_the_same() -> None:
    before = threading.active_count()
    with pytest.raises(ValueError, match="two rows"):
        wb.backward(Stubborn(), squares, ROWS[:8], 3, batch_norm="exact-lock-step", verify="never")
    assert threading.active_count() == before


def in_another_thread(draw: Any) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(draw).result()


@pytest.mark.parametrize("always", [False, True], ids=["as it is", "the twin that always sets back"])
def test_what_other_threads_draw_is_not_set_back_by_a_window_that_draws_nothing(
    always: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread draws while micro-batches are encoded a second time."""
    if always:
        monkeypatch.setattr(State, "drew", lambda state: True)
    calls: list[int] = []
    drawn: list[float] = []

    def encode(model: nn.Module, x: Tensor) -> Tensor:
        calls.append(len(x))
        if len(calls) > 4:  # of 12 rows by 3: the second time
            drawn.append(in_another_thread(lambda: float(torch.rand(()))))
        return model(x)  # type: ignore[no-any-return]

    model = nn.Linear(3, 2).double()
    wb.coupled_backward(model, encode, lambda z: torch.pdist(z).mean(), ROWS, 3, verify="never")
    everything = [*drawn, float(torch.rand(()))]
    assert len(everything) == 4
    assert len(set(everything)) == (1 if always else 4)


def test_two_threads_capture_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capturing has warnings and logs of the whole process for a while; each thread's gradient is right."""
    inside, most, made = [0], [0], program_cache._made

    def watched(*given: Any) -> Any:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        try:
            return made(*given)
        finally:
            inside[0] -= 1

    monkeypatch.setattr(program_cache, "_made", watched)
    models = [normed(seed) for seed in range(2)]

    def run(model: nn.Module) -> None:
        wb.backward(model, squares, ROWS, 5, batch_norm="exact", verify="never")

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, models))
    assert most == [1]
    for model in models:
        assert_same_gradient(model, whole_batch(model, lambda model, x: squares(model, x).mean(), ROWS))


def test_an_object_that_was_made_half_ends_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory may run out while a saved tensor is noted; what then ends is not whole."""
    raised: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", raised.append)
    watch, tensor = SavedBytes(), torch.ones(3)

    def short(tensor: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(torch.Tensor, "detach", short)
    with pytest.raises(torch.OutOfMemoryError):
        watch.pack(tensor)
    del watch
    _Saved.__new__(_Saved)  # and one of which nothing was made at all
    assert not raised
