"""Inner steps with torch.autograd.grad, one outer backward a task, divided by the tasks."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
tasks = 3

for _ in range(4):
    optimizer.zero_grad()
    for _ in range(tasks):
        slope = torch.randn(2, 1)
        near, far = torch.randn(5, 2), torch.randn(5, 2)
        fast = dict(model.named_parameters())
        for _ in range(2):
            loss = F.mse_loss(torch.func.functional_call(model, fast, (near,)), near @ slope)
            gradients = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
            fast = {name: value - 0.1 * g for (name, value), g in zip(fast.items(), gradients)}
        outer = F.mse_loss(torch.func.functional_call(model, fast, (far,)), far @ slope)
        (outer / tasks).backward()
    optimizer.step()
