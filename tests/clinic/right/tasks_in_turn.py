"""Each task has a head, rows and a backward of its own, and all are added on purpose."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
body = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
heads = nn.ModuleDict({"sentiment": nn.Linear(8, 2), "topic": nn.Linear(8, 5), "age": nn.Linear(8, 3)})
weights = {"sentiment": 1.0, "topic": 0.5, "age": 0.25}
optimizer = torch.optim.Adam([*body.parameters(), *heads.parameters()], lr=1e-3)

for step in range(4):
    for name, head in heads.items():
        x = torch.randn(4 + len(name), 6)
        y = torch.randint(0, head.out_features, (len(x),))
        loss = weights[name] * F.cross_entropy(head(body(x)), y)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
