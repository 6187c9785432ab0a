"""What a trial has shown, and if it does not add up, why: a cause is named only if it explains what remains."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from wholebatch.batch.tree import BatchTree
from wholebatch.batch.window import MicroBatch, Window
from wholebatch.errors import InexactError, LossError, SplitError, WholeBatchError
from wholebatch.first_window import reasons
from wholebatch.first_window.bends import refuse_bent
from wholebatch.first_window.cut_leaves import USER_ERRORS, leaf_to_go_whole, named_whole, takes
from wholebatch.first_window.levels import HeldStill
from wholebatch.first_window.sample import Portion, TriedRows, others_of, sideways
from wholebatch.first_window.trial import Trial, TrialOutcome
from wholebatch.first_window.watch import alone, handed_on
from wholebatch.first_window.words import named, of_draws, or_stated, verified
from wholebatch.model.memory import is_out_of_memory, release

NOISE = 20
"""How many times the difference that the order of the rows makes still counts as rounding."""

COARSE = 1e-2
"""From here on no order of additions is asked about."""


class NotTried(Exception):
    """Why something could not be tried, in words."""


class DrawnElsewhere(NotTried):
    """Draws that nobody can hold still matter: fewer rows would add up by chance alone."""

    def __init__(self) -> None:
        super().__init__("NumPy's or Python's own random numbers are drawn in the forward, and can't be held still")


class Judge:
    """Tries samples of a window until one says something.

    Args:
        trial: runs them.
        batch: as the caller gave it.
        micro_batches: its micro-batches.

    Attributes:
        tried: what cut the rows of which something could be said.
    """

    def __init__(self, trial: Trial, batch: Any, micro_batches: Sequence[MicroBatch]) -> None:
        self.trial, self.batch, self.micro_batches, self.options = trial, batch, micro_batches, trial.options
        self.tried: object = None

    def judge(self, samples: Sequence[TriedRows]) -> str:
        """Say what was shown.

        Raises:
            NotTried: if nothing could be.
            InexactError: if parts do not add up to the whole.
        """
        reason, beside = "", samples[0].beside
        for sample in (*samples, *beside):
            try:
                return self._said_of(sample, beside)
            except DrawnElsewhere:
                raise
            except NotTried as error:
                reason = str(error)
        raise NotTried(reason)

    def _said_of(self, sample: TriedRows, beside: Sequence[TriedRows]) -> str:
        """Say what one sample has shown."""
        sample, outcome = self._tried(sample)
        _refuse_steps(outcome)
        _refuse_redrawn(outcome)
        self._refuse_unserved_batch_norm(outcome)
        if outcome.empty:
            raise NotTried(outcome.empty)
        said = self._verdict(sample, outcome)
        self.tried = sample.cut
        if not self._try_beside(beside) and outcome.own:
            self._try_beside([sample])
        return said

    def _tried(self, sample: TriedRows) -> tuple[TriedRows, TrialOutcome]:
        """Run a sample, or one like it that can be run: fewer rows, halves, or rows that belong together kept so."""
        attempt: TriedRows | None = sample
        reason = ""
        while attempt is not None:
            memory = False
            try:
                outcome = self.trial.run(attempt)
                if outcome.is_finite:
                    return attempt, outcome
                reason = "their loss or gradient is not finite"
            except (*USER_ERRORS, MemoryError) as error:
                if not self._ready_made and _is_final(error, attempt):
                    raise
                reason, memory = f"{type(error).__name__}: {error}".split("\n")[0], is_out_of_memory(error)
            if memory:
                release()
            attempt = attempt.smaller() if memory else attempt.even()
        for other in others_of(sample, self.batch, self.micro_batches, self.options):
            found = self._safely(other)
            if found is not None and found.is_finite:
                return other, found
        self._refuse_a_cut_leaf(sample)
        raise NotTried(f"{len(sample.whole)} rows could not be run as {sample.sizes} ({reason:.200})")

    def _refuse_a_cut_leaf(self, sample: TriedRows) -> None:
        """Refuse single rows that run only because a leaf that should go whole fits any one of them.

        Micro-batches of more rows do not run then, and say so themselves.
        """
        lone = all(micro_batch.rows == 1 for micro_batch in self.micro_batches) and not self._ready_made
        if not lone or self.trial.ranks.world > 1 or self.options.get("collate") is not None:
            return
        info, loss_fn, whole = self.trial.model_info, self.trial.loss_fn, named_whole(self.options)
        if not takes(info, loss_fn, lambda: sample.cut(sample.whole)):
            words = leaf_to_go_whole(info, loss_fn, self.batch, whole, sample.whole)
            if words:
                raise SplitError(words)

    def _verdict(self, sample: TriedRows, outcome: TrialOutcome) -> str:
        if outcome.adds_up:
            return self._shown(sample, outcome)
        self._refuse_unsteady(sample, outcome)
        for other in others_of(sample, self.batch, self.micro_batches, self.options):
            again = self._safely(other)
            if again is not None and again.adds_up and not again.empty and self._explains(other):
                return self._shown(other, again)
        if self._is_rounding(sample, outcome):
            return self._shown(sample, outcome)
        self._leave_ready_made_alone(sample, outcome)
        outcome.shapes.check()
        raise InexactError(self._cause(sample, outcome))

    def _shown(self, sample: TriedRows, outcome: TrialOutcome) -> str:
        """Say what adds up, and what that does not show of later windows.

        Raises:
            InexactError: if something is bent that has met all rows: it adds up as long as no part is beyond.
            NotTried: if draws that nobody can hold still matter, so that it adds up by chance.
        """
        if outcome.elsewhere and not self.trial.repeat(sample, carry=True).adds_up:
            raise DrawnElsewhere
        beyond = refuse_bent(self.trial, sample, outcome, alone=self._ready_made_alone(sample))
        return verified(sample, outcome) + beyond + of_draws(outcome.held, self.trial.shared(sample, outcome))

    def _try_beside(self, samples: Sequence[TriedRows]) -> bool:
        """Try rows that lie side by side, with other draws; tell whether any could be tried.

        What can't be shown of these few takes nothing from what has been shown.

        Raises:
            InexactError: if they do not add up.
        """
        tried = False
        for sample in samples:
            outcome = self._safely(sample, flipped=True)
            if outcome is None or outcome.empty or not outcome.is_finite:
                continue
            with suppress(NotTried):
                self._verdict(sample, outcome)
                tried = True
        return tried

    def _explains(self, sample: TriedRows) -> bool:
        """Tell whether a layout is the reason: cut through it, rows must not add up; further rows laid so must.

        Else they add up by chance: rows are alike, such as in the number of their labels, or signs agree.
        """
        against = sample.against()
        through = None if against is None else self._safely(against)
        if through is not None and through.adds_up:
            return False
        further = [self._safely(each) for each in sample.further]
        return all(found is None or found.adds_up for found in further)

    def _safely(self, sample: TriedRows, flipped: bool = False, even: bool = False) -> TrialOutcome | None:
        """Run a further trial; None if it can't be run."""
        try:
            return self.trial.run(sample, flipped=flipped, even=even)
        except (*USER_ERRORS, MemoryError):
            return None

    def _refuse_unserved_batch_norm(self, outcome: TrialOutcome) -> None:
        """Raise if a BatchNorm ran on the rows' statistics that nobody has chosen a way for."""
        if outcome.batch_norms and self.options.get("batch_norm") is None:  # every way of ours refuses for itself
            raise InexactError(alone(outcome.batch_norms[0], len(self.micro_batches)))

    def _refuse_unsteady(self, sample: TriedRows, outcome: TrialOutcome) -> None:
        """Stop where the same rows, asked twice, say two things: then parts cannot be told from the whole.

        Raises:
            NotTried: if draws that nobody can hold still explain it.
            InexactError: if the loss function keeps a state that can't be found, so that micro-batches follow it.
        """
        again = self.trial.repeat(sample)
        if outcome.elsewhere:
            raise DrawnElsewhere
        if again.loss <= again.tolerance and again.miscounted is None:  # a state would show in the loss
            return
        raise InexactError(
            "The same rows, run twice from the same state, give two gradients "
            f"({again.gradient:.1e} apart, losses {again.loss:.1e}): the model or the loss function keeps a state that "
            "moves with each call, or draws from a generator that cannot be found, so each micro-batch would be "
            'another\'s. Keep it in buffers, or move it after the step (after_step=); verify="never" goes on all the '
            "same."
        )

    @property
    def _ready_made(self) -> bool:
        """Whether the micro-batches came as they are, so that only the proof cuts them."""
        return isinstance(self.batch, Window) and not any(micro_batch.is_cut for micro_batch in self.micro_batches)

    def _leave_ready_made_alone(self, sample: TriedRows, outcome: TrialOutcome) -> None:
        """Stop where only the proof cuts: a micro-batch may be one document, one cloud of points, one chunk of time.

        Raises:
            NotTried: unless tensors of several kinds share the first dimension, as rows and their labels do.
        """
        if not self._ready_made:
            return
        if outcome.moved and not self.trial.repeat(sample, carry=True).adds_up:
            carried = handed_on(outcome.moved, self.micro_batches)
            if not carried:
                return
            raise NotTried(f"each micro-batch hands {', '.join(carried[:3])} on to the next one")
        if self._ready_made_alone(sample):
            raise NotTried(
                f"the {len(sample.whole)} entries of a ready-made micro-batch are not its parts' sum, so that nothing "
                "says whether they are rows"
            )

    def _ready_made_alone(self, sample: TriedRows) -> bool:
        """Whether nothing says that what only the proof cuts has rows, as a second tensor of as many, their labels."""
        if not self._ready_made:
            return False
        shared = [leaf for leaf in BatchTree(sample.cut(sample.whole)).leaves if leaf.rows == len(sample.whole)]
        return len(shared) < 2 or max(len(leaf.shape) for leaf in shared) < 2

    def _is_rounding(self, sample: TriedRows, outcome: TrialOutcome) -> bool:
        """Tell whether the order of the rows alone makes about as much difference."""
        if outcome.miscounted is not None or max(outcome.gradient, outcome.loss) > COARSE:
            return False
        rows = sample.whole, list(sample.whole)[::-1]
        whole, backwards = (sample.portion(each) for each in rows)
        turned = self.trial.compare(whole, [backwards], HeldStill())
        return outcome.gradient <= NOISE * turned.gradient and outcome.loss <= max(NOISE * turned.loss, 1e-6)

    def _cause(self, sample: TriedRows, outcome: TrialOutcome) -> str:
        """Say why parts do not add up, counts first, then draws, padding, state, hooks, and rows that meet."""
        counts = self._miscounted, self._repeated, self._unseen, self._drawn
        layouts = self._padded, self._sideways
        for cause in (*counts, *layouts, self._moved, self._bent, self._gradient_only, self._met):
            said = cause(sample, outcome)
            if said:
                return said + self._own_cut()
        return ""

    def _miscounted(self, sample: TriedRows, outcome: TrialOutcome) -> str:
        found = outcome.miscounted
        if found is None:
            return ""
        name, whole, parts = found
        return (
            f"{named(sample)} state {whole:g} items for the term {name!r}, and in two parts ({sample.sizes}) they "
            f"state {parts:g}. {reasons.ITEMS}"
        )

    def _repeated(self, sample: TriedRows, outcome: TrialOutcome) -> str:
        """Find a sum that is the same in each part as in the whole."""
        for key, kind in outcome.whole.schema.terms:
            whole, parts = (float(sums.totals.get(key, 0.0)) for sums in (outcome.whole, outcome.parts))
            if kind == "one" and whole and abs(parts - 2 * whole) <= outcome.tolerance * abs(whole):
                return (
                    f"The sum {key[0]!r} is {whole:g} for {named(sample)} and for each of two parts ({sample.sizes}): "
                    "it does not depend on the rows, and would count once a micro-batch. Return wb.once(value) for "
                    "what exists once a batch."
                )
        return ""

    def _unseen(self, sample: TriedRows, outcome: TrialOutcome) -> str:
        """Find a part that states no items although its loss was divided by some, such as by ``max(n, 1)``."""
        for key in outcome.unseen:
            return (
                f"A part of {named(sample)} ({sample.sizes}) states 0 items for the term {key[0]!r}, so it counts for "
                "nothing, and without it the whole is another. Where the sum is divided by a number that has a floor, "
                "as max(n, 1), return the two sums: wb.LossSum(total, n). Or else: " + reasons.MEETING.why
            )
        return ""

    def _drawn(self, sample: TriedRows, outcome: TrialOutcome) -> str:
        """Try the same parts with random numbers that are the same for each row."""
        if not outcome.drawn_by_rows:
            return ""
        try:
            still = self.trial.held_still(sample)
        except (*USER_ERRORS, MemoryError):
            return ""
        if still.empty or not still.adds_up:
            return ""
        return (
            f"{named(sample)} that draw random numbers of their own are not the sum of their parts ({sample.sizes}): "
            f"losses {outcome.loss:.2g} apart, gradients {outcome.gradient:.2g}; with the same numbers for each row "
            f"they are. Drawn is in {', '.join(sorted(outcome.own or outcome.seen))}. {reasons.DRAWN} "
            'verify="never" goes on as a plain loop would.'
        )

    def _sideways(self, sample: TriedRows, outcome: TrialOutcome) -> str:
        """Try rows on the second dimension, behind time; a window of ready-made micro-batches has tried them."""
        if isinstance(self.batch, Window) or self.options.get("collate") is not None:
            return ""
        across = sideways(self.batch, self.options.get("whole", ()))
        again = None if across is None else self._safely(across)
        if across is None or again is None or again.empty or not again.adds_up:
            return ""
        return (
            f"{named(sample)} on the first dimension are not the sum of their parts ({sample.sizes}), and "
            f"{len(across.whole)} on the second one are: rows lie behind time there. Give the batch with rows first, "
            "x.transpose(0, 1), and turn it back in loss_fn, or use batch_first=True."
        )

    def _padded(self, sample: TriedRows, outcome: TrialOutcome) -> str:
        """Try the same parts padded as wide as the whole."""
        try:
            tree = BatchTree(sample.cut(sample.whole), self.options.get("whole", ()))
            sides = [sorted(sample.whole.index(row) for row in part) for part in sample.parts]
            wide = [Portion(side, functools.partial(tree.take, side)) for side in sides]
            again = self.trial.compare(Portion(range(len(sample.whole)), lambda: tree.batch), wide, even=False)
        except (SplitError, *USER_ERRORS):
            return ""
        if not again.adds_up:
            return ""
        return (
            f"{named(sample)} give another gradient in two parts ({sample.sizes}), relatively {outcome.gradient:.2g} "
            f"apart, and the same one if the parts are padded as wide as the whole. {reasons.PADDING}"
        )

    def _moved(self, sample: TriedRows, outcome: TrialOutcome) -> str:
        moved = [each for each in outcome.moved if each.kind != "generator"]
        if not moved or self.trial.repeat(sample, carry=True).adds_up:
            return ""
        names = ", ".join(f"{each.name!r} ({each.kind})" for each in moved[:3])
        more = f" and {len(moved) - 3} more" * (len(moved) > 3)
        return (
            f"A micro-batch moves {names}{more}, and the next one depends on it: {named(sample)} give another gradient "
            f"in two parts ({sample.sizes}), relatively {outcome.gradient:.2g} apart. {reasons.STATE} "
            'verify="never" goes on as a plain loop would.'
        )

    def _bent(self, sample: TriedRows, outcome: TrialOutcome) -> str:
        """Find something that acts on the size of a gradient, which is provisional until the window has counted."""
        again = self._safely(sample, even=True) if outcome.provisional else None
        if again is None or not again.adds_up:
            return ""
        return (
            f"The gradient of {named(sample)} is not half as large if it begins half as large (relatively "
            f"{outcome.gradient:.2g} apart): a hook or a backward of its own clips it, rounds it, or adds to it. "
            f"{reasons.PROVISIONAL}"
        )

    def _gradient_only(self, sample: TriedRows, outcome: TrialOutcome) -> str:
        if outcome.loss > outcome.tolerance:
            return ""
        # Rows that meet may show in the gradient alone: normalised advantages add up to zero in whole and parts.
        likely, other = (reasons.HOOKS, reasons.MEETING) if self.trial.hooked else (reasons.MEETING, reasons.HOOKS)
        return (
            f"The loss of {named(sample)} adds up over two parts ({sample.sizes}), its gradient does not (relatively "
            f"{outcome.gradient:.2g} apart). {likely} Or else: {other} Return all that is to be minimised as part of "
            "the loss."
        )

    def _met(self, sample: TriedRows, outcome: TrialOutcome) -> str:
        return (
            f"{named(sample)} are not the sum of their parts ({sample.sizes}): losses {outcome.loss:.2g} apart, "
            f'gradients {outcome.gradient:.2g}. {reasons.MEETING} verify="never" goes on as a plain loop would.'
            + or_stated(outcome)
            + f" Or else: {reasons.DRAWN}" * bool(outcome.own)
        )

    def _own_cut(self) -> str:
        if not self._ready_made:
            return ""
        return (
            " (The micro-batches of this window were cut by the proof alone: if rows in them belong together, lay "
            'them on one row, such as (pairs, 2, ...), or pass verify="never".)'
        )


def _refuse_steps(outcome: TrialOutcome) -> None:
    """Raise if parameters have moved although nobody has stepped; they are back where they were.

    Raises:
        InexactError: naming the first.
    """
    moved = [each.name for each in outcome.moved if each.kind == "parameter"]
    if moved:
        raise InexactError(
            f"One forward and backward moves {len(moved)} parameters (first: {moved[0]!r}): something steps inside, as "
            f"optimizers in the backward pass do. {reasons.STEPS}"
        )


def _refuse_redrawn(outcome: TrialOutcome) -> None:
    """Raise if a checkpoint draws other numbers when it runs again.

    Raises:
        InexactError: naming the operators.
    """
    if outcome.redrawn:
        raise InexactError(
            f'{", ".join(sorted(outcome.redrawn))}: {reasons.REDRAWN} verify="never" goes on as a plain loop would.'
        )


def _is_final(error: BaseException, sample: TriedRows) -> bool:
    """Tell whether an error is the answer: one of ours, on more than one row."""
    return isinstance(error, WholeBatchError) and not (
        isinstance(error, LossError) and min(map(len, sample.parts)) == 1
    )
