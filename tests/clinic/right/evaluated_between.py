"""The model is evaluated in the middle of windows, once with the gradient's norm looked at."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
k = 4
model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))

optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
data = torch.utils.data.TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)

held_out = torch.randn(16, 6), torch.randint(0, 3, (16,))
for epoch in range(2):
    model.train()
    for i, (x, y) in enumerate(loader):
        (F.cross_entropy(model(x), y) / k).backward()
        if i % 3 == 0:
            model.eval()
            with torch.inference_mode():
                F.cross_entropy(model(held_out[0]), held_out[1])
            model.train()
        if (i + 1) % k == 0:
            norm = sum(p.grad.square().sum() for p in model.parameters()).sqrt()
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        scheduler.step(metrics=F.cross_entropy(model(held_out[0]), held_out[1]))
