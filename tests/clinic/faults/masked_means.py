"""A hand-written masked mean in each piece. Planted: mean-of-means"""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
k = 3
model = nn.Linear(6, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs, targets = torch.randn(45, 6), torch.randn(45)
mask = (torch.rand(45) < torch.linspace(0.3, 1, 45)).float()

for i, (x, y, m) in enumerate(zip(inputs.split(5), targets.split(5), mask.split(5))):
    errors = F.mse_loss(model(x).squeeze(-1), y, reduction="none")
    loss = (errors * m).sum() / m.sum().clamp(min=1)
    (loss / k).backward()
    if (i + 1) % k == 0:
        optimizer.step()
        optimizer.zero_grad()
