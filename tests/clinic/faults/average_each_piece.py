"""The weight average is updated with every piece. Planted: average-per-piece"""

import copy

import torch
from torch import nn

torch.manual_seed(0)
k, decay = 4, 0.9
model = nn.Linear(3, 1)
average = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for i, x in enumerate(torch.randn(36, 3).split(3)):
    loss = model(x).square().mean() / k
    loss.backward()
    if (i + 1) % k == 0:
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        for kept, current in zip(average.parameters(), model.parameters()):
            kept.copy_(decay * kept + (1 - decay) * current)
