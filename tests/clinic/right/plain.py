"""Plain loop over equal rows: every window divides by the pieces it holds, the short last one too."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
k, epochs = 4, 2
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,))), batch_size=4)

for _ in range(epochs):
    batches = list(loader)
    for start in range(0, len(batches), k):
        window = batches[start : start + k]
        for inputs, targets in window:
            loss = F.cross_entropy(model(inputs), targets) / len(window)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
