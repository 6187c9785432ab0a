"""Only one of two models in the optimizer is cleared. Planted: zero-grad-missing"""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
encoder, decoder = nn.Linear(6, 3), nn.Linear(3, 6)
optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=0.1)

for x in torch.randn(40, 6).split(10):
    encoder.zero_grad()
    F.mse_loss(decoder(encoder(x)), x).backward()
    optimizer.step()
