"""A GAN over windows: the discriminator's pieces, its step, then the generator's, without touching the discriminator."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
k = 2
generator = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4))
discriminator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3)
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=1e-3)
real = torch.randn(24, 4).split(4)

for start in range(0, len(real), k):
    window = real[start : start + k]
    noises = [torch.randn(4, 3) for _ in window]
    for images, noise in zip(window, noises):
        fake = generator(noise).detach()
        loss = F.softplus(-discriminator(images)).mean() + F.softplus(discriminator(fake)).mean()
        (loss / len(window)).backward()
    optimizer_d.step()
    optimizer_d.zero_grad()
    discriminator.requires_grad_(False)
    for noise in noises:
        (F.softplus(-discriminator(generator(noise))).mean() / len(window)).backward()
    discriminator.requires_grad_(True)
    optimizer_g.step()
    optimizer_g.zero_grad()
