"""A small ResNet: BatchNorm over the whole batch, in micro-batches of four, beside what micro-batches of four do by
themselves."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wholebatch as wb


class Block(nn.Module):
    def __init__(self, channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm1, self.norm2, self.act = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels), nn.SiLU(inplace=True)
        self.skip = nn.AvgPool2d(stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(self.act(self.norm1(self.conv1(x)))))
        y += self.skip(x)
        return self.act(y)


def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


def main() -> None:
    torch.manual_seed(0)
    stem = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.SiLU(inplace=True)]
    model = nn.Sequential(*stem, Block(16), Block(16, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))
    labels = torch.randint(4, (32,))
    images = torch.randn(32, 3, 16, 16) + labels[:, None, None, None] / 2  # a class has its own brightness
    batch = images, labels

    nets = {choice: copy.deepcopy(model) for choice in ("whole", "micro", "pooled", "exact")}
    losses(nets["whole"], batch).mean().backward()
    for choice in ("micro", "pooled", "exact"):
        wb.backward(nets[choice], losses, batch, micro_batch_size=4, batch_norm=choice)
    true, statistics = gradient(nets["whole"]), nets["whole"][4].norm2.running_var
    for choice, net in nets.items():
        off = (gradient(net) - true).norm() / true.norm()
        drift = (net[4].norm2.running_var - statistics).norm() / statistics.norm()
        updates = int(net[4].norm2.num_batches_tracked)
        print(f"{choice:6}  gradient off by {off:.1e}, running variance by {drift:.1e}, updated {updates} times")
    print(f"gradient error {off:.1e}")


if __name__ == "__main__":
    main()
