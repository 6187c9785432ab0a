"""Windows out of public reports: what people ran, with the loss they meant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import wholebatch as wb
from tests.cases.situation import Loss, Situation, columns

Pair = tuple[torch.Tensor, torch.Tensor]


class TokenMeans(Situation):
    """One sequence a micro-batch, of 7, 1, 3 and 2 tokens: the mean of their means is not the mean over 13 tokens."""

    source = "huggingface/transformers#24725"
    seed = 1

    def build(self) -> tuple[nn.Module, list[Any]]:
        model = nn.Sequential(nn.Embedding(11, 6), nn.Tanh(), nn.Linear(6, 11)).double()
        return model, [torch.randint(0, 11, (tokens + 1,)) for tokens in (7, 1, 3, 2)]

    def values(self, model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(ids[:-1]), ids[1:], reduction="none")

    def loss(self, model: nn.Module, ids: torch.Tensor) -> Any:
        return wb.mean(self.values(model, ids))

    def whole(self, model: nn.Module, window: list[Any]) -> torch.Tensor:
        inputs, labels = torch.cat([ids[:-1] for ids in window]), torch.cat([ids[1:] for ids in window])
        return F.cross_entropy(model(inputs), labels)

    def usual(self, model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(ids[:-1]), ids[1:])

    def items(self, ids: torch.Tensor) -> Any:
        return len(ids) - 1

    @property
    def forms(self) -> dict[str, Loss]:
        return {
            "mean": self.loss,
            "from_mean": lambda model, ids: wb.from_mean(self.usual(model, ids), items=len(ids) - 1),
            "sums": lambda model, ids: wb.LossSum(self.values(model, ids).sum(), len(ids) - 1),
            "causal_lm": lambda model, ids: wb.losses.causal_lm(model(ids[None]), ids[None]),
            "masked": self._masked,
        }

    def _masked(self, model: nn.Module, ids: torch.Tensor) -> Any:
        padded = torch.cat([ids, ids.new_zeros(3)])
        mask = torch.arange(len(padded) - 1) < len(ids) - 1
        return wb.mean(F.cross_entropy(model(padded[:-1]), padded[1:], reduction="none"), weights=mask)


class ClassWeights(Situation):
    """Weighted cross entropy divides by the sum of the weights it saw, and every micro-batch saw other classes."""

    source = "pytorch/pytorch#72047"
    seed = 3
    weight = torch.tensor([0.1, 1.0, 10.0], dtype=torch.float64)
    smoothing = 0.0

    def build(self) -> tuple[nn.Module, list[Any]]:
        model = nn.Linear(4, 3).double()
        inputs, labels = torch.randn(9, 4).double(), torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 0])
        return model, list(zip(inputs.split(3), labels.split(3), strict=True))

    def weights(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.weight.to(inputs.dtype)

    def loss(self, model: nn.Module, rows: Pair) -> Any:
        return wb.losses.cross_entropy(model(rows[0]), rows[1], weight=self.weights(rows[0]))

    def whole(self, model: nn.Module, window: list[Any]) -> torch.Tensor:
        return self.usual(model, columns(window))

    def usual(self, model: nn.Module, rows: Any) -> torch.Tensor:
        weight = self.weights(rows[0])
        return F.cross_entropy(model(rows[0]), rows[1], weight=weight, label_smoothing=self.smoothing)

    def items(self, rows: Pair) -> Any:
        return self.weights(rows[0])[rows[1]].sum()

    @property
    def forms(self) -> dict[str, Loss]:
        return {"cross_entropy": self.loss, "weights": self._by_hand, "from_mean": self._ready_made}

    def _by_hand(self, model: nn.Module, rows: Pair) -> Any:
        values = F.cross_entropy(model(rows[0]), rows[1], reduction="none")
        return wb.mean(values, weights=self.weights(rows[0])[rows[1]])

    def _ready_made(self, model: nn.Module, rows: Pair) -> Any:
        return wb.from_mean(self.usual(model, rows), items=self.items(rows))


class IgnoredMicroBatch(Situation):
    """The middle micro-batch holds ignored labels only: its own mean is 0/0, and it must weigh nothing."""

    source = "karpathy/nanochat#623"
    seed = 4

    def build(self) -> tuple[nn.Module, list[Any]]:
        model, inputs = nn.Linear(4, 6).double(), torch.randn(12, 4).double()
        labels = torch.tensor([1, -100, 3, 2, -100, -100, -100, -100, 0, 5, -100, -100])
        return model, list(zip(inputs.split(4), labels.split(4), strict=True))

    def loss(self, model: nn.Module, rows: Pair) -> Any:
        return wb.losses.cross_entropy(model(rows[0]), rows[1])

    def whole(self, model: nn.Module, window: list[Any]) -> torch.Tensor:
        return self.usual(model, columns(window))

    def usual(self, model: nn.Module, rows: Any) -> torch.Tensor:
        return F.cross_entropy(model(rows[0]), rows[1])

    def items(self, rows: Pair) -> Any:
        return (rows[1] != -100).sum()

    @property
    def forms(self) -> dict[str, Loss]:
        return {
            "cross_entropy": self.loss,
            "mask": self._by_hand,
            "from_mean": lambda model, rows: wb.from_mean(self.usual(model, rows), items=self.items(rows)),
            "none": lambda model, rows: self.loss(model, rows) if self.items(rows) else None,
        }

    def _by_hand(self, model: nn.Module, rows: Pair) -> Any:
        return wb.mean(F.cross_entropy(model(rows[0]), rows[1], reduction="none"), weights=rows[1] != -100)


class UnevenRows(Situation):
    """Micro-batches of 3 rows and of 1, not divided by anything: each of the 4 rows must weigh the same."""

    source = "NVIDIA-NeMo/Automodel#3829"
    seed = 11

    def build(self) -> tuple[nn.Module, list[Any]]:
        model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4)).double()
        inputs, labels = torch.randn(4, 6).double(), torch.tensor([0, 3, 1, 2])
        return model, list(zip(inputs.split([3, 1]), labels.split([3, 1]), strict=True))

    def loss(self, model: nn.Module, rows: Pair) -> Any:
        return F.cross_entropy(model(rows[0]), rows[1], reduction="none")

    def whole(self, model: nn.Module, window: list[Any]) -> torch.Tensor:
        return self.usual(model, columns(window))

    def usual(self, model: nn.Module, rows: Any) -> torch.Tensor:
        return F.cross_entropy(model(rows[0]), rows[1])

    def items(self, rows: Pair) -> Any:
        return len(rows[0])

    def usual_loop(self, model: nn.Module, window: list[Any]) -> None:
        for rows in window:
            self.usual(model, rows).backward()


class TiedEmbedding(TokenMeans):
    """Input and output embedding are one parameter: both uses and all micro-batches add up in one gradient."""

    source = "NVIDIA/Megatron-LM#7228"
    seed = 34

    def build(self) -> tuple[nn.Module, list[Any]]:
        window = [torch.randint(0, 8, (tokens + 1,)) for tokens in (6, 2, 3)]
        return TiedModel().double(), window

    @property
    def forms(self) -> dict[str, Loss]:
        return {"": self.loss}


class TiedModel(nn.Module):
    """A language model of one hidden layer whose output matrix is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.middle = nn.Embedding(8, 4), nn.Linear(4, 4)
        self.output = nn.Linear(4, 8, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.output(torch.tanh(self.middle(self.embedding(ids))))  # type: ignore[no-any-return]


class GradientPenalty(Situation):
    """The loss differentiates inside (a penalty on the input's gradient): each micro-batch must see its own images."""

    source = "NVlabs/stylegan2#9"
    seed = 38

    def build(self) -> tuple[nn.Module, list[Any]]:
        model = nn.Sequential(nn.Linear(3, 5), nn.Softplus(), nn.Linear(5, 1)).double()
        return model, list(torch.randn(6, 3).double().split(2))

    def loss(self, model: nn.Module, images: torch.Tensor) -> Any:
        images = images.detach().requires_grad_()
        scores = model(images)
        (slope,) = torch.autograd.grad(scores.sum(), images, create_graph=True)
        return scores.squeeze(-1) + 5 * slope.pow(2).sum(-1)

    def whole(self, model: nn.Module, window: list[Any]) -> torch.Tensor:
        mean: torch.Tensor = self.loss(model, torch.cat(window)).mean()
        return mean

    def usual_loop(self, model: nn.Module, window: list[Any]) -> None:
        for _ in window:  # fetched once, outside the loop
            (self.loss(model, window[0]).mean() / len(window)).backward()

    def items(self, images: torch.Tensor) -> Any:
        return len(images)


class TokensAndSequences(Situation):
    """A token mean beside an auxiliary mean per sequence: 12 tokens, 5 sequences, two denominators."""

    source = "NVIDIA-NeMo/Automodel#3359"
    seed = 39
    terms = 2
    lengths: tuple[tuple[int, ...], ...] = ((4,), (1, 2), (3, 2))

    def build(self) -> tuple[nn.Module, list[Any]]:
        model = RoutedModel().double()
        return model, [[torch.randint(0, 7, (tokens + 1,)) for tokens in micro_batch] for micro_batch in self.lengths]

    def loss(self, model: nn.Module, sequences: list[torch.Tensor]) -> Any:
        tokens, balance = model(sequences)
        return wb.mean(tokens) + 0.1 * wb.mean(balance)

    def whole(self, model: nn.Module, window: list[Any]) -> torch.Tensor:
        tokens, balance = model([ids for micro_batch in window for ids in micro_batch])
        mean: torch.Tensor = tokens.mean() + 0.1 * balance.mean()
        return mean

    def usual_loop(self, model: nn.Module, window: list[Any]) -> None:
        in_all = sum(self.items(sequences)[0] for sequences in window)
        for sequences in window:  # the tokens are divided rightly, the other term by its own micro-batch
            tokens, balance = model(sequences)
            (tokens.sum() / in_all + 0.1 * balance.mean()).backward()

    def items(self, sequences: list[torch.Tensor]) -> Any:
        return sum(len(ids) - 1 for ids in sequences), len(sequences)

    @property
    def forms(self) -> dict[str, Loss]:
        return {"sum": self.loss, "named": self._named, "sums": self._sums}

    def _named(self, model: nn.Module, sequences: list[torch.Tensor]) -> Any:
        tokens, balance = model(sequences)
        return {"tokens": wb.mean(tokens), "balance": 0.1 * wb.mean(balance)}

    def _sums(self, model: nn.Module, sequences: list[torch.Tensor]) -> Any:
        tokens, balance = model(sequences)
        return wb.LossSum(tokens.sum(), len(tokens)) + wb.LossSum(0.1 * balance.sum(), len(balance))


class RoutedModel(nn.Module):
    """Give each token its loss, and each sequence the squared mean share of each of its three experts."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.gate, self.output = nn.Embedding(7, 4), nn.Linear(4, 3), nn.Linear(4, 7)

    def forward(self, sequences: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, labels = torch.cat([ids[:-1] for ids in sequences]), torch.cat([ids[1:] for ids in sequences])
        tokens = F.cross_entropy(self.output(self.embedding(inputs)), labels, reduction="none")
        shares = [self.gate(self.embedding(ids)).softmax(-1).mean(0) for ids in sequences]
        return tokens, torch.stack([3 * share.pow(2).sum() for share in shares])


class Adapter(Situation):
    """Low-rank adapters in a wrapper that takes anything and returns a ready-made mean: nothing can be read off it."""

    source = "huggingface/transformers#35856"
    seed = 48

    def build(self) -> tuple[nn.Module, list[Any]]:
        sequences = [torch.randint(0, 7, (tokens + 1,)) for tokens in (5, 1, 3)]
        return AdapterModel().double(), [{"ids": ids[:-1], "labels": ids[1:]} for ids in sequences]

    def loss(self, model: nn.Module, inputs: dict[str, torch.Tensor]) -> Any:
        return wb.from_mean(model(**inputs)["loss"], items=len(inputs["labels"]))

    def whole(self, model: nn.Module, window: list[Any]) -> torch.Tensor:
        return self.usual(model, {key: torch.cat([inputs[key] for inputs in window]) for key in ("ids", "labels")})

    def usual(self, model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = model(**inputs)["loss"]
        return loss

    def items(self, inputs: dict[str, torch.Tensor]) -> Any:
        return len(inputs["labels"])


class AdapterModel(nn.Module):
    """A frozen base with a trainable output bias, and two adapter matrices beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = BaseModel().requires_grad_(False)
        self.base.linear.bias.requires_grad_(True)
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 7, bias=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base(*args, change=lambda hidden: self.up(self.down(hidden)), **kwargs)


class BaseModel(nn.Module):
    """A model that returns its loss and its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(7, 4), nn.Linear(4, 7)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, change: Callable[..., torch.Tensor]) -> Any:
        hidden = self.embedding(ids)
        logits = self.linear(hidden) + change(hidden)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


REPORTED: list[Situation] = [
    TokenMeans(),
    ClassWeights(),
    IgnoredMicroBatch(),
    UnevenRows(),
    TiedEmbedding(),
    GradientPenalty(),
    TokensAndSequences(),
    Adapter(),
]
