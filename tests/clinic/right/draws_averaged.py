"""The same batch runs several times with other dropout, and the losses are averaged."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
k = 4
model = nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.3), nn.Linear(12, 3))

optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
data = torch.utils.data.TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)

for x, y in loader:
    for _ in range(k):
        loss = F.cross_entropy(model(x), y) / k
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
