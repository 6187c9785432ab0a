"""Mixed precision with everything at the boundary: unscale, clip, step, update, then schedule and average, once each."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
k = 3
model = nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Dropout(0.1), nn.Linear(12, 1))
average = copy.deepcopy(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 10)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
inputs, targets = torch.randn(36, 5), torch.randn(36, 1)
targets[10] = float("inf")  # one window overflows: a skipped step

for i, (x, y) in enumerate(zip(inputs.split(3), targets.split(3))):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.mse_loss(model(x).float(), y)
    scaler.scale(loss / k).backward()
    if (i + 1) % k == 0:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= before:
            scheduler.step()
            with torch.no_grad():
                for kept, current in zip(average.parameters(), model.parameters()):
                    kept.mul_(0.9).add_(current, alpha=0.1)
        optimizer.zero_grad()
