"""Three terms, three denominators: boxes where there are boxes, classes everywhere, and a penalty once a batch."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

import wholebatch as wb

Batch = dict[str, torch.Tensor]


def loss_fn(model: nn.Module, batch: Batch) -> tuple[dict[str, wb.LossSum], dict[str, torch.Tensor]]:
    out = model(batch["x"])
    scores, boxes = out[:, :4], out[:, 4:]
    off = F.smooth_l1_loss(boxes, batch["box"], reduction="none").sum(dim=1)
    terms = {
        "class": wb.mean(F.cross_entropy(scores, batch["label"], reduction="none")),
        "box": 2.0 * wb.mean(off, weights=batch["has_box"]),
        "decay": 1e-3 * wb.once(sum(p.square().sum() for p in model.parameters())),
    }
    return terms, {"accuracy": (scores.argmax(dim=1) == batch["label"]).float()}


def whole_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The same objective as one would write it with the whole batch in memory."""
    out = model(batch["x"])
    off = F.smooth_l1_loss(out[:, 4:], batch["box"], reduction="none").sum(dim=1)
    box = (off * batch["has_box"]).sum() / batch["has_box"].sum()
    decay = sum(p.square().sum() for p in model.parameters())
    return F.cross_entropy(out[:, :4], batch["label"]) + 2.0 * box + 1e-3 * decay


def main() -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(30, 8), "label": torch.randint(4, (30,)), "box": torch.rand(30, 4)}
    batch["has_box"] = (torch.rand(30) < 0.3).float()
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
    whole = copy.deepcopy(model)

    result = wb.backward(model, loss_fn, batch, micro_batch_size=7)
    whole_loss(whole, batch).backward()

    for name, term in result.terms.items():
        print(f"{name:6} {float(term):.4f} over {float(result.items[name]):g} items")
    print(f"accuracy {float(result.metrics['accuracy']):.3f}")
    ours, true = (torch.cat([p.grad.flatten() for p in m.parameters()]) for m in (model, whole))
    print(f"gradient error {(ours - true).norm() / true.norm():.1e}")


if __name__ == "__main__":
    main()
