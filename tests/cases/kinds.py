"""More windows of the reported kinds: other denominators, other shapes of loss, other parameters."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import wholebatch as wb
from tests.cases.reported import ClassWeights, TokensAndSequences
from tests.cases.situation import Loss, Situation, columns


class Rows(Situation):
    """A situation whose micro-batches are tuples of tensors, so that the whole batch is their columns in one
    micro-batch.

    A subclass says `share(model, rows)`, the mean that is meant for any number of rows: over the columns it is the
    whole batch's, over a micro-batch it is the usual one.
    """

    same_shapes = True
    """Whether the micro-batches can be joined and cut anew: rows of one shape, nothing decided a micro-batch."""

    def share(self, model: nn.Module, rows: Any) -> torch.Tensor:
        raise NotImplementedError

    def whole(self, model: nn.Module, window: list[Any]) -> torch.Tensor:
        return self.share(model, columns(window))

    def usual(self, model: nn.Module, micro_batch: Any) -> torch.Tensor:
        return self.share(model, micro_batch)


def cut(columns_of_rows: list[torch.Tensor], sizes: list[int]) -> list[Any]:
    """Cut columns into micro-batches of these sizes."""
    return list(zip(*(column.split(sizes) for column in columns_of_rows), strict=True))


def network(inputs: int, outputs: int) -> nn.Module:
    """A small network of one hidden layer."""
    return nn.Sequential(nn.Linear(inputs, 5), nn.Tanh(), nn.Linear(5, outputs))


class SmoothedClassWeights(ClassWeights):
    """Class weights together with label smoothing: torch still divides by the weights of the labels alone."""

    smoothing = 0.2

    @property
    def forms(self) -> dict[str, Loss]:
        return {"cross_entropy": self.loss, "from_mean": self._ready_made}

    def loss(self, model: nn.Module, rows: Any) -> Any:
        weight = self.weights(rows[0])
        return wb.losses.cross_entropy(model(rows[0]), rows[1], weight=weight, label_smoothing=self.smoothing)


class RowWeights(Rows):
    """Importance weights a row, normalised by their sum; one micro-batch weighs next to nothing."""

    seed = 101

    def build(self) -> tuple[nn.Module, list[Any]]:
        inputs, targets = torch.randn(9, 3), torch.randn(9)
        weights = torch.tensor([1.0, 5.0, 0.5, 0.01, 0.02, 0.01, 3.0, 0.0, 2.5])
        return network(3, 1), cut([inputs, targets, weights], [3, 3, 3])

    def loss(self, model: nn.Module, rows: Any) -> Any:
        return wb.mean((model(rows[0]).squeeze(-1) - rows[1]).abs(), weights=rows[2])

    def share(self, model: nn.Module, rows: Any) -> torch.Tensor:
        inputs, targets, weights = rows
        return (weights * (model(inputs).squeeze(-1) - targets).abs()).sum() / weights.sum()

    def items(self, rows: Any) -> Any:
        return rows[2].sum()


class FractionalWeights(RowWeights):
    """Weights whose sum over the whole window is far below one: a floor of one under the denominator would show."""

    seed = 102

    def build(self) -> tuple[nn.Module, list[Any]]:
        model, window = super().build()
        return model, [(inputs, targets, weights / 1000) for inputs, targets, weights in window]


class TokenMeansPerRow(Rows):
    """The mean over rows of each row's own token mean: rows count, not tokens, and micro-batches differ in rows."""

    seed = 103

    def build(self) -> tuple[nn.Module, list[Any]]:
        values, lengths = torch.randn(7, 6, 3), torch.tensor([6, 1, 2, 5, 3, 1, 4])
        return network(3, 1), cut([values, torch.arange(6) < lengths[:, None]], [4, 2, 1])

    def rows(self, model: nn.Module, rows: Any) -> torch.Tensor:
        values, mask = rows
        losses = model(values).squeeze(-1).square()
        return (losses * mask).sum(1) / mask.sum(1)

    def loss(self, model: nn.Module, rows: Any) -> Any:
        return self.rows(model, rows)

    def share(self, model: nn.Module, rows: Any) -> torch.Tensor:
        return self.rows(model, rows).mean()

    def items(self, rows: Any) -> Any:
        return len(rows[0])


class Segmentation(Rows):
    """Pixels with an ignored label and class weights; one image is ignored altogether."""

    seed = 104

    def build(self) -> tuple[nn.Module, list[Any]]:
        images, labels = torch.randn(5, 2, 4, 4), torch.randint(0, 3, (5, 4, 4))
        labels[1, :3], labels[2], labels[4, :, 2:] = 255, 255, 255
        return nn.Conv2d(2, 3, 3, padding=1), cut([images, labels], [2, 1, 2])

    def weight(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.tensor([0.2, 1.0, 4.0], dtype=logits.dtype)

    def loss(self, model: nn.Module, rows: Any) -> Any:
        logits = model(rows[0])
        return wb.losses.cross_entropy(logits, rows[1], weight=self.weight(logits), ignore_index=255)

    def share(self, model: nn.Module, rows: Any) -> torch.Tensor:
        logits = model(rows[0])
        return F.cross_entropy(logits, rows[1], weight=self.weight(logits), ignore_index=255)


class SequenceSums(Rows):
    """A loss that is a sum over the batch (as transducers are trained): no denominator at all."""

    seed = 105

    def build(self) -> tuple[nn.Module, list[Any]]:
        return network(3, 1), cut([torch.randn(7, 3)], [3, 3, 1])

    def loss(self, model: nn.Module, rows: Any) -> Any:
        return wb.total(F.softplus(model(rows[0])))

    def share(self, model: nn.Module, rows: Any) -> torch.Tensor:
        return F.softplus(model(rows[0])).sum()


class SumAndMean(Rows):
    """A sum beside a mean: the sum has no denominator and must not be given the other's."""

    seed = 106
    terms = 2

    def build(self) -> tuple[nn.Module, list[Any]]:
        return network(3, 2), cut([torch.randn(8, 3)], [3, 3, 2])

    def loss(self, model: nn.Module, rows: Any) -> Any:
        out = model(rows[0])
        return {"mean": wb.mean(out[:, 0].square()), "sum": 0.01 * wb.total(out[:, 1].square())}

    def share(self, model: nn.Module, rows: Any) -> torch.Tensor:
        out = model(rows[0])
        return out[:, 0].square().mean() + 0.01 * out[:, 1].square().sum()


class MaskedRegression(Rows):
    """A masked squared error over a field, divided by the mask's sum; written by hand it is NaN for an empty mask."""

    seed = 107

    def build(self) -> tuple[nn.Module, list[Any]]:
        mask = torch.rand(6, 4) < 0.5
        mask[2:4] = False
        return network(3, 4), cut([torch.randn(6, 3), torch.randn(6, 4), mask], [2, 2, 2])

    def loss(self, model: nn.Module, rows: Any) -> Any:
        inputs, targets, mask = rows
        return wb.mean((model(inputs) - targets).square(), weights=mask)

    def share(self, model: nn.Module, rows: Any) -> torch.Tensor:
        inputs, targets, mask = rows
        return ((model(inputs) - targets).square() * mask).sum() / mask.sum()

    def items(self, rows: Any) -> Any:
        return rows[2].sum()


class DicePerRow(Rows):
    """Dice of each image, averaged over images: separable, unlike the Dice of a batch."""

    seed = 108

    def build(self) -> tuple[nn.Module, list[Any]]:
        return nn.Conv2d(1, 1, 3, padding=1), cut([torch.randn(5, 1, 4, 4), torch.rand(5, 1, 4, 4).round()], [1, 3, 1])

    def rows(self, model: nn.Module, rows: Any) -> torch.Tensor:
        found, truth = model(rows[0]).sigmoid().flatten(1), rows[1].flatten(1)
        return 1 - (2 * (found * truth).sum(1) + 1) / (found.sum(1) + truth.sum(1) + 1)

    def loss(self, model: nn.Module, rows: Any) -> Any:
        return self.rows(model, rows)

    def share(self, model: nn.Module, rows: Any) -> torch.Tensor:
        return self.rows(model, rows).mean()


class Detection(Rows):
    """Class and box losses over the boxes, a quality loss over the images; one micro-batch has no box."""

    seed = 109
    terms = 2

    def build(self) -> tuple[nn.Module, list[Any]]:
        boxes = torch.zeros(6, 4)  # which of an image's four candidates are real
        boxes[0, :3], boxes[1, 0], boxes[4], boxes[5, 1] = 1, 1, 1, 1
        return network(3, 12), cut([torch.randn(6, 3), torch.randn(6, 4), boxes], [2, 2, 2])

    def parts(self, model: nn.Module, rows: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        images, targets, _ = rows
        classes, places, quality = model(images).chunk(3, dim=1)
        return F.softplus(classes), (places - targets).abs(), quality.square().mean(1)

    def loss(self, model: nn.Module, rows: Any) -> Any:
        classes, places, quality = self.parts(model, rows)
        boxes = rows[2]
        return wb.mean(classes, weights=boxes) + 5 * wb.mean(places, weights=boxes) + 0.1 * wb.mean(quality)

    def share(self, model: nn.Module, rows: Any) -> torch.Tensor:
        classes, places, quality = self.parts(model, rows)
        count = rows[2].sum().clamp(min=1)
        return ((classes + 5 * places) * rows[2]).sum() / count + 0.1 * quality.mean()

    def items(self, rows: Any) -> Any:
        return rows[2].sum(), rows[2].sum(), len(rows[0])


class FocalByPositives(Rows):
    """A focal loss summed over all candidates and divided by the positives, which one micro-batch lacks."""

    seed = 110

    def build(self) -> tuple[nn.Module, list[Any]]:
        truth = (torch.rand(6, 5) < 0.2).float()
        truth[:2] = 0
        truth[2, 0] = 1
        return network(3, 5), cut([torch.randn(6, 3), truth], [2, 3, 1])

    def values(self, model: nn.Module, rows: Any) -> torch.Tensor:
        logits, truth = model(rows[0]), rows[1]
        doubt = (truth - logits.sigmoid()).abs()
        return doubt.square() * F.binary_cross_entropy_with_logits(logits, truth, reduction="none")

    def loss(self, model: nn.Module, rows: Any) -> Any:
        return wb.LossSum(self.values(model, rows).sum(), rows[1].sum())

    def share(self, model: nn.Module, rows: Any) -> torch.Tensor:
        return self.values(model, rows).sum() / rows[1].sum().clamp(min=1)

    def items(self, rows: Any) -> Any:
        return rows[1].sum()


class PolicyValueEntropy(Rows):
    """Policy over tokens, value over rows, entropy over tokens, a penalty over other tokens: three denominators."""

    seed = 111
    terms = 3

    def build(self) -> tuple[nn.Module, list[Any]]:
        lengths = torch.tensor([5, 1, 2, 1, 4, 3, 1])
        tokens = torch.arange(5) < lengths[:, None]
        prompt = torch.arange(5) < torch.tensor([1, 0, 1, 0, 3, 0, 1])[:, None]
        advantages = torch.randn(7, 5)
        return network(3, 4), cut([torch.randn(7, 5, 3), advantages, tokens, prompt], [3, 1, 3])

    def parts(self, model: nn.Module, rows: Any) -> tuple[torch.Tensor, ...]:
        inputs, advantages, tokens, _ = rows
        out = model(inputs)
        ratio = (out[..., 0] * 0.1).exp()
        policy = -torch.minimum(ratio * advantages, ratio.clamp(0.9, 1.1) * advantages)
        value = ((out[..., 1] * tokens).sum(1) / tokens.sum(1)).square()
        entropy = -(out[..., 2:].softmax(-1) * out[..., 2:].log_softmax(-1)).sum(-1)
        return policy, value, entropy, (ratio - 1 - ratio.log())

    def loss(self, model: nn.Module, rows: Any) -> Any:
        policy, value, entropy, drift = self.parts(model, rows)
        tokens, prompt = rows[2], rows[3]
        return {
            "policy": wb.mean(policy, weights=tokens),
            "value": 0.5 * wb.mean(value),
            "entropy": -0.01 * wb.mean(entropy, weights=tokens),
            "drift": 0.2 * wb.mean(drift, weights=prompt),
        }

    def share(self, model: nn.Module, rows: Any) -> torch.Tensor:
        policy, value, entropy, drift = self.parts(model, rows)
        tokens, prompt = rows[2], rows[3]
        answer = ((policy - 0.01 * entropy) * tokens).sum() / tokens.sum()
        return answer + 0.5 * value.mean() + 0.2 * (drift * prompt).sum() / prompt.sum()

    def items(self, rows: Any) -> Any:
        tokens, prompt = rows[2].sum(), rows[3].sum()
        return {"policy": tokens, "value": len(rows[0]), "entropy": tokens, "drift": prompt}


class EqualByChance(TokensAndSequences):
    """The first micro-batch has as many tokens as sequences, so that two denominators look like one until the next."""

    source = ""
    seed = 112
    lengths = ((1, 1, 1), (4, 2), (3,))


class SharedWeightsOtherShapes(Rows):
    """One weight a row, given to a term a token and to a term a row: the same tensor, but two denominators."""

    same_shapes = False
    seed = 113
    terms = 2

    def build(self) -> tuple[nn.Module, list[Any]]:
        weights = torch.tensor([1.0, 3.0, 0.5, 2.0, 4.0, 0.1])
        long, short = torch.randn(2, 5, 3), torch.randn(4, 2, 3)
        return network(3, 2), [(long, weights[:2]), (short, weights[2:])]

    def loss(self, model: nn.Module, rows: Any) -> Any:
        inputs, weights = rows
        out = model(inputs)
        return wb.mean(out[..., 0].square(), weights=weights) + wb.mean(out[..., 1].mean(1).square(), weights=weights)

    def whole(self, model: nn.Module, window: list[Any]) -> torch.Tensor:
        tokens, row, counts = 0, 0, [0, 0]  # the lengths differ: added up micro-batch by micro-batch, divided once
        for inputs, weights in window:
            out = model(inputs)
            tokens = tokens + (out[..., 0].square() * weights[:, None]).sum()
            row = row + (out[..., 1].mean(1).square() * weights).sum()
            counts = [counts[0] + weights.sum() * inputs.shape[1], counts[1] + weights.sum()]
        return torch.as_tensor(tokens / counts[0] + row / counts[1])

    def usual(self, model: nn.Module, micro_batch: Any) -> torch.Tensor:
        return self.whole(model, [micro_batch])


class Mixup(Rows):
    """Rows with two labels and a share: mixed within the row, so nothing is coupled."""

    seed = 114

    def build(self) -> tuple[nn.Module, list[Any]]:
        first, second = torch.randint(0, 4, (7,)), torch.randint(0, 4, (7,))
        return network(3, 4), cut([torch.randn(7, 3), first, second, torch.rand(7)], [3, 3, 1])

    def rows(self, model: nn.Module, rows: Any) -> torch.Tensor:
        inputs, first, second, share = rows
        logits = model(inputs)
        one, other = (F.cross_entropy(logits, labels, reduction="none") for labels in (first, second))
        return share * one + (1 - share) * other

    def loss(self, model: nn.Module, rows: Any) -> Any:
        return self.rows(model, rows)

    def share(self, model: nn.Module, rows: Any) -> torch.Tensor:
        return self.rows(model, rows).mean()


class TwoViews(Rows):
    """Two forwards of the same rows under two noises, and the divergence of their answers (as R-Drop trains)."""

    seed = 115

    def build(self) -> tuple[nn.Module, list[Any]]:
        inputs, labels = torch.randn(7, 3), torch.randint(0, 4, (7,))
        noises = [1 + 0.5 * torch.randn(7, 3) for _ in range(2)]
        return network(3, 4), cut([inputs, labels, *noises], [2, 4, 1])

    def rows(self, model: nn.Module, rows: Any) -> torch.Tensor:
        inputs, labels, *noises = rows
        one, other = model(torch.cat([inputs * noise for noise in noises])).log_softmax(-1).chunk(2)
        wrong = F.nll_loss(one, labels, reduction="none") + F.nll_loss(other, labels, reduction="none")
        apart = (one.exp() * (one - other) + other.exp() * (other - one)).sum(-1)
        return wrong + 0.5 * apart

    def loss(self, model: nn.Module, rows: Any) -> Any:
        return self.rows(model, rows)

    def share(self, model: nn.Module, rows: Any) -> torch.Tensor:
        return self.rows(model, rows).mean()


class Distillation(Rows):
    """Cross entropy over the labels that are there, divergence from a frozen teacher over all tokens that count."""

    seed = 116
    terms = 2

    def build(self) -> tuple[nn.Module, list[Any]]:
        labels, mask = torch.randint(0, 4, (6, 5)), torch.arange(5) < torch.tensor([5, 2, 1, 4, 3, 1])[:, None]
        labels[torch.rand(6, 5) < 0.4] = -100
        labels[:, 0] = -100
        labels[0, 1] = 2
        teacher = torch.randn(6, 5, 4).log_softmax(-1)
        return network(3, 4), cut([torch.randn(6, 5, 3), labels, mask, teacher], [1, 2, 3])

    def parts(self, model: nn.Module, rows: Any) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, _, _, teacher = rows
        student = (model(inputs) / 2).log_softmax(-1)
        return student, 4 * F.kl_div(student, teacher, reduction="none", log_target=True).sum(-1)

    def loss(self, model: nn.Module, rows: Any) -> Any:
        student, apart = self.parts(model, rows)
        hard = wb.losses.cross_entropy(2 * student.movedim(-1, 1), rows[1])
        return {"hard": 0.3 * hard, "soft": 0.7 * wb.mean(apart, weights=rows[2])}

    def share(self, model: nn.Module, rows: Any) -> torch.Tensor:
        student, apart = self.parts(model, rows)
        hard = F.cross_entropy(2 * student.movedim(-1, 1), rows[1])
        return 0.3 * hard + 0.7 * (apart * rows[2]).sum() / rows[2].sum()


class AlignmentFree(Rows):
    """Connectionist temporal classification: each row over its own target length, then the mean over rows."""

    seed = 117

    def build(self) -> tuple[nn.Module, list[Any]]:
        frames, lengths = torch.tensor([9, 7, 8, 9, 6]), torch.tensor([4, 1, 2, 3, 1])
        return network(3, 6), cut([torch.randn(5, 9, 3), torch.randint(1, 6, (5, 4)), frames, lengths], [2, 2, 1])

    def rows(self, model: nn.Module, rows: Any) -> torch.Tensor:
        inputs, targets, frames, lengths = rows
        logits = model(inputs).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(logits, targets, frames, lengths, reduction="none") / lengths

    def loss(self, model: nn.Module, rows: Any) -> Any:
        return self.rows(model, rows)

    def share(self, model: nn.Module, rows: Any) -> torch.Tensor:
        return self.rows(model, rows).mean()


class TaskAbsent(Rows):
    """Two tasks, of which the second has no row in the first micro-batch, and none in the last."""

    seed = 118
    terms = 2

    def build(self) -> tuple[nn.Module, list[Any]]:
        present = torch.tensor([0, 0, 0, 1, 1, 0, 1, 0, 0]).bool()
        return network(3, 2), cut([torch.randn(9, 3), present], [3, 4, 2])

    def loss(self, model: nn.Module, rows: Any) -> Any:
        out = model(rows[0]).square()
        return {"always": wb.mean(out[:, 0]), "sometimes": wb.mean(out[:, 1], weights=rows[1])}

    def share(self, model: nn.Module, rows: Any) -> torch.Tensor:
        out = model(rows[0]).square()
        return out[:, 0].mean() + (out[:, 1] * rows[1]).sum() / rows[1].sum().clamp(min=1)

    def items(self, rows: Any) -> Any:
        return {"always": len(rows[0]), "sometimes": rows[1].sum()}

    @property
    def forms(self) -> dict[str, Loss]:
        return {"weights": self.loss, "selected": self._selected, "left out": self._left_out}

    def _left_out(self, model: nn.Module, rows: Any) -> Any:
        terms = self._selected(model, rows)
        return terms if rows[1].any() else {"always": terms["always"]}

    def _selected(self, model: nn.Module, rows: Any) -> Any:
        out = model(rows[0]).square()
        return {"always": wb.mean(out[:, 0]), "sometimes": wb.mean(out[rows[1], 1])}


class LearnedVariance(Rows):
    """A regression whose log-variance is learned: it stands in every row's loss and once in the batch's."""

    seed = 119
    terms = 2

    def build(self) -> tuple[nn.Module, list[Any]]:
        return Uncertain(network(3, 1), 1), cut([torch.randn(7, 3), torch.randn(7)], [3, 3, 1])

    def values(self, model: nn.Module, rows: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, logs = model(rows[0])
        return (out.squeeze(-1) - rows[1]).square() * torch.exp(-logs), logs.sum()

    def loss(self, model: nn.Module, rows: Any) -> Any:
        values, logs = self.values(model, rows)
        return wb.mean(values) + wb.once(logs)

    def share(self, model: nn.Module, rows: Any) -> torch.Tensor:
        values, logs = self.values(model, rows)
        return values.mean() + logs

    def usual_loop(self, model: nn.Module, window: list[Any]) -> None:
        total = sum(len(rows[0]) for rows in window)
        for rows in window:  # the rows are divided rightly, the variance's own term comes with every micro-batch
            values, logs = self.values(model, rows)
            (values.sum() / total + logs).backward()


class LearnedTaskWeights(Rows):
    """Two tasks weighed by learned uncertainties: a weight with gradient, and a term that exists once per batch."""

    seed = 120
    terms = 3

    def build(self) -> tuple[nn.Module, list[Any]]:
        lengths = torch.tensor([4, 1, 2, 1, 3])
        return Uncertain(network(3, 2), 2), cut([torch.randn(5, 4, 3), torch.arange(4) < lengths[:, None]], [1, 2, 2])

    def loss(self, model: nn.Module, rows: Any) -> Any:
        out, logs = model(rows[0])
        first = wb.mean(out[..., 0].square(), weights=rows[1])
        second = wb.mean(out[..., 1].mean(1).square())
        return torch.exp(-logs[0]) * first + torch.exp(-logs[1]) * second + wb.once(logs.sum())

    def share(self, model: nn.Module, rows: Any) -> torch.Tensor:
        out, logs = model(rows[0])
        first = (out[..., 0].square() * rows[1]).sum() / rows[1].sum()
        second = out[..., 1].mean(1).square().mean()
        return torch.exp(-logs[0]) * first + torch.exp(-logs[1]) * second + logs.sum()


class Uncertain(nn.Module):
    """A network and some learned log-variances, both given back by one forward."""

    def __init__(self, body: nn.Module, tasks: int) -> None:
        super().__init__()
        self.body, self.logs = body, nn.Parameter(torch.linspace(-0.5, 0.5, tasks + 1)[1:].clone())

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.body(inputs), self.logs


class WeightPenalty(Rows):
    """A penalty on the weights in the loss: it exists once per batch, not once a token."""

    seed = 121
    terms = 2

    def build(self) -> tuple[nn.Module, list[Any]]:
        return Penalised(network(3, 1)), cut([torch.randn(6, 3)], [1, 4, 1])

    def loss(self, model: nn.Module, rows: Any) -> Any:
        out, size = model(rows[0])
        return {"fit": out.squeeze(-1).square(), "size": 0.1 * wb.once(size)}

    def share(self, model: nn.Module, rows: Any) -> torch.Tensor:
        out, size = model(rows[0])
        return out.square().mean() + 0.1 * size

    def usual_loop(self, model: nn.Module, window: list[Any]) -> None:
        for rows in window:
            out, size = model(rows[0])
            (out.square().sum() / 6 + 0.1 * size).backward()


class Penalised(nn.Module):
    """A network that gives back its weights' squared norm too."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.body(inputs), torch.stack([weight.square().sum() for weight in self.body.parameters()]).sum()


class SkippedMicroBatch(Rows):
    """A micro-batch is thrown away by the user's rule: the divisor is the rows of the others."""

    same_shapes = False
    seed = 122

    def build(self) -> tuple[nn.Module, list[Any]]:
        inputs = torch.randn(8, 3)
        inputs[3] = 50  # an outlier in the second micro-batch
        return network(3, 1), cut([inputs], [2, 2, 2, 2])

    def loss(self, model: nn.Module, rows: Any) -> Any:
        return None if self.bad(rows) else model(rows[0]).square()

    def bad(self, rows: Any) -> bool:
        return bool(rows[0].abs().max() > 10)

    def whole(self, model: nn.Module, window: list[Any]) -> torch.Tensor:
        mean: torch.Tensor = model(torch.cat([rows[0] for rows in window if not self.bad(rows)])).square().mean()
        return mean

    def usual_loop(self, model: nn.Module, window: list[Any]) -> None:
        for rows in window:
            if not self.bad(rows):
                (model(rows[0]).square().mean() / len(window)).backward()


class SkippedFirst(SkippedMicroBatch):
    """The micro-batch that is thrown away is the first one, which a first guess of the denominator would rest on."""

    seed = 123

    def build(self) -> tuple[nn.Module, list[Any]]:
        model, window = super().build()
        return model, [window[1], window[0], *window[2:]]


class SkippedLast(SkippedMicroBatch):
    """The micro-batch that is thrown away is the last one, where ranks would synchronise."""

    seed = 124

    def build(self) -> tuple[nn.Module, list[Any]]:
        model, window = super().build()
        return model, [window[0], *window[2:], window[1]]


class ComplexParameters(Rows):
    """Complex weights, a real loss."""

    seed = 125

    def build(self) -> tuple[nn.Module, list[Any]]:
        return ComplexModel(), cut([torch.randn(6, 3, dtype=torch.complex64), torch.randn(6)], [2, 3, 1])

    def rows(self, model: nn.Module, rows: Any) -> torch.Tensor:
        return (model(rows[0]) - rows[1]).square()

    def loss(self, model: nn.Module, rows: Any) -> Any:
        return self.rows(model, rows)

    def share(self, model: nn.Module, rows: Any) -> torch.Tensor:
        return self.rows(model, rows).mean()


class ComplexModel(nn.Module):
    """The modulus of a complex linear form."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, dtype=torch.complex64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (inputs @ self.weight).abs()


class SparseEmbedding(Rows):
    """An embedding with sparse gradients; rows of the table occur in several micro-batches and twice in one."""

    seed = 126

    def build(self) -> tuple[nn.Module, list[Any]]:
        ids = torch.tensor([[1, 1, 2], [2, 5, 5], [5, 5, 0], [1, 2, 7], [7, 7, 7]])
        model = nn.Sequential(nn.EmbeddingBag(9, 4, mode="sum", sparse=True), nn.Linear(4, 1))
        return model, cut([ids, torch.randn(5)], [2, 2, 1])

    def rows(self, model: nn.Module, rows: Any) -> torch.Tensor:
        return (model(rows[0]).squeeze(-1) - rows[1]).square()

    def loss(self, model: nn.Module, rows: Any) -> Any:
        return self.rows(model, rows)

    def share(self, model: nn.Module, rows: Any) -> torch.Tensor:
        return self.rows(model, rows).mean()


class FrozenAndUnused(Rows):
    """A frozen layer and a layer that is never called: neither has a gradient afterwards, not even zeros."""

    seed = 127

    def build(self) -> tuple[nn.Module, list[Any]]:
        body = nn.Sequential(nn.Linear(3, 4).requires_grad_(False), nn.Tanh(), nn.Linear(4, 1))
        return PartlyUsed(body), cut([torch.randn(5, 3)], [2, 2, 1])

    def loss(self, model: nn.Module, rows: Any) -> Any:
        return model(rows[0]).squeeze(-1).square()

    def share(self, model: nn.Module, rows: Any) -> torch.Tensor:
        mean: torch.Tensor = model(rows[0]).square().mean()
        return mean


class PartlyUsed(nn.Module):
    """A body, and a spare layer that no forward reaches."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.spare = body, nn.Linear(2, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(inputs)
        return out


class UsedInOneMicroBatch(Rows):
    """A branch that only one micro-batch goes through: its gradient is that micro-batch's share of the whole."""

    same_shapes = False
    seed = 128

    def build(self) -> tuple[nn.Module, list[Any]]:
        return Branches(), [
            (rows[0], which) for rows, which in zip(cut([torch.randn(7, 3)], [2, 4, 1]), "aba", strict=True)
        ]

    def loss(self, model: nn.Module, rows: Any) -> Any:
        return model(*rows).squeeze(-1).square()

    def whole(self, model: nn.Module, window: list[Any]) -> torch.Tensor:
        return torch.cat([model(*rows).square() for rows in window]).mean()

    def usual(self, model: nn.Module, rows: Any) -> torch.Tensor:
        mean: torch.Tensor = model(*rows).square().mean()
        return mean


class Branches(nn.Module):
    """Two layers, of which a call uses the named one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, inputs: torch.Tensor, which: str) -> torch.Tensor:
        out: torch.Tensor = getattr(self, which)(inputs)
        return out


class WideSpread(Rows):
    """One micro-batch with one item and one with four hundred: a first guess of the denominator is far off."""

    same_shapes = False
    seed = 129

    def build(self) -> tuple[nn.Module, list[Any]]:
        inputs = [torch.randn(2, 1, 3), torch.randn(1, 400, 3), torch.randn(2, 3, 3)]
        masks = [torch.tensor([[True], [False]]), torch.ones(1, 400).bool(), torch.tensor([[True, True, False]] * 2)]
        return network(3, 1), list(zip(inputs, masks, strict=True))

    def loss(self, model: nn.Module, rows: Any) -> Any:
        return wb.mean(model(rows[0]).squeeze(-1).square(), weights=rows[1])

    def whole(self, model: nn.Module, window: list[Any]) -> torch.Tensor:
        return torch.cat([model(inputs).squeeze(-1).square()[mask] for inputs, mask in window]).mean()

    def usual(self, model: nn.Module, rows: Any) -> torch.Tensor:
        return self.whole(model, [rows])

    def items(self, rows: Any) -> Any:
        return rows[1].sum()


class EmptyMicroBatch(Rows):
    """A micro-batch of no rows at all, as a filter inside a loader leaves behind."""

    seed = 130

    def build(self) -> tuple[nn.Module, list[Any]]:
        return network(3, 1), cut([torch.randn(7, 3)], [3, 0, 4])

    def ran(self, window: list[Any]) -> int:
        return 2

    def loss(self, model: nn.Module, rows: Any) -> Any:
        return wb.mean(model(rows[0]).squeeze(-1).square())

    def share(self, model: nn.Module, rows: Any) -> torch.Tensor:
        mean: torch.Tensor = model(rows[0]).square().mean()
        return mean

    def items(self, rows: Any) -> Any:
        return len(rows[0])


class OnceAfterNone(LearnedVariance):
    """A term that exists once per batch, and a first micro-batch that is thrown away."""

    same_shapes = False
    seed = 131

    def bad(self, rows: Any) -> bool:
        return bool(rows[1].abs().max() > 10)

    def build(self) -> tuple[nn.Module, list[Any]]:
        model, window = super().build()
        return model, [(window[0][0], window[0][1] + 50), *window[1:]]

    def loss(self, model: nn.Module, rows: Any) -> Any:
        return None if self.bad(rows) else super().loss(model, rows)

    def whole(self, model: nn.Module, window: list[Any]) -> torch.Tensor:
        return self.share(model, columns([rows for rows in window if not self.bad(rows)]))


class MetaLearning(Situation):
    """Each row is a task: a step on its support set, differentiated through, then the loss on its query set."""

    seed = 132
    wrapped = False

    def build(self) -> tuple[nn.Module, list[Any]]:
        window = [[(torch.randn(4, 3), torch.randn(2, 3)) for _ in range(tasks)] for tasks in (2, 3, 1)]
        return network(3, 1), window

    def task(self, model: nn.Module, support: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        inner = model(support).square().mean()
        weights = dict(model.named_parameters())
        slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        moved = {name: w - 0.1 * slope for (name, w), slope in zip(weights.items(), slopes, strict=True)}
        loss: torch.Tensor = torch.func.functional_call(model, moved, (query,)).square().mean()
        return loss

    def loss(self, model: nn.Module, tasks: Any) -> Any:
        return wb.mean(torch.stack([self.task(model, *task) for task in tasks]))

    def whole(self, model: nn.Module, window: list[Any]) -> torch.Tensor:
        return torch.stack([self.task(model, *task) for tasks in window for task in tasks]).mean()

    def usual(self, model: nn.Module, tasks: Any) -> torch.Tensor:
        return self.whole(model, [tasks])


class CriticWithPenalty(Situation):
    """A critic's mean over the real rows, over the made rows, and a penalty on slopes: three denominators, and a
    counting pass through a loss that differentiates inside.
    """

    seed = 133
    terms = 3

    def build(self) -> tuple[nn.Module, list[Any]]:
        return network(3, 1), [(torch.randn(made, 3), torch.randn(real, 3)) for made, real in ((3, 1), (1, 4), (2, 2))]

    def parts(self, model: nn.Module, rows: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        made, real = rows
        between = (made[:1] + real[:1]).detach().requires_grad_()
        scores = model(torch.cat([made, real, between])).squeeze(-1)
        (slope,) = torch.autograd.grad(scores[-1].sum(), between, create_graph=True)
        return scores[: len(made)], scores[len(made) : -1], (slope.norm(dim=1) - 1).square()

    def loss(self, model: nn.Module, rows: Any) -> Any:
        made, real, slope = self.parts(model, rows)
        return {"made": wb.mean(made), "real": -1.0 * wb.mean(real), "slope": 10 * wb.mean(slope)}

    def whole(self, model: nn.Module, window: list[Any]) -> torch.Tensor:
        made, real, slope = (
            torch.cat(part) for part in zip(*(self.parts(model, rows) for rows in window), strict=True)
        )
        return made.mean() - real.mean() + 10 * slope.mean()

    def usual(self, model: nn.Module, rows: Any) -> torch.Tensor:
        return self.whole(model, [rows])

    def items(self, rows: Any) -> Any:
        return {"made": len(rows[0]), "real": len(rows[1]), "slope": 1}


KINDS: list[Situation] = [
    SmoothedClassWeights(),
    RowWeights(),
    FractionalWeights(),
    TokenMeansPerRow(),
    Segmentation(),
    SequenceSums(),
    SumAndMean(),
    MaskedRegression(),
    DicePerRow(),
    Detection(),
    FocalByPositives(),
    PolicyValueEntropy(),
    EqualByChance(),
    SharedWeightsOtherShapes(),
    Mixup(),
    TwoViews(),
    Distillation(),
    AlignmentFree(),
    TaskAbsent(),
    LearnedVariance(),
    LearnedTaskWeights(),
    WeightPenalty(),
    SkippedMicroBatch(),
    SkippedFirst(),
    SkippedLast(),
    ComplexParameters(),
    SparseEmbedding(),
    FrozenAndUnused(),
    UsedInOneMicroBatch(),
    WideSpread(),
    EmptyMicroBatch(),
    OnceAfterNone(),
    MetaLearning(),
    CriticWithPenalty(),
]
