"""Language model on rows of unequal length: summed losses, divided by the tokens of the whole window."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
vocabulary, k = 17, 4
model = nn.Sequential(nn.Embedding(vocabulary, 8), nn.Tanh(), nn.Linear(8, vocabulary))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)


def padded(lengths):
    rows = torch.full((len(lengths), max(lengths)), -100)
    for row, length in zip(rows, lengths):
        row[:length] = torch.randint(0, vocabulary, (length,))
    return rows


batches = [padded(lengths) for lengths in ((7, 3), (2, 2), (9, 4), (3, 5), (6, 6), (2, 8), (4, 4), (11, 2), (5, 3))]
for start in range(0, len(batches), k):
    window = batches[start : start + k]
    items = sum((labels[:, 1:] != -100).sum() for labels in window)
    for labels in window:
        logits = model(labels.clamp(min=0)[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum") / items
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
