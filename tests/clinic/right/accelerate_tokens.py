"""Accelerate: the window is drawn first, its tokens counted, and accelerate's own division is undone."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn

torch.manual_seed(0)
k = 3
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=k)
model = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 9))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
rows = [torch.randint(0, 9, (length + 1,)) for length in (7, 2, 4, 1, 5, 3, 6)]
loader = torch.utils.data.DataLoader(rows, batch_size=None)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

for _ in range(2):
    batches = list(loader)
    for start in range(0, len(batches), k):
        window = batches[start : start + k]
        items = sum(len(row) - 1 for row in window)
        for place, row in enumerate(window):
            accelerator.gradient_state._set_sync_gradients(place == len(window) - 1)
            loss = F.cross_entropy(model(row[:-1]), row[1:], reduction="sum") * accelerator.gradient_accumulation_steps / items
            accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
