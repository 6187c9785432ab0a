"""Sharpness-aware steps: two passes over the window, the first only to find where to look."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = list(zip(torch.randn(24, 6).split(4), torch.randint(0, 3, (24,)).split(4)))


def gradients(window):
    for inputs, targets in window:
        (F.cross_entropy(model(inputs), targets) / len(window)).backward()


for start in range(0, len(batches), 3):
    window = batches[start : start + 3]
    gradients(window)
    with torch.no_grad():
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        moves = [0.05 * p.grad / norm for p in model.parameters()]
        for parameter, move in zip(model.parameters(), moves):
            parameter.add_(move)
    optimizer.zero_grad()
    gradients(window)
    with torch.no_grad():
        for parameter, move in zip(model.parameters(), moves):
            parameter.sub_(move)
    optimizer.step()
    optimizer.zero_grad()
