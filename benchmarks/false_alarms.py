"""Shout at false alarms: is anything right called wrong, and anything wrong called exact?

Right set-ups, in training mode with their own dropout, go through `wb.check`, `wb.find_coupling` and the proof of the
first window; faulty ones go the other way. Takes at most a quarter of an hour on one core; `--only` and `--limit` make
it shorter. What is kept says which were false alarms, which faults were missed, and what was not shown and why.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import random
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from record import RESULTS, save
from torch import Tensor, nn

import wholebatch as wb

ROWS, WIDTH, CLASSES, WORDS = 11, 8, 3, 20
SECONDS = 40
"""What one set-up may take of the processor: others on the machine are no fault of its own."""


class SetUp(NamedTuple):
    """What `wb.backward` is given; ``loss_fn`` may be one that is wrong."""

    name: str
    model: Callable[[], nn.Module]
    loss_fn: Callable[[Any, Any], Any]
    batch: Callable[[], Any]
    size: Any = 4
    options: dict[str, Any] | None = None


class Reads(nn.Module):
    """A body between words and classes; what it makes of a sequence is averaged over its length, masked."""

    def __init__(self, body: nn.Module, width: int = WIDTH, per_token: bool = False) -> None:
        super().__init__()
        self.table, self.body, self.out = nn.Embedding(WORDS, WIDTH), body, nn.Linear(width, CLASSES)
        self.per_token = per_token

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        hidden = self.table(ids)
        hidden = self.body(hidden, src_key_padding_mask=~mask) if hasattr(self.body, "norm1") else self.body(hidden)
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        if not self.per_token:
            hidden = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        out: Tensor = self.out(hidden)
        return out


class Attends(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return out


class LowRank(nn.Module):
    """A frozen layer and an adapter beside it, at its start: the second factor is zero."""

    def __init__(self, dropout: float, alone: bool) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.dropout = nn.Dropout(dropout)
        if alone:
            nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.b(self.a(self.dropout(x)))
        return out


class Decodes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(WIDTH, 2, 16, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x, x)
        return out


def bodies() -> dict[str, Callable[[], tuple[nn.Module, int]]]:
    """Bodies by name; those that look along the rows of a text come with other widths."""

    def encoder(**options: Any) -> Callable[[], tuple[nn.Module, int]]:
        return lambda: (nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True, **options), WIDTH)

    def cells(kind: type[nn.Module], **options: Any) -> Callable[[], tuple[nn.Module, int]]:
        wide = 5 * (2 if options.get("bidirectional") else 1)
        return lambda: (kind(WIDTH, 5, batch_first=True, **options), wide)

    def plain(*make: Callable[[], nn.Module]) -> Callable[[], tuple[nn.Module, int]]:
        return lambda: (nn.Sequential(*(each() for each in make)), WIDTH)

    def linear() -> nn.Module:
        return nn.Linear(WIDTH, WIDTH)

    return {
        "encoder": encoder(dropout=0.3),
        "encoder, norm first": encoder(dropout=0.1, norm_first=True),
        "encoder, gelu": encoder(dropout=0.5, activation="gelu"),
        "encoder without dropout": encoder(dropout=0.0),
        "attention": lambda: (Attends(0.2), WIDTH),
        "attention without dropout": lambda: (Attends(0.0), WIDTH),
        "decoder": lambda: (Decodes(), WIDTH),
        "LSTM": cells(nn.LSTM, num_layers=2, dropout=0.4),
        "LSTM, both ways": cells(nn.LSTM, bidirectional=True),
        "GRU": cells(nn.GRU, num_layers=2, dropout=0.3),
        "RNN": cells(nn.RNN, num_layers=2, dropout=0.3),
        "adapter at its start": lambda: (LowRank(0.2, True), WIDTH),
        "adapter": lambda: (LowRank(0.5, False), WIDTH),
        "dropout": plain(linear, nn.ReLU, nn.Dropout, linear),
        "alpha dropout": plain(linear, nn.SELU, nn.AlphaDropout, linear),
        "feature dropout": plain(linear, nn.Dropout1d, linear),
        "random ReLU": plain(linear, nn.RReLU, linear),
        "learned ReLU": plain(linear, nn.PReLU, linear),
        "layer norm": plain(linear, lambda: nn.LayerNorm(WIDTH), nn.Dropout, linear),
        "RMS norm": plain(linear, lambda: nn.RMSNorm(WIDTH), nn.Dropout, linear),
        "GLU": plain(lambda: nn.Linear(WIDTH, 2 * WIDTH), nn.GLU, nn.Dropout, linear),
        "weight norm": plain(lambda: nn.utils.parametrizations.weight_norm(linear()), nn.Tanh, nn.Dropout),
        "batch norm in eval": plain(linear, lambda: _Transposed(nn.BatchNorm1d(WIDTH).eval()), nn.Dropout, linear),
    }


class _Transposed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x.transpose(1, 2)).transpose(1, 2)
        return out


def texts() -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(1)
    lengths = torch.randint(2, 9, (ROWS,), generator=draws)
    lengths[0] = 8
    mask = torch.arange(8) < lengths[:, None]
    ids = torch.randint(1, WORDS, (ROWS, 8), generator=draws) * mask
    return {"ids": ids, "mask": mask, "y": torch.randint(0, CLASSES, (ROWS,), generator=draws)}


def values(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["ids"], batch["mask"]), batch["y"], reduction="none")


RIGHT = {
    "values": values,
    "mean": lambda model, batch: wb.mean(values(model, batch), weights=1.0 + (batch["y"] > 0)),
    "stated": lambda model, batch: wb.from_mean(values(model, batch).mean(), items=len(batch["y"])),
    "total": lambda model, batch: wb.total(values(model, batch) / 4),
    "two terms": lambda model, batch: {"ce": wb.mean(values(model, batch)), "w": wb.once(model.out.weight.norm())},
}


def of_torch() -> Iterator[SetUp]:
    """Torch's own modules, under each right loss, cut by rows and by tokens."""
    sizes = {"rows": 4, "tokens": wb.Tokens(40, mask="mask")}
    for (body, make), (loss, loss_fn), (size, cut) in itertools.product(bodies().items(), RIGHT.items(), sizes.items()):
        if size == "tokens" and ("LSTM" in body or body in ("decoder", "GRU", "RNN") or body.startswith("attention")):
            continue  # these read padding, which is another fault

        def model(make: Callable[[], tuple[nn.Module, int]] = make) -> nn.Module:
            inner, width = make()
            return Reads(inner, width)

        yield SetUp(f"{body}; {loss}; {size}", model, loss_fn, texts, cut)


def images() -> Iterator[SetUp]:
    """BatchNorm over the whole batch beside dropout in every place."""
    for before, between, behind in itertools.product((0.0, 0.3), (0.0, 0.5), (0.0, 0.4)):

        def model(before: float = before, between: float = between, behind: float = behind) -> nn.Module:
            head = (nn.Flatten(), nn.Dropout(behind), nn.Linear(4 * 16, CLASSES))
            second = (nn.Dropout2d(between), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
            first = (nn.Dropout(before), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
            return nn.Sequential(*first, *second, *head)

        def batch() -> Any:
            draws = torch.Generator().manual_seed(1)
            return torch.randn(ROWS, 3, 8, 8, generator=draws), torch.arange(ROWS) % CLASSES

        def loss_fn(model: nn.Module, batch: Any) -> Tensor:
            return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

        name = f"images, dropout {before}, {between}, {behind}; exact BatchNorm"
        yield SetUp(name, model, loss_fn, batch, 4, {"batch_norm": "exact"})


CLASSES_OF_TRANSFORMERS = {
    "sequence": ("Bert", "Roberta", "DistilBert", "Electra", "Albert", "GPT2", "XLNet"),
    "token": ("Bert", "MPNet", "Funnel"),
    "masked": ("Bert", "Electra", "DistilBert", "ConvBert"),
    "causal": ("GPT2", "Llama", "OPT", "GPTNeoX", "Mistral", "Qwen2", "Gemma", "Bloom", "Falcon", "Phi", "CodeGen"),
    "seq2seq": ("T5", "Bart", "Pegasus"),
}
HEADS = {
    "sequence": ("ForSequenceClassification",),
    "token": ("ForTokenClassification",),
    "masked": ("ForMaskedLM",),
    "causal": ("ForCausalLM", "LMHeadModel"),
    "seq2seq": ("ForConditionalGeneration",),
}


def of_transformers() -> Iterator[SetUp]:
    """A sample of each kind of text model, small, with the dropout that its configuration brings."""
    import transformers
    from transformers_sweep import EXACTLY, TRIES, small

    for kind, families in CLASSES_OF_TRANSFORMERS.items():
        for family in families:
            found = [name for head in HEADS[kind] if hasattr(transformers, name := family + head)]
            if not found:
                continue

            def model(class_name: str = found[0], kind: str = kind) -> nn.Module:
                made = getattr(transformers, class_name)
                layers, widths = TRIES[0]
                chosen = small(made.config_class().to_dict(), layers, EXACTLY | widths)
                chosen = {name: value for name, value in chosen.items() if "drop" not in name}
                special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
                labels = {"num_labels": CLASSES} if kind in ("sequence", "token") else {}
                built: nn.Module = made(made.config_class(**chosen | special | labels)).train()
                return built

            def loss_fn(model: nn.Module, batch: Any, kind: str = kind) -> Any:
                labels = batch["labels"]
                counted = labels[:, 1:] if kind == "causal" else labels
                return wb.from_mean(model(**batch).loss, items=(counted != -100).sum())

            def batch(kind: str = kind) -> Any:
                from transformers_sweep import collate, rows_for

                return collate(rows_for(kind))

            yield SetUp(f"transformers {found[0]}", model, loss_fn, batch)


def tokens(model: Any, batch: Any) -> Tensor:
    """One loss for each word; what is added to the table's words is drawn in the loss functions below."""
    said = model(batch["ids"], batch["mask"])
    return F.cross_entropy(said.transpose(1, 2), batch["ids"] % CLASSES, reduction="none")


def drawing() -> Iterator[SetUp]:
    """Loss functions that draw for each row, beside dropout in the model."""

    def counted(model: Any, batch: Any) -> Any:
        return wb.mean(tokens(model, batch), (torch.rand(batch["ids"].shape) < 0.5) & batch["mask"])

    def stated(model: Any, batch: Any) -> Any:
        chosen = batch["mask"] & (torch.rand(batch["ids"].shape) < 0.7)
        return wb.from_mean(tokens(model, batch)[chosen].mean(), items=chosen.sum())

    def replaced(model: Any, batch: Any) -> Tensor:
        hidden = torch.bernoulli(torch.full(batch["ids"].shape, 0.2)).bool()
        return tokens(model, {**batch, "ids": batch["ids"].masked_fill(hidden, 1)}).mean(1)

    def rows_kept(model: Any, batch: Any) -> Any:
        return wb.mean(tokens(model, batch).mean(1), torch.rand(len(batch["ids"])) < 0.6)

    def ordered(model: Any, batch: Any) -> Tensor:
        places = torch.rand(batch["ids"].shape).argsort(1)[:, :4]
        return tokens(model, batch).gather(1, places).mean(1)

    def weighted(model: Any, batch: Any) -> Tensor:
        return tokens(model, batch).mean(1) * torch.distributions.Exponential(1.0).sample((len(batch["ids"]), 1))[:, 0]

    def sampled(model: Any, batch: Any) -> Tensor:
        likely = torch.distributions.Categorical(logits=model(batch["ids"], batch["mask"]).mean(1))
        return -likely.log_prob(likely.sample())

    def softened(model: Any, batch: Any) -> Tensor:
        return F.gumbel_softmax(model(batch["ids"], batch["mask"]).mean(1), dim=-1).square().sum(1)

    def twice(model: Any, batch: Any) -> Tensor:
        views = {name: torch.cat([value, value]) for name, value in batch.items()}
        one, two = model(views["ids"], views["mask"]).mean(1).chunk(2)
        return (one - two).square().sum(1) + one.square().sum(1)

    each = (counted, stated, replaced, rows_kept, ordered, weighted, sampled, softened, twice)
    inner = [(body, bodies()[body]) for body in ("encoder", "dropout", "LSTM", "attention")]
    for loss_fn, (body, make), size in itertools.product(each, inner, (4, 2)):

        def model(make: Callable[[], tuple[nn.Module, int]] = make) -> nn.Module:
            made, width = make()
            return Reads(made, width, per_token=True)

        yield SetUp(f"{loss_fn.__name__}, {body}, by {size}", model, loss_fn, texts, size)


class Reversed(torch.autograd.Function):
    """Turns a gradient round, as training against a domain does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -0.3 * gradient


class Hooked(nn.Module):
    """A layer with something at its gradient that acts on a sum as on its parts, or only looks."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind, self.seen = nn.Linear(WIDTH, WIDTH), kind, 0.0
        if kind == "scales":
            self.layer.weight.register_hook(lambda gradient: 0.5 * gradient)
        elif kind == "freezes rows":
            self.layer.weight.register_hook(lambda gradient: gradient * (torch.arange(WIDTH) > 2)[:, None])
        elif kind == "looks":
            self.layer.weight.register_hook(self.look)
        elif kind == "looks at the module":
            self.layer.register_full_backward_hook(lambda module, given, out: None)

    def look(self, gradient: Tensor) -> None:
        self.seen = max(self.seen, float(gradient.norm()))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = F.dropout(self.layer(x), 0.2, self.training)
        if self.kind == "reverses":
            out = Reversed.apply(out)
        if self.kind == "rounds straight through":
            out = out + (out.round() - out).detach()
        if self.kind == "clamps each row":
            out = out.clamp(-0.5, 0.5)
        if self.kind == "scales on the graph" and out.requires_grad:
            out.register_hook(lambda gradient: 2.0 * gradient)
        if self.kind == "logs the mean":
            self.seen = max(self.seen, float(out.detach().mean()))
        return out


KINDS = ("scales", "freezes rows", "looks", "looks at the module", "reverses", "rounds straight through")


def hooked() -> Iterator[SetUp]:
    """Hooks and backwards of one's own that are no fault."""
    more = ("clamps each row", "scales on the graph", "logs the mean")
    for kind, (loss, loss_fn) in itertools.product((*KINDS, *more), RIGHT.items()):
        yield SetUp(f"hooked, {kind}; {loss}", lambda kind=kind: Reads(Hooked(kind)), loss_fn, texts)


def of_images() -> Iterator[SetUp]:
    """Image models of transformers, small, with dropout and layers that are left out by chance."""
    import transformers

    small = {"image_size": 16, "num_labels": CLASSES}
    wide = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    sizes = {"hidden_sizes": [8, 12], "depths": [1, 1], "num_labels": CLASSES}
    models: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "ViT": ({**small, **wide, "patch_size": 4, "hidden_dropout_prob": 0.1}, {}),
        "DeiT": ({**small, **wide, "patch_size": 4, "hidden_dropout_prob": 0.1}, {}),
        "ConvNext": ({**sizes, "num_stages": 2, "drop_path_rate": 0.2}, {}),
        "Swin": (
            {**small, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2},
            {},
        ),
        "ResNet": ({**sizes, "embedding_size": 8, "layer_type": "basic"}, {"batch_norm": "exact"}),
    }
    for family, (shape, options) in models.items():

        def model(family: str = family, shape: dict[str, Any] = shape) -> nn.Module:
            made = getattr(transformers, f"{family}ForImageClassification")
            built: nn.Module = made(made.config_class(**shape)).train()
            return built

        def batch() -> Any:
            draws = torch.Generator().manual_seed(1)
            return torch.randn(ROWS, 3, 16, 16, generator=draws), torch.arange(ROWS) % CLASSES

        def loss_fn(model: nn.Module, batch: Any) -> Tensor:
            return F.cross_entropy(model(batch[0]).logits, batch[1], reduction="none")

        yield SetUp(f"transformers {family}ForImageClassification", model, loss_fn, batch, 4, options)


def faulty() -> Iterator[SetUp]:
    """Faults of loops and losses, each beside dropout and without."""

    def in_batch(model: Any, batch: Any) -> Tensor:
        rows = F.normalize(model(batch["ids"], batch["mask"]), dim=-1)
        return F.cross_entropy(rows @ rows.T / 0.1, torch.arange(len(rows)), reduction="none")

    def normalised(model: Any, batch: Any) -> Tensor:
        losses = values(model, batch)
        return losses * ((losses - losses.mean()) / losses.std()).detach()

    def per_class(model: Any, batch: Any) -> Tensor:
        said, hot = model(batch["ids"], batch["mask"]).softmax(1), F.one_hot(batch["y"], CLASSES)
        return 1 - 2 * (said * hot).sum(0) / (said.sum(0) + hot.sum(0))

    def clears(model: Any, batch: Any) -> Tensor:
        model.zero_grad()
        return values(model, batch)

    def goes_backward(model: Any, batch: Any) -> Tensor:
        losses = values(model, batch)
        losses.mean().backward(retain_graph=True)
        return losses

    def forgets_the_mask(model: Any, batch: Any) -> Any:
        return model(batch["ids"], torch.ones_like(batch["mask"])).square()

    moving = {"mean": 1.0}

    def moves(model: Any, batch: Any) -> Any:
        losses = values(model, batch)
        moving["mean"] = 0.9 * moving["mean"] + 0.1 * float(losses.detach().mean())
        return wb.total(losses / moving["mean"])

    def means(model: Any, batch: Any) -> Any:
        return wb.from_mean(values(model, batch).mean(), items=1)

    def one_too_many(model: Any, batch: Any) -> Any:
        return wb.from_mean(values(model, batch).mean(), items=len(batch["y"]) + 1)

    def once(model: Any, batch: Any) -> Any:
        return wb.once(values(model, batch).mean())

    def rooted(model: Any, batch: Any) -> Any:
        return wb.from_mean(values(model, batch).mean().sqrt(), items=len(batch["y"]))

    def hardest(model: Any, batch: Any) -> Tensor:
        losses = values(model, batch)
        return losses.topk(max(1, len(losses) // 2)).values

    def by_number(model: Any, batch: Any) -> Any:
        return wb.total(values(model, batch).mean())

    def over_drawn_rows(model: Any, batch: Any) -> Any:
        losses, kept = values(model, batch), torch.rand(len(batch["y"])) < 0.6
        return wb.from_mean((losses * kept).sum() / kept.sum().clamp(min=1), items=len(losses))

    def over_drawn_places(model: Any, batch: Any) -> Any:
        hidden = (torch.rand(batch["ids"].shape) < 0.4) & batch["mask"]
        losses = values(model, {**batch, "ids": batch["ids"].masked_fill(hidden, 1)})
        return wb.from_mean((losses * hidden.sum(1)).sum() / hidden.sum().clamp(min=1), items=len(losses))

    def shuffled(model: Any, batch: Any) -> Tensor:
        other = torch.rand(len(batch["y"])).argsort()
        said = model(batch["ids"], batch["mask"])
        return F.cross_entropy(0.7 * said + 0.3 * said[other], batch["y"], reduction="none")

    wrong = (in_batch, normalised, per_class, clears, goes_backward, moves, means, one_too_many, once, rooted, hardest)
    by_chance = (over_drawn_rows, over_drawn_places, shuffled)
    for loss_fn, drop in itertools.product((*wrong, by_number, *by_chance), (0.0, 0.3)):

        def model(drop: float = drop) -> nn.Module:
            return Reads(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(drop), nn.Tanh()))

        yield SetUp(f"{loss_fn.__name__}, dropout {drop}", model, loss_fn, texts)
        yield SetUp(f"{loss_fn.__name__}, encoder, dropout {drop}", lambda d=drop: _encoder(d), loss_fn, texts)
    tokens = wb.Tokens(40, mask="mask")
    for drop in (0.0, 0.3):
        yield SetUp(f"padding, dropout {drop}", lambda d=drop: _encoder(d), forgets_the_mask, texts, tokens)
    for each in images():
        yield each._replace(name=each.name.replace("exact", "micro"), options={"batch_norm": "micro"})


def _encoder(drop: float) -> nn.Module:
    return Reads(nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=drop, batch_first=True))


def tried(call: Callable[[], str]) -> str:
    """Say in words what became of it; what raises says so."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"takes more than {SECONDS} seconds of the processor")

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        return call()
    except wb.WholeBatchError as error:
        return f"refused: {type(error).__name__}: {' '.join(str(error).split()):.200}"
    except Exception as error:  # any model may fail in any way: what it said is the result
        return f"failed: {type(error).__name__}: {' '.join(str(error).split()):.160}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def ask(each: SetUp, right: bool) -> dict[str, Any]:
    """Put one set-up to `check`, the detector and the proof of the first window."""

    def fresh() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        random.seed(0)
        return each.model(), each.batch()

    def check() -> str:
        model, batch = fresh()
        report = wb.check(model, each.loss_fn, batch, each.size, **(each.options or {}))
        said = "; ".join([*(finding.line() for finding in report.findings), *report.not_shown])
        return f"{report.verdict}{': ' * bool(said)}{said:.300}"

    def detector() -> str:
        model, batch = fresh()
        found = wb.find_coupling(model, each.loss_fn, batch)
        return str(found) if found else "apart"

    def proof() -> str:
        model, batch = fresh()
        result = wb.backward(model, each.loss_fn, batch, each.size, **{**(each.options or {}), "verify": "always"})
        return f"passed: {getattr(result, 'verified', ''):.200}"

    row = {"set-up": each.name, "check": tried(check), "proof": tried(proof)}
    if right and not each.options:  # BatchNorm is found to couple rows, as it should be
        row["find_coupling"] = tried(detector)
    return row


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Count what matters: alarms at what is right, faults that nobody saw, what was not shown."""
    right, wrong = ([row for row in rows if row["right"] is each] for each in (True, False))
    alarms = [
        f"{row['set-up']}: {tool}: {row[tool]}"
        for row in right
        for tool, good in (("check", ("exact", "not shown")), ("proof", ("passed",)), ("find_coupling", ("apart",)))
        if tool in row and not row[tool].startswith(good)
    ]
    return {
        "right": len(right),
        "false_alarms": alarms,
        "faulty": len(wrong),
        "missed_by_check": [row["set-up"] for row in wrong if row["check"].startswith("exact")],
        "missed_by_the_proof": [row["set-up"] for row in wrong if row["proof"].startswith("passed")],
        "not_shown": [f"{row['set-up']}: {row['check']}" for row in right if row["check"].startswith("not shown")],
    }


def runs_plainly(each: SetUp) -> str:
    """Say why a set-up can't be tried at all; nothing if it can."""
    said = tried(lambda: str(each.loss_fn(each.model(), each.batch()) is None))
    return said if said.startswith("failed") else ""


GROUPS = {
    "torch": of_torch,
    "images": images,
    "draws": drawing,
    "hooks": hooked,
    "transformers": of_transformers,
    "transformers' images": of_images,
    "faulty": faulty,
}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--out", type=Path, default=RESULTS)
    options.add_argument("--only", default="", help="set-ups whose name holds this")
    options.add_argument("--groups", nargs="*", default=list(GROUPS), choices=list(GROUPS))
    options.add_argument("--limit", type=int, default=None, help="at most so many of each group")
    options.add_argument("--minutes", type=float, default=15.0, help="stop after so long, and say what was left out")
    chosen = options.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows, skipped, start = [], [], time.monotonic()
    for group in chosen.groups:
        try:
            wanted = [each for each in GROUPS[group]() if chosen.only in each.name][: chosen.limit]
        except ImportError as error:
            skipped.append(f"{group}: {error}")
            continue
        for each in wanted:
            if time.monotonic() - start > 60 * chosen.minutes:
                skipped.append(each.name)
                continue
            if group != "faulty" and (why := runs_plainly(each)):
                skipped.append(f"{each.name}: {why}")
                continue
            rows.append({"group": group, "right": group != "faulty", **ask(each, group != "faulty")})
    found = summary(rows)
    for name, value in found.items():
        print(f"{name}: {value if isinstance(value, int) else len(value)}")
        for line in value if isinstance(value, list) else ():
            print(f"  {line}")
    save("false_alarms", {"torch": torch.__version__, "skipped": skipped, "summary": found}, rows, chosen.out)


if __name__ == "__main__":
    main()
