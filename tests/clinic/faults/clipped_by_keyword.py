"""The clip stands outside of the condition. Planted: clip-per-piece"""

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
    (F.cross_entropy(model(x), y) / k).backward()
    torch.nn.utils.clip_grad_norm_(parameters=model.parameters(), max_norm=0.05)
    if (i + 1) % k == 0:
        optimizer.step()
        optimizer.zero_grad()
