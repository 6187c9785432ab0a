"""An Accelerate loop whose windows are exact, the short last one too: one call more, and a loss that says its items."""

from __future__ import annotations

import accelerate
import torch
import torch.nn.functional as F
from torch import nn

import wholebatch as wb
from wholebatch.integrations.accelerate import Window

torch.manual_seed(0)
accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
x, y = torch.randn(26, 12, 6), torch.randint(0, 5, (26, 12))
y[torch.arange(12) >= torch.randint(1, 13, (26, 1))] = -100  # sequences of uneven length
model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

window, errors, seen = Window(accelerator, model), [], 0
for inputs, labels in loader:
    with accelerator.accumulate(model):
        losses = F.cross_entropy(model(inputs).mT, labels, reduction="none")
        window.backward(wb.mean(losses, labels != -100))  # was: accelerator.backward(losses.sum() / counted)
        if accelerator.sync_gradients:
            rows = slice(seen, seen + 8)
            true = torch.autograd.grad(F.cross_entropy(model(x[rows]).mT, y[rows]), list(model.parameters()))
            apart = torch.cat([(p.grad - g).flatten() for p, g in zip(model.parameters(), true)])
            errors.append(float(apart.norm() / torch.cat([g.flatten() for g in true]).norm()))
            seen += 8
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
print(f"{len(errors)} windows, gradient error {max(errors):.1e}")
