"""The loss of a Hugging Face Trainer over all rows of a window at once, whatever its `compute_loss` does with them.

`compute_loss` stays as it is. While micro-batches are encoded, the answers of some modules are kept, row by row; then
it runs once more, over the inputs of all rows, and those modules answer from what was kept. Which modules is measured:
the model, or the parts that its own forward puts together (a loss within the forward), or the parts of these. They are
believed only if the loss of some rows, in value and in gradient, is the one that two uneven parts of them give so.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

import wholebatch as wb
from wholebatch.batch.tree import move
from wholebatch.batch.window import Window
from wholebatch.errors import LossError, SplitError
from wholebatch.integrations import probing
from wholebatch.integrations.foreign_loop import everywhere, world
from wholebatch.integrations.infer_denominator import Inputs, Said, apart, has_rows, targets_of
from wholebatch.integrations.module_calls import Answers, Layout, may_have_rows, parts
from wholebatch.integrations.recognition import UNFIT, few, said_by, tolerances
from wholebatch.integrations.side_effects import Kept
from wholebatch.integrations.trainer_loss import Meaning, is_number, value_of
from wholebatch.options import Options

DEEPEST = 3
"""How far below the model the modules are looked for whose answers are kept."""


class Held:
    """The inputs of a micro-batch, to be handed on as they are."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs


class Coupling:
    """What of a Trainer's loss is made row by row, and what of all rows.

    Args:
        trainer: whose `compute_loss` is asked.
        meaning: asks it.
    """

    def __init__(self, trainer: Any, meaning: Meaning) -> None:
        self._trainer, self._meaning = trainer, meaning
        self._modules: list[nn.Module] = []
        self._answers = Answers(Layout())
        self._ignored: list[int] = []
        self._dimensions: dict[str, int] = {}

    def run(self, model: nn.Module, alone: nn.Module, batches: Sequence[Any], options: Options) -> wb.Result:
        """Leave the gradient of a window's loss over all its rows, those of all ranks.

        Args:
            model: as the engine wraps it.
            alone: the same without its wrapper.
            batches: this rank's micro-batches.
            options: as of `wb.coupled_backward`.

        Raises:
            LossError: if the loss cannot be made of what modules say row by row, or the inputs have no rows.
        """
        self._refuse(batches)
        with self._one_batch():
            return self._run(model, alone, batches, options)

    def _run(self, model: nn.Module, alone: nn.Module, batches: Sequence[Any], options: Options) -> wb.Result:
        prepared: Sequence[Inputs] = [dict(self._trainer._prepare_inputs(each)) for each in batches]
        if not self._modules:
            with self._meaning.without_trace(alone), torch.no_grad(), probing.Targets() as seen:
                self._ask(alone, prepared[0])
            self._ignored = seen.ignored
        prepared = self._of_one_width(prepared)
        if not self._modules:
            self._learn(alone, prepared)
        rest = _together([each for theirs in everywhere([_rest(p) for p in prepared]) for each in theirs], self._layout)
        scaler, held = self._trainer.accelerator.scaler, Window(Held(each) for each in prepared)
        proven = Options(**{**options, "verify": "never"})  # `_learn` has: whole against parts

        def encode(wrapped: nn.Module, each: Held) -> dict[str, Any]:
            return self._encoded(alone, each.inputs)

        def loss_fn(encoded: dict[str, Any]) -> Any:
            return self._of_all(alone, encoded, rest)

        return wb.coupled_backward(model, encode, loss_fn, held, gather=world() > 1, scaler=scaler, **proven)

    @property
    def _layout(self) -> Layout:
        return self._answers.layout

    @contextlib.contextmanager
    def _one_batch(self) -> Iterator[None]:
        """Let the loss be that of one batch, also where `compute_loss` divides a part of it by the micro-batches."""
        trainer, args = self._trainer, self._trainer.args
        before = args.gradient_accumulation_steps, vars(trainer).get("current_gradient_accumulation_steps", 1)
        args.gradient_accumulation_steps = trainer.current_gradient_accumulation_steps = 1
        try:
            yield
        finally:
            args.gradient_accumulation_steps, trainer.current_gradient_accumulation_steps = before

    def _refuse(self, batches: Sequence[Any]) -> None:
        if not all(map(has_rows, batches)):
            raise LossError("A micro-batch is no mapping of tensors with rows, so rows cannot be put together.")
        own = getattr(self._trainer, "loss", None)
        within = own.modules() if isinstance(own, nn.Module) else [own]
        if world() > 1 and any(getattr(part, "gather_across_devices", False) for part in within):
            raise LossError(
                f"{type(own).__name__} gathers rows over ranks itself (gather_across_devices=True), and under "
                "coupled=True it is given those of all ranks already. Leave it to coupled=True: "
                "gather_across_devices=False."
            )

    def _of_one_width(self, batches: Sequence[Inputs]) -> list[Inputs]:
        """Fill micro-batches up to the widest of the window over all ranks, as one batch of them would be."""
        ignored = probing.known_ignored(self._ignored, batches)
        heard = everywhere(probing.widths(batches))
        widest = {
            name: [max(sizes) for sizes in zip(*(each[name] for each in heard), strict=True)] for name in heard[0]
        }
        try:
            return probing.filled(batches, ignored, widest)
        except SplitError as error:
            raise LossError(f"The window's micro-batches cannot be put together: {error}") from error

    def _learn(self, alone: nn.Module, batches: Sequence[Inputs]) -> None:
        """Find the modules whose answers are kept, the same on every rank."""
        with self._meaning.without_trace(alone):
            for paired, depth in itertools.product((False, True), range(DEEPEST + 1)):
                self._modules, self._answers = self._at(alone, depth), Answers(Layout(paired))
                if all(everywhere(self._explained(alone, batches))):
                    return
        self._modules = []
        raise LossError(
            "coupled=True cannot tell what of the loss is made row by row: the loss of some rows is not the one that "
            "the answers of the model, or of its modules, to two parts of them give. Do its rows meet within the "
            "model, or does the loss keep gradients itself (Cached... of sentence-transformers: use its plain form)? "
            "Train with wb.coupled_backward and an encode function of your own, or "
            "give the trainer whole batches (gradient_accumulation_steps=1)."
        )

    def _explained(self, alone: nn.Module, batches: Sequence[Inputs]) -> bool:
        """Say whether what the modules say of two parts of some rows gives the loss of these rows."""
        parameters, layout = few(alone), self._layout
        try:
            cut = self._cut(batches)
            if cut is None:
                return False
            whole, *two = cut
            direct = _said(self._ask(alone, whole), parameters)
            with torch.enable_grad():
                encoded = [self._encoded(alone, part) for part in two]
                joined = {
                    name: [torch.cat(column) for column in zip(*(each[name] for each in encoded), strict=True)]
                    for name in encoded[0]
                }
                loss = self._of_all(alone, joined, _together([_rest(part) for part in two], layout))
            by_parts = _said(loss, parameters)
        except (*UNFIT, LossError, SplitError):
            return False
        near = tolerances(alone, bool(self._trainer.args.bf16 or self._trainer.args.fp16))[1]
        return apart(direct, by_parts, max(abs(direct.value), abs(by_parts.value))) <= near

    def _cut(self, batches: Sequence[Inputs]) -> Sequence[Inputs] | None:
        """Return some rows and two parts of them: uneven ones, or two micro-batches if their rows cannot be cut."""
        ignored = probing.known_ignored(self._ignored, batches)
        if self._layout.paired:
            return probing.in_pairs(batches, ignored)
        try:
            return probing.uneven(batches, ignored)
        except SplitError:
            two = [batches[0], batches[-1]]
            return None if len(batches) < 2 else [_as_one(two, self._layout), *two]

    def _at(self, alone: nn.Module, depth: int) -> list[nn.Module]:
        """Return the modules so far below the model, and whole models that the trainer holds besides."""
        inside = [alone]
        for _ in range(depth):
            inside = [part for module in inside for part in (parts(module) or [module])]
        known = set(alone.modules())
        held = [value for value in vars(self._trainer).values() if isinstance(value, nn.Module)]
        beside = [module for module in held if known.isdisjoint(module.modules())]
        return list(dict.fromkeys([*inside, *beside]))

    def _ask(self, alone: nn.Module, inputs: Inputs) -> Any:
        items = None if self._meaning.own else self._meaning.count([inputs])
        return self._meaning.ask(alone, inputs, items)[0]

    def _encoded(self, alone: nn.Module, inputs: Inputs) -> dict[str, Any]:
        """Return what the modules say of a micro-batch, and its own tensors, all of them row by row."""
        rows, kept = _rows(inputs, self._layout), Kept(self._trainer)
        with self._answers.kept(self._modules, rows) as said:
            self._ask(alone, inputs)
        kept.restore()
        given = {name: self._layout.by_row(each, rows) for name, each in inputs.items() if may_have_rows(each)}
        self._dimensions = {name: inputs[name].dim() for name in given}
        return {"said": said, "given": list(given.values())}

    def _of_all(self, alone: nn.Module, encoded: Mapping[str, list[Tensor]], rest: Mapping[str, Any]) -> Any:
        """Return the loss of all rows, of what modules said of them."""
        pairs = zip(self._dimensions.items(), encoded["given"], strict=True)
        inputs = {name: self._layout.together(rows, dimensions) for (name, dimensions), rows in pairs}
        with self._answers.given(self._modules, encoded["said"]):
            return self._ask(alone, {**rest, **inputs})


def _said(loss: Any, parameters: Sequence[Tensor]) -> Said:
    """Return value and gradient of a loss in whatever form."""
    return said_by(loss if is_number(loss) else value_of(loss), parameters)


def _rows(inputs: Inputs, layout: Layout) -> int:
    return len(targets_of(inputs)) // (2 if layout.paired else 1)


def _rest(inputs: Inputs) -> tuple[int, dict[str, Any]]:
    """Return how many rows a micro-batch has, and what is no tensor with rows in it, on the host."""
    others = {name: value for name, value in inputs.items() if not may_have_rows(value)}
    return len(targets_of(inputs)), cast("dict[str, Any]", move(others, "cpu") if world() > 1 else others)


def _as_one(batches: Sequence[Inputs], layout: Layout) -> dict[str, Any]:
    """Put micro-batches of one width together."""
    tensors = {name: value.dim() for name, value in batches[0].items() if may_have_rows(value)}
    by_row = {name: [layout.by_row(each[name], _rows(each, layout)) for each in batches] for name in tensors}
    joined = {name: layout.together(torch.cat(by_row[name]), dimensions) for name, dimensions in tensors.items()}
    return {**_together([_rest(each) for each in batches], layout), **joined}


def _together(rests: Sequence[tuple[int, Mapping[str, Any]]], layout: Layout) -> dict[str, Any]:
    """Put together what has an entry a row, and keep what is the same for all micro-batches.

    Raises:
        LossError: for what is neither.
    """
    rows = [count // 2 if layout.paired else count for count, _ in rests]
    found: dict[str, Any] = {}
    for name in rests[0][1]:
        values = [rest.get(name) for _, rest in rests]
        lists = [value for value in values if isinstance(value, list)]
        if len(lists) == len(values) and all(len(each) in (n, 2 * n) for each, n in zip(lists, rows, strict=True)):
            found[name] = layout.listed(lists, rows)
        elif all(_same(value, values[0]) for value in values):
            found[name] = values[0]
        else:
            raise LossError(
                f"{name!r} of the inputs has no entry a row and is not the same in all micro-batches, so it cannot be "
                "put together. Give rows to it, or train with wb.coupled_backward."
            )
    return found


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return bool(one == other)
