"""Each piece divides by its own tokens. Planted: mean-of-means"""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
k = 4
model = nn.Sequential(nn.Embedding(17, 8), nn.Tanh(), nn.Linear(8, 17))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
lengths = ((7, 3), (2, 2), (9, 4), (3, 5), (6, 6), (2, 8), (4, 4), (11, 2))

for i, (a, b) in enumerate(lengths):
    labels = torch.full((2, max(a, b)), -100)
    labels[0, :a], labels[1, :b] = torch.randint(0, 17, (a,)), torch.randint(0, 17, (b,))
    logits = model(labels.clamp(min=0)[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
    loss = loss / k
    loss.backward()
    if (i + 1) % k == 0:
        optimizer.step()
        optimizer.zero_grad()
