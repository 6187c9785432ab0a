"""Adversarial training with three steps of attack; the attack leaves gradients that are cleared."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
k = 4
model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))

optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)


def attack(x, y):
    delta = torch.zeros_like(x, requires_grad=True)
    for _ in range(3):
        F.cross_entropy(model(x + delta), y).backward()
        delta.data = (delta + 0.02 * delta.grad.sign()).clamp(-0.1, 0.1)
        delta.grad.zero_()
    return (x + delta).detach()


for x, y in loader:
    harder = attack(x, y)
    optimizer.zero_grad()
    F.cross_entropy(model(harder), y).backward()
    optimizer.step()
