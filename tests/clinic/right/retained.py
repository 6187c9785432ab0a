"""Two losses of one forward go back one after the other, over accumulated micro-batches."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
k = 3
body, labels, boxes = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 2)
optimizer = torch.optim.AdamW([*body.parameters(), *labels.parameters(), *boxes.parameters()], lr=1e-3)

for i, x in enumerate(torch.randn(45, 6).split(5)):
    features = torch.relu(body(x))
    label_loss = F.cross_entropy(labels(features), torch.randint(0, 3, (5,))) / k
    box_loss = F.smooth_l1_loss(boxes(features), torch.randn(5, 2)) / k
    label_loss.backward(retain_graph=True)
    box_loss.backward()
    if i % k == k - 1:
        optimizer.step()
        optimizer.zero_grad()
