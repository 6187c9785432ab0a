"""Fine-tuning with a frozen, normalised backbone: its BatchNorm uses its running statistics, one piece after another."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
k = 2
backbone = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
backbone.requires_grad_(False).eval()
head = nn.Linear(8, 4)
average = torch.optim.swa_utils.AveragedModel(head)
optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
images, labels = torch.randn(24, 3, 8, 8), torch.randint(0, 4, (24,))

for i, (x, y) in enumerate(zip(images.split(4), labels.split(4))):
    (F.cross_entropy(head(backbone(x)), y) / k).backward()
    if i % k == k - 1:
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(head)
