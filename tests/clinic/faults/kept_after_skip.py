"""Gradients are cleared after real steps only, so an overflow stays. Planted: not-cleared-after-skipped-step"""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
k = 2
model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
inputs, targets = torch.randn(24, 2), torch.randn(24, 1)
targets[9] = float("inf")

for i, (x, y) in enumerate(zip(inputs.split(3), targets.split(3))):
    scaler.scale(F.mse_loss(model(x), y) / k).backward()
    if (i + 1) % k == 0:
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= before:
            optimizer.zero_grad()
