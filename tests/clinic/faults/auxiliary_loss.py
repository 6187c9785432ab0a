"""Tokens are divided by the window's count, the balancing term by nothing. Planted: loss-not-divided"""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
k = 4
model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
rows = [torch.randint(0, 11, (length + 1,)) for length in (7, 1, 3, 2, 5, 5, 2, 9, 4, 4, 1, 6)]

for start in range(0, len(rows), k):
    window = rows[start : start + k]
    tokens = sum(len(row) - 1 for row in window)
    for row in window:
        logits = model(row[:-1])
        loss = F.cross_entropy(logits, row[1:], reduction="sum") / tokens
        balance = logits.softmax(-1).mean(0).square().mean()
        (loss + 0.1 * balance).backward()
    optimizer.step()
    optimizer.zero_grad()
