"""Both networks learn by wb.backward; the generator's loss leaves nothing in the discriminator's step."""

import torch
import torch.nn.functional as F
from torch import nn

import wholebatch as wb

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4))
discriminator = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))

optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=1e-3)
optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3)


def loss_d(model, batch):
    real, noise = batch
    return F.softplus(-model(real)) + F.softplus(model(generator(noise).detach()))


def loss_g(model, noise):
    return F.softplus(-discriminator(model(noise)))


for real in torch.randn(40, 4).split(8):
    noise = torch.randn(8, 3)
    optimizer_d.zero_grad()
    wb.backward(discriminator, loss_d, (real, noise), micro_batch_size=3)
    optimizer_d.step()
    optimizer_g.zero_grad()
    wb.backward(generator, loss_g, noise, micro_batch_size=3)
    optimizer_g.step()
