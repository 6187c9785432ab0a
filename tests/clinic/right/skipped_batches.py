"""Batches whose loss or gradient is not finite are left out, and what they left is cleared."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
k = 4
model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))

optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for i, x in enumerate(torch.randn(48, 6).split(6)):
    if i == 3:
        x[0, 0] = float("inf")
    loss = F.cross_entropy(model(x), torch.randint(0, 3, (6,)))
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    if not torch.isfinite(norm):
        optimizer.zero_grad()
        continue
    optimizer.step()
    optimizer.zero_grad()
