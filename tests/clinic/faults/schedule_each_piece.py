"""Warm-up moves with every piece. Planted: scheduler-per-piece"""

import torch
from torch import nn

torch.manual_seed(0)
k = 4
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))

for i, x in enumerate(torch.randn(36, 3).split(3)):
    loss = model(x).square().mean() / k
    loss.backward()
    if (i + 1) % k == 0:
        optimizer.step()
        optimizer.zero_grad()
    scheduler.step()
