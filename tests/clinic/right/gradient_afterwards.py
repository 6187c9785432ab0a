"""After training, a gradient is looked at for its own sake: nothing is left over from the loop."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
k = 3
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs, targets = torch.randn(18, 4), torch.randint(0, 2, (18,))

for i, (x, y) in enumerate(zip(inputs.split(2), targets.split(2))):
    loss = F.cross_entropy(model(x), y) / k
    loss.backward()
    if (i + 1) % k == 0:
        optimizer.step()
        optimizer.zero_grad()

F.cross_entropy(model(inputs), targets).backward()
print("norm of the gradient at the end:", float(model.weight.grad.norm()))
