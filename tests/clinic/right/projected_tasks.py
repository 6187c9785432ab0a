"""Each task's gradient is taken away, projected off the others, and the sum is put back."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
body, heads = nn.Linear(6, 8), nn.ModuleList([nn.Linear(8, 1), nn.Linear(8, 1)])
optimizer = torch.optim.Adam([*body.parameters(), *heads.parameters()], lr=1e-3)
shared = list(body.parameters())

for x in torch.randn(30, 6).split(10):
    taken = []
    optimizer.zero_grad()
    for head in heads:
        for p in shared:
            p.grad = None
        F.mse_loss(head(torch.relu(body(x))), x.sum(1, keepdim=True)).backward()
        taken.append(torch.cat([p.grad.flatten() for p in shared]).clone())
    a, b = taken
    dot = torch.dot(a, b)
    if dot < 0:
        a, b = a - dot / b.dot(b) * b, b - dot / a.dot(a) * a
    start = 0
    for p in shared:
        p.grad = (a + b)[start : start + p.numel()].view_as(p).clone()
        start += p.numel()
    optimizer.step()
