"""Class-weighted cross entropy divides by the weights of its piece. Planted: mean-of-means"""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
weight = torch.tensor([0.1, 1.0, 10.0])
model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs, targets = torch.randn(36, 4), torch.randint(0, 3, (36,))

for i, (x, y) in enumerate(zip(inputs.split(4), targets.split(4))):
    loss = F.cross_entropy(model(x), y, weight=weight) / 3
    loss.backward()
    if i % 3 == 2:
        optimizer.step()
        optimizer.zero_grad()
