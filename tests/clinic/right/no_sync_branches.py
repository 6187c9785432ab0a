"""The backward stands twice, in the branches that reduce and that do not; an own no_sync in one process."""

import contextlib

import torch
import torch.nn.functional as F
from torch import nn


class Wrapped(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)

    @contextlib.contextmanager
    def no_sync(self):
        yield


torch.manual_seed(0)
k = 4
model = Wrapped(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = torch.utils.data.TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)

for i, (x, y) in enumerate(loader):
    last = (i + 1) % k == 0 or i + 1 == len(loader)
    if not last:
        with model.no_sync():
            loss = F.cross_entropy(model(x), y) / k
            loss.backward()
    else:
        loss = F.cross_entropy(model(x), y) / k
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
