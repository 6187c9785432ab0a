"""One head is detached by mistake and learns nothing. Planted: parameters-without-gradient"""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
k = 2
body, head, second = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 3)
parameters = [*body.parameters(), *head.parameters(), *second.parameters()]
optimizer = torch.optim.AdamW(parameters, lr=0.01)
inputs, targets = torch.randn(24, 6), torch.randint(0, 3, (24,))

for i, (x, y) in enumerate(zip(inputs.split(3), targets.split(3))):
    features = torch.relu(body(x))
    logits = head(features) + second(features).detach()
    (F.cross_entropy(logits, y) / k).backward()
    if (i + 1) % k == 0:
        optimizer.step()
        optimizer.zero_grad()
