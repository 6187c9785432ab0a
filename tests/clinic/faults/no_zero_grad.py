"""Nothing clears the gradients. Planted: zero-grad-missing"""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
k = 2
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs, targets = torch.randn(32, 6), torch.randint(0, 3, (32,))

for i, (x, y) in enumerate(zip(inputs.split(4), targets.split(4))):
    loss = F.cross_entropy(model(x), y) / k
    loss.backward()
    if (i + 1) % k == 0:
        optimizer.step()
