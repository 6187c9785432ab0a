"""Sixty-four pieces are added up in bfloat16. Planted: short-format-sum"""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
k = 64
model = nn.Linear(8, 4).bfloat16()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs, targets = torch.randn(256, 8).bfloat16(), torch.randint(0, 4, (256,))

for i, (x, y) in enumerate(zip(inputs.split(2), targets.split(2))):
    (F.cross_entropy(model(x).float(), y) / k).backward()
    if (i + 1) % k == 0:
        optimizer.step()
        optimizer.zero_grad()
