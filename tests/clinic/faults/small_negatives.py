"""Every pair is compared with its own piece only. Planted: in-batch-negatives"""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
k = 4
encoder = nn.Linear(6, 5)
optimizer = torch.optim.AdamW(encoder.parameters(), lr=0.01)
queries = torch.randn(48, 6)
passages = queries + 0.1 * torch.randn(48, 6)

for i, (q, p) in enumerate(zip(queries.split(4), passages.split(4))):
    scores = F.normalize(encoder(q), dim=-1) @ F.normalize(encoder(p), dim=-1).T / 0.1
    loss = F.cross_entropy(scores, torch.arange(len(scores))) / k
    loss.backward()
    if (i + 1) % k == 0:
        optimizer.step()
        optimizer.zero_grad()
