"""The actor's loss leaves gradients in the critic, which are cleared too early. Planted: gradient-of-another-loss"""

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
actor_optimizer = torch.optim.Adam(actor.parameters(), lr=1e-3)
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)

for _ in range(6):
    state, action, reward, after = replay()
    critic_optimizer.zero_grad()
    actor_optimizer.zero_grad()
    actor_loss = -critic(torch.cat([state, actor(state)], 1)).mean()
    actor_loss.backward()
    critic_loss = F.mse_loss(critic(torch.cat([state, action], 1)), reward)
    critic_loss.backward()
    actor_optimizer.step()
    critic_optimizer.step()
