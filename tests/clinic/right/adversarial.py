"""A first backward only asks how to disturb the input; its gradients are cleared."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
k = 4
model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))

optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
data = torch.utils.data.TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)

for x, y in loader:
    x.requires_grad_(True)
    loss = F.cross_entropy(model(x), y)
    model.zero_grad()
    loss.backward()
    disturbed = (x + 0.05 * x.grad.sign()).detach()
    optimizer.zero_grad()
    loss = F.cross_entropy(model(disturbed), y)
    loss.backward()
    optimizer.step()
