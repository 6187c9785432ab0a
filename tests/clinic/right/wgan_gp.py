"""Three critic steps with a gradient penalty for each step of the generator."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4))
discriminator = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))

optimizer_d = torch.optim.RMSprop(discriminator.parameters(), lr=1e-3)
optimizer_g = torch.optim.RMSprop(generator.parameters(), lr=1e-3)


def penalty(real, fake):
    mix = torch.rand(len(real), 1)
    between = (mix * real + (1 - mix) * fake).requires_grad_(True)
    (slope,) = torch.autograd.grad(discriminator(between).sum(), between, create_graph=True)
    return ((slope.norm(2, dim=1) - 1) ** 2).mean()


for i, real in enumerate(torch.randn(54, 4).split(6)):
    optimizer_d.zero_grad()
    fake = generator(torch.randn(6, 3)).detach()
    loss = discriminator(fake).mean() - discriminator(real).mean() + 10 * penalty(real, fake)
    loss.backward()
    optimizer_d.step()
    if i % 3 == 2:
        optimizer_g.zero_grad()
        (-discriminator(generator(torch.randn(6, 3))).mean()).backward()
        optimizer_g.step()
