"""Windows in which memory runs out somewhere, and the plain loop that each is held against.

The oracle is a plain loop over the micro-batches that the window ended with, on the same draws: torch alone. Which
micro-batches those are is read off the rows that the loss function was called with last.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import wholebatch as wb
from tests.faults.injection import AtOperator
from tests.oracle import assert_same_gradient

ROWS = 10
Batch = dict[str, Tensor]


class Case:
    """A model, a loss function, and each micro-batch's share of the loss in plain torch."""

    dtype = torch.float64
    options: ClassVar[dict[str, Any]] = {}

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))

    def outside(self) -> dict[str, Tensor]:
        """Tensors that learn without being a part of the model."""
        return {}

    def size(self) -> Any:
        return wb.Auto(5)

    def batch(self) -> Any:
        draws = torch.Generator().manual_seed(7)
        x = torch.randn(ROWS, 5, generator=draws, dtype=torch.float64).to(self.dtype)
        return {"x": x, "y": torch.randint(0, 3, (ROWS,), generator=draws), "row": torch.arange(ROWS)}

    def cut(self, batch: Any, rows: list[int]) -> Batch:
        return {name: value[rows] for name, value in batch.items()}

    def values(self, model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(
            model(batch["x"]).to(torch.promote_types(self.dtype, torch.float32)), batch["y"], reduction="none"
        )

    def loss(self, model: nn.Module, batch: Batch) -> Any:
        return self.values(model, batch)

    def share(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.values(model, batch).sum() / ROWS

    def settle(self, calm: Any, fresh: Any) -> None:
        """Make the buffers of the plain loop what the window shall leave, where that is something else."""


class Layers(Case):
    pass


class Dropout(Case):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.5), nn.Tanh(), nn.Linear(6, 3))


class Proven(Dropout):
    """A first window, which is proven before it runs."""

    options: ClassVar[dict[str, Any]] = {"verify": "first"}


class GlobalDraws(Dropout):
    """Python's and NumPy's global generators, once a micro-batch."""

    def values(self, model: nn.Module, batch: Batch) -> Tensor:
        return super().values(model, batch) * (1 + random.random()) * (1 + np.random.rand())


class OwnDraws(Case):
    """Generators that nobody else knows of; the plain loop repeats what each row has drawn last."""

    def __init__(self) -> None:
        self.numpy, self.torch = np.random.default_rng(1), torch.Generator().manual_seed(1)
        self.drawn: dict[int, Tensor] = {}

    def model(self) -> nn.Module:
        return nn.ModuleList([nn.Linear(5, 6), nn.Linear(6, 3)])

    def said(self, model: Any, batch: Batch, noise: Tensor) -> Tensor:
        return F.cross_entropy(model[1](torch.tanh(model[0](batch["x"])) * noise), batch["y"], reduction="none")

    def loss(self, model: nn.Module, batch: Batch) -> Any:
        noise = torch.as_tensor(self.numpy.standard_normal((len(batch["y"]), 6)))
        noise = noise * torch.rand(noise.shape, generator=self.torch, dtype=torch.float64)
        self.drawn.update(zip(batch["row"].tolist(), noise.clone(), strict=True))
        return self.said(model, batch, noise)

    def share(self, model: nn.Module, batch: Batch) -> Tensor:
        noise = torch.stack([self.drawn[row] for row in batch["row"].tolist()])
        return self.said(model, batch, noise).sum() / ROWS


class MicroNorm(Case):
    options: ClassVar[dict[str, Any]] = {"batch_norm": "micro"}

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 3))


class PooledNorm(MicroNorm):
    options: ClassVar[dict[str, Any]] = {"batch_norm": "pooled"}

    def settle(self, calm: Any, fresh: Any) -> None:
        """One update from all rows: the first normalising layer sees them as they are."""
        seen, norm = fresh[0](self.batch()["x"]), calm[1]
        norm.running_mean.copy_(fresh[1].running_mean.lerp(seen.mean(0), 0.1))
        norm.running_var.copy_(fresh[1].running_var.lerp(seen.var(0), 0.1))
        norm.num_batches_tracked.fill_(1)


class Tied(Case):
    """An embedding and a head that are one; sparse gradients in another."""

    sparse = False

    class Net(nn.Module):
        def __init__(self, sparse: bool) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(7, 4, sparse=sparse), nn.Linear(4, 7, bias=False)
            self.inside = nn.Linear(4, 4)
            if not sparse:
                self.head.weight = self.words.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(torch.tanh(self.inside(self.words(ids))))

    def model(self) -> nn.Module:
        return Tied.Net(self.sparse)

    def batch(self) -> Any:
        draws = torch.Generator().manual_seed(7)
        return {
            "x": torch.randint(0, 7, (ROWS,), generator=draws),
            "y": torch.randint(0, 7, (ROWS,), generator=draws),
            "row": torch.arange(ROWS),
        }


class Sparse(Tied):
    sparse = True


class Wide(Dropout):
    """Sums that are wider than the parameters."""

    dtype = torch.bfloat16
    options: ClassVar[dict[str, Any]] = {"accumulate_in": torch.float32}


class Checkpointed(Case):
    reentrant = False

    class Net(nn.Module):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.first, self.last, self.reentrant = nn.Linear(5, 6), nn.Linear(6, 3), reentrant
            self.inside = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.4))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for _ in range(2):  # the same weights twice
                x = checkpoint(self.inside, x, use_reentrant=self.reentrant)
            return self.last(x)

    def model(self) -> nn.Module:
        return Checkpointed.Net(self.reentrant)


class Reentrant(Checkpointed):
    reentrant = True


class Again(torch.autograd.Function):
    """A checkpoint of one's own: the backward runs the layer again, and a backward inside."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, x: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        with torch.no_grad():
            return layer(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.layer(x), grad)
        return None, x.grad


class OwnCheckpoint(Case):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inside, self.last = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.inside(self.first(x)))
            return self.last(Again.apply(self.inside, Again.apply(self.inside, x)))  # type: ignore[no-untyped-call, no-any-return]

    def model(self) -> nn.Module:
        return OwnCheckpoint.Net()


class TwoTerms(Dropout):
    """Two denominators, which a counting pass finds."""

    def loss(self, model: nn.Module, batch: Batch) -> Any:
        values = self.values(model, batch)
        return wb.mean(values) + 0.5 * wb.mean(values.square(), weights=batch["y"] != 0)

    def share(self, model: nn.Module, batch: Batch) -> Tensor:
        values, counted = self.values(model, batch), int((self.batch()["y"] != 0).sum())
        return values.sum() / ROWS + 0.5 * (values.square() * (batch["y"] != 0)).sum() / counted


class Once(Case):
    """A term that exists once a batch, and a metric."""

    def loss(self, model: nn.Module, batch: Batch) -> Any:
        values = self.values(model, batch)
        size = sum(parameter.square().sum() for parameter in model.parameters())
        return {"said": wb.mean(values), "size": 0.1 * wb.once(size)}, {"low": (values < 1).double()}

    def share(self, model: nn.Module, batch: Batch) -> Tensor:
        size = sum(parameter.square().sum() for parameter in model.parameters())
        return self.values(model, batch).sum() / ROWS + 0.1 * size * (batch["row"][0] == 0)


class Outside(Dropout):
    """A tensor that the loss function reaches for in a place where nobody looks, and late."""

    def __init__(self) -> None:
        self.kept = [torch.ones((), dtype=torch.float64, requires_grad=True)]

    def outside(self) -> dict[str, Tensor]:
        return {"temperature": self.kept[0]}

    def values(self, model: nn.Module, batch: Batch) -> Tensor:
        values = super().values(model, batch)
        late = batch["row"] >= ROWS // 2
        return values * (1 + late * hidden(self)) if bool(late.any()) else values


def hidden(case: Outside) -> Tensor:
    return case.kept[0]


class Lengths(Case):
    """Rows of several lengths in token budgets, made by a collate function."""

    options: ClassVar[dict[str, Any]] = {
        "collate": lambda rows: {
            "x": nn.utils.rnn.pad_sequence([r["x"] for r in rows], batch_first=True),
            "row": torch.tensor([r["row"] for r in rows]),
        }
    }

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 7))

    def size(self) -> Any:
        return wb.Auto(wb.Tokens(24, length="x"))

    def batch(self) -> Any:
        draws = torch.Generator().manual_seed(7)
        lengths = torch.randint(1, 7, (ROWS,), generator=draws).tolist()
        return [
            {"x": torch.randint(1, 7, (length,), generator=draws), "row": row} for row, length in enumerate(lengths)
        ]

    def cut(self, batch: Any, rows: list[int]) -> Batch:
        return self.options["collate"]([batch[row] for row in rows])

    def values(self, model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["x"]).transpose(1, 2), batch["x"], reduction="none")

    def loss(self, model: nn.Module, batch: Batch) -> Any:
        return wb.mean(self.values(model, batch), weights=batch["x"] != 0)

    def share(self, model: nn.Module, batch: Batch) -> Tensor:
        counted = sum(len(row["x"]) for row in self.batch())
        return (self.values(model, batch) * (batch["x"] != 0)).sum() / counted


CASES: list[type[Case]] = [
    Layers, Dropout, Proven, GlobalDraws, OwnDraws, MicroNorm, PooledNorm, Tied, Sparse, Wide,
    Checkpointed, Reentrant, OwnCheckpoint, TwoTerms, Once, Outside, Lengths,
]  # fmt: skip


@dataclass
class Trial:
    """One window, broken off or not, and what it left behind."""

    case: Case
    model: nn.Module
    learning: dict[str, Tensor]
    before: dict[str, Tensor | None]
    left: dict[str, Tensor | None] = field(default_factory=dict)
    calls: list[list[int]] = field(default_factory=list)
    error: BaseException | None = None
    next_draws: tuple[Any, ...] = ()


def begun(case: Case, gathered: bool) -> tuple[nn.Module, dict[str, Tensor]]:
    """Build the model of a case; ``gathered``: with gradients of earlier calls in ``.grad``."""
    torch.manual_seed(3)
    model = case.model().to(case.dtype)
    learning = dict(model.named_parameters()) | case.outside()
    for tensor in learning.values():
        tensor.grad = torch.full_like(tensor, 0.25) if gathered else None
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    return model, learning


def drawn_next() -> tuple[Any, ...]:
    return float(torch.rand(())), random.random(), float(np.random.rand())


def run(kind: type[Case], injection: AtOperator, gathered: bool = False) -> Trial:
    """Run one window with a fault injected."""
    case = kind()
    model, learning = begun(case, gathered)
    trial = Trial(case, model, learning, {name: tensor.grad for name, tensor in learning.items()})

    def noted(model: nn.Module, batch: Batch) -> Any:
        trial.calls.append(batch["row"].tolist())
        return case.loss(model, batch)

    batch = case.batch()
    try:
        with injection:
            wb.backward(model, noted, batch, case.size(), **{"verify": "never", **case.options})
    except BaseException as error:
        trial.error = error
    trial.next_draws = drawn_next()
    trial.left = {name: tensor.grad for name, tensor in learning.items()}
    return trial


def final_micro_batches(calls: list[list[int]]) -> list[list[int]]:
    """Read off the micro-batches that a window ended with: for each row, the last call that it came in."""
    last = {row: call for call, rows in enumerate(calls) for row in rows}
    micro_batches = [[row for row in rows if last[row] == call] for call, rows in enumerate(calls)]
    assert all(micro_batch in ([], rows) for micro_batch, rows in zip(micro_batches, calls, strict=True))
    return [micro_batch for micro_batch in micro_batches if micro_batch]


def assert_survived(trial: Trial, gathered: bool, draws: bool = True) -> None:
    """Fail unless the window ended as a plain loop over its final micro-batches, or raised and left ``.grad`` alone."""
    if trial.error is not None:
        for name, grad in trial.left.items():
            assert grad is trial.before[name], f".grad of {name} is another tensor"
            assert grad is None or bool((grad == 0.25).all()), f".grad of {name} has changed"
        return
    case, micro_batches = trial.case, final_micro_batches(trial.calls)
    assert sorted(row for micro_batch in micro_batches for row in micro_batch) == list(range(ROWS))
    calm, learning = begun(case, gathered)
    for micro_batch in micro_batches:
        case.share(calm, case.cut(case.batch(), micro_batch)).backward()
    assert not draws or trial.next_draws == drawn_next()
    assert_same_gradient(dense(trial.left), dense({name: tensor.grad for name, tensor in learning.items()}))
    with torch.no_grad():
        case.settle(calm, begun(case, gathered)[0])
    for (name, ours), (_, theirs) in zip(trial.model.named_buffers(), calm.named_buffers(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-9), f"buffer {name} has moved otherwise"


def dense(gradients: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {name: None if grad is None else grad.detach().to_dense().clone() for name, grad in gradients.items()}
