"""Each micro-batch's gradient is moved into a wider buffer, which the step gets back."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
k = 4
model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))

optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
main = {p: torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()}
data = torch.utils.data.TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)

for i, (x, y) in enumerate(loader):
    (F.cross_entropy(model(x), y) / k).backward()
    for p, total in main.items():
        total += p.grad
        p.grad = None
    if (i + 1) % k == 0:
        for p, total in main.items():
            p.grad = total.to(p.dtype)
            total.zero_()
        optimizer.step()
        optimizer.zero_grad()
