"""Encoder and decoder have an optimizer each; one loss serves both and another the encoder alone."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
encoder, decoder = nn.Linear(6, 3), nn.Linear(3, 6)
optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (encoder, decoder)]

for x in torch.randn(40, 6).split(10):
    for optimizer in optimizers:
        optimizer.zero_grad()
    code = encoder(x)
    F.mse_loss(decoder(code), x).backward(retain_graph=True)
    (0.1 * code.square().mean()).backward()
    for optimizer in optimizers:
        optimizer.step()
