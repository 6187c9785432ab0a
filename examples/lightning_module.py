"""A Lightning module whose accumulate_grad_batches is exact: a callback, and a training_step that says its items."""

from __future__ import annotations

import lightning
import torch
from torch import nn
from torch.nn import functional as F

import wholebatch as wb
from wholebatch.integrations.lightning import Exact, whole

torch.manual_seed(0)
X, Y = torch.randn(26, 12, 6), torch.randint(0, 5, (26, 12))
Y[torch.arange(12) >= torch.randint(1, 13, (26, 1))] = -100  # sequences of uneven length


class Tagger(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model, self.errors = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 5)), []

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        losses = F.cross_entropy(self.model(batch[0]).mT, batch[1], reduction="none")
        return whole(self, wb.mean(losses, batch[1] != -100))  # was: return losses.sum() / counted

    def configure_gradient_clipping(self, *args: object, **kwargs: object) -> None:
        x, y = (part[8 * len(self.errors) :][:8] for part in (X, Y))
        true = torch.autograd.grad(F.cross_entropy(self.model(x).mT, y), list(self.parameters()))
        apart = torch.cat([(p.grad - g).flatten() for p, g in zip(self.parameters(), true)])
        self.errors.append(float(apart.norm() / torch.cat([g.flatten() for g in true]).norm()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


module, quiet = Tagger(), dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", accumulate_grad_batches=4, callbacks=[Exact()], **quiet)
trainer.fit(module, torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=2))
print(f"{len(module.errors)} windows, gradient error {max(module.errors):.1e}")
