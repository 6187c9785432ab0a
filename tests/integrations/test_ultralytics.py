"""Ultralytics: what its trainers do to a window, and what the door makes of it. Images and labels are drawn here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import wholebatch as wb
from tests.oracle import Gradients, assert_differs, assert_same_gradient, gradients_of

os.environ.setdefault("YOLO_AUTOINSTALL", "false")
os.environ.setdefault("YOLO_OFFLINE", "true")
try:
    import torchvision
except RuntimeError:  # built for another build of torch: it lacks operators, which only a validation asks for
    OPERATORS = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        OPERATORS.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision

    OPERATORS.impl("nms", lambda boxes, scores, threshold: scores.argsort(descending=True), "CPU")
    torchvision.ops.boxes._assert_has_ops = lambda: None
except ModuleNotFoundError:
    pass
ultralytics = pytest.importorskip("ultralytics")

from PIL import Image, ImageDraw  # noqa: E402
from ultralytics.models.yolo.classify import ClassificationTrainer  # noqa: E402
from ultralytics.models.yolo.detect import DetectionTrainer  # noqa: E402
from ultralytics.models.yolo.obb import OBBTrainer  # noqa: E402
from ultralytics.models.yolo.pose import PoseTrainer  # noqa: E402
from ultralytics.models.yolo.segment import SegmentationTrainer  # noqa: E402
from ultralytics.utils.loss import v8DetectionLoss  # noqa: E402

from wholebatch.integrations.ultralytics import exact  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

COLOURS = ("red", "green", "blue")
IMAGES, PIXELS = 22, 64


def drawn(number: int) -> tuple[Image.Image, list[str]]:
    """An image with rectangles of three colours and its label lines; every fifth image is empty."""
    draws = torch.Generator().manual_seed(number)
    image = Image.new("RGB", (PIXELS, PIXELS), "gray")
    lines = []
    for _ in range(0 if number % 5 == 0 else 1 + number % 4):
        kind = int(torch.randint(3, (), generator=draws))
        x, y = (torch.rand(2, generator=draws) * 0.6).tolist()
        width, height = (torch.rand(2, generator=draws) * 0.25 + 0.12).tolist()
        box = [x * PIXELS, y * PIXELS, (x + width) * PIXELS, (y + height) * PIXELS]
        ImageDraw.Draw(image).rectangle(box, fill=COLOURS[kind])
        lines.append(f"{kind} {x + width / 2} {y + height / 2} {width} {height}")
    return image, lines


def corners(line: str) -> str:
    """The same rectangle by its corners, a little turned: a mask's outline, or an oriented box."""
    kind, *box = line.split()
    x, y, width, height = map(float, box)
    signs = [(-1, -0.8), (0.8, -1), (1, 0.8), (-0.8, 1)]
    return " ".join([kind, *(f"{x + a * width / 2} {y + b * height / 2}" for a, b in signs)])


def posed(line: str) -> str:
    """The rectangle with two key points; one of them is out of sight in every red one."""
    kind, *box = line.split()
    x, y, width, height = map(float, box)
    return f"{line} {x - width / 3} {y} 2 {x + width / 3} {y + height / 4} {2 * (kind != '0')}"


def data_set(root: Path, label: Any = str, more: str = "") -> str:
    for part in ("images", "labels"):
        (root / part).mkdir()
    for number in range(IMAGES):
        image, lines = drawn(number)
        image.save(root / "images" / f"{number:02}.png")
        (root / "labels" / f"{number:02}.txt").write_text("\n".join(map(label, lines)))
    names = "\n".join(f"  {i}: {name}" for i, name in enumerate(COLOURS))
    (root / "data.yaml").write_text(f"path: {root}\ntrain: images\nval: images\n{more}names:\n{names}\n")
    return str(root / "data.yaml")


@pytest.fixture(scope="module")
def boxes(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A data set for detection."""
    return data_set(tmp_path_factory.mktemp("boxes"))


@pytest.fixture(scope="module")
def outlines(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A data set for segmentation, and for oriented boxes."""
    return data_set(tmp_path_factory.mktemp("outlines"), corners)


@pytest.fixture(scope="module")
def poses(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A data set for poses of two key points."""
    return data_set(tmp_path_factory.mktemp("poses"), posed, "kpt_shape: [2, 3]\nflip_idx: [0, 1]\n")


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A data set for classification."""
    root = tmp_path_factory.mktemp("kinds")
    for part in ("train", "val"):
        for number in range(IMAGES):
            folder = root / part / COLOURS[number % 3]
            folder.mkdir(parents=True, exist_ok=True)
            drawn(number)[0].save(folder / f"{number:02}.png")
    return str(root)


class Recorded:
    """Keeps what each optimizer step was given; BatchNorm layers stay in evaluation mode, weights where they are."""

    steps: list[Gradients]
    precise = False

    def _setup_train(self) -> None:
        super()._setup_train()  # type: ignore[misc]
        self.steps = []
        if self.precise:
            self.model.double()

    def _model_train(self) -> None:
        self.model.train()
        for module in self.model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()

    def preprocess_batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        batch = super().preprocess_batch(batch)  # type: ignore[misc]
        return {**batch, "img": batch["img"].double()} if self.precise else batch

    def optimizer_step(self) -> None:
        self.steps.append(gradients_of(self.model))
        super().optimizer_step()  # type: ignore[misc]


class Boxes(Recorded, DetectionTrainer):  # type: ignore[misc]
    pass


class Kinds(Recorded, ClassificationTrainer):  # type: ignore[misc]
    pass


def train(trainer: Any, model: str, data: str, folder: Path, **settings: Any) -> Any:
    """Train on the CPU without any augmentation."""
    plain = dict.fromkeys(
        ("mosaic", "hsv_h", "hsv_s", "hsv_v", "translate", "scale", "fliplr", "erasing", "close_mosaic"), 0
    )
    chosen = {"model": model, "data": data, "project": str(folder), "name": trainer.__name__, "device": "cpu"}
    chosen |= {"imgsz": PIXELS, "workers": 0, "plots": False, "val": False, "amp": False, "optimizer": "SGD"}
    chosen |= {"pretrained": False, "verbose": False, "exist_ok": True, "seed": 0, "auto_augment": None, "save": False}
    chosen |= {"epochs": 1, "warmup_epochs": 0, "nbs": 16, "batch": 4, "lr0": 0.0, "weight_decay": 0.0}
    made = trainer(overrides=plain | chosen | settings)
    made.train()
    return made


@pytest.fixture
def double() -> Iterator[None]:
    """Let everything that is made be float64: the loss is summed in the default dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class PreciseBoxes(Boxes):
    precise = True


class PreciseKinds(Kinds):
    precise = True


class Masks(Recorded, SegmentationTrainer):  # type: ignore[misc]
    precise = True


class Poses(Recorded, PoseTrainer):  # type: ignore[misc]
    precise = True


class Oriented(Recorded, OBBTrainer):  # type: ignore[misc]
    precise = True


CASES = [
    pytest.param(PreciseBoxes, "yolo26n.yaml", "boxes", 5e-3, id="yolo26-two-branches"),
    pytest.param(PreciseBoxes, "yolo11n.yaml", "boxes", 5e-3, id="yolo11"),
    pytest.param(Masks, "yolo11n-seg.yaml", "outlines", 5e-3, id="masks"),
    pytest.param(Poses, "yolo11n-pose.yaml", "poses", 5e-3, id="poses"),
    pytest.param(Oriented, "yolo11n-obb.yaml", "outlines", 5e-3, id="oriented-boxes"),
    pytest.param(Oriented, "yolo26n-obb.yaml", "outlines", 5e-3, id="oriented-boxes-two-branches"),
    pytest.param(PreciseKinds, "yolo11n-cls.yaml", "kinds", 2.9, id="classes"),
]


@pytest.mark.parametrize(("trainer", "model", "data", "off"), CASES)
def test_four_times_four_is_sixteen(
    trainer: Any, model: str, data: str, off: float, tmp_path: Path, double: None, request: pytest.FixtureRequest
) -> None:
    where = request.getfixturevalue(data)
    whole = train(trainer, model, where, tmp_path, batch=16).steps
    usual = train(trainer, model, where, tmp_path).steps
    ours = train(exact(trainer), model, where, tmp_path).steps
    assert len(whole) == len(ours) == 2 and len(usual) == 1, "the trainer drops the last six images"
    assert_differs(usual[0], whole[0], by=off)
    for mine, reference in zip(ours, whole, strict=True):
        assert_same_gradient(mine, reference, tol=1e-8 if trainer is Poses else 1e-12)  # key points are float32 within


def test_a_window_without_a_single_box(boxes: str, tmp_path: Path, double: None) -> None:
    empty = Path(boxes).with_name("empty.yaml")
    names = [f"./images/{number:02}.png" for number in range(0, IMAGES, 5)]
    (empty.parent / "empty.txt").write_text("\n".join(names))
    empty.write_text(Path(boxes).read_text().replace("train: images", "train: empty.txt"))
    whole, ours = (
        train(trainer, "yolo26n.yaml", str(empty), tmp_path, batch=batch, nbs=8).steps
        for trainer, batch in ((PreciseBoxes, 8), (exact(PreciseBoxes), 2))
    )
    assert_same_gradient(ours[0], whole[0], tol=1e-12)


def test_a_real_run_steps_averages_shows_and_saves(boxes: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"epochs": 2, "lr0": 0.01, "nbs": 8, "warmup_epochs": 1, "save": True, "val": True}
    made = train(exact(DetectionTrainer, batch_norm="exact"), "yolo26n.yaml", boxes, tmp_path, **settings)
    nominal = wb.NominalBatch(8, 4, micro_batches=6, epochs=2, warmup_epochs=1)
    assert made.ema.updates == len(nominal.sizes())
    losses = [float(line.split(",")[2]) for line in made.csv.read_text().splitlines()[1:]]
    assert len(losses) == 2 and all(0 < loss < 100 for loss in losses)
    assert made.last.exists()
    best = ultralytics.YOLO(made.last)
    assert len(best.predict(str(Path(boxes).parent / "images" / "01.png"), verbose=False, imgsz=PIXELS)) == 1


def test_the_trainer_argument_takes_it(kinds: str, tmp_path: Path) -> None:
    model = ultralytics.YOLO("yolo11n-cls.yaml")
    trainer = exact(ClassificationTrainer, batch_norm="pooled")
    model.train(
        trainer=trainer,
        data=kinds,
        project=str(tmp_path),
        epochs=2,
        batch=4,
        nbs=8,
        imgsz=32,
        workers=0,
        plots=False,
        device="cpu",
        amp=False,
        pretrained=False,
        verbose=False,
    )
    assert isinstance(model.trainer, trainer)
    assert model.trainer.model.criterion.__class__.__name__ == "v8ClassificationLoss"


class Odd(v8DetectionLoss):
    """A loss of the user's own."""


class OddBoxes(Boxes):
    def _setup_train(self) -> None:
        super()._setup_train()
        self.model.criterion = Odd(self.model)


def test_what_is_not_served_is_refused_by_name(boxes: str, tmp_path: Path) -> None:
    with pytest.raises(wb.InexactError, match="BatchNorm"):
        train(exact(DetectionTrainer), "yolo11n.yaml", boxes, tmp_path)
    with pytest.raises(wb.InexactError, match="What Odd of the task 'detect' averages over"):
        train(exact(OddBoxes), "yolo11n.yaml", boxes, tmp_path)


@pytest.mark.parametrize(
    ("trainer", "model", "data", "error"),
    [
        (Masks, "yolo26n-seg.yaml", "outlines", "SegmentLoss26"),
        (Poses, "yolo26n-pose.yaml", "poses", "PoseLoss26"),
    ],
)
def test_losses_whose_parts_have_other_denominators_are_refused_by_name(
    trainer: Any, model: str, data: str, error: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    with pytest.raises(wb.InexactError, match=error):
        train(exact(trainer), model, request.getfixturevalue(data), tmp_path)


def shown(made: Any) -> list[float]:
    head, row = (line.split(",") for line in made.csv.read_text().splitlines()[:2])
    return [float(value) for name, value in zip(head, row, strict=True) if name.strip().startswith("train/")]


class Outlines(Recorded, SegmentationTrainer):  # type: ignore[misc]
    pass


@pytest.mark.parametrize(
    ("trainer", "model", "data"),
    [
        (Boxes, "yolo11n.yaml", "boxes"),
        (Outlines, "yolo11n-seg.yaml", "outlines"),
        (Kinds, "yolo11n-cls.yaml", "kinds"),
    ],
)
def test_the_loss_that_is_shown_is_that_of_the_batch(
    trainer: Any, model: str, data: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    where, one = request.getfixturevalue(data), {"nbs": 24}
    whole = shown(train(trainer, model, where, tmp_path, batch=IMAGES, **one))
    ours = shown(train(exact(trainer), model, where, tmp_path, batch=4, **one))
    assert ours == pytest.approx(whole, rel=1e-3) and any(whole)


def test_the_end_may_be_dropped_as_the_trainer_does(kinds: str, tmp_path: Path) -> None:
    assert len(train(exact(Kinds, flush="never"), "yolo11n-cls.yaml", kinds, tmp_path).steps) == 1
