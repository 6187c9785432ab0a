"""Accelerate: what `accumulate` and `backward` do to a window, and what the door makes of it."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import wholebatch as wb
from tests.distributed import Ranks
from tests.oracle import Gradients, assert_differs, assert_same_gradient, gradients_of, whole_batch

accelerate = pytest.importorskip("accelerate")

from wholebatch.integrations import accelerate as door  # noqa: E402

WIDTH, CLASSES, STEPS = 12, 7, 4
Batch = dict[str, Tensor]


def tagger() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, CLASSES))


def rows(count: int = 13) -> Batch:
    """Sequences of very uneven length: the rest of their labels is ignored."""
    draws = torch.Generator().manual_seed(2)
    labels = torch.randint(0, CLASSES, (16, WIDTH), generator=draws)
    lengths = torch.randint(1, WIDTH + 1, (16, 1), generator=draws) ** 2 // WIDTH + 1
    x = torch.randn(16, WIDTH, 6, generator=draws)
    return {"x": x[:count], "y": labels.where(torch.arange(WIDTH) < lengths, -100)[:count]}


def values(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]).mT, batch["y"], reduction="none")


def stated(model: nn.Module, batch: Batch) -> Any:
    return wb.mean(values(model, batch), batch["y"] != -100)


def mean(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]).mT, batch["y"])


def several(model: nn.Module, batch: Batch) -> Any:
    return stated(model, batch) + 0.1 * wb.mean(model(batch["x"]).square().mean((1, 2)))


def several_meant(model: nn.Module, batch: Batch) -> Tensor:
    return mean(model, batch) + 0.1 * model(batch["x"]).square().mean()


def references(count: int = 13, window: int = 8, loss: Callable[..., Tensor] = mean) -> list[Any]:
    """The whole windows' gradients: eight rows, then the five that are left."""
    batch = rows(count)
    parts = [
        {name: value[start : start + window] for name, value in batch.items()} for start in range(0, count, window)
    ]
    return [whole_batch(tagger(), loss, part) for part in parts]


def loader(accelerator: Any, size: int, count: int = 13) -> Any:
    batch = rows(count)
    samples = [{name: value[i] for name, value in batch.items()} for i in range(count)]
    return accelerator.prepare(torch.utils.data.DataLoader(samples, batch_size=size))


def accumulated(
    accelerator: Any, model: nn.Module, go_back: Callable[[nn.Module, Batch], None], size: int = 2, count: int = 13
) -> list[Gradients]:
    """Run the loop of the documentation over one epoch; return what each optimizer step was given."""
    model = accelerator.prepare(copy.deepcopy(model))
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.0))
    steps = []
    for batch in loader(accelerator, size, count):
        with accelerator.accumulate(model):
            go_back(model, batch)
            if accelerator.sync_gradients:
                steps.append(gradients_of(model))
            optimizer.step()
            optimizer.zero_grad()
    return steps


def on_cpu() -> Any:
    accelerate.state.GradientState._reset_state()  # every accelerator of a process shares both
    accelerate.state.AcceleratorState._reset_state()
    return accelerate.Accelerator(cpu=True, gradient_accumulation_steps=STEPS)


def test_the_usual_loop_averages_means_and_divides_a_short_window_by_all_steps() -> None:
    accelerator = on_cpu()
    steps = accumulated(accelerator, tagger(), lambda model, batch: accelerator.backward(mean(model, batch)))
    for ours, reference in zip(steps, references(), strict=True):
        assert_differs(ours, reference, by=0.05)


def test_a_window_gathered_by_accumulate() -> None:
    accelerator, model = on_cpu(), tagger()
    window, losses = None, []

    def go_back(model: nn.Module, batch: Batch) -> None:
        nonlocal window
        window = window or door.Window(accelerator, model)
        window.backward(stated(model, batch))
        losses.append(window.loss)

    steps = accumulated(accelerator, model, go_back)
    for ours, reference, loss in zip(steps, references(), (losses[3], losses[6]), strict=True):
        assert_same_gradient(ours, reference)
        assert float(loss) == pytest.approx(float(reference.loss), rel=1e-6)
    assert [loss is None for loss in losses] == [True, True, True, False, True, True, False]


def test_items_that_are_not_what_the_mean_was_divided_by_are_refused() -> None:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=STEPS)
    model = accelerator.prepare(tagger())
    window, batch = door.Window(accelerator, model), rows(4)
    with pytest.raises(wb.LossError, match="was divided by"):
        for start in range(4):
            part = {name: value[start : start + 1] for name, value in batch.items()}
            with accelerator.accumulate(model):
                window.backward(wb.from_mean(mean(model, part), items=WIDTH))


@pytest.mark.parametrize(("loss", "meant"), [(stated, mean), (several, several_meant)], ids=["one-term", "two-terms"])
@pytest.mark.parametrize("size", [None, 1, 3], ids=str)
def test_a_window_given_whole(loss: Any, meant: Any, size: int | None) -> None:
    accelerator = on_cpu()
    model = accelerator.prepare(tagger())
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.0))
    expected = references(loss=meant)
    for window, reference in zip(wb.windows(loader(accelerator, 2), STEPS), expected, strict=True):
        result = door.backward(accelerator, model, loss, window, size)
        assert_same_gradient(model, reference)
        assert float(result.loss) == pytest.approx(float(reference.loss), rel=1e-6)
        assert float(accelerator.clip_grad_norm_(model.parameters(), 1e9)) > 0
        optimizer.step()
        optimizer.zero_grad()


def test_the_optimizer_really_steps_after_a_window_given_whole() -> None:
    accelerator = on_cpu()
    model = accelerator.prepare(tagger())
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.5))
    losses = []
    for _ in range(10):
        losses.append(float(door.backward(accelerator, model, stated, rows(), 4).loss))
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.9 * losses[0]


def test_what_accumulate_cannot_serve_is_refused() -> None:
    accelerator = on_cpu()
    window = door.Window(accelerator, tagger())
    with pytest.raises(wb.LossError, match="2 terms with denominators of their own"):
        window.backward(several(tagger(), rows()))
    with pytest.raises(wb.LossError, match="without dimensions"):
        window.backward(mean(tagger(), rows()))
    with pytest.raises(wb.LossError, match="nothing to learn from"):
        window.backward(None)


def test_a_whole_window_inside_of_accumulate_is_refused() -> None:
    accelerator, model = on_cpu(), tagger()
    with accelerator.accumulate(model), pytest.raises(wb.InexactError, match="accumulate"):
        door.backward(accelerator, model, stated, rows(), 4)


def test_a_window_with_nothing_to_learn_has_a_gradient_of_zeros() -> None:
    accelerator, model = on_cpu(), tagger()
    window = door.Window(accelerator, model)
    empty = {**rows(), "y": torch.full((13, WIDTH), -100)}
    window.backward(stated(model, empty))
    assert all(bool((p.grad == 0).all()) for p in model.parameters() if p.grad is not None)
    assert float(window.loss) == 0


def on_a_rank(gathered: bool, ours: bool) -> list[Gradients]:
    """One epoch of this rank: micro-batches of one row, four a window, so eight rows over both ranks."""
    os.environ.update(RANK=str(dist.get_rank()), LOCAL_RANK=str(dist.get_rank()), WORLD_SIZE=str(dist.get_world_size()))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    accelerator = on_cpu()
    assert accelerator.num_processes == 2
    if gathered:
        windows: dict[int, Any] = {}

        def go_back(model: nn.Module, batch: Batch) -> None:
            if not ours:
                return accelerator.backward(mean(model, batch))
            window = windows.setdefault(id(model), door.Window(accelerator, model))
            return window.backward(stated(model, batch))

        return accumulated(accelerator, tagger(), go_back, size=1, count=14)
    model = accelerator.prepare(tagger())
    steps = []
    for window in wb.windows(loader(accelerator, 1, 12), STEPS):
        door.backward(accelerator, model, several, window)
        steps.append(gradients_of(model))
        model.zero_grad()
    return steps


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Two processes of our own: Accelerate keeps its view of the world for as long as they live."""
    pair = Ranks(2)
    yield pair
    pair.close()


@pytest.mark.distributed
def test_two_ranks_gather_a_window(ranks: Ranks) -> None:
    for steps in ranks.run(on_a_rank, True, True, seconds=60.0):
        for ours, reference in zip(steps, references(14), strict=True):
            assert_same_gradient(ours, reference)
    assert_differs(ranks.run(on_a_rank, True, False)[0][0], references(14)[0], by=0.05)


@pytest.mark.distributed
def test_two_ranks_are_given_windows(ranks: Ranks) -> None:
    for steps in ranks.run(on_a_rank, False, True, seconds=60.0):
        for ours, reference in zip(steps, references(12, loss=several_meant), strict=True):
            assert_same_gradient(ours, reference)


def test_a_window_of_several_models_and_of_a_parameter_outside_of_them() -> None:
    torch.manual_seed(0)
    encoder, head = nn.Linear(6, 5).double(), nn.Linear(5, 3).double()
    temperature = nn.Parameter(torch.tensor(1.5).double())
    rows, labels = torch.randn(20, 6).double(), torch.randint(0, 3, (20,))
    leaves = [encoder.weight, head.weight, temperature]
    whole = F.cross_entropy(head(encoder(rows)) * temperature, labels)
    expected = torch.autograd.grad(whole, leaves)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=3)
    encoder, head = accelerator.prepare(encoder, head)
    window = door.Window(accelerator, head)
    for start, end in ((0, 3), (3, 7), (7, 20)):
        with accelerator.accumulate(encoder, head):
            logits = head(encoder(rows[start:end])) * temperature
            window.backward(wb.mean(F.cross_entropy(logits, labels[start:end], reduction="none")))
    for leaf, gradient in zip(leaves, expected, strict=True):
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, gradient)
    assert float(window.loss) == pytest.approx(float(whole.detach()))


@pytest.mark.parametrize("hidden", [False, True], ids=["registered", "hidden"])
def test_batch_norm_in_a_window_is_refused_and_chosen(hidden: bool) -> None:
    norm, head = nn.BatchNorm1d(6), nn.Linear(6, 3)
    model = nn.Sequential(nn.Linear(6, 6), head) if hidden else nn.Sequential(nn.Linear(6, 6), norm, head)

    def loss_of(rows: Tensor) -> Any:
        outputs = head(norm(model[0](rows))) if hidden else model(rows)
        return wb.mean(outputs.square().mean(1))

    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    with accelerator.accumulate(model), pytest.raises(wb.InexactError, match=r'BatchNorm.*batch_norm="micro"'):
        door.Window(accelerator, model).backward(loss_of(torch.randn(4, 6)))
    assert all(parameter.grad is None for parameter in model.parameters())
    window = door.Window(accelerator, model, batch_norm="micro")
    for _ in range(2):
        with accelerator.accumulate(model):
            window.backward(loss_of(torch.randn(4, 6)))


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"verify": "first"}, r"no verify=.*never the rows behind it.*backward\(...\)"),
        ({"items": len}, "no items=.*cuts and runs its micro-batches itself"),
        ({"batch_norm": "exact"}, "no batch_norm='exact'.*Choose \"micro\""),
    ],
)
def test_options_that_a_loop_of_losses_cannot_serve_are_refused(option: dict[str, Any], words: str) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    with pytest.raises(TypeError, match=words):
        door.Window(accelerator, accelerator.prepare(tagger()), **option)


# What acts on a window before its end, and two losses of one micro-batch


def run_of(act: str, ours: bool = True) -> list[Gradients]:
    """Two windows; `act` says what the loop does besides."""
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=STEPS)
    model, batch, found = tagger(), rows(), []
    plain = torch.optim.SGD(model.parameters(), lr=0.1 if act == "steps" else 0.0)
    samples = [{name: value[i] for name, value in batch.items()} for i in range(13)]
    loader = torch.utils.data.DataLoader(samples, batch_size=2)
    prepared, optimizer, loader = accelerator.prepare(model, plain, loader)
    window = door.Window(accelerator, prepared)
    back = window.backward if ours else lambda loss: accelerator.backward(loss.value)
    for part in loader:
        with accelerator.accumulate(prepared):
            back(stated(prepared, part))
            if act == "two losses":
                back(0.1 * wb.mean(prepared(part["x"]).square().mean((1, 2))))
            if act == "a loss beside":
                accelerator.backward(0.1 * prepared(part["x"]).square().mean())
            if act == "clips":
                accelerator.clip_grad_norm_(prepared.parameters(), 0.01)
            if accelerator.sync_gradients:
                if act == "clips at the end":
                    accelerator.clip_grad_norm_(prepared.parameters(), 0.01)
                found.append(gradients_of(prepared))
            (plain if act == "steps" else optimizer).step()
            optimizer.zero_grad()
    return found


@pytest.mark.parametrize(
    ("act", "error", "words"),
    [
        ("clips", wb.InexactError, "gradients have been changed.*sync_gradients"),
        ("steps", wb.InexactError, "parameters have been stepped"),
        ("a loss beside", wb.InexactError, "gradients have been changed"),
        ("two losses", wb.LossError, r"called twice.*window\.backward\(wb\.mean"),
    ],
)
def test_what_acts_on_each_micro_batch_is_refused(act: str, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        run_of(act)
    meant = several_meant if "loss" in act else mean
    assert_differs(run_of(act, ours=False)[0], references(loss=meant)[0].gradients)


def test_what_acts_at_the_end_of_a_window_is_served() -> None:
    for found, reference in zip(run_of("clips at the end"), references(), strict=True):
        norm = torch.stack([g.norm() for g in reference.gradients.values() if g is not None]).norm()
        assert_same_gradient(
            found, {n: g if g is None else g * 0.01 / norm for n, g in reference.gradients.items()}, 1e-5
        )
    assert_differs(run_of("nothing", ours=False)[0], references()[0].gradients)
