"""Clipping stands inside the loop over pieces. Planted: clip-per-piece"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_

torch.manual_seed(0)
k = 3
model = nn.Linear(5, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs, targets = torch.randn(18, 5), 4 * torch.randn(18, 1)

for i, (x, y) in enumerate(zip(inputs.split(2), targets.split(2))):
    loss = F.mse_loss(model(x), y) / k
    loss.backward()
    clip_grad_norm_(model.parameters(), 0.5)
    if (i + 1) % k == 0:
        optimizer.step()
        optimizer.zero_grad()
