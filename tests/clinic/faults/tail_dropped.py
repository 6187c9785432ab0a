"""The tail of each epoch is cleared away at the next one's start. Planted: last-window-dropped"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
k = 4
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,))), batch_size=4)

for epoch in range(2):
    optimizer.zero_grad()
    for i, (inputs, targets) in enumerate(loader):
        loss = F.cross_entropy(model(inputs), targets) / k
        loss.backward()
        if (i + 1) % k == 0:
            optimizer.step()
            optimizer.zero_grad()
