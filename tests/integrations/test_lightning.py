"""Lightning and Fabric: what they do to a window by themselves, and what the door makes of it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import wholebatch as wb
from tests.distributed import Ranks
from tests.oracle import Gradients, assert_differs, assert_same_gradient, gradients_of, whole_batch

lightning = pytest.importorskip("lightning")

from lightning.pytorch.callbacks import GradientAccumulationScheduler  # noqa: E402

from wholebatch.integrations import lightning as door  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

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


def loader(size: int = 2, count: int = 13, rank: int = 0, world: int = 1) -> Any:
    batch = rows(count)
    samples = [{name: value[i] for name, value in batch.items()} for i in range(rank, count, world)]
    return torch.utils.data.DataLoader(samples, batch_size=size)


def mean(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]).mT, batch["y"])


def stated(model: nn.Module, batch: Batch) -> Any:
    return wb.mean(F.cross_entropy(model(batch["x"]).mT, batch["y"], reduction="none"), batch["y"] != -100)


def several(model: nn.Module, batch: Batch) -> Any:
    return stated(model, batch) + 0.1 * wb.mean(model(batch["x"]).square().mean((1, 2)))


def several_meant(model: nn.Module, batch: Batch) -> Tensor:
    return mean(model, batch) + 0.1 * model(batch["x"]).square().mean()


def references(count: int = 13, sizes: tuple[int, ...] = (8, 5), loss: Any = mean) -> list[Any]:
    batch, start, found = rows(count), 0, []
    for size in sizes:
        found.append(whole_batch(tagger(), loss, {name: value[start : start + size] for name, value in batch.items()}))
        start += size
    return found


class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
    """A tagger whose step is written in Lightning's way, or for the door."""

    def __init__(self, ours: bool = True, returns: Any = stated, rate: float = 0.0) -> None:
        super().__init__()
        self.model, self.ours, self.returns, self.rate = tagger(), ours, returns, rate
        self.steps: list[Gradients] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return door.whole(self, self.returns(self.model, batch)) if self.ours else mean(self.model, batch)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("validation", door.whole(self, stated(self.model, batch)), batch_size=len(batch["y"]))

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        self.steps.append(gradients_of(self.model))  # Lightning's place for it: right before the clip

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.rate)


def fit(module: Any, callbacks: Any = (), train: Any = None, **settings: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_epochs=settings.pop("max_epochs", 1),
            accumulate_grad_batches=settings.pop("accumulate_grad_batches", STEPS),
            callbacks=list(callbacks),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            **settings,
        )
        trainer.fit(module, loader() if train is None else train)
    return trainer


def test_lightning_by_itself_averages_means_and_divides_a_short_window_by_all_steps() -> None:
    module = Module(ours=False)
    fit(module)
    for ours, reference in zip(module.steps, references(), strict=True):
        assert_differs(ours, reference, by=0.05)


def test_a_window_and_a_short_one() -> None:
    module = Module()
    trainer = fit(module, [door.Exact(log="loss")])
    for ours, reference in zip(module.steps, references(), strict=True):
        assert_same_gradient(ours, reference)
    assert float(trainer.callback_metrics["loss"]) == pytest.approx(float(references()[1].loss), rel=1e-6)


def test_windows_that_grow_from_epoch_to_epoch() -> None:
    module = Module()
    callbacks = [GradientAccumulationScheduler({0: 1, 1: 4}), door.Exact()]
    fit(module, callbacks, max_epochs=2, accumulate_grad_batches=1)
    expected = references(sizes=(2,) * 6 + (1,)) + references()
    for ours, reference in zip(module.steps, expected, strict=True):
        assert_same_gradient(ours, reference)


def test_a_micro_batch_that_is_skipped_and_one_that_has_nothing_to_learn() -> None:
    def skipping(model: nn.Module, batch: Batch) -> Any:
        nothing = bool((batch["x"] == rows()["x"][2:4]).all()) if len(batch["x"]) == 2 else False
        return wb.mean(stated(model, batch).total[None], torch.zeros(1)) if nothing else stated(model, batch)

    module = Module(returns=skipping)
    fit(module, [door.Exact()])
    batch = {name: torch.cat([value[:2], value[4:8]]) for name, value in rows().items()}
    assert_same_gradient(module.steps[0], whole_batch(tagger(), mean, batch))


def test_ten_steps_learn_and_validation_says_the_loss_of_the_batch() -> None:
    module = Module(rate=1.0)
    trainer = fit(module, [door.Exact()], max_epochs=5)
    assert len(module.steps) == 10
    found = trainer.validate(module, loader(13), verbose=False)[0]["validation"]
    assert found == pytest.approx(float(mean(module.model, rows())), rel=1e-6)
    assert found < 0.9 * float(mean(tagger(), rows()))


def test_what_the_callback_cannot_serve_is_refused() -> None:
    with pytest.raises(wb.LossError, match="2 terms with denominators of their own"):
        fit(Module(returns=several), [door.Exact()])
    with pytest.raises(wb.LossError, match="bare number"):
        fit(Module(ours=False), [door.Exact()])
    with pytest.raises(wb.LossError, match=r"callbacks=\[Exact\(\)\]"):
        fit(Module())
    module = Module()
    module.configure_optimizers = lambda: torch.optim.LBFGS(module.parameters())  # type: ignore[method-assign]
    with pytest.raises(wb.InexactError, match="LBFGS"):
        fit(module, [door.Exact()])


def test_lbfgs_without_accumulation_is_the_batch_each_time() -> None:
    module = Module()
    module.configure_optimizers = lambda: torch.optim.LBFGS(module.parameters(), max_iter=2)  # type: ignore[method-assign]
    fit(module, [door.Exact()], train=loader(8), accumulate_grad_batches=1)
    assert_same_gradient(module.steps[0], references()[0])


class Manual(Module):
    """The same in manual optimization: several terms, and the whole batch cut anew."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        result = door.backward(self, self, lambda module, micro_batch: several(module.model, micro_batch), batch, 3)
        self.steps.append(gradients_of(self.model))
        self.optimizers().step()
        self.optimizers().zero_grad()
        self.log("loss", result.loss)


def test_manual_optimization_is_refused_by_the_callback() -> None:
    with pytest.raises(wb.InexactError, match=r"automatic_optimization = False.*manual_backward"):
        fit(Manual(), [door.Exact()], train=loader(8), accumulate_grad_batches=1)


def test_manual_optimization_with_several_terms() -> None:
    module = Manual()
    fit(module, train=loader(8), accumulate_grad_batches=1)
    for ours, reference in zip(module.steps, references(loss=several_meant), strict=True):
        assert_same_gradient(ours, reference)


def fabric_steps(fabric: Any, exact: bool, data: Any) -> list[Gradients]:
    module = tagger()
    model, _ = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.0))
    data = fabric.setup_dataloaders(data, use_distributed_sampler=False)
    steps = []
    if exact:
        for window in wb.windows(data, STEPS):
            door.backward(fabric, model, several, window)
            steps.append(gradients_of(model.module))
            model.zero_grad()
        return steps
    for number, batch in enumerate(data):  # as Fabric's documentation has it
        accumulating = number % STEPS != 0
        with fabric.no_backward_sync(model, enabled=accumulating):
            fabric.backward(mean(model, batch))
        if not accumulating:
            steps.append(gradients_of(model.module))
            model.zero_grad()
    return steps


def test_fabric_as_documented_begins_with_a_window_of_one_and_divides_by_nothing() -> None:
    first, second = fabric_steps(lightning.Fabric(accelerator="cpu"), exact=False, data=loader())
    assert_same_gradient(first, references(sizes=(2,))[0])
    assert_differs(second, references(sizes=(2, 8))[1], by=1.0)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "64-true"])
def test_fabric_with_whole_windows(precision: Any) -> None:
    fabric = lightning.Fabric(accelerator="cpu", precision=precision)
    steps = fabric_steps(fabric, exact=True, data=loader())
    tolerance = {"32-true": 2e-6, "bf16-mixed": 2e-2, "64-true": 1e-7}[precision]  # Fabric hands out float32 here too
    for ours, reference in zip(steps, references(loss=several_meant), strict=True):
        assert_same_gradient(ours, reference, tol=tolerance)


def test_strategies_that_make_the_step_themselves_are_refused_by_name() -> None:
    class DeepSpeedStrategy:
        precision = None

    fabric = lightning.Fabric(accelerator="cpu")
    fabric._strategy = DeepSpeedStrategy()
    with pytest.raises(wb.InexactError, match="DeepSpeedStrategy"):
        door.backward(fabric, tagger(), several, rows())


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Two processes of our own: Lightning reads the world from their environment."""
    pair = Ranks(2)
    yield pair
    pair.close()


def on_a_rank(kind: str) -> list[Gradients]:
    """One epoch of this rank: micro-batches of one row, four a window, so eight rows over both ranks."""
    os.environ.update(RANK=str(dist.get_rank()), LOCAL_RANK=str(dist.get_rank()), WORLD_SIZE=str(dist.get_world_size()))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", NODE_RANK="0")
    mine = {"count": 12, "rank": dist.get_rank(), "world": 2}
    if kind == "fabric":
        fabric = lightning.Fabric(accelerator="cpu", strategy="ddp", devices=2)
        fabric.launch()
        return fabric_steps(fabric, exact=True, data=loader(1, **mine))
    modules = {"exact": Module(), "lightning": Module(ours=False), "manual": Manual()}
    module, size = modules[kind], 4 if kind == "manual" else 1
    steps = 1 if kind == "manual" else STEPS
    callbacks = [door.Exact()] if kind == "exact" else []
    settings = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False, "accumulate_grad_batches": steps}
    fit(module, callbacks, loader(size, **mine), **settings)
    return module.steps


def interleaved(size: int, loss: Any) -> list[Any]:
    """The windows of two ranks of which each takes every second row of 12."""
    batch, first, second = rows(12), [*range(0, 12, 2)], [*range(1, 12, 2)]
    groups = [first[i : i + size] + second[i : i + size] for i in range(0, 6, size)]
    return [whole_batch(tagger(), loss, {name: value[group] for name, value in batch.items()}) for group in groups]


@pytest.mark.distributed
@pytest.mark.parametrize(("kind", "loss"), [("exact", mean), ("manual", several_meant), ("fabric", several_meant)])
def test_two_ranks(ranks: Ranks, kind: str, loss: Any) -> None:
    for steps in ranks.run(on_a_rank, kind, seconds=60.0):
        for ours, reference in zip(steps, interleaved(4, loss), strict=True):
            assert_same_gradient(ours, reference)


@pytest.mark.distributed
def test_lightning_by_itself_is_off_on_two_ranks(ranks: Ranks) -> None:
    for ours, reference in zip(ranks.run(on_a_rank, "lightning", seconds=60.0)[0], interleaved(4, mean), strict=True):
        assert_differs(ours, reference, by=0.05)


class Skipping(Module):
    """A step that returns None for some micro-batches, and logs what it returns."""

    def __init__(self, skipped: tuple[int, ...], **more: Any) -> None:
        super().__init__(**more)
        self.skipped, self.logged = skipped, []

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        if batch_idx in self.skipped:
            return None
        loss = super().training_step(batch, batch_idx)
        self.logged.append((float(loss.detach()), float(mean(self.model, batch).detach())))
        return loss


@pytest.mark.parametrize("k", [1, 2], ids=["single", "window"])
def test_a_window_in_which_nothing_is_returned_is_passed_over(k: int) -> None:
    module = Skipping((2, 3))
    fit(module, [door.Exact()], accumulate_grad_batches=k)
    assert len(module.logged) == 5


def test_what_a_step_returns_shows_the_loss_of_its_micro_batch() -> None:
    module = Skipping(())
    fit(module, [door.Exact()])
    for shown, true in module.logged:
        assert shown == pytest.approx(true, rel=1e-5)


def test_a_tuner_that_puts_callbacks_away_finds_a_learning_rate() -> None:
    from lightning.pytorch.tuner import Tuner

    module = Module(rate=0.01)
    module.lr = 0.01
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_epochs=1,
            accumulate_grad_batches=STEPS,
            callbacks=[door.Exact()],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        assert Tuner(trainer).lr_find(module, loader(), num_training=3) is not None


class Normed(Module):
    """A tagger with a BatchNorm, registered or held where no module looks."""

    def __init__(self, hidden: bool) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(6)
        self.norm = [norm] if hidden else nn.ModuleList([norm])

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        normed = self.norm[0](batch["x"].mT).mT
        return door.whole(self, stated(self.model, {**batch, "x": normed}))


@pytest.mark.parametrize("hidden", [False, True], ids=["registered", "hidden"])
def test_batch_norm_that_runs_in_a_window_is_refused_and_chosen(hidden: bool) -> None:
    with pytest.raises(wb.InexactError, match=r'BatchNorm.*Exact\(batch_norm="micro"\)'):
        fit(Normed(hidden), [door.Exact()])
    module = Normed(hidden)
    fit(module, [door.Exact(batch_norm="micro")])
    assert len(module.steps) == 2


def test_the_older_package_serves_where_the_newer_one_is_not_installed() -> None:
    pytest.importorskip("pytorch_lightning")
    script = """
import sys
sys.modules["lightning"] = None
from wholebatch.integrations.lightning import Exact, backward
import pytorch_lightning, lightning_fabric, torch
assert issubclass(Exact, pytorch_lightning.Callback)
fabric = lightning_fabric.Fabric(accelerator="cpu")
model = fabric.setup(torch.nn.Linear(3, 1))
print(backward(fabric, model, lambda model, x: model(x).square(), torch.randn(10, 3), 4).micro_batches)
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert ran.stdout.strip().endswith("3"), ran.stderr


@pytest.mark.parametrize("option", [{"verify": "first"}, {"items": len}, {"batch_norm": "exact"}], ids=str)
def test_options_that_a_callback_of_losses_cannot_serve_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=f"Exact has no {next(iter(option))}="):
        door.Exact(**option)


# What acts on a window before its end, and what goes back beside it


class ClippingEach(Module):
    def on_after_backward(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.01)


class ZeroingEach(Module):
    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        self.optimizers().zero_grad()
        return super().training_step(batch, batch_idx)


class Beside(Module):
    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + 0.1 * self.model(batch["x"]).square().mean()


class Twice(Module):
    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        aux = 0.1 * wb.mean(self.model(batch["x"]).square())
        return super().training_step(batch, batch_idx) + (door.whole(self, aux) if self.ours else aux.value)


REFUSED = [
    (ClippingEach, wb.InexactError, "gradients have been changed.*gradient_clip_val", mean),
    (ZeroingEach, wb.InexactError, "gradients have been changed", mean),
    (Beside, wb.LossError, "something beside it", several_meant),
    (Twice, wb.LossError, "called twice", several_meant),
]


@pytest.mark.parametrize(
    ("module", "error", "words", "meant"), REFUSED, ids=lambda value: getattr(value, "__name__", None)
)
def test_what_acts_on_a_window_before_its_end_or_goes_back_beside_it_is_refused(
    module: Any, error: Any, words: str, meant: Any
) -> None:
    with pytest.raises(error, match=words):
        fit(module(), [door.Exact()])
    stock = module(ours=False)
    fit(stock)
    assert_differs(stock.steps[0], references(loss=meant)[0])


class Scaled(Module):
    """Parts of a share, and of what has no gradient, change nothing but a number that all micro-batches share."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return 0.5 * loss + self.model(batch["x"]).square().mean().detach()


def test_a_share_may_be_multiplied_and_logged() -> None:
    module = Scaled()
    fit(module, [door.Exact()])
    for found, reference in zip(module.steps, references(), strict=True):
        assert_same_gradient(found, {name: g if g is None else 0.5 * g for name, g in reference.gradients.items()})
    stock = Scaled(ours=False)
    fit(stock)
    assert_differs(stock.steps[0], {n: g if g is None else 0.5 * g for n, g in references()[0].gradients.items()})


class Norms(lightning.Callback):  # type: ignore[misc,name-defined]
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.seen.append(float(torch.stack([p.grad.norm() for p in pl_module.parameters()]).norm()))


def test_a_callback_that_logs_norms_sees_those_of_the_batch_wherever_it_stands() -> None:
    expected = [
        float(torch.stack([g.norm() for g in reference.gradients.values() if g is not None]).norm())
        for reference in references()
    ]
    for order in (lambda norms: [norms, door.Exact()], lambda norms: [door.Exact(), norms]):
        norms = Norms()
        fit(Module(), order(norms))
        assert norms.seen == pytest.approx(expected, rel=1e-5)
    stock = Norms()
    fit(Module(ours=False), [stock])
    assert stock.seen != pytest.approx(expected, rel=1e-2)
