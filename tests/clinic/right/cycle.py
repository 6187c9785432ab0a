"""Two generators in one optimizer, two discriminators in another, frozen while the generators learn."""

import itertools

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
there, back, judge_a, judge_b = (nn.Linear(4, size) for size in (4, 4, 1, 1))
optimizer_g = torch.optim.Adam(itertools.chain(there.parameters(), back.parameters()), lr=1e-3)
optimizer_d = torch.optim.Adam(itertools.chain(judge_a.parameters(), judge_b.parameters()), lr=1e-3)


def judged(judge, rows, value):
    scores = judge(rows)
    return F.mse_loss(scores, torch.tensor(value).expand_as(scores))


def frozen(networks, flag):
    for network in networks:
        for parameter in network.parameters():
            parameter.requires_grad = not flag


for a, b in zip(torch.randn(24, 4).split(6), torch.randn(24, 4).split(6)):
    frozen([judge_a, judge_b], True)
    optimizer_g.zero_grad()
    fake_b, fake_a = there(a), back(b)
    loss = judged(judge_b, fake_b, 1.0) + judged(judge_a, fake_a, 1.0)
    loss = loss + 10 * (F.l1_loss(back(fake_b), a) + F.l1_loss(there(fake_a), b))
    loss.backward()
    optimizer_g.step()
    frozen([judge_a, judge_b], False)
    optimizer_d.zero_grad()
    for judge, real, fake in ((judge_a, a, fake_a), (judge_b, b, fake_b)):
        loss_d = (judged(judge, real, 1.0) + judged(judge, fake.detach(), 0.0)) * 0.5
        loss_d.backward()
    optimizer_d.step()
