"""Critic, actor and temperature, each with an optimizer and a loss; the critics' losses go back one by one."""

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

actor, first, second = net(5, 4), net(7, 1), net(7, 1)
targets = copy.deepcopy([first, second])
log_alpha = torch.zeros(1, requires_grad=True)
actor_optimizer = torch.optim.Adam(actor.parameters(), lr=1e-3)
first_optimizer = torch.optim.Adam(first.parameters(), lr=1e-3)
second_optimizer = torch.optim.Adam(second.parameters(), lr=1e-3)
alpha_optimizer = torch.optim.Adam([log_alpha], lr=1e-3)


def act(state):
    mean, log_std = actor(state).chunk(2, dim=-1)
    normal = torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp())
    action = normal.rsample()
    return action.tanh(), normal.log_prob(action).sum(-1, keepdim=True)


for _ in range(5):
    state, action, reward, after = replay()
    with torch.no_grad():
        chosen, log_prob = act(after)
        pair = torch.cat([after, chosen], 1)
        value = reward + 0.99 * (torch.min(*(target(pair) for target in targets)) - log_alpha.exp() * log_prob)
    for critic, optimizer in ((first, first_optimizer), (second, second_optimizer)):
        optimizer.zero_grad()
        F.mse_loss(critic(torch.cat([state, action], 1)), value).backward()
        optimizer.step()
    chosen, log_prob = act(state)
    pair = torch.cat([state, chosen], 1)
    actor_optimizer.zero_grad()
    (log_alpha.exp().detach() * log_prob - torch.min(first(pair), second(pair))).mean().backward()
    actor_optimizer.step()
    alpha_optimizer.zero_grad()
    (-(log_alpha * (log_prob + 2.0).detach()).mean()).backward()
    alpha_optimizer.step()
    follow(targets[0], first)
    follow(targets[1], second)
