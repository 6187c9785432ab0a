"""The discriminator's two losses are made by one line that runs twice, over two accumulated micro-batches."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4))
discriminator = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))

optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=1e-3)
optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3)
k = 2

for window in torch.randn(48, 4).split(8):
    optimizer_d.zero_grad(set_to_none=False)
    for images in window.split(4):
        fake = generator(torch.randn(4, 3)).detach()
        for rows, value in ((images, 1.0), (fake, 0.0)):
            scores = discriminator(rows)
            (F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, value)) / k).backward()
    optimizer_d.step()
    optimizer_g.zero_grad(set_to_none=False)
    for _ in range(k):
        scores = discriminator(generator(torch.randn(4, 3)))
        (F.binary_cross_entropy_with_logits(scores, torch.ones_like(scores)) / k).backward()
    optimizer_g.step()
