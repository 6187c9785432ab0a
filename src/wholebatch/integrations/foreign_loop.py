"""Loops that call the loss and the backward themselves: one factor at the boundary makes their window exact.

Every micro-batch's sum is divided by the same number, fixed beforehand and the same on all ranks; what the window
averages over is known at its end, and the sum of gradients is multiplied once, before it is clipped.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from wholebatch.errors import LossError
from wholebatch.loss.counts import power_of_two
from wholebatch.loss.terms import read
from wholebatch.loss.totals import LossAccumulator, LossTotals
from wholebatch.model.gradients import scale_


def everywhere(value: Any) -> list[Any]:
    """Return what every rank has to say, by rank."""
    answers: list[Any] = [value] * world()
    if len(answers) > 1:
        dist.all_gather_object(answers, value)
    return answers


def world() -> int:
    """Return the number of ranks."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class Boundary:
    """The window of a loop that is not ours.

    1. `share` turns what a loss function returned into the number to go back from, and notes its items.
    2. `close` multiplies the gradients, once all of the window's shares have gone back, and returns the true loss.
    """

    def __init__(self) -> None:
        self._provisional = 0.0
        self._tally = LossAccumulator()

    def forget(self) -> None:
        """Begin a window anew."""
        self._tally = LossAccumulator()

    def share(self, returned: Any, micro_batches: int) -> Tensor:
        """Return a number with the value of this micro-batch's loss, and with the gradient of its provisional share.

        So what is logged is the loss that the loop knows, and what goes back is divided by one number for the window.

        Args:
            returned: any form that `wb.backward` knows, with one denominator.
            micro_batches: micro-batches of a window, as far as is known; only the size of the numbers depends on it.

        Raises:
            LossError: for a bare number, nothing, or terms with different denominators.
        """
        answer = read(returned, rows=1)
        if answer is None or not answer.terms:
            raise LossError(
                f"The loss function returned {returned!r}: nothing to learn from. This loop needs a number for its own "
                "backward: return wb.mean(values, mask) with a mask of zeros."
            )
        if len(set(answer.groups.values())) > 1:
            raise LossError(
                f"The loss has {len(answer.terms)} terms with denominators of their own, which have to be known before "
                "the first backward, and this loop shows one micro-batch at a time. Give whole windows to this "
                "integration's `backward`."
            )
        self._tally.add(answer)
        if not self._provisional:
            items = float(next(iter(answer.terms.values())).count) * micro_batches
            self._provisional = max(map(float, everywhere(power_of_two(items))))
        share = torch.stack([term.total * term.weight for term in answer.terms.values()]).sum() / self._provisional
        known = [term for term in answer.terms.values() if float(term.count)]
        shown = torch.stack([term.value.detach() for term in known]).sum() if known else torch.zeros_like(share)
        return share + (shown.to(share) - share).detach()

    @torch.no_grad()
    def close(self, parameters: Iterable[Tensor]) -> Tensor:
        """Bring gradients, which are averaged over ranks, to the window's true denominator; return its true loss.

        Raises:
            LossError: if nothing went through `share`, so that the loop went back from numbers of its own, or if a
                device says by now that the items stated are not what a mean was divided by.
        """
        here, flags, self._tally = self._tally.sums(), self._tally.flags, LossAccumulator()
        heard = [(schema, numbers) for schema, numbers in everywhere((here.schema, here.numbers(here.schema)))]
        flags.settle()
        schema = next((schema for schema, _ in heard if schema.terms), None)
        held = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if schema is None and not any(everywhere(bool(held))):
            return torch.zeros(())  # nothing was learned in this window, on no rank
        if schema is None:
            raise LossError(
                "The loop went back from a bare number, and over what that averages is not known. Say it: return "
                "wb.mean(values, weights) or wb.from_mean(loss, items=n), and let this integration make a number of it."
            )
        whole = LossTotals.of_numbers(
            schema, torch.stack([numbers for theirs, numbers in heard if theirs.terms]).sum(0)
        )
        items = float(whole.denominator(*schema.terms[0]))
        if items:
            scale_(held, self._provisional * len(heard) / items)
        else:
            torch._foreach_zero_(held)
        return torch.as_tensor(whole.report(None)["loss"])
