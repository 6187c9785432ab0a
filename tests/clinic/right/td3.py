"""Two critics, and an actor that steps with every second step of theirs."""

import copy

import torch
import torch.nn.functional as F
from torch import nn


def net(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, outputs))


def follow(target, source, tau=0.05):
    with torch.no_grad():
        for old, new in zip(target.parameters(), source.parameters()):
            old.data.mul_(1 - tau).add_(tau * new.data)


def replay(size=8):
    return torch.randn(size, 5), torch.randn(size, 2), torch.randn(size, 1), torch.randn(size, 5)


torch.manual_seed(0)

actor, first, second = net(5, 2), net(7, 1), net(7, 1)
targets = copy.deepcopy([actor, first, second])
actor_optimizer = torch.optim.Adam(actor.parameters(), lr=1e-3)
critic_optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()], lr=1e-3)

for step in range(8):
    state, action, reward, after = replay()
    with torch.no_grad():
        pair = torch.cat([after, targets[0](after) + 0.1 * torch.randn(8, 2)], 1)
        value = reward + 0.99 * torch.min(targets[1](pair), targets[2](pair))
    seen = torch.cat([state, action], 1)
    loss = F.mse_loss(first(seen), value) + F.mse_loss(second(seen), value)
    critic_optimizer.zero_grad()
    loss.backward()
    critic_optimizer.step()
    if step % 2 == 0:
        actor_optimizer.zero_grad()
        (-first(torch.cat([state, actor(state)], 1)).mean()).backward()
        actor_optimizer.step()
        for target, source in zip(targets, (actor, first, second)):
            follow(target, source)
