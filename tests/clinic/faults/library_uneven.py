"""wb.backward runs once a micro-batch, divided by their number, but their rows differ. Planted: mean-of-means"""

import torch
import torch.nn.functional as F
from torch import nn

import wholebatch as wb

torch.manual_seed(0)
k = 4
model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none") / 2


for _ in range(3):
    for rows in (7, 2):
        wb.backward(model, loss_fn, (torch.randn(rows, 6), torch.randint(0, 3, (rows,))), micro_batch_size=2)
    optimizer.step()
    optimizer.zero_grad()
