"""LBFGS: the closure walks through the whole window each time it is called."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 2)
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
inputs, targets = torch.randn(18, 4), torch.randn(18, 2)

for _ in range(2):

    def closure():
        optimizer.zero_grad()
        total = 0.0
        for x, y in zip(inputs.split(6), targets.split(6)):
            loss = F.mse_loss(model(x), y) / 3
            loss.backward()
            total += loss.detach()
        return total

    optimizer.step(closure)
