"""Truncated back-propagation through time: a step a stretch, the state goes on without its history."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
cell, readout = nn.LSTMCell(3, 8), nn.Linear(8, 2)
parameters = [*cell.parameters(), *readout.parameters()]
optimizer = torch.optim.Adam(parameters, lr=1e-2)
sequence, targets = torch.randn(40, 5, 3), torch.randn(40, 5, 2)
state = (torch.zeros(5, 8), torch.zeros(5, 8))

for start in range(0, 40, 8):
    state = tuple(part.detach() for part in state)
    losses = []
    for t in range(start, start + 8):
        state = cell(sequence[t], state)
        losses.append(F.mse_loss(readout(state[0]), targets[t]))
    loss = torch.stack(losses).mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(parameters, max_norm=0.5)
    optimizer.step()
