"""Two models in one optimizer, and one backward for both."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
encoder, decoder = nn.Linear(6, 3), nn.Linear(3, 6)
optimizer = torch.optim.Adam([{"params": encoder.parameters()}, {"params": decoder.parameters(), "lr": 1e-2}], lr=1e-3)
k = 2

for i, x in enumerate(torch.randn(40, 6).split(5)):
    code = encoder(x)
    loss = F.mse_loss(decoder(code), x) + 1e-3 * code.abs().mean()
    (loss / k).backward()
    if (i + 1) % k == 0:
        torch.nn.utils.clip_grad_value_(encoder.parameters(), clip_value=0.5)
        torch.nn.utils.clip_grad_value_(decoder.parameters(), clip_value=0.5)
        optimizer.step()
        optimizer.zero_grad()
