"""The Hugging Face Trainer on engines that shard the model: FSDP 1 and 2, DeepSpeed ZeRO, on two processes."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import wholebatch as wb
from tests.distributed import Ranks, needs_shards

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from tests.integrations import test_transformers as alone  # noqa: E402
from wholebatch.integrations.transformers import exact  # noqa: E402

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")

RATE = 8.0  # so large that storing parameters in float32 rounds off 4e-7 of their update; at 0.5 it is 5.7e-6
ROUNDING = 2e-6
WRAPPED = {"fsdp1": "FullyShardedDataParallel", "fsdp2": "FSDPModule", "zero": "DeepSpeedEngine"}
ENGINES = [
    pytest.param("fsdp2", marks=needs_shards),
    "fsdp1",
    *(pytest.param(f"zero{stage}", marks=needs_deepspeed) for stage in (1, 2, 3)),
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Two processes of our own, in which Accelerate is told of another engine for every run."""
    pair = Ranks(2)
    yield pair
    pair.close()


def settings_of(engine: str) -> dict[str, Any]:
    if engine.startswith("fsdp"):
        version = int(engine[-1])
        wrapping = {"transformer_layer_cls_to_wrap": ["BertLayer"], "sync_module_states": False}
        return {"fsdp": True, "fsdp_config": {"version": version, "fsdp_version": version, **wrapping}}
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    config["zero_optimization"] = {"stage": int(engine[-1]), "stage3_gather_16bit_weights_on_model_save": True}
    return {"deepspeed": {**config, "zero_allow_untested_optimizer": True}}


def mean_fsdp_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Accelerate wrap as it is told to on a CPU too, where it passes FSDP over in silence and wraps in DDP."""
    from accelerate.state import AcceleratorState, DistributedType, PartialState

    AcceleratorState._reset_state(reset_partial_state=True)
    first = AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        first(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            PartialState._shared_state["device"] = self.device = torch.device("cpu")
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin

    monkeypatch.setattr(AcceleratorState, "__init__", init)


def whole_parameters(trainer: Any) -> dict[str, Tensor]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = trainer.model_wrapped
    if trainer.is_deepspeed_enabled:
        return {name: value.cpu() for name, value in (trainer.accelerator.get_state_dict(model) or {}).items()}
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model):
            named = model.module.named_parameters()
            return {name.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for name, p in named}
    return {name: p.detach().full_tensor() for name, p in model.named_parameters()}


def train(engine: str, ours: bool, options: Any) -> tuple[list[str], dict[str, Tensor]]:
    """Train on sixteen rows over both ranks, then eight: four micro-batches of two rows a rank, then two."""
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
        del os.environ[name]  # where TrainingArguments has told Accelerate of an earlier engine
    os.environ.update(RANK=str(dist.get_rank()), LOCAL_RANK=str(dist.get_rank()), WORLD_SIZE=str(dist.get_world_size()))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", DS_ACCELERATOR="cpu")
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        mean_fsdp_on_the_cpu(patch)
        arguments = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "num_train_epochs": 1}
        arguments |= {"learning_rate": RATE, "optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
        arguments |= {"weight_decay": 0.0, "train_sampling_strategy": "sequential", "report_to": [], "use_cpu": True}
        arguments |= {"save_strategy": "no", "remove_unused_columns": False, "disable_tqdm": True}
        args = transformers.TrainingArguments(folder, **arguments, ddp_backend="gloo", **settings_of(engine))
        kind = exact(transformers.Trainer, **options) if ours else transformers.Trainer
        trainer = kind(model(), args, train_dataset=rows(), data_collator=alone.padded)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        return [each.__name__ for each in type(trainer.model_wrapped).__mro__], whole_parameters(trainer)


def rows() -> Any:
    return alone.labelled(alone.texts(24), lambda i: i % 3)


def model() -> Any:
    return alone.tiny("BertForSequenceClassification", **alone.CLASSES)


def by_whole_batches(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """What two plain steps make of the parameters."""
    whole = model().to(dtype)
    for window in (rows()[:16], rows()[16:]):
        whole.zero_grad()
        alone.own_loss(whole, alone.padded(window)).backward()
        with torch.no_grad():
            for parameter in whole.parameters():
                parameter -= RATE * (0 if parameter.grad is None else parameter.grad)
    return {name: p.detach() for name, p in whole.named_parameters()}


def off_by(done: dict[str, Tensor]) -> float:
    """Return the distance to the whole batches' update, relative to it."""
    start, wanted = model().state_dict(), by_whole_batches()
    apart = sum(float((done[name] - wanted[name]).square().sum()) for name in wanted)
    return float((apart / sum(float((start[name] - wanted[name]).square().sum()) for name in wanted)) ** 0.5)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_sharded_model_makes_the_whole_batches_update(ranks: Ranks, engine: str) -> None:
    wrapped, done = ranks.run(train, engine, True, {}, seconds=90.0)[0]
    assert WRAPPED[engine if engine in WRAPPED else engine[:-1]] in wrapped
    assert off_by(done) < ROUNDING


def test_two_plain_steps_in_float32_come_as_near() -> None:
    assert off_by(by_whole_batches(torch.float32)) < ROUNDING


@needs_shards
def test_the_trainer_by_itself_is_off_where_the_model_is_sharded(ranks: Ranks) -> None:
    wrapped, done = ranks.run(train, "fsdp2", False, {}, seconds=90.0)[0]
    assert WRAPPED["fsdp2"] in wrapped
    assert off_by(done) > 1.0


def refused() -> str:
    with pytest.raises(wb.InexactError) as refusal:
        train("fsdp2", True, {"micro_batch_size": 3})
    return str(refusal.value)


@needs_shards
def test_a_window_that_has_to_wait_is_refused_where_the_model_is_sharded(ranks: Ranks) -> None:
    for said in ranks.run(refused, seconds=60.0):
        assert "because of micro_batch_size=3, but fsdp runs its own backward" in said
