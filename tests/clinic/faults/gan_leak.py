"""The generator's loss leaves gradients in the discriminator. Planted: gradient-of-another-loss"""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
k = 3
generator = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4))
discriminator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3)
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=1e-3)

for i, images in enumerate(torch.randn(36, 4).split(4)):
    fake = generator(torch.randn(4, 3))
    d_loss = F.softplus(-discriminator(images)).mean() + F.softplus(discriminator(fake.detach())).mean()
    (d_loss / k).backward()
    g_loss = F.softplus(-discriminator(fake)).mean()
    (g_loss / k).backward()
    if (i + 1) % k == 0:
        optimizer_d.step()
        optimizer_g.step()
        optimizer_d.zero_grad()
        optimizer_g.zero_grad()
