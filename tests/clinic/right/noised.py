"""The gradient is divided, decayed and noised by hand before the step."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
k = 4
model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))

optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)

for i, (x, y) in enumerate(loader):
    F.cross_entropy(model(x), y).backward()
    if (i + 1) % k == 0:
        for p in model.parameters():
            p.grad.div_(k)
            p.grad += 0.3 * torch.randn_like(p) + 0.01 * p.data
        optimizer.step()
        model.zero_grad()
