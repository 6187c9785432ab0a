"""The unfinished window leaks into the next epoch's first step. Planted: carried-into-next-epoch"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
k = 3
model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(20, 2), torch.randn(20, 1)), batch_size=4)

for epoch in range(3):
    for i, (inputs, targets) in enumerate(loader):
        loss = F.mse_loss(model(inputs), targets)
        (loss / k).backward()
        if (i + 1) % k == 0:
            optimizer.step()
            optimizer.zero_grad()
