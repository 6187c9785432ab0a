"""A contrastive loss over all rows, each window once through wb.coupled_backward."""

import torch
import torch.nn.functional as F
from torch import nn

import wholebatch as wb

torch.manual_seed(0)
model = nn.Linear(6, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def encode(model, batch):
    return F.normalize(model(batch[0]), dim=-1), F.normalize(model(batch[1]), dim=-1)


def loss_fn(a, b):
    return F.cross_entropy(a @ b.T / 0.1, torch.arange(len(a)))


for a, b in zip(torch.randn(36, 6).split(12), torch.randn(36, 6).split(12)):
    optimizer.zero_grad()
    wb.coupled_backward(model, encode, loss_fn, (a, b), micro_batch_size=4)
    optimizer.step()
