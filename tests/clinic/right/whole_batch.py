"""The library's own step: batches of sentences of unequal length, cut by it."""

import torch
from torch import nn

import wholebatch as wb

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(13, 8), nn.Dropout(0.1), nn.Linear(8, 13))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)


def loss_fn(model, labels):
    return wb.losses.causal_lm(model(labels.clamp(min=0)), labels)


step = wb.Step(model, optimizer, loss_fn, micro_batch_size=3, max_grad_norm=0.1)
for _ in range(3):
    labels = torch.randint(0, 13, (8, 10))
    labels[torch.arange(10) > torch.randint(2, 10, (8, 1))] = -100
    step(labels)
