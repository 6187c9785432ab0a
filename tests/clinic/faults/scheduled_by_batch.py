"""One of two schedulers runs with every micro-batch. Planted: scheduler-per-piece"""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4))
discriminator = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))

optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=1e-3)
optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3)
schedule_d = torch.optim.lr_scheduler.StepLR(optimizer_d, 4)
schedule_g = torch.optim.lr_scheduler.StepLR(optimizer_g, 4)

for window in torch.randn(48, 4).split(12):
    for images in window.split(4):
        fake = generator(torch.randn(4, 3)).detach()
        loss = F.softplus(-discriminator(images)).mean() + F.softplus(discriminator(fake)).mean()
        (loss / 3).backward()
        schedule_d.step()
    optimizer_d.step()
    optimizer_g.zero_grad()
    F.softplus(-discriminator(generator(torch.randn(4, 3)))).mean().backward()
    optimizer_g.step()
    schedule_g.step()
    optimizer_d.zero_grad()
