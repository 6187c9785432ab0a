"""The body is frozen in the first phase and learns in the second, with a new optimizer."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
k = 4
model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))

data = torch.utils.data.TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)

for phase in range(2):
    model[0].requires_grad_(phase == 1)
    optimizer = torch.optim.SGD(filter(lambda p: p.requires_grad, model.parameters()), lr=0.05)
    for i, (x, y) in enumerate(loader):
        F.cross_entropy(model(x), y).div(k).backward()
        if (i + 1) % k == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
