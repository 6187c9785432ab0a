"""Each row's tokens are averaged over the row, rows over the window. Planted: mean-of-means"""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
k = 4
model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
criterion = nn.CrossEntropyLoss(ignore_index=-100)

for step in range(3):
    for _ in range(k):
        tokens = torch.randint(0, 11, (2, 7))
        labels = tokens.clone()
        labels[:, : int(torch.randint(1, 6, ()))] = -100
        criterion(model(tokens[:, :-1]).flatten(0, 1), labels[:, 1:].flatten()).div(k).backward()
    optimizer.step()
    optimizer.zero_grad()
