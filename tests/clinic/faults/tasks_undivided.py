"""Each task's micro-batches are added up. Planted: loss-not-divided"""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
body = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
heads = nn.ModuleDict({"sentiment": nn.Linear(8, 2), "topic": nn.Linear(8, 5)})
optimizer = torch.optim.Adam([*body.parameters(), *heads.parameters()], lr=1e-3)

for step in range(4):
    for micro_batch in range(3):
        for name, head in heads.items():
            x, y = torch.randn(4, 6), torch.randint(0, head.out_features, (4,))
            loss = F.cross_entropy(head(body(x)), y)
            loss.backward()
    optimizer.step()
    optimizer.zero_grad()
