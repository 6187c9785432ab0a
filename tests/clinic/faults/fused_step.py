"""The step is fused into backward, with every piece. Planted: optimizer-in-backward"""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
k = 4
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}
inputs, targets = torch.randn(48, 6), torch.randint(0, 3, (48,))


def step(parameter):
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()


for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(step)
for x, y in zip(inputs.split(4), targets.split(4)):
    loss = F.cross_entropy(model(x), y)
    (loss / k).backward()
