"""One batch of sentences of uneven length: the usual loop's gradient, ours, and the whole batch's."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

import wholebatch as wb

Batch = dict[str, torch.Tensor]


def token_losses(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["words"]).transpose(1, 2), batch["tags"], reduction="none")


def loss_fn(model: nn.Module, batch: Batch) -> wb.LossSum:
    return wb.mean(token_losses(model, batch), weights=batch["mask"])


def usual_mean(model: nn.Module, batch: Batch) -> torch.Tensor:
    return (token_losses(model, batch) * batch["mask"]).sum() / batch["mask"].sum()


def gradient(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten().double() for parameter in model.parameters()])


def main() -> None:
    torch.manual_seed(0)
    lengths = torch.tensor([3, 40, 5, 4, 28, 6, 3, 3, 35, 4, 5, 7])
    batch = {
        "words": torch.randint(100, (12, 40)),
        "tags": torch.randint(10, (12, 40)),
        "mask": (torch.arange(40) < lengths[:, None]).double(),
    }
    whole = nn.Sequential(nn.Embedding(100, 32), nn.Linear(32, 10)).double()
    ours, usual = copy.deepcopy(whole), copy.deepcopy(whole)

    usual_mean(whole, batch).backward()
    wb.backward(ours, loss_fn, batch, micro_batch_size=3)
    for start in range(0, 12, 3):
        micro_batch = {name: tensor[start : start + 3] for name, tensor in batch.items()}
        (usual_mean(usual, micro_batch) / 4).backward()

    print("distance to the whole batch's gradient, 12 rows in micro-batches of 3")
    for name, model in {"the usual loop": usual, "wholebatch": ours}.items():
        print(f"{name:15} {(gradient(model) - gradient(whole)).norm() / gradient(whole).norm():.1e}")


if __name__ == "__main__":
    main()
