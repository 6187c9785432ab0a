"""Unscale and clip for every piece; torch stops the script. Planted: unscale-twice"""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
k = 3
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
inputs, targets = torch.randn(12, 4), torch.randint(0, 2, (12,))

for i, (x, y) in enumerate(zip(inputs.split(2), targets.split(2))):
    scaler.scale(F.cross_entropy(model(x), y) / k).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    if (i + 1) % k == 0:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
