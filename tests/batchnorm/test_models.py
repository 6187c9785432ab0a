"""Nets as people have them: BatchNorm over the whole batch in the models of four libraries."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import wholebatch as wb
from tests.oracle import assert_same_gradient, relative_error, whole_batch


def torchvision_net(name: str, **options: Any) -> nn.Module:
    models = pytest.importorskip("torchvision.models")
    net: nn.Module = getattr(models, name)(weights=None, **options)
    return net


def segmentation() -> nn.Module:
    models = pytest.importorskip("torchvision.models.segmentation")
    net: nn.Module = models.fcn_resnet50(weights=None, weights_backbone=None, num_classes=3)
    return net


def timm_net(name: str) -> nn.Module:
    net: nn.Module = pytest.importorskip("timm").create_model(name)
    return net


def yolo() -> nn.Module:
    tasks = pytest.importorskip("ultralytics.nn.tasks")
    net: nn.Module = tasks.DetectionModel("yolo11n.yaml", nc=3, verbose=False)
    return net


def hugging_face(name: str, **options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    net: nn.Module = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**options))
    return net


SMALL: dict[str, Any] = {"embedding_size": 8, "hidden_sizes": [8, 12, 16], "depths": [1, 2, 1], "layer_type": "basic"}
REGNET: dict[str, Any] = {**SMALL, "layer_type": "y", "groups_width": 4}
SPEECH: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16, "conv_dim": (8, 8),
    "conv_stride": (4, 2), "conv_kernel": (4, 2), "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
    "hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "feat_proj_dropout": 0.0,
    "layerdrop": 0.0, "final_dropout": 0.0, "conformer_conv_dropout": 0.0, "mask_time_prob": 0.0,
    "feat_extract_norm": "layer", "num_feat_extract_layers": 2,
}  # fmt: skip

NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "torchvision resnet18": (lambda: torchvision_net("resnet18"), (3, 32, 32)),
    "torchvision resnet50": (lambda: torchvision_net("resnet50"), (3, 64, 64)),
    "torchvision mobilenet_v3_small": (lambda: torchvision_net("mobilenet_v3_small"), (3, 32, 32)),
    "torchvision densenet121": (lambda: torchvision_net("densenet121"), (3, 32, 32)),
    "torchvision inception_v3": (
        lambda: torchvision_net("inception_v3", aux_logits=False, init_weights=False),
        (3, 75, 75),
    ),
    "torchvision fcn_resnet50": (segmentation, (3, 32, 32)),
    "timm resnet26": (lambda: timm_net("resnet26"), (3, 32, 32)),
    "timm efficientnet_b0": (lambda: timm_net("efficientnet_b0"), (3, 32, 32)),
    "timm regnety_002": (lambda: timm_net("regnety_002"), (3, 64, 64)),
    "timm levit_128s": (lambda: timm_net("levit_128s"), (3, 224, 224)),
    "ultralytics yolo11n": (yolo, (3, 64, 64)),
    "transformers ResNet": (lambda: hugging_face("ResNet", **SMALL), (3, 16, 16)),
    "transformers RegNet": (lambda: hugging_face("RegNet", **REGNET), (3, 16, 16)),
    "transformers MobileNetV2": (lambda: hugging_face("MobileNetV2", depth_multiplier=0.25), (3, 32, 32)),
    "transformers Wav2Vec2Conformer": (lambda: hugging_face("Wav2Vec2Conformer", **SPEECH), (400,)),
}


def values(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """One smooth number a row from every tensor with rows that the net answers."""
    answer = model(x)
    leaves = [
        leaf for leaf in pytree.tree_leaves(answer) if torch.is_tensor(leaf) and leaf.dim() and len(leaf) == len(x)
    ]
    told = [leaf.flatten(1) for leaf in leaves if leaf.requires_grad]
    return sum((leaf.sin() * torch.linspace(1, 2, leaf.shape[1], dtype=leaf.dtype)).mean(1) for leaf in told)


def built(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(4)
    model = make().double().train()
    for module in model.modules():
        if "Drop" in type(module).__name__:
            module.eval()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.affine:
            nn.init.uniform_(module.weight, 0.7, 1.3)
            nn.init.uniform_(module.bias, -0.2, 0.2)
    return model


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", NETS)
def test_a_net_of_the_field_has_the_whole_batch_s_gradient_and_statistics(name: str) -> None:
    make, shape = NETS[name]
    model = built(make)
    x = torch.randn(8, *shape).double() * torch.linspace(0.5, 2, 8).double().view(-1, *[1] * len(shape))
    reference, naive = whole_batch(model, lambda m, x: values(m, x).mean(), x), copy.deepcopy(model)
    # The same rows in another order are the same batch: so far the whole batch is from itself by rounding.
    other = whole_batch(model, lambda m, x: values(m, x).mean(), x.flip(0))
    rounding = relative_error(other, reference)
    wb.backward(model, values, x, micro_batch_size=3, batch_norm="exact")
    layers = sum(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())
    assert_same_gradient(model, reference, tol=max(1e-12 if layers < 90 else 1e-11, 4 * rounding))
    for key, buffer in reference.model.named_buffers():
        apart, itself = (
            (each.get_buffer(key).double() - buffer.double()).norm().item() for each in (model, other.model)
        )
        assert apart <= max(1e-12 * buffer.double().norm().item(), 4 * itself, 1e-14), key
    wb.backward(naive, values, x, micro_batch_size=3, batch_norm="micro")
    assert relative_error(naive, reference) > 1e-3
