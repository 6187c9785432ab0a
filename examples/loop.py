"""A plain training loop at batch 64, eight rows in memory at a time; the last batch is short."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import wholebatch as wb


def loss_fn(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels, reduction="none")


def gradient(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten().double() for parameter in model.parameters()])


def error(model: nn.Module, batch: list[torch.Tensor]) -> float:
    """The distance of the gradient in .grad to that of one backward over the whole batch in float64."""
    reference = copy.deepcopy(model).double()
    reference.zero_grad()
    loss_fn(reference, [batch[0].double(), batch[1]]).mean().backward()
    return float((gradient(model) - gradient(reference)).norm() / gradient(reference).norm())


def main() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(300, 20)
    labels = (inputs[:, :5].argmax(dim=1) + inputs[:, 5].gt(1)) % 5
    loader = DataLoader(TensorDataset(inputs, labels), batch_size=64, shuffle=True)
    model = nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Linear(64, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    worst = 0.0
    for epoch in range(5):
        for batch in loader:
            result = wb.backward(model, loss_fn, batch, micro_batch_size=8)
            worst = max(worst, error(model, batch))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        print(f"epoch {epoch}  loss {result.loss:.3f}  {result.rows} rows in {result.micro_batches} micro-batches")
    print(f"gradient error {worst:.1e}")


if __name__ == "__main__":
    main()
