"""Cached features, the loss back-propagated once a piece with its temperature. Planted: loss-parameters-counted-again"""

import torch
import torch.nn.functional as F
from torch import nn


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(6, 5), nn.Linear(7, 5)
        self.logit_scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, image, text):
        return F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1)


torch.manual_seed(0)
k = 4
model = Towers()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
images, texts = torch.randn(48, 6), torch.randn(48, 7)

for image_batch, text_batch in zip(images.split(16), texts.split(16)):
    pieces = list(zip(image_batch.split(4), text_batch.split(4)))
    with torch.no_grad():
        cached = [model(*piece) for piece in pieces]
    for place, piece in enumerate(pieces):
        a, b = model(*piece)
        every_a = torch.cat([c[0] for c in cached[:place]] + [a] + [c[0] for c in cached[place + 1 :]])
        every_b = torch.cat([c[1] for c in cached[:place]] + [b] + [c[1] for c in cached[place + 1 :]])
        logits = model.logit_scale.exp() * every_a @ every_b.T
        target = torch.arange(len(logits))
        loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
