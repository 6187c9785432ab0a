"""The denominator counts labels before the shift. Planted: labels-counted-before-shift"""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
k = 3
model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
batches = [torch.randint(0, 11, (2, length)) for length in (7, 3, 4, 6, 2, 5, 3, 8, 4)]

for start in range(0, len(batches), k):
    window = batches[start : start + k]
    tokens = sum((labels != -100).sum() for labels in window)
    for labels in window:
        logits = model(labels)[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum") / tokens
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
