"""Summed losses; the gradients are divided by the window's items once, just before the step."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
sizes = (5, 1, 3, 4, 2, 6, 7, 1)
batches = [(torch.randn(n, 6), torch.randint(0, 3, (n,))) for n in sizes]

items = 0
for i, (inputs, targets) in enumerate(batches):
    F.cross_entropy(model(inputs), targets, reduction="sum").backward()
    items += len(inputs)
    if (i + 1) % 4 == 0:
        for parameter in model.parameters():
            parameter.grad /= items
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        items = 0
