"""An actor whose loss runs through the critic, with targets that follow both."""

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

actor, critic = net(5, 2), net(7, 1)
actor_target, critic_target = copy.deepcopy(actor), copy.deepcopy(critic)
actor_optimizer = torch.optim.Adam(actor.parameters(), lr=1e-3)
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)

for _ in range(6):
    state, action, reward, after = replay()
    with torch.no_grad():
        value = reward + 0.99 * critic_target(torch.cat([after, actor_target(after)], 1))
    critic_loss = F.mse_loss(critic(torch.cat([state, action], 1)), value)
    critic_optimizer.zero_grad()
    critic_loss.backward()
    critic_optimizer.step()
    actor_loss = -critic(torch.cat([state, actor(state)], 1)).mean()
    actor_optimizer.zero_grad()
    actor_loss.backward()
    actor_optimizer.step()
    follow(critic_target, critic)
    follow(actor_target, actor)
