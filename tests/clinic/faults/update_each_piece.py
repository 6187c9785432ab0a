"""The discriminator steps with every piece and updates the scaler that the generator's window shares.

Planted: scaler-update-inside-window
"""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
k = 4
generator = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4))
discriminator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3)
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)

for i, images in enumerate(torch.randn(32, 4).split(4)):
    fake = generator(torch.randn(4, 3))
    loss = F.softplus(-discriminator(images)).mean() + F.softplus(discriminator(fake.detach())).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer_d)
    optimizer_d.zero_grad()
    discriminator.requires_grad_(False)
    scaler.scale(F.softplus(-discriminator(fake)).mean() / k).backward()
    discriminator.requires_grad_(True)
    if (i + 1) % k == 0:
        scaler.step(optimizer_g)
        optimizer_g.zero_grad()
    scaler.update()
