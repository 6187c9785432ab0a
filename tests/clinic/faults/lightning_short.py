"""Lightning divides the short last window by the full number. Planted: last-window-short"""

import logging
import warnings

import lightning
import torch
import torch.nn.functional as F
from torch import nn

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))

    def training_step(self, batch, index):
        inputs, targets = batch
        return F.cross_entropy(self.net(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(36, 6), torch.randint(0, 3, (36,)))
trainer = lightning.Trainer(
    accelerator="cpu", devices=1, max_epochs=2, accumulate_grad_batches=4, gradient_clip_val=1.0, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(Classifier(), torch.utils.data.DataLoader(data, batch_size=4))
