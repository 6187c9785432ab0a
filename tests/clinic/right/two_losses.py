"""A detector with a loss per row and one per box: each divided by its own items of the whole window."""

import torch
import torch.nn.functional as F
from torch import nn


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.classes, self.boxes = nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x):
        features = torch.relu(self.body(x))
        return self.classes(features), self.boxes(features)


torch.manual_seed(0)
k = 3
model = Detector()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
stream = [(torch.randn(5, 8), torch.randint(0, 4, (5,)), torch.randn(5, 4), torch.rand(5) < p) for p in torch.rand(9)]

for start in range(0, len(stream), k):
    window = stream[start : start + k]
    rows = sum(len(batch[0]) for batch in window)
    found = sum(batch[3].sum() for batch in window).clamp(min=1)
    for x, labels, targets, has_box in window:
        logits, boxes = model(x)
        class_loss = F.cross_entropy(logits, labels, reduction="sum") / rows
        box_loss = F.smooth_l1_loss(boxes[has_box], targets[has_box], reduction="sum") / found
        (class_loss + 0.5 * box_loss).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
