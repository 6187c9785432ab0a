"""BatchNorm sees four images at a time. Planted: batch-norm"""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
k = 3
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
images, labels = torch.randn(36, 3, 8, 8), torch.randint(0, 4, (36,))

for i, (x, y) in enumerate(zip(images.split(4), labels.split(4))):
    (F.cross_entropy(model(x), y) / k).backward()
    if (i + 1) % k == 0:
        optimizer.step()
        optimizer.zero_grad()
