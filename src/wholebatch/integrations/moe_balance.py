"""The load-balancing loss of mixture-of-experts models over the whole batch.

The loss multiplies two averages over all tokens, E * sum_e f_e * p_e: how often expert e was chosen (a count, without
gradient) and how likely it was. Averages of micro-batches do not multiply to the batch's, so f is counted over the
whole batch first, by a forward pass without gradient; given f, what is left is a plain mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wholebatch.errors import LossError


@dataclass(frozen=True)
class Router:
    """What a model's load-balancing term was found to be: its weight, and the experts that a token is sent to."""

    coefficient: float
    top_k: int


@dataclass(frozen=True)
class Load:
    """Sums over tokens and layers: choices and probabilities by expert, and how many were summed."""

    chosen: Tensor
    likely: Tensor
    tokens: Tensor

    def __add__(self, other: Load) -> Load:
        return Load(self.chosen + other.chosen, self.likely + other.likely, self.tokens + other.tokens)

    def cpu(self) -> Load:
        """Return the same sums on the host."""
        return Load(self.chosen.cpu(), self.likely.cpu(), self.tokens.cpu())

    def loss(self, share: Load | None = None) -> Tensor:
        """Return the loss of this load, or the share of it that comes from a micro-batch's probabilities."""
        likely = (self if share is None else share).likely
        return len(self.chosen) * (self.chosen.to(likely) * likely).sum() / self.tokens.to(likely) ** 2


@dataclass(frozen=True)
class Balance:
    """What the experts' shares are divided by: the window's items and load, over all ranks."""

    items: float
    load: Load


def load_of(router_logits: tuple[Tensor, ...], mask: Tensor | None, top_k: int) -> Load:
    """Sum up what the routers of one micro-batch did.

    Args:
        router_logits: one tensor a layer, (rows x length, experts).
        mask: (rows, length), zero at padding; None if every token counts.
        top_k: experts a token.
    """
    device = router_logits[0].device
    experts, tokens = router_logits[0].shape[-1], router_logits[0].shape[0]
    weights = torch.ones(tokens, device=device) if mask is None else mask.reshape(-1).to(device).float()
    chosen, likely = torch.zeros(experts, device=device), torch.zeros(experts, device=device)
    for logits in router_logits:
        probabilities = logits.to(device).softmax(-1)
        picks = torch.nn.functional.one_hot(probabilities.detach().topk(top_k, dim=-1).indices, experts).sum(1)
        chosen = chosen + weights @ picks.float()
        likely = likely + weights @ probabilities.float()
    return Load(chosen, likely, weights.sum() * len(router_logits))


def recognise_router(outputs: Mapping[str, Any], mask: Tensor | None, rest: float, tolerance: float) -> Router:
    """Find the term's weight and reach, so that our sum gives the very number that the model reports.

    Args:
        outputs: what the model returned, with `router_logits` and `aux_loss`.
        mask: the attention mask of the micro-batch.
        rest: what the loss holds besides the part that is divided by the items.
        tolerance: how far the numbers may lie apart, relative.

    Raises:
        LossError: if the model's term is another one.
    """
    aux, logits = float(outputs["aux_loss"]), outputs["router_logits"]
    for top_k in range(1, logits[0].shape[-1] + 1):
        if abs(float(load_of(logits, mask, top_k).loss()) - aux) <= tolerance * abs(aux):
            return Router(rest / aux, top_k)
    raise LossError(
        f"The model's auxiliary loss of {aux:.6g} is not the load-balancing loss over its {len(logits)} routers, so "
        "what it couples is not known. Set output_router_logits=False, or return terms of your own from compute_loss."
    )
