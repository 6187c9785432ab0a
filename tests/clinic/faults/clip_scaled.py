"""Gradients are clipped while they carry the scale. Planted: clip-before-unscale"""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
k = 2
model = nn.Linear(5, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
inputs, targets = torch.randn(24, 5), torch.randn(24, 1)

for i, (x, y) in enumerate(zip(inputs.split(3), targets.split(3))):
    scaler.scale(F.mse_loss(model(x), y) / k).backward()
    if (i + 1) % k == 0:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
