"""The backward stands twice, and neither divides. Planted: loss-not-divided"""

import contextlib

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
k = 4
model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = torch.utils.data.TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)

for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(model(x), y)
    if (i + 1) % k != 0:
        with contextlib.nullcontext():
            loss.backward()
    else:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
