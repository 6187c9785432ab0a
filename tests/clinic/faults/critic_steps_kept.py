"""The discriminator steps twice on gradients that are cleared once. Planted: zero-grad-missing"""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4))
discriminator = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))

optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=1e-3)
optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3)

for images in torch.randn(40, 4).split(8):
    optimizer_d.zero_grad()
    for real in images.split(4):
        fake = generator(torch.randn(4, 3)).detach()
        loss = F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(fake)).mean()
        loss.backward()
        optimizer_d.step()
    optimizer_g.zero_grad()
    F.softplus(-discriminator(generator(torch.randn(4, 3)))).mean().backward()
    optimizer_g.step()
