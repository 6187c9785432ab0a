"""Two epochs of YOLO26 on drawn boxes: micro-batches of 4, a nominal batch of 8, BatchNorm over the whole window."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from ultralytics import YOLO
from ultralytics.models.yolo.detect import DetectionTrainer

from wholebatch.integrations.ultralytics import exact

root, draws = Path(tempfile.mkdtemp()), torch.Generator().manual_seed(0)
for number in range(18):
    image, lines = Image.new("RGB", (64, 64), "gray"), []
    for _ in range(number % 4):
        x, y, size = (torch.rand(3, generator=draws) * 0.5 + 0.1).tolist()
        ImageDraw.Draw(image).rectangle([64 * x, 64 * y, 64 * (x + size / 2), 64 * (y + size / 2)], fill="red")
        lines.append(f"0 {x + size / 4} {y + size / 4} {size / 2} {size / 2}")
    for name in ("images", "labels"):
        (root / name).mkdir(exist_ok=True)
    image.save(root / "images" / f"{number}.png")
    (root / "labels" / f"{number}.txt").write_text("\n".join(lines))
(root / "data.yaml").write_text(f"path: {root}\ntrain: images\nval: images\nnames: {{0: box}}\n")

model = YOLO("yolo26n.yaml")
small = {"imgsz": 64, "batch": 4, "nbs": 8, "epochs": 2, "warmup_epochs": 0, "mosaic": 0.0, "optimizer": "SGD"}
quiet = {"device": "cpu", "workers": 0, "amp": False, "plots": False, "project": str(root), "verbose": False}
model.train(data=str(root / "data.yaml"), trainer=exact(DetectionTrainer, batch_norm="exact"), **small, **quiet)
print(f"{model.trainer.ema.updates} steps for 36 images, none dropped")
