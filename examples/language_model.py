"""A language model on lines of uneven length: samples are cut by padded tokens first, then padded micro-batch by
micro-batch."""

from __future__ import annotations

import copy
import inspect

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import wholebatch as wb


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(128, 64), nn.GRU(64, 64, batch_first=True), nn.Linear(64, 128)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.mix(self.embed(ids))[0])


def collate(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    ids = pad_sequence(samples, batch_first=True)
    return {"ids": ids, "labels": pad_sequence(samples, batch_first=True, padding_value=-100)}


def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> wb.LossSum:
    return wb.losses.causal_lm(model(batch["ids"]), batch["labels"])


def main() -> None:
    torch.manual_seed(0)
    text = "".join(
        inspect.getdoc(thing) or "" for thing in (inspect, DataLoader, nn.GRU, nn.Transformer, torch.optim.AdamW)
    )
    lines = [torch.tensor(list(line.encode("ascii", "ignore"))) for line in text.splitlines() if len(line) > 2]
    loader = DataLoader(lines, batch_size=32, shuffle=True, collate_fn=list)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    micro_batches = {"micro_batch_size": wb.Tokens(512, length=len), "collate": collate}
    step = wb.Step(model, optimizer, loss_fn, max_grad_norm=1.0, **micro_batches)
    for epoch in range(3):
        results = [step(batch) for batch in loader]
        print(f"epoch {epoch}  {sum(float(r.loss) for r in results) / len(results) / 0.6931:.2f} bits per byte")

    whole = copy.deepcopy(model).double()
    loss_fn(whole, collate(lines[:32])).value.backward()
    wb.backward(model, loss_fn, lines[:32], **micro_batches)
    ours, true = (torch.cat([p.grad.flatten().double() for p in m.parameters()]) for m in (model, whole))
    print(f"gradient error {(ours - true).norm() / true.norm():.1e}")


if __name__ == "__main__":
    main()
