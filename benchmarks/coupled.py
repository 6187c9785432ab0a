"""BatchNorm over the whole batch, and losses over all rows: error, time and memory beside the other ways. Minutes.

Memory is counted in bytes of live tensors, parameters and their gradients left out, on a machine without a device: what
lies on the shelf between stages is then counted apart, as it would lie in host memory. Copying it there and back is a
copy within memory here, and the time of that is included; over a bus it would be another.

    python benchmarks/coupled.py --side 64 --rows 32 128
"""

from __future__ import annotations

import argparse
import copy
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from record import RESULTS, Clock, quartiles, save, significant
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import wholebatch as wb
from wholebatch.staged.engine import Engine
from wholebatch.staged.shelf import Shelf
from wholebatch.staged.window import WholeWindow
from wholebatch.window import pieces_of


class LiveBytes(TorchDispatchMode):
    """Count the bytes of all tensors that are made in the block and still alive, and the most there were at once.

    The batch, parameters and buffers are not counted, nor what has become a parameter's gradient: every way has those.
    """

    def __init__(self, model: nn.Module, batch: Any) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._model = model
        there = (*model.parameters(), *model.buffers(), *pytree.tree_leaves(batch))
        self._known = {tensor.untyped_storage()._cdata: 0 for tensor in there}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                self._leave_out(parameter.grad)
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._add(leaf)
        return result

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known[key] = size
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._drop, key)

    def _leave_out(self, tensor: Tensor) -> None:
        key = tensor.untyped_storage()._cdata
        self.now -= self._known.get(key, 0)
        self._known[key] = 0

    def _drop(self, key: int) -> None:
        self.now -= self._known.pop(key, 0)


class CountedShelf(Shelf):
    """A host for a machine that has none apart: copies that are counted for themselves."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def put(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        with torch.utils._python_dispatch._disable_current_modes():
            held = value.detach().clone()
        size = held.untyped_storage().nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(held.untyped_storage(), self._drop, size)
        return held

    def take(self, held: Any) -> Any:
        return held.clone() if isinstance(held, Tensor) else held

    def _drop(self, size: int) -> None:
        self.now -= size


class Basic(nn.Module):
    """The block of ResNet-18."""

    def __init__(self, inside: int, outside: int, stride: int, act: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside)
        self.conv2, self.norm2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False), nn.BatchNorm2d(outside)
        self.act = act()
        self.skip: nn.Module = nn.Identity()
        if stride > 1 or inside != outside:
            self.skip = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(self.act(self.norm1(self.conv1(x)))))
        y += self.skip(x)
        return self.act(y)


def resnet18(act: Callable[[], nn.Module]) -> nn.Module:
    """ResNet-18 for a thousand classes: 20 BatchNorm layers."""
    torch.manual_seed(0)
    widths = [
        (64, 64, 1),
        (64, 64, 1),
        (64, 128, 2),
        (128, 128, 1),
        (128, 256, 2),
        (256, 256, 1),
        (256, 512, 2),
        (512, 512, 1),
    ]
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), act(), nn.MaxPool2d(3, 2, 1)]
    blocks = [Basic(*width, act) for width in widths]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))


Rows = tuple[Tensor, Tensor]


def losses(model: nn.Module, rows: Rows) -> Tensor:
    return F.cross_entropy(model(rows[0]), rows[1], reduction="none")


def whole(model: nn.Module, rows: Rows, size: int) -> None:
    losses(model, rows).mean().backward()


def plain(model: nn.Module, rows: Rows, size: int) -> None:
    for x, y in zip(rows[0].split(size), rows[1].split(size), strict=True):
        (losses(model, (x, y)).sum() / len(rows[0])).backward()


def exact(model: nn.Module, rows: Rows, size: int) -> None:
    wb.backward(model, losses, rows, micro_batch_size=size, batch_norm="exact")


def sparing(model: nn.Module, rows: Rows, size: int) -> None:
    wb.backward(model, losses, rows, micro_batch_size=size, batch_norm="exact", offload=True)


def exact_on(shelf: Shelf) -> Callable[[nn.Module, Rows, int], None]:
    def run(model: nn.Module, rows: Rows, size: int) -> None:
        pieces = pieces_of(rows, size)
        window = WholeWindow(model, losses, Engine(model, shelf))
        window.forward(pieces)
        for piece in pieces:
            (window.loss(piece).sum() / len(rows[0])).backward()
        window.backward()
        window.commit()

    return run


@dataclass
class Way:
    """One way to a gradient."""

    name: str
    run: Callable[[nn.Module, Any, int], None]
    shelf: CountedShelf | None = None


def gradients(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


def measure(model: nn.Module, rows: Any, size: int, ways: list[Way], repeats: int) -> list[dict[str, object]]:
    """Run every way in turns; the first round is not counted (it captures graphs and starts threads)."""
    truth = copy.deepcopy(model).double()
    ways[0].run(truth, pytree.tree_map(lambda t: t.double() if t.is_floating_point() else t, rows), size)
    expected = gradients(truth)
    found: list[dict[str, Any]] = []
    twins = [copy.deepcopy(model) for _ in ways]
    for way, twin in zip(ways, twins, strict=True):
        way.run(twin, rows, size)
        error = float((gradients(twin) - expected).norm() / expected.norm())
        found.append({"way": way.name, "error": significant(error), "cpu": [], "peak": 0})
    for _ in range(repeats):
        for way, twin, row in zip(ways, twins, found, strict=True):
            with Clock() as clock:
                way.run(twin, rows, size)
            row["cpu"].append(clock.seconds.cpu)
    for way, twin, row in zip(ways, twins, found, strict=True):
        if way.shelf is not None:
            way.shelf.peak = 0
        with LiveBytes(twin, rows) as live:
            way.run(twin, rows, size)
        row["peak"] = live.peak
        row["host_peak"] = way.shelf.peak if way.shelf else 0
    return found


def relative(found: list[dict[str, Any]], to: str) -> list[dict[str, object]]:
    base = dict(next(row for row in found if row["way"] == to))
    for row in found:
        ratios = [a / b for a, b in zip(row["cpu"], base["cpu"], strict=True)]
        row["time_over"] = quartiles(ratios)
        row["peak_over"] = significant(row["peak"] / base["peak"])
        row["peak_mb"] = significant(row.pop("peak") / 1e6)
        row["host_mb"] = significant(row.pop("host_peak") / 1e6)
        row["cpu_seconds"] = quartiles(row.pop("cpu"))
    return found


def batch_norm(rows: int, side: int, size: int, repeats: int) -> list[dict[str, object]]:
    torch.manual_seed(1)
    data = torch.randn(rows, 3, side, side), torch.randint(0, 1000, (rows,))
    shelf = CountedShelf()
    ways = [
        Way("whole batch", whole),
        Way("plain loop, another gradient", plain),
        Way("exact", exact),
        Way("exact, crossing tensors made twice", sparing),
        Way("exact, crossing tensors on the host", exact_on(shelf), shelf),
    ]
    found = relative(measure(resnet18(lambda: nn.ReLU(inplace=True)), data, size, ways, repeats), ways[1].name)
    return [{"part": "BatchNorm", "rows": rows, "side": side, "micro_batch": size, **row} for row in found]


class Encoder(nn.Module):
    """The size and form of MiniLM-L6: six layers of 384, with random weights and a vocabulary of 30,522."""

    def __init__(self, layers: int = 6, width: int = 384, words: int = 30522) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(width, width // 32, 4 * width, 0.0, F.gelu, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.normalize(self.layers(self.words(tokens)).mean(1), dim=-1)


def in_batch(queries: Tensor, documents: Tensor) -> Tensor:
    return F.cross_entropy(20 * queries @ documents.T, torch.arange(len(queries)))


def contrast_whole(model: nn.Module, rows: Any, size: int) -> None:
    in_batch(model(rows[0]), model(rows[1])).backward()


def contrast_plain(model: nn.Module, rows: Any, size: int) -> None:
    pieces = list(zip(rows[0].split(size), rows[1].split(size), strict=True))
    for queries, documents in pieces:
        (in_batch(model(queries), model(documents)) / len(pieces)).backward()


def contrast_two_passes(model: nn.Module, rows: Any, size: int) -> None:
    towers = [lambda model, rows: model(rows[0]), lambda model, rows: model(rows[1])]
    wb.coupled_backward(model, towers, in_batch, rows, micro_batch_size=size)


def contrastive(rows: int, size: int, layers: int, repeats: int) -> list[dict[str, object]]:
    torch.manual_seed(2)
    data = torch.randint(0, 30522, (rows, 16)), torch.randint(0, 30522, (rows, 48))
    ways = [
        Way("whole batch", contrast_whole),
        Way("plain loop, another gradient", contrast_plain),
        Way("two passes", contrast_two_passes),
    ]
    found = relative(measure(Encoder(layers), data, size, ways, repeats), ways[0].name)
    return [{"part": "contrastive", "rows": rows, "micro_batch": size, **row} for row in found]


def show(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        print(
            f"{row['part']:12} {row['rows']:4} rows / {row['micro_batch']}  {row['way']:38} error {row['error']:8.2g}  "
            f"time x{row['time_over']['median']:5.2f}  peak {row['peak_mb']:7.1f} MB x{row['peak_over']:5.2f}  "
            f"host {row['host_mb']:6.1f} MB",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--side", type=int, default=64)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=64)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for count in chosen.rows:
        rows += batch_norm(count, chosen.side, chosen.micro_batch, chosen.repeats)
        show(rows[-5:])
    rows += contrastive(chosen.pairs, max(chosen.pairs // 8, 1), chosen.layers, chosen.repeats)
    show(rows[-3:])
    save("coupled", {key: str(value) for key, value in vars(chosen).items() if key != "out"}, rows, chosen.out)


if __name__ == "__main__":
    main()
