"""Losses over all rows at once: in-batch negatives, triplets, batch Dice, correlations, RMSE.

Rows meet in the loss alone, so it is enough to have what the encoder says about all of them, without graphs:

1. Encode every micro-batch without graph; the last one keeps its graph.
2. Join the encoded rows, take the loss of all of them, and its gradient for each.
3. Encode every other micro-batch again, with graph and with the same draws, and go on backward from there.

That is 2k - 1 forward passes for k micro-batches, one micro-batch's graph in memory at a time. What the loss itself
is made of (a temperature, a bias) gets its gradient in step 2, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.utils import _pytree as pytree
from typing_extensions import Unpack

from wholebatch.batch.sizes import Auto, Size, Tokens
from wholebatch.batch.window import MicroBatch, Window
from wholebatch.errors import LossError, OutOfMemoryError, SplitError, SyncError, plainly
from wholebatch.first_window import proven
from wholebatch.first_window.proof import Unlike
from wholebatch.first_window.trial import Trial
from wholebatch.gradient.preconditions import refuse_foreign
from wholebatch.gradient.result import Pending, Result
from wholebatch.gradient.setup import Setup, refuse_no_model, set_up
from wholebatch.gradient.two_pass import Encode, EncodedMicroBatch, EncoderPass, summed
from wholebatch.loss.denominators import Provisional
from wholebatch.loss.earlier import leave
from wholebatch.loss.seeds import BackwardSeeds
from wholebatch.loss.terms import LossSum, ParsedLoss, read
from wholebatch.loss.totals import LossAccumulator, LossTotals, Sizes
from wholebatch.model.gradients import GradientAccumulator, all_or_nothing
from wholebatch.model.memory import is_out_of_memory, release, too_few_rows, words_of
from wholebatch.model.reached import Step, external_parameters
from wholebatch.model.state import State
from wholebatch.norms import pooled
from wholebatch.options import Options, checked
from wholebatch.ranks.agreement import Next, Status
from wholebatch.ranks.gathering import everyone


@dataclass(frozen=True)
class CoupledLoss:
    """A loss over all rows as one thing, for :class:`wholebatch.Step` in the place of a loss function.

    Args:
        encode: as in ``coupled_backward``.
        loss_fn: as in ``coupled_backward``.
        gather: as in ``coupled_backward``.

    Example:
        >>> model = torch.nn.Linear(3, 2)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> spread = wb.CoupledLoss(lambda model, x: model(x), lambda z: torch.pdist(z).mean())
        >>> wb.Step(model, sgd, spread, micro_batch_size=4)(torch.randn(10, 3)).stepped
        True
    """

    encode: Encode | Sequence[Encode]
    loss_fn: Callable[..., Any]
    gather: bool = False

    @property
    def encoders(self) -> list[Encode]:
        """The functions that encode, one or several."""
        return list(self.encode) if isinstance(self.encode, Sequence) else [self.encode]


@plainly
def coupled_backward(
    model: nn.Module,
    encode: Encode | Sequence[Encode],
    loss_fn: Callable[..., Any],
    batch: Any,
    micro_batch_size: Size = None,
    *,
    gather: bool = False,
    scaler: GradScaler | None = None,
    **options: Unpack[Options],
) -> Result:
    """Leave in ``.grad`` the gradient of a loss that needs all rows of the batch at once.

    ``loss_fn(*encode(model, batch))`` over the whole batch, though only a micro-batch is encoded with its graph at a
    time. The loss may be anything; random draws of the encoder are repeated, and buffers are updated once. Gradients
    are added to what ``.grad`` holds; if anything fails, it is as before the call. Costs 2k - 1 forward passes for k
    micro-batches. With ``Auto``, all is done again in smaller micro-batches when memory runs out.

    Args:
        model: plain, wrapped in ``DistributedDataParallel``, or sharded by ``fully_shard``.
        encode: ``encode(model, micro_batch)`` returns a tensor (rows, ...) or a nest of them. Several functions, one
            for each tower, run one after another, so that one tower's graph is in memory at a time.
        loss_fn: takes what ``encode`` returned for all rows, in the batch's order: a tuple's or list's members as
            arguments of their own, anything else as one; several encoders' results one after another. Returns one
            number, or any form that ``backward`` knows.
        batch: as in ``backward``.
        micro_batch_size: as in ``backward``.
        gather: whether the loss is taken over the rows of all ranks. Without it each rank takes its own, and the
            loss of the step is their mean.
        scaler: as in ``backward``.
        **options: see :class:`wholebatch.options.Options`; all but ``items`` and ``sync="every"``.

    Returns:
        The loss of the whole batch, its terms and metrics, detached.

    Raises:
        TypeError, ValueError: for an option that has no meaning here.
        SplitError: for a batch without rows.
        InexactError: if a micro-batch encoded a second time says something else, or BatchNorm layers would see one
            micro-batch at a time.
        LossError: if what ``encode`` or ``loss_fn`` returns cannot be used.
        OutOfMemoryError: with ``Auto``, if micro-batches of one row do not fit.

    Example:
        >>> model, rows = torch.nn.Linear(3, 2), torch.randn(10, 3)
        >>> spread = lambda z: torch.pdist(z).mean()
        >>> wb.coupled_backward(model, lambda model, x: model(x), spread, rows, micro_batch_size=4).micro_batches
        3
    """
    loss = CoupledLoss(encode, loss_fn, gather)

    def work(gradients: GradientAccumulator) -> Result:
        pending = accumulate_coupled(model, loss, batch, micro_batch_size, gradients, scaler=scaler, **options)
        leave(model, pending.flags)
        return pending.finish()

    return all_or_nothing(work)


def accumulate_coupled(
    model: nn.Module,
    loss: CoupledLoss,
    batch: Any,
    micro_batch_size: Size,
    gradients: GradientAccumulator,
    *,
    scaler: GradScaler | None = None,
    also: Iterable[Tensor] = (),
    **options: Unpack[Options],
) -> Pending:
    """Do all of ``coupled_backward`` but the last multiplication, which ``Step`` joins with its clip."""
    refuse_no_model(model)
    _refuse_no_functions(loss)
    functions = [*loss.encoders, loss.loss_fn]
    setup = set_up(model, functions, micro_batch_size, checked_for_all_rows(options), scaler)
    info, ranks = setup.model_info, setup.ranks

    def run(size: int | Tokens | None) -> Pending:
        with ranks:
            micro_batches = setup.cut(batch, size)
            order = None if isinstance(batch, Window) else _order(micro_batches)
            leaves = [*info.parameters, *also]
            encode = summed(loss.encoders)
            new_trial = partial(Trial, info, encode, ranks, setup.scaler, setup.options, leaves, functions)
            proof = proven(new_trial, batch, micro_batches)
            setup.begin(gradients, also)
            pending = _Coupled(setup, loss, micro_batches, order, gradients, proof).pending()
            gradients.end()
            return pending.noted(info, proof.said)

    if not isinstance(micro_batch_size, Auto):
        return run(micro_batch_size)
    if ranks.world > 1:
        raise SyncError(
            f"micro_batch_size={micro_batch_size!r} begins anew when memory runs out, for which the other "
            f"{ranks.world - 1} ranks would have to wait. Give a number of rows or Tokens(...)."
        )
    return _fitting(micro_batch_size, run, State(info), gradients)


def _refuse_no_functions(loss: CoupledLoss) -> None:
    for name, function in [*(("encode", each) for each in loss.encoders), ("loss_fn", loss.loss_fn)]:
        if not callable(function):
            raise TypeError(
                f"{name} is {type(function).__name__}; there are two functions: encode(model, "
                "micro_batch) returns what the loss is made of, one value a row, and loss_fn(encoded) takes all rows: "
                "wb.coupled_backward(model, encode, loss_fn, batch, micro_batch_size=32)."
            )


def checked_for_all_rows(options: Options) -> Options:
    """Refuse, besides what nobody knows, the options that say how shares of a loss over micro-batches are taken.

    Raises:
        TypeError: for ``items`` and ``noise_scale``.
        ValueError: for ``sync="every"``.
    """
    if options.get("items") is not None:
        raise TypeError(
            "items= states what each micro-batch counts, but a loss over all rows is taken once, and states its own "
            "counts. Leave items= out, and return wb.mean(values, weights) or wb.from_mean(loss, items=n) from loss_fn."
        )
    if options.get("noise_scale") is not None:
        raise TypeError(
            "noise_scale= compares the gradients of micro-batches, but a loss over all rows has none of a single "
            "micro-batch. Leave it out."
        )
    if options.get("sync") == "every":
        raise ValueError(
            'sync="every" sends gradients with each micro-batch, but those of a loss over all rows travel once, when '
            'all are there. Leave sync= out, or pass sync="last".'
        )
    return checked(options)


def _fitting(
    auto: Auto, run: Callable[[int | Tokens], Pending], state: State, gradients: GradientAccumulator
) -> Pending:
    """Begin anew in smaller micro-batches until they fit: the gradient does not depend on how the batch is cut."""
    while True:
        said, size = "", auto.size
        try:
            pending = run(size)
            auto.rest()
            return pending
        except (RuntimeError, MemoryError, OSError) as error:
            if not is_out_of_memory(error):
                raise
            said = words_of(error)
        except ValueError as error:
            if not auto.shrunk or not too_few_rows(error):
                raise
            said = words_of(error)
        gradients.take_back()
        release()
        state.restore()
        if auto.shrink() == size:
            raise OutOfMemoryError(
                f"Micro-batches of {size!r} do not fit into memory, and there are no smaller ones. It failed with: "
                f"{said} Try activation checkpointing, offload=True where there is a device, or shorter rows."
            )


class _Coupled:
    """The two passes; :meth:`pending` is the algorithm."""

    def __init__(
        self,
        setup: Setup,
        loss: CoupledLoss,
        micro_batches: Sequence[MicroBatch],
        order: Sequence[int] | None,
        gradients: GradientAccumulator,
        proof: Unlike,
    ) -> None:
        model_info, ranks, options = setup.model_info, setup.ranks, setup.options
        self.model_info, self.loss_fn, self.micro_batches, self.order = model_info, loss.loss_fn, micro_batches, order
        self.ranks, self.gradients, self.everyone = ranks, gradients, everyone(ranks, loss.gather)
        self.proof = proof
        self.pools, self.scaler = options.get("batch_norm") == "pooled", setup.scaler
        self.encoders = [EncoderPass(model_info, function, micro_batches, options, ranks) for function in loss.encoders]
        gradients.include(ranks.leaves())

    def pending(self) -> Pending:
        """Encode, take the loss of all rows, and encode again backward."""
        rows = sum(micro_batch.rows for micro_batch in self.micro_batches)
        with pooled(self.model_info, self.pools):  # the second pass would count its rows again
            towers = [e.turns(keep_last=e is self.encoders[-1]) for e in self.encoders]
        after = State(self.model_info)
        then = Next.UNKNOWN if self.everyone.meets else Next.AGREEMENT
        _refuse_no_rows(self.ranks.agree(Status.READY, LossTotals(), micro_batches=rows, then=then).micro_batches)
        joined = [_join([turn.said for turn in turns], self.order) for turns in towers]
        leaves = [[leaf.detach().requires_grad_(leaf.is_floating_point()) for leaf in each] for each in joined]
        tally, answer = self._loss([turns[0].form for turns in towers], leaves)
        sums = self.ranks.agree(Status.READY, tally.sums()).sums
        learns = self._propagate(answer, sums)
        moved = State(self.model_info, buffers=False)
        self._go_back(towers, leaves)
        after.restore_buffers()
        if any(turn.drew for turns in towers for turn in turns):
            moved.restore_random()
        if learns and self.ranks.world == 1 and not self.gradients.held():
            raise LossError(
                "No gradient has arrived at any parameter: what encode returned does not depend on one that requires "
                "a gradient. Compute it from the model's output, without detach() or torch.no_grad(), and look whether "
                "the model is frozen (requires_grad)."
            )
        with self.gradients.paused():
            self.proof.finish()
        self.ranks.agree(Status.READY, LossTotals(), then=Next.UNKNOWN)
        self.ranks.settle()
        self.ranks.reduce(self.gradients)
        self.ranks.conclude(self.gradients)
        sizes = Sizes(indices=[micro_batch.index for micro_batch in self.micro_batches])
        result = Result(**sums.report(self.model_info.device), micro_batches=len(sizes), rows=rows, sizes=sizes)
        return Pending(result, self.gradients, 1.0, sums.alive, tally.losses, tally.flags)

    def _loss(
        self, forms: Sequence[pytree.TreeSpec], encoded: Sequence[Sequence[Tensor]]
    ) -> tuple[LossAccumulator, ParsedLoss | None]:
        """Take the loss of what the encoders said about all rows, those of other ranks too if they are gathered."""
        arguments: list[Any] = []
        for form, leaves in zip(forms, encoded, strict=True):
            said = pytree.tree_unflatten([self.everyone.gather(leaf) for leaf in leaves], form)
            arguments += said if type(said) in (tuple, list) else [said]
        self.ranks.resume()
        with self.ranks.local():
            returned = self.loss_fn(*arguments)
        if isinstance(returned, Tensor) and returned.dim() == 0:
            returned = LossSum(returned, 1.0)
        tally = LossAccumulator()
        return tally, tally.add(read(returned, rows=1))

    def _propagate(self, answer: ParsedLoss | None, sums: LossTotals) -> bool:
        """Take the gradient of the loss, for the encoded rows and for what it is made of itself; tell if it has any."""
        if answer is None:
            return False
        alone = self.ranks.world == 1
        denominators = Provisional(self.ranks.world, exact_last=True, loose=False)
        denominators.settle(sums)
        shares = BackwardSeeds(self.scaler, self.ranks.divides, drops_empty=alone)
        outputs, seeds = shares.of(answer, denominators)
        if alone:
            shares.check()
        self._explore(outputs)
        if outputs:
            torch.autograd.backward(outputs, seeds)
        return bool(outputs)

    def _go_back(self, towers: Sequence[Sequence[EncodedMicroBatch]], encoded: Sequence[Sequence[Tensor]]) -> None:
        """Bring the gradients of what was encoded back to the parameters.

        The last encoder comes first: its last micro-batch has a graph, which may hold buffers that are set back for
        others.
        """
        for encoder, turns, leaves in reversed(list(zip(self.encoders, towers, encoded, strict=True))):
            told = [None if leaf.grad is None else self.everyone.share(leaf.grad) for leaf in leaves]
            encoder.window.rewind()
            self._encode_again(turns, told)
            encoder.window.backward()

    def _encode_again(self, turns: Sequence[EncodedMicroBatch], gradient: Sequence[Tensor | None]) -> None:
        """Go backward through every micro-batch from the gradient of what it said, the one with a graph first."""
        if self.order is not None:
            place = torch.tensor(self.order)
            gradient = [None if g is None else g[place.to(g.device)] for g in gradient]
        sizes = [turn.said[0].shape[0] for turn in turns]
        parts = [[None] * len(turns) if g is None else torch.split(g, sizes) for g in gradient]
        told_apart = zip(turns, zip(*parts, strict=True), self.micro_batches, strict=True)
        for turn, told, micro_batch in sorted(told_apart, key=lambda each: not each[0].graph):
            pairs = [(s, g) for s, g in zip(turn.again(), told, strict=True) if g is not None and s.requires_grad]
            if pairs:
                outputs, seeds = zip(*pairs, strict=True)
                self.proof.note(micro_batch, None, self._explore(outputs))
                with self.ranks.local():
                    torch.autograd.backward(outputs, seeds)
            turn.said, turn.graph = [], False

    def _explore(self, outputs: Sequence[Tensor]) -> set[Step]:
        """Find leaves outside of the model that a backward from here adds to, so that they are kept apart too.

        Returns what the outputs are made of.
        """
        steps = set[Step]()
        foreign = external_parameters(outputs, self.model_info, steps)
        if self.ranks.world > 1:
            refuse_foreign(foreign)
        self.gradients.include(leaf for leaf in foreign if isinstance(leaf, nn.Parameter))
        return steps


def _refuse_no_rows(rows: Sequence[int]) -> None:
    """Raise if some rank has none: there is no loss over no rows, and a rank cannot know what the others' is like."""
    if 0 not in rows:
        return
    if len(rows) == 1:
        raise SplitError("The batch has no rows, and a loss over all rows needs some. Leave this step out.")
    raise SplitError(
        f"The ranks bring {list(rows)} rows, and a loss over all rows needs some on each. Deal them out evenly "
        "(wb.DealtBatches), or leave this step out on all ranks."
    )


def _order(micro_batches: Sequence[MicroBatch]) -> list[int] | None:
    """Say where each encoded row belongs in the batch, if micro-batches took them out of order."""
    rows = [row for micro_batch in micro_batches for row in micro_batch.index]
    return None if rows == sorted(rows) else rows


def _join(said: Sequence[Sequence[Tensor]], order: Sequence[int] | None) -> list[Tensor]:
    """Put the rows of all micro-batches together, in the batch's order."""
    joined = [torch.cat([leaf.detach() for leaf in column]) for column in zip(*said, strict=True)]
    if order is None:
        return joined
    return [torch.empty_like(leaf).index_copy_(0, torch.tensor(order, device=leaf.device), leaf) for leaf in joined]
