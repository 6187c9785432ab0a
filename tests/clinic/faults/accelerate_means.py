"""Accelerate with a mean per piece over unequal tokens. Planted: mean-of-means"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn

torch.manual_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
model = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 9))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = [torch.randint(0, 9, (length + 1,)) for length in (7, 2, 4, 1, 5, 3, 6, 2, 9)]
model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(rows, batch_size=None))

for row in loader:
    with accelerator.accumulate(model):
        loss = F.cross_entropy(model(row[:-1]), row[1:])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
