"""Two towers and a learned temperature: every pair of the batch is a negative, a few pairs are in memory at a time."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wholebatch as wb

Pairs = tuple[Tensor, Tensor]


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(500, 32)
        self.question, self.answer = nn.Linear(32, 16), nn.Linear(32, 16)
        self.log_scale = nn.Parameter(torch.tensor(2.0))


def questions(model: Towers, pairs: Pairs) -> Tensor:
    return F.normalize(model.question(model.words(pairs[0])), dim=1)


def answers(model: Towers, pairs: Pairs) -> Tensor:
    return F.normalize(model.answer(model.words(pairs[1])), dim=1)


def contrast(model: Towers, questions: Tensor, answers: Tensor) -> Tensor:
    return F.cross_entropy(model.log_scale.exp() * questions @ answers.T, torch.arange(len(questions)))


def main() -> None:
    torch.manual_seed(0)
    batch = (torch.randint(0, 400, (256, 1)) + torch.randint(0, 100, (256, 12))).split(6, dim=1)
    model = Towers()
    whole, usual, step = copy.deepcopy(model), copy.deepcopy(model), torch.optim.AdamW(model.parameters(), lr=3e-3)

    contrast(whole, questions(whole, batch), answers(whole, batch)).backward()
    for pairs in zip(*(side.split(16) for side in batch), strict=True):
        (contrast(usual, questions(usual, pairs), answers(usual, pairs)) / 16).backward()
    towers = [questions, answers]
    for number in range(30):
        result = wb.coupled_backward(model, towers, lambda *rows: contrast(model, *rows), batch, micro_batch_size=16)
        if not number:
            ours, true, off = (torch.cat([p.grad.flatten() for p in m.parameters()]) for m in (model, whole, usual))
        if number % 10 == 9:
            print(f"step {number + 1:2}: loss {float(result.loss):.3f} over {len(batch[0])} negatives")
        step.step()
        step.zero_grad()
    print(f"16 negatives at a time, as usual: off by {(off - true).norm() / true.norm():.2f}")
    print(f"gradient error {(ours - true).norm() / true.norm():.1e}")


if __name__ == "__main__":
    main()
