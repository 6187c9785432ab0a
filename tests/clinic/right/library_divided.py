"""wb.backward runs once a micro-batch, of equal rows and divided by their number."""

import torch
import torch.nn.functional as F
from torch import nn

import wholebatch as wb

torch.manual_seed(0)
k = 4
model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = torch.utils.data.TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)

for i, batch in enumerate(loader):
    wb.backward(model, lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="none") / k, batch, micro_batch_size=2)
    if (i + 1) % k == 0:
        optimizer.step()
        optimizer.zero_grad()
