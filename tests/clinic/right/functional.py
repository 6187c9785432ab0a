"""Gradients by torch.func, put into .grad by hand, two micro-batches a step."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad_and_value

torch.manual_seed(0)
model = nn.Linear(5, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of(parameters, x, y):
    return F.mse_loss(functional_call(model, parameters, (x,)), y)


for batch, target in zip(torch.randn(32, 5).split(8), torch.randn(32, 2).split(8)):
    total = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    for x, y in zip(batch.split(4), target.split(4)):
        gradients, _ = grad_and_value(loss_of)(dict(model.named_parameters()), x, y)
        for name, gradient in gradients.items():
            total[name] += gradient / 2
    for name, parameter in model.named_parameters():
        parameter.grad = total[name].detach()
    optimizer.step()
