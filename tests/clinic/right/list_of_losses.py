"""Losses are gathered in a list, added, and go back once."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
k = 4
model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))

optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
data = torch.utils.data.TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)

losses = []
for i, (x, y) in enumerate(loader, start=1):
    losses.append(F.cross_entropy(model(x), y))
    if i % k == 0:
        loss = sum(losses) / len(losses)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses = []
