"""The usual GAN: two losses are added for the discriminator, each network clears its own before its turn."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4))
discriminator = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))

criterion = nn.BCEWithLogitsLoss()
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))

for images in torch.randn(40, 4).split(8):
    discriminator.zero_grad()
    label = torch.full((8,), 1.0)
    loss_real = criterion(discriminator(images).view(-1), label)
    loss_real.backward()
    fake = generator(torch.randn(8, 3))
    label.fill_(0.0)
    loss_fake = criterion(discriminator(fake.detach()).view(-1), label)
    loss_fake.backward()
    optimizer_d.step()
    generator.zero_grad()
    label.fill_(1.0)
    loss_g = criterion(discriminator(fake).view(-1), label)
    loss_g.backward()
    optimizer_g.step()
