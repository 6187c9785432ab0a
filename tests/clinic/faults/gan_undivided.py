"""The discriminator's two losses are added on purpose, its four micro-batches are not. Planted: loss-not-divided"""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4))
discriminator = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))

optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=1e-3)
optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3)
criterion = nn.BCEWithLogitsLoss()

for window in torch.randn(48, 4).split(16):
    optimizer_d.zero_grad()
    for images in window.split(4):
        criterion(discriminator(images), torch.ones(4, 1)).backward()
        fake = generator(torch.randn(4, 3))
        criterion(discriminator(fake.detach()), torch.zeros(4, 1)).backward()
    optimizer_d.step()
    optimizer_g.zero_grad()
    criterion(discriminator(generator(torch.randn(4, 3))), torch.ones(4, 1)).backward()
    optimizer_g.step()
