"""Batch Dice: overlap over size, both summed over all images, is no mean of the images' or the micro-batches' own
Dice."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import wholebatch as wb

Batch = dict[str, Tensor]


def circles(count: int, side: int = 24) -> Batch:
    """Noisy images of a bright disc, of very different sizes, and their masks."""
    line = torch.arange(side)
    middle, radius = torch.rand(count, 2, 1, 1) * side, torch.rand(count, 1, 1).square() * side / 2
    mask = (line[:, None] - middle[:, 0]).square() + (line - middle[:, 1]).square() < radius.square()
    return {"image": (mask + 0.7 * torch.randn(count, side, side))[:, None], "mask": mask.float()}


def encode(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Two numbers an image are all that the loss needs, so that is all that waits for the other images."""
    inside = model(batch["image"])[:, 0].sigmoid()
    return (inside * batch["mask"]).sum((1, 2)), (inside + batch["mask"]).sum((1, 2))


def dice(overlap: Tensor, size: Tensor) -> Tensor:
    return 1 - 2 * overlap.sum() / size.sum()


def main() -> None:
    torch.manual_seed(0)
    batch = circles(32)
    layers = [nn.Conv2d(1, 8, 5, padding=2), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 1, 5, padding=2)]
    model = nn.Sequential(*layers)
    whole, usual, optimizer = copy.deepcopy(model), copy.deepcopy(model), torch.optim.Adam(model.parameters(), lr=1e-2)

    dice(*encode(whole, batch)).backward()
    for start in range(0, 32, 4):
        micro_batch = {name: rows[start : start + 4] for name, rows in batch.items()}
        (dice(*encode(usual, micro_batch)) / 8).backward()
    for number in range(30):
        result = wb.coupled_backward(model, encode, dice, batch, micro_batch_size=4)
        if number == 0:
            ours, true, off = (torch.cat([p.grad.flatten() for p in m.parameters()]) for m in (model, whole, usual))
        if number % 10 == 9:
            print(f"step {number + 1:2}: batch Dice loss {float(result.loss):.3f}")
        optimizer.step()
        optimizer.zero_grad()
    print(f"mean of the micro-batches' Dice, as usual: off by {(off - true).norm() / true.norm():.2f}")
    print(f"gradient error {(ours - true).norm() / true.norm():.1e}")


if __name__ == "__main__":
    main()
