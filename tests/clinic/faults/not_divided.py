"""Four means are added up. Planted: loss-not-divided"""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
k = 4
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs, targets = torch.randn(48, 6), torch.randint(0, 3, (48,))

for i, (x, y) in enumerate(zip(inputs.split(4), targets.split(4))):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    if (i + 1) % k == 0:
        optimizer.step()
        optimizer.zero_grad()
